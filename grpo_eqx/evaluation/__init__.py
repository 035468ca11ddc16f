"""Evaluations on held-out problems: during training, from Python, and by the command `eval`."""
