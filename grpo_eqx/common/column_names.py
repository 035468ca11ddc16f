"""Names of the completions table's own columns."""

SHOWN_COLUMNS = (
    "step", "prompt_id", "prompt", "completion", "reward", "advantage", "length", "truncated",
)  # fmt: skip
"""Columns without which completions cannot be shown."""
TOKEN_COLUMNS = "tokens", "token_logps"
"""Columns with a list per completion, which take most of a table's space."""
