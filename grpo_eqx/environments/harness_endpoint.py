"""Where an agent finds the model."""

from typing import NamedTuple


class HarnessEndpoint(NamedTuple):
    """Where an agent finds the model, in OpenAI's protocol."""

    base_url: str
    """Such as `http://127.0.0.1:41234/v1`."""
    api_key: str
    """Secret of this run of the harness. It says whose tokens are drawn."""
    model: str
    """Name of the model."""
