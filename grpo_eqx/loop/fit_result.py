"""The result of `GRPOTrainer.fit`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path


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
