"""The training loop around its steps: events, callbacks, metrics, start and continuation."""
