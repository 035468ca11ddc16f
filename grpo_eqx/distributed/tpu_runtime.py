"""Keeps JAX from looking for a TPU where none exists: libtpu would print alarming lines."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_LIBRARY = "TPU_LIBRARY_PATH"
"""Environment variable with the path from which JAX loads libtpu."""
_NO_LIBRARY = str(Path(__file__))
"""Path of a file that is not libtpu: JAX goes on without a TPU, as if libtpu were missing."""
_DEVICE_FILES = Path("/dev")


def has_tpu(device_files: Path = _DEVICE_FILES) -> bool:
    """Returns whether the kernel has device files of a TPU."""
    by_vfio = _libtpu() is not None and any(device_files.glob("vfio/[0-9]*"))
    return by_vfio or any(device_files.glob("accel[0-9]*"))


def leave_out_libtpu(
    environment: MutableMapping[str, str] = os.environ, device_files: Path = _DEVICE_FILES
) -> None:
    """Keeps JAX from loading libtpu, installed to compile for TPUs, on a machine without a TPU.

    Does nothing if environment variables refer to a TPU.
    """
    # Importing JAX and libtpu sets these variables, the first only where JAX sees no TPU.
    by_import = {("TPU_SKIP_MDS_QUERY", "1"), (_LIBRARY, str(_libtpu()))}
    of_tpus = {item for item in environment.items() if item[0].startswith(("TPU_", "JAX_FORCE_T"))}
    speaks = of_tpus - by_import or "tpu" in environment.get("JAX_PLATFORMS", "")
    if _libtpu() is not None and not speaks and not has_tpu(device_files):
        environment[_LIBRARY] = _NO_LIBRARY


@contextlib.contextmanager
def libtpu_to_compile() -> Iterator[None]:
    """Lets JAX load libtpu to compile for TPUs that are not attached."""
    left_out = os.environ.get(_LIBRARY) == _NO_LIBRARY
    if left_out:
        del os.environ[_LIBRARY]
    try:
        yield
    finally:
        if left_out:
            os.environ[_LIBRARY] = _NO_LIBRARY


def _libtpu() -> Path | None:
    """Returns the path of the installed libtpu, if any."""
    spec = importlib.util.find_spec("libtpu")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "libtpu.so"
