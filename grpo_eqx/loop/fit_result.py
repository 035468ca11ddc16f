"""The result of `GRPOTrainer.fit`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_eqx.common.errors import MissingAttributeError


@dataclasses.dataclass(frozen=True)
class FitResult:
    """Result of `GRPOTrainer.fit`."""

    output_dir: Path
    history: Sequence[Mapping[str, float]]
    """The metrics of every step."""
    seconds: float
    """Duration of the steps, compilation included, and evaluations not."""
    evaluations: Sequence[Mapping[str, float]] = ()
    """The metrics of every evaluation, with the step after which it was made as `step`."""
    stopped: str | None = None
    """Name of the callback that ended the run before its last step, and its reason."""

    def __getattr__(self, name: str) -> Any:
        raise MissingAttributeError(
            f"the result of fit has no attribute {name!r}: it has history, with the metrics of "
            f"every step, evaluations, output_dir, seconds and stopped"
        )
