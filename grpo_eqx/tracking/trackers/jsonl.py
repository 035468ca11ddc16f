"""`metrics.jsonl`: the record that every run has."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from grpo_eqx.tracking.trackers.base import Tracker


class JsonlTracker(Tracker):
    """Tracker that writes a line of JSON per step or evaluation; values not finite are null.

    Every line is flushed at once, so that a killed run keeps its record. A resumed run appends to
    the lines that the file already has.
    """

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Waits until all lines are on the disk, so that they survive a power cut."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        self.sync()
        self._file.close()
