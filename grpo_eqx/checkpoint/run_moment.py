"""The moment of a run, at which its chat template stands still."""

import contextlib
from datetime import datetime
from pathlib import Path

from grpo_eqx.checkpoint.checkpoints import located
from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.checkpoint.saved import SavedStep, complete_steps
from grpo_eqx.distributed.exchange import from_main
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.tracking.run_folder import RunFolder


def run_moment(cfg: GRPOConfig) -> datetime:
    """Returns the time of a run's prompts, for chat templates that ask for it.

    A run that continues keeps that of its checkpoints. A new one takes the time of process 0, for
    all processes.
    """
    saved = _saved_moment(cfg) if is_main() else None
    return datetime.fromisoformat(from_main(saved or datetime.now().isoformat()))


def _saved_moment(cfg: GRPOConfig) -> str | None:
    """Returns the moment in the checkpoints that a config resumes from, if there is one."""
    if cfg.resume == "never":
        return None
    assert cfg.output_dir is not None  # resolved
    own = _facts(RunFolder(cfg.output_dir).checkpoints, None)
    if cfg.resume == "auto" or (own is not None and own.config["resume"] == cfg.resume):
        return None if own is None else own.time
    with contextlib.suppress(Exception):  # of a path without checkpoints, `Checkpoints.find` tells
        named = _facts(*located("resume", Path(cfg.resume)))
        return None if named is None else named.time
    return None


def _facts(folder: Path, step: int | None) -> RunFacts | None:
    """Returns the facts of a checkpoint, by default of the newest that can be read."""
    for each in complete_steps(folder) if step is None else [step]:
        with contextlib.suppress(Exception):  # whatever is wrong with it, `restore` says it
            return RunFacts.saved(SavedStep(folder, each))
    return None
