"""Sliding windows in the files of Qwen's configs."""

from typing import Any

from grpo_eqx.models.config_fields import FULL, WINDOWED


def read_windows(fields: dict[str, Any]) -> dict[str, Any]:
    """Keeps a window that is in use, and names the layers that have it."""
    fields = dict(fields)
    first, number = fields.pop("max_window_layers", None), fields.get("num_hidden_layers")
    is_used = fields.pop("use_sliding_window", False)
    if is_used and fields.get("layer_types") is None and isinstance(number, int):
        full = 28 if first is None else first
        fields["layer_types"] = [FULL if i < full else WINDOWED for i in range(number)]
    if not is_used or WINDOWED not in (fields.get("layer_types") or ()):
        fields.pop("sliding_window", None)
    return fields


def write_windows(fields: dict[str, Any]) -> dict[str, Any]:
    """Says whether the window is in use."""
    return {**fields, "use_sliding_window": "sliding_window" in fields}
