"""Evaluations on held-out problems: during training, by a call, and by the command `eval`."""
