"""Output folder of a run."""

import dataclasses
import json
from pathlib import Path

from grpo_eqx.config import GRPOConfig
from grpo_eqx.errors import UserError
from grpo_eqx.sharding.layout_report import LayoutReport


class RunFolder:
    """Paths of a run's config, layout, metrics, completions, learning curve and model.

    A run that is already in the folder is kept: its entries move to `previous-1`, `previous-2`...
    """

    def __init__(self, path: str | Path):
        self.path = path = Path(path)
        self.config = path / "config.json"
        self.layout = path / "layout.json"
        self.metrics = path / "metrics.jsonl"
        self.completions = path / "completions"
        self.learning_curve = path / "learning_curve.png"
        self.model = path / "model"

    def start(self, cfg: GRPOConfig, layout: LayoutReport) -> None:
        """Creates the folder and writes the run's config and its layout on devices.

        Raises `UserError` if it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._keep_previous()
            self.completions.mkdir()
            for path, facts in ((self.config, cfg), (self.layout, layout)):
                fields = json.dumps(dataclasses.asdict(facts), indent=2, default=str)
                path.write_text(fields + "\n")
        except OSError as error:
            raise UserError(
                f"output_dir {str(self.path)!r} cannot be written ({error.strerror}): choose "
                f"another."
            ) from error

    def completions_of(self, step: int) -> Path:
        """Returns the path of a step's table of completions."""
        return self.completions / f"step_{step:06d}.parquet"

    def _keep_previous(self) -> None:
        entries = [
            self.config, self.layout, self.metrics, self.completions, self.learning_curve,
            self.model, self.path / "wandb",
        ]  # fmt: skip
        present = [entry for entry in entries if entry.exists()]
        if not present:
            return
        if not self.metrics.exists():
            raise UserError(
                f"output_dir {str(self.path)!r} already contains {present[0].name!r}, but is not a "
                f"run folder: choose another."
            )
        number = 1
        while (self.path / f"previous-{number}").exists():
            number += 1
        kept = self.path / f"previous-{number}"
        kept.mkdir()
        for entry in present:
            entry.rename(kept / entry.name)
