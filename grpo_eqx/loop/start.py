"""Start of a run: its processes meet, and check their folder and code before they load anything."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from grpo_eqx.checkpoint.same_run import code_hash
from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.exchange import (
    assert_same_on_all_hosts,
    from_main,
    raise_on_all_hosts,
)
from grpo_eqx.distributed.startup import is_main, join_processes
from grpo_eqx.loop.callbacks import Callback
from grpo_eqx.rewards import RewardFunc
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.tracking.run_lock import RunLock


def join_run(cfg: GRPOConfig, callbacks: Sequence[Callback]) -> None:
    """Connects the processes of the run.

    Raises `UserError` where they do not agree on it, and `RunError` where some did not join.
    """
    join_processes(cfg)
    if jax.process_count() > 1:  # callbacks are called, and agree, in all processes
        names = ", ".join(type(callback).__qualname__ for callback in callbacks)
        assert_same_on_all_hosts({"callbacks": names or "none"})


def folder_lock(cfg: GRPOConfig) -> RunLock:
    """Checks the run's folder, and returns its lock.

    Raises `UserError` if it is in use or not writable, or if the hosts do not share it, which is
    tried in it.
    """
    assert cfg.output_dir is not None  # resolved
    folder = RunFolder(cfg.output_dir)
    raise_on_all_hosts(folder.check_writable)
    lock = RunLock(folder.path)
    raise_on_all_hosts(lock.check_free)
    check_shared(folder.path)
    return lock


def check_shared(folder: Path) -> None:
    """Raises `UserError`, on all hosts, if one does not see what process 0 writes to a folder.

    Each host writes its own part of a checkpoint: with separate folders, no host would hold a
    complete one.
    """
    if jax.process_count() == 1:
        return
    probe = folder / f".shared-{from_main(secrets.token_hex(4))}"

    def write() -> None:
        if is_main():
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()

    def read() -> None:
        if not probe.exists():
            raise UserError(
                f"output_dir {str(folder)!r} is not the same folder on the host of process "
                f"{jax.process_index()} as on that of process 0: checkpoints need storage that all "
                f"hosts share. Set output_dir to a folder there."
            )

    raise_on_all_hosts(write)
    try:
        raise_on_all_hosts(read)
    finally:
        if is_main():
            probe.unlink()


def check_same_code(funcs: Mapping[str, RewardFunc]) -> None:
    """Raises `UserError` where hosts have other functions, or other code of one.

    Each host calls them on its share of the completions, and results are gathered by position.
    """
    if jax.process_count() > 1:
        code = raise_on_all_hosts(lambda: {name: code_hash(func) for name, func in funcs.items()})
        facts = {f"the code of {name}": hashed for name, hashed in code.items()}
        assert_same_on_all_hosts({"the functions that score": ", ".join(funcs), **facts})
