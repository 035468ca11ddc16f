"""Command lines: flags from a config's fields, and the command `grpo-eqx`."""

from grpo_eqx.cli.flags import run as run
