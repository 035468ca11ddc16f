"""Checkpoints of a run: one folder per saved step, written by Orbax."""

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from grpo_eqx.checkpoint.checksums import checksums
from grpo_eqx.errors import RunError, first_line
from grpo_eqx.models.base import CausalLM
from grpo_eqx.training.state import TrainState

_STATE, _FACTS, _SCORE = "state", "facts", "score"
_LONGEST_REASON = 300
_COUNTERS = ("step", "next_batch", "num_tokens")


def complete_steps(folder: Path) -> list[int]:
    """Returns the steps with a complete checkpoint in a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted(ocp.utils.checkpoint_steps(folder.absolute()), reverse=True)


class CheckpointStore:
    """Checkpoints in a folder, numbered by the steps after which they were saved.

    A checkpoint appears under its number only when all processes have written their parts of it;
    what an interrupted save leaves behind is deleted by the next one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        save_total_limit: int | None = None,
        keep_best: bool = False,
        read_only: bool = False,
    ):
        """**Arguments:** the folder, created where missing; the number of newest checkpoints to
        keep, `None` for all; whether to keep the one of the highest score too; whether to leave the
        folder as it is, because a run may be writing to it.
        """
        policies: list[preservation.PreservationPolicy] = [preservation.LatestN(n=save_total_limit)]
        if keep_best:
            best = preservation.BestN(
                get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False
            )
            policies.append(best)
        options = ocp.CheckpointManagerOptions(
            best_fn=_score if keep_best else None,
            preservation_policy=preservation.AnyPreservationPolicy(policies),
            step_prefix="step",
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=not read_only,
            read_only=read_only,
        )
        self.folder = folder
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=options, item_names=(_STATE, _FACTS)
        )
        self._saving = 0

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Waits for the last save. Raises `RunError` if it could not be written."""
        with self._explained():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save, and frees what writing it took."""
        with self._explained():
            self._manager.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns whatever Orbax and TensorStore raise while they write into a `RunError`."""
        try:
            yield
        except Exception as error:
            full = "No space left" in str(error)
            reason = "no space is left there" if full else first_line(error)[:_LONGEST_REASON]
            steps = complete_steps(self.folder)
            last = f"the last is step_{steps[0]}" if steps else "there is none yet"
            raise RunError(
                f"the checkpoint of step {self._saving} could not be written to "
                f"{str(self.folder)!r} ({reason}). Earlier ones are intact, {last}: free space or "
                f"make the folder writable, and the same command continues."
            ) from error

    def save(self, state: TrainState, facts: Mapping[str, Any], score: float | None = None) -> None:
        """Saves the state of a run, and what must be known of it to resume it.

        **Arguments:** the state; the facts, which JSON must be able to hold; how good it is, for a
        store that keeps the best.

        Returns as soon as the arrays are copied to host memory; the rest is written in the
        background. A save that is still being written is waited for first. Raises `RunError` if
        either cannot be written.
        """
        self.wait()
        self._saving = state.step
        arrays = _arrays(state)
        counters = {name: getattr(state, name) for name in _COUNTERS}
        facts = {"counters": counters, "checksums": checksums(arrays), **facts}
        with self._explained():
            self._manager.save(
                state.step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays),
                    facts=ocp.args.JsonSave({"facts": facts, "sha256": _digest(facts)}),
                ),
                metrics=None if score is None else {_SCORE: score},
            )

    def facts(self, step: int) -> dict[str, Any]:
        """Reads the facts that were saved with a step. Raises `DamagedError` if they changed."""
        args = ocp.args.Composite(facts=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)[_FACTS]
        if _digest(restored["facts"]) != restored["sha256"]:
            raise DamagedError("its facts are not as they were saved")
        return dict(restored["facts"])

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Reads the state after a step onto the devices, and verifies its checksums.

        **Arguments:** the step; a state of `jax.ShapeDtypeStruct`s, whose shardings the arrays get.
        The mesh and the number of processes may differ from those that saved.

        Raises `DamagedError` if an array is not as it was saved, and Orbax's errors.
        """
        facts = self.facts(step)
        state = self._verified(step, like, ocp.args.StandardRestore(_arrays(like)), facts)
        return dataclasses.replace(state, **{name: facts["counters"][name] for name in _COUNTERS})

    def restore_model(self, step: int, like: CausalLM) -> CausalLM:
        """Reads only the parameters after a step, and verifies their checksums.

        **Arguments:** as for `restore`, but a model.

        Raises `OtherModelError` if the checkpoint is of a model with other parameters, and what
        `restore` raises.
        """
        wanted = TrainState(like, opt_state=())
        arrays = _arrays(wanted)
        with ocp.StandardCheckpointer() as reader:
            saved = reader.metadata(self.folder.absolute() / f"step_{step}" / _STATE).item_metadata
        found = {name: x.shape for name, x in saved.items() if name.startswith("model.")}
        expected = {name: x.shape for name, x in arrays.items()}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise OtherModelError(
                    f"{name.removeprefix('model.')} is {found.get(name, 'missing')} there, and "
                    f"{expected.get(name, 'missing')} here"
                )
        args = ocp.args.PyTreeRestore(
            arrays,
            restore_args=ocp.checkpoint_utils.construct_restore_args(arrays),
            partial_restore=True,
        )
        return self._verified(step, wanted, args, self.facts(step)).model

    def _verified(
        self, step: int, like: TrainState, args: ocp.args.CheckpointArgs, facts: Mapping[str, Any]
    ) -> TrainState:
        """Reads arrays into a state, and compares them with their checksums."""
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=args))[_STATE]
        for name, value in checksums(arrays).items():
            if value != facts["checksums"][name]:
                raise DamagedError(f"the values of {name} are not as they were saved")
        leaves, structure = jax.tree_util.tree_flatten_with_path(like)
        return jax.tree_util.tree_unflatten(
            structure, [arrays.get(_name(path), leaf) for path, leaf in leaves]
        )


class DamagedError(RuntimeError):
    """A checkpoint's files have changed since they were written."""


class OtherModelError(RuntimeError):
    """A checkpoint is of a model with other parameters; the message names the first of them."""


def _score(metrics: Mapping[str, float]) -> float:
    return metrics[_SCORE]


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _arrays(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a state, or their shapes, by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {_name(path): leaf for path, leaf in leaves if not isinstance(leaf, int)}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _of_others(record: logging.LogRecord) -> bool:
    """Returns whether a log record is not about Orbax's files."""
    return "orbax" not in record.pathname and "orbax" not in record.getMessage()


# Orbax logs a note on every folder that it reads, and each failure, with a traceback from each of
# its threads; what matters of them it also raises.
for _logger in ("absl", "asyncio"):
    logging.getLogger(_logger).addFilter(_of_others)
