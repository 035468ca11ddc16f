"""Checks that all hosts of a run see the same files."""

import secrets
from pathlib import Path

import jax

from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.exchange import from_main, raise_on_all_hosts
from grpo_eqx.distributed.startup import is_main


def check_shared(folder: Path) -> None:
    """Raises `UserError`, on all hosts, if one does not see what process 0 writes to a folder.

    Each host writes its own part of a checkpoint: in folders of their own, no host would have a
    whole one.
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
