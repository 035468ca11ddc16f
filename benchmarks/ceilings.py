"""The matrix rate and the memory bandwidth that plain programs reach on a device here.

    python benchmarks/ceilings.py --dtype bfloat16

Prints them as JSON. Run it alone on the machine.
"""

import json
from typing import Literal

import jax
import jax.numpy as jnp
import tyro

from grpo_eqx.tracking.device_peaks import copy_rate, product_rate


def main(dtype: Literal["float32", "bfloat16"] = "bfloat16") -> None:
    """Measures both.

    Args:
        dtype: Of the matrices that are multiplied.
    """
    print(json.dumps(measure_ceilings(jnp.dtype(dtype))))


def measure_ceilings(dtype: jnp.dtype) -> dict[str, float]:
    """FLOPs a second of one large product, and bytes a second of one long copy, at best."""
    on_cpu = jax.default_backend() == "cpu"
    return {
        "flops_per_s": product_rate(dtype, [2048 if on_cpu else 8192]),
        "bytes_per_s": copy_rate([(64 if on_cpu else 1024) * 2**20]),
    }


if __name__ == "__main__":
    tyro.cli(main)
