"""Folder in which servers find the weights."""

import secrets
import shutil
from pathlib import Path

import jax

from grpo_eqx.common.errors import RunError, first_line
from grpo_eqx.distributed.exchange import raise_on_all_hosts
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.generation.remote.server import Weights
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.pretrained import save_pretrained


class WeightsFolder:
    """Folder that the run and the servers share, with one version of the weights at a time."""

    def __init__(self, path: str | Path, dtype: jax.typing.DTypeLike):
        """**Arguments:**

        - `path`: the folder, under the path that servers see it.
        - `dtype`: dtype of the tensors.
        """
        self._path, self._dtype = Path(path).absolute(), dtype
        self._written: Path | None = None

    def write(self, model: CausalLM, version: int) -> Weights:
        """Writes weights in place of those before, which no server may still load.

        All processes must call this. Raises `RunError` where the folder cannot be written.
        """
        self.clear()
        self._written = self._path / f"v{version}"
        try:
            raise_on_all_hosts(self._make)
            save_pretrained(model.merged(), self._written, self._dtype)
        except OSError as error:
            raise RunError(
                f"the weights for the servers cannot be written to {self._written} "
                f"({first_line(error)}): give a folder with room that the servers share."
            ) from error
        # Servers may have weights of that number already, such as those of another run.
        return Weights(str(self._written), f"{version}-{secrets.token_hex(4)}")

    def _make(self) -> None:
        if is_main():
            self._path.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Removes the weights."""
        if self._written is not None and is_main():
            shutil.rmtree(self._written, ignore_errors=True)
