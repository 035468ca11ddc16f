"""Checks of values that cannot be quoted where they go, or would be rejected only later."""

import re

from grpo_eqx.common.errors import UserError


def check_name(flag: str, value: str, pattern: str, rule: str) -> None:
    """Raises `UserError` unless the whole value matches the pattern."""
    if not re.fullmatch(pattern, value):
        raise UserError(f"--{flag} is {value!r}: it must be {rule}.")


def check_at_least(flag: str, value: int, least: int) -> None:
    """Raises `UserError` for smaller values."""
    if value < least:
        raise UserError(f"--{flag} is {value}: it must be at least {least}.")
