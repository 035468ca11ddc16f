"""Checkpoints as they lie in a folder, to be read.

Reading changes no file and exchanges nothing between processes, so it may fail in one of them; the
checksums are computed by all devices together.
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from grpo_eqx.checkpoint.checksums import checksums, host_checksum
from grpo_eqx.checkpoint.orbax_reports import silence_orbax
from grpo_eqx.common.clean_text import clean
from grpo_eqx.common.durable import write_durably
from grpo_eqx.common.errors import FileError
from grpo_eqx.common.plain_data import field
from grpo_eqx.common.read_files import read_object
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.arrays import nowhere
from grpo_eqx.training.state import TrainState

STATE, FACTS = "state", "facts"
"""Names of the two parts of a checkpoint."""
CARRIED = "carried."
"""Beginning of the names of arrays on the host, whose sizes change."""
_CARRIED_FILE = "carried.npz"


class DamagedError(RuntimeError):
    """A checkpoint's files have changed since they were written."""


class OtherArraysError(RuntimeError):
    """A checkpoint has other arrays than expected; the message names the first of them."""


def complete_steps(folder: Path) -> list[int]:
    """Returns the steps with a complete checkpoint in a folder, newest first."""
    if not os.path.isdir(folder):
        return []
    return sorted(ocp.utils.checkpoint_steps(folder.absolute()), reverse=True)


class SavedStep:
    """The complete checkpoint of one step."""

    def __init__(self, folder: Path, step: int):
        self.step = step
        self.path = folder / f"step_{step}"

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The facts that were saved with it, read once. Raises `DamagedError` if they changed."""
        path = self.path / FACTS / "metadata"
        try:
            saved = read_object(path)
            facts = field(saved, "facts", dict, str(path))
            for name in ("shapes", "checksums", "counters"):
                field(facts, name, dict, str(path))
        except FileError as error:
            raise DamagedError(str(error)) from error
        if digest(facts) != saved.get("sha256"):
            raise DamagedError("its facts are not as they were saved")
        return facts

    def check_arrays(self, like: TrainState) -> None:
        """Raises `OtherArraysError` if the checkpoint has other arrays than a state's shapes."""
        arrays = named_arrays(like)
        shapes = {
            name: tuple(shape)
            for name, shape in self.facts["shapes"].items()
            if not name.startswith(CARRIED)
        }
        if not like.opt_state:
            shapes = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
        for name in sorted(shapes.keys() | arrays.keys()):
            expected = arrays[name].shape if name in arrays else "missing"
            if shapes.get(name, "missing") != expected:
                raise OtherArraysError(
                    f"{name.removeprefix('model.')} is {shapes.get(name, 'missing')} there, and "
                    f"{expected} here"
                )

    def read(self, like: TrainState) -> dict[str, jax.Array | np.ndarray]:
        """Reads the arrays of a state, unverified, onto the devices.

        **Arguments:**

        - `like`: a state of `jax.ShapeDtypeStruct`s, whose shardings the arrays get. Only the
          fields that it has are read; a model alone will do.

        The mesh and the number of processes may differ from those that saved. What is carried over
        between steps comes as it was saved, on the host.

        Raises `OtherArraysError` if the checkpoint has others, and TensorStore's errors.
        """
        self.check_arrays(like)
        arrays = named_arrays(like)
        if like.opt_state:  # else it is the model alone
            shapes = self.facts["shapes"].items()
            arrays |= {name: np.zeros(x) for name, x in shapes if name.startswith(CARRIED)}
        elsewhere = {
            name: nowhere(x)
            for name, x in arrays.items()
            if isinstance(x, jax.ShapeDtypeStruct) and not x.sharding.addressable_devices
        }
        arrays = {name: x for name, x in arrays.items() if name not in elsewhere}
        if not arrays:
            return dict(elsewhere)
        restore_args = {
            name: ocp.RestoreArgs(restore_type=np.ndarray)
            if name.startswith(CARRIED)
            else ocp.checkpoint_utils.construct_restore_args(x)
            for name, x in arrays.items()
        }
        args = ocp.args.PyTreeRestore(arrays, restore_args=restore_args, partial_restore=True)
        silence_orbax()
        reader = ocp.PyTreeCheckpointHandler()
        try:
            return {**elsewhere, **reader.restore((self.path / STATE).absolute(), args=args)}
        except Exception as error:
            # Orbax's own message is pages of an array's specification.
            raise error.__cause__ or error from None
        finally:
            reader.close()

    def verified(
        self, arrays: Mapping[str, jax.Array | np.ndarray], like: TrainState
    ) -> TrainState:
        """Returns the state with arrays that `read` returned, and its counters.

        Raises `DamagedError`, in all processes alike, if an array is not as it was saved.
        """
        for name, value in all_checksums(arrays).items():
            if value != self.facts["checksums"][name]:
                raise DamagedError(f"the values of {name} are not as they were saved")
        found = {**arrays, **self.facts["counters"]}
        leaves, structure = jax.tree_util.tree_flatten_with_path(like)
        state = jax.tree_util.tree_unflatten(
            structure, [found.get(_name(path), leaf) for path, leaf in leaves]
        )
        carried = {
            name.removeprefix(CARRIED): np.asarray(x)
            for name, x in arrays.items()
            if name.startswith(CARRIED)
        }
        if like.opt_state:
            carried = self._later_carried() or carried
        return dataclasses.replace(state, carried=carried)

    def write_carried(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes what is carried over beside the checkpoint, as it is later in the next step."""
        content = io.BytesIO()
        np.savez(content, allow_pickle=False, **arrays)
        write_durably(self.path / _CARRIED_FILE, content.getvalue())

    def _later_carried(self) -> dict[str, np.ndarray] | None:
        """Returns what `write_carried` wrote; `None` where nothing is there, or it is damaged."""
        path = self.path / _CARRIED_FILE
        try:
            with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
                return dict(file)  # whose checksums are verified
        except FileNotFoundError:
            return None
        except (OSError, ValueError, zipfile.BadZipFile, KeyError, EOFError) as error:
            warnings.warn(
                clean(
                    f"{path} is damaged ({error}): what was drawn after the checkpoint is drawn "
                    "again."
                ),
                stacklevel=2,
            )
            return None

    def model(self, like: CausalLM) -> CausalLM:
        """Reads only the parameters, and verifies their checksums; raises as the steps do."""
        wanted = TrainState(like, opt_state=())
        return self.verified(self.read(wanted), wanted).model


def all_checksums(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, int]:
    """Computes the checksum of each array, where it lies."""
    on_devices = {name: x for name, x in arrays.items() if not name.startswith(CARRIED)}
    return checksums(on_devices) | {
        name: host_checksum(np.asarray(arrays[name])) for name in arrays.keys() - on_devices.keys()
    }


def digest(facts: Mapping[str, Any]) -> str:
    """Returns the hash by which changed facts are noticed."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def named_arrays(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a state, or their shapes, by name."""
    return {name: leaf for name, leaf in _named(state) if not isinstance(leaf, int)}


def named_counters(state: TrainState) -> dict[str, int]:
    """Returns the integers of a state by name."""
    return {name: leaf for name, leaf in _named(state) if isinstance(leaf, int)}


def _named(state: TrainState) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return [(_name(path), leaf) for path, leaf in leaves]


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
