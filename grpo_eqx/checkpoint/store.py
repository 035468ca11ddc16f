"""Writes the checkpoints of a run: one folder per saved step, by Orbax."""

import contextlib
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from grpo_eqx.checkpoint.orbax_reports import silence_orbax
from grpo_eqx.checkpoint.saved import (
    FACTS,
    STATE,
    all_checksums,
    complete_steps,
    digest,
    named_arrays,
    named_counters,
)
from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.durable import sync, sync_tree
from grpo_eqx.common.errors import RunError, first_line
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.training.state import TrainState

_LONGEST_REASON = 300


class _Kept(preservation.PreservationPolicy):
    """Policy by which steps that cannot be deleted stay besides."""

    def __init__(self, others: preservation.AnyPreservationPolicy, stuck: Iterable[int]):
        """**Arguments:**

        - `others`: the policy on all other steps.
        - `stuck`: steps that cannot be deleted.
        """
        self.others, self.stuck = others, set(stuck)
        self.unwanted: set[int] = set()
        """Steps that were to be deleted last."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        wanted = self.others.should_preserve(checkpoints, context=context)
        steps = [each.step for each in checkpoints]
        self.unwanted = {x for x, stays in zip(steps, wanted, strict=True) if not stays}
        self.unwanted -= self.stuck
        return [step not in self.unwanted for step in steps]


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
        say: Callable[[str], None] = print_clean,
        processes: Collection[int] | None = None,
    ):
        """**Arguments:**

        - `folder`: the folder, created where missing.
        - `save_total_limit`: number of newest checkpoints to keep; `None` for all.
        - `best`: name of the score by which the best checkpoint is kept too; `None` for none.
        - `stuck`: damaged steps that cannot be moved, which are neither counted nor deleted.
        - `say`: shows the user a line.
        - `processes`: processes that hold parts of what is saved; by default, all do.

        Raises `RunError` if the folder cannot be written.
        """

        def of_best(scores: Mapping[str, float]) -> float:
            # What was saved with another score is not the best by this one.
            return scores.get(str(best), -math.inf)

        limit = None if save_total_limit is None else save_total_limit + len(stuck)
        policies: list[preservation.PreservationPolicy] = [preservation.LatestN(n=limit)]
        if best is not None:
            policies.append(
                preservation.BestN(
                    get_metric_fn=of_best, n=1, keep_checkpoints_without_metrics=False
                )
            )
        self._kept = _Kept(preservation.AnyPreservationPolicy(policies), stuck)
        options = ocp.CheckpointManagerOptions(
            best_fn=None if best is None else of_best,
            preservation_policy=self._kept,
            step_prefix="step",
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._sync_unnamed),
            create=processes is None,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=None if processes is None else set(processes)
            ),
        )
        self.folder = folder
        self.best = best
        self._saving: int | None = None
        self._say = say
        silence_orbax()
        self._manager: ocp.CheckpointManager | None = None
        """Writes what this process holds; `None` where that is nothing."""
        if processes is not None and jax.process_index() not in processes:
            return
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                folder.absolute(), options=options, item_names=(STATE, FACTS)
            )

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Waits until the last save is on the disk. Raises `RunError` if it cannot be written.

        An earlier one that should be deleted and cannot be stays, and is named once.
        """
        if self._manager is None:
            return
        with self._explained():
            try:
                self._manager.wait_until_finished()
            except Exception:
                if not self._stuck_ones_stay():
                    raise
            sync(self.folder)

    def _stuck_ones_stay(self) -> bool:
        """Goes on without deleting what cannot be deleted; returns whether that is all that failed.

        Orbax deletes when the new checkpoint is complete, in the first process alone. As long as it
        is not, the run may need those before it.
        """
        assert self._manager is not None
        present, failed = complete_steps(self.folder), False
        if self._saving not in present or not is_main():
            return False
        for step in self._kept.unwanted & set(present):
            path, failed = self.folder / f"step_{step}", True
            try:
                shutil.rmtree(path)
            except OSError as error:
                self._kept.stuck.add(step)
                self._say(
                    f"warning: the checkpoint {path} cannot be deleted ({error.strerror or error}):"
                    f" it stays, and the run goes on"
                )
        self._manager.reload()
        return failed

    def close(self) -> None:
        """Waits for the last save, and frees what writing it took."""
        self.wait()
        if self._manager is not None:
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

        **Arguments:**

        - `state`: the state.
        - `facts`: JSON data to save beside it.
        - `score`: its score, for a store that keeps the best.

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
            "checksums": all_checksums(arrays),
            **facts,
        }
        if self._manager is None:
            return
        if jax.process_count() > 1:  # Orbax takes what one process has alone as NumPy's
            arrays = {
                name: jax.device_get(x)
                if isinstance(x, jax.Array) and x.is_fully_addressable
                else x
                for name, x in arrays.items()
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
