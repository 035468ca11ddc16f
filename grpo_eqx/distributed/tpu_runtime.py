"""Whether JAX looks for a TPU on this machine: libtpu prints alarming lines where there is none."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_LIBRARY = "TPU_LIBRARY_PATH"
"""Environment variable with the path of libtpu, by which JAX loads it."""
_NO_LIBRARY = str(Path(__file__))
"""Path of a file that is none, so that JAX goes on without, as it does where libtpu is missing."""
_DEVICE_FILES = Path("/dev")


def has_tpu(device_files: Path = _DEVICE_FILES) -> bool:
    """Returns whether the kernel has device files of a TPU."""
    by_vfio = _libtpu() is not None and any(device_files.glob("vfio/[0-9]*"))
    return by_vfio or any(device_files.glob("accel[0-9]*"))


def leave_out_libtpu(
    environment: MutableMapping[str, str] = os.environ, device_files: Path = _DEVICE_FILES
) -> None:
    """Keeps JAX from loading libtpu, installed to compile for TPUs, on a machine without a TPU.

    It does nothing where the environment speaks of a TPU.
    """
    # These are set as JAX and libtpu are imported, the first only where JAX sees no TPU.
    by_import = {("TPU_SKIP_MDS_QUERY", "1"), (_LIBRARY, str(_libtpu()))}
    of_tpus = {item for item in environment.items() if item[0].startswith(("TPU_", "JAX_FORCE_T"))}
    speaks = of_tpus - by_import or "tpu" in environment.get("JAX_PLATFORMS", "")
    if _libtpu() is not None and not speaks and not has_tpu(device_files):
        environment[_LIBRARY] = _NO_LIBRARY


@contextlib.contextmanager
def libtpu_to_compile() -> Iterator[None]:
    """Lets JAX load libtpu, for described TPUs."""
    left_out = os.environ.get(_LIBRARY) == _NO_LIBRARY
    if left_out:
        del os.environ[_LIBRARY]
    try:
        yield
    finally:
        if left_out:
            os.environ[_LIBRARY] = _NO_LIBRARY


def _libtpu() -> Path | None:
    """Returns the path of the installed libtpu, `None` without one."""
    spec = importlib.util.find_spec("libtpu")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "libtpu.so"
