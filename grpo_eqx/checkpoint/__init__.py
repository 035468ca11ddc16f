"""Checkpoints: what is saved of a run, when, and how a run continues from it."""
