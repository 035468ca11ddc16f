"""The model and the problems that ship with the package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_eqx.common.errors import UserError
from grpo_eqx.common.read_files import expanded, read_object

EMBEDDED_MODEL = "tiny_qwen2"
"""Name of the model that ships with the package."""

EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / EMBEDDED_MODEL

EMBEDDED_DATA = "word_problems"
"""Name of the problem set that ships with the package."""

_SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
"""Fields of a model's `config.json` that the embedded model shares with what is trained from it."""


def is_embedded(model: str, architecture: Mapping[str, Any] | None = None) -> bool:
    """Returns whether a model is the embedded one or has its shape, as what was trained from it.

    **Arguments:**

    - `model`: name or folder of the model.
    - `architecture`: fields of the `config.json` of a model that was passed as an object.
    """
    if architecture is None and model == EMBEDDED_MODEL:
        return True
    if architecture is None:
        try:
            architecture = read_object(expanded(model) / "config.json")
        except UserError:  # a name on the hub, or what loading it refuses
            return False
    embedded = read_object(EMBEDDED_FOLDER / "config.json")
    return all(architecture.get(name) == embedded[name] for name in _SHAPE)
