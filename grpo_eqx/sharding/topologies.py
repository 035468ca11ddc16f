"""TPUs that are not there: devices to compile for, described by name."""

import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from grpo_eqx.errors import UserError

# A TPU's type, as one rents it -> libtpu's name of its chips' grid.
GRIDS = {
    "v4-8": "v4:2x2x1",
    "v4-16": "v4:2x2x2",
    "v5e-4": "v5e:2x2",
    "v5e-8": "v5e:2x4",
    "v5e-16": "v5e:4x4",
    "v5p-8": "v5p:2x2x1",
    "v5p-16": "v5p:2x2x2",
    "v6e-4": "v6e:2x2",
    "v6e-8": "v6e:2x4",
    "v6e-16": "v6e:4x4",
    "v6e-256": "v6e:16x16",
}


def described_devices(name: str) -> Sequence[jax.Device]:
    """The devices of a TPU type (v6e-16) or grid (v6e:4x4): programs compile for them, no more.

    Raises `UserError` for a type that is not known, and without libtpu.
    """
    name = {grid: name for name, grid in GRIDS.items()}.get(name, name)
    if name not in GRIDS:
        raise UserError(f"TPU type {name!r} is not known: use one of {', '.join(GRIDS)}.")
    # Without these libtpu asks the machine it runs on for its TPU, and locks it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # The two cores of a v4 chip are one device, as when it runs JAX.
    options = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    try:
        described = topologies.get_topology_desc(GRIDS[name], "tpu", **options)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"TPU type {name} cannot be described ({error}): "
            f'pip install "grpo_eqx[plan]" brings the compiler.'
        ) from error
    return described.devices
