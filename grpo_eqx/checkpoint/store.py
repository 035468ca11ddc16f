"""Writes the checkpoints of a run: one folder per saved step, by Orbax."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from grpo_eqx.checkpoint.checksums import checksums
from grpo_eqx.checkpoint.orbax_reports import silence_orbax
from grpo_eqx.checkpoint.saved import (
    FACTS,
    STATE,
    complete_steps,
    digest,
    named_arrays,
    named_counters,
)
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.durable import sync, sync_tree
from grpo_eqx.errors import RunError, first_line
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.training.state import TrainState

_LONGEST_REASON = 300


class CheckpointStore:
    """Folder of checkpoints, numbered by the steps after which they are saved.

    A checkpoint appears under its number only when all processes have written their parts of it;
    what an interrupted save left behind is deleted when the store is made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        save_total_limit: int | None = None,
        best: str | None = None,
        stuck: Sequence[int] = (),
    ):
        """**Arguments:** the folder, created where missing; the number of newest checkpoints to
        keep, `None` for all; the name of the score by which the best is kept too, `None` for none;
        damaged steps that cannot be moved, which are neither counted nor deleted.

        Raises `RunError` if the folder cannot be written.
        """

        def of_best(scores: Mapping[str, float]) -> float:
            # What was saved with another score is not the best by this one.
            return scores.get(str(best), -math.inf)

        limit = None if save_total_limit is None else save_total_limit + len(stuck)
        policies: list[preservation.PreservationPolicy] = [preservation.LatestN(n=limit)]
        if stuck:
            policies.append(preservation.CustomSteps(steps=stuck))
        if best is not None:
            policies.append(
                preservation.BestN(
                    get_metric_fn=of_best, n=1, keep_checkpoints_without_metrics=False
                )
            )
        options = ocp.CheckpointManagerOptions(
            best_fn=None if best is None else of_best,
            preservation_policy=preservation.AnyPreservationPolicy(policies),
            step_prefix="step",
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._sync_unnamed),
        )
        self.folder = folder
        self.best = best
        self._saving: int | None = None
        silence_orbax()
        with self._explained():
            self._manager = ocp.CheckpointManager(
                folder.absolute(), options=options, item_names=(STATE, FACTS)
            )

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Waits until the last save is on the disk. Raises `RunError` if it cannot be written."""
        with self._explained():
            self._manager.wait_until_finished()
            sync(self.folder)

    def close(self) -> None:
        """Waits for the last save, and frees what writing it took."""
        self.wait()
        with self._explained():
            self._manager.close()

    def _sync_unnamed(self) -> None:
        """Waits until a checkpoint is on the disk, just before Orbax gives it its name."""
        if is_main():
            for unnamed in self.folder.glob(f"step_{self._saving}.*"):
                sync_tree(unnamed)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns whatever Orbax and TensorStore raise while they write into a `RunError`."""
        try:
            yield
        except Exception as error:
            full = "No space left" in str(error)
            reason = "no space is left there" if full else first_line(error)[:_LONGEST_REASON]
            step = self._saving
            what = "checkpoints" if step is None else f"the checkpoint of step {step}"
            fix = RunFolder(self.folder.parent).what_continues()
            raise RunError(
                f"{what} could not be written to {str(self.folder)!r} ({reason}): "
                f"{'free space or make the folder writable' if step is None else fix}."
            ) from error

    def save(self, state: TrainState, facts: Mapping[str, Any], score: float | None = None) -> None:
        """Saves the state of a run, and what must be known of it to resume it.

        **Arguments:** the state; the facts, which JSON must be able to hold; its score, for a store
        that keeps the best.

        Returns as soon as the arrays are copied to host memory; the rest is written in the
        background. A save that is still being written is waited for first. Raises `RunError` if
        either cannot be written.
        """
        self.wait()
        self._saving = state.step
        arrays = named_arrays(state.saved())
        facts = {
            "counters": named_counters(state),
            "shapes": {name: list(x.shape) for name, x in arrays.items()},
            "checksums": checksums(arrays),
            **facts,
        }
        with self._explained():
            saves = self._manager.save(
                state.step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays),
                    facts=ocp.args.JsonSave({"facts": facts, "sha256": digest(facts)}),
                ),
                metrics=None if score is None or self.best is None else {self.best: score},
            )
            if not saves:
                raise ValueError(f"step {complete_steps(self.folder)[0]} is saved there already")
