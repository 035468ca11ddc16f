"""The matrix rate and the memory bandwidth that plain programs reach on a device here.

    python benchmarks/ceilings.py --dtype bfloat16

Prints them as JSON. Run it alone on the machine.
"""

import json
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro


def main(dtype: Literal["float32", "bfloat16"] = "bfloat16") -> None:
    """Measures both.

    Args:
        dtype: Of the matrices that are multiplied.
    """
    print(json.dumps(measure_ceilings(jnp.dtype(dtype))))


def measure_ceilings(dtype: jnp.dtype) -> dict[str, float]:
    """FLOPs a second of one large product, and bytes a second of one long copy, at best."""
    on_cpu = jax.default_backend() == "cpu"
    n = 2048 if on_cpu else 8192
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((n, n)), dtype)
    multiply = jax.jit(lambda a: a @ a)
    array = jnp.ones((64 if on_cpu else 1024) * 2**20, jnp.float32)
    copy = jax.jit(lambda a: a + 1)
    best = {
        name: min(timed(run) for _ in range(10))
        for name, run in (("multiply", lambda: multiply(matrix)), ("copy", lambda: copy(array)))
    }
    return {
        "flops_per_s": 2.0 * n**3 / best["multiply"],
        "bytes_per_s": 2.0 * array.nbytes / best["copy"],
    }


def timed(run: Callable[[], Any]) -> float:
    """Seconds of a call and everything that it leaves to the device."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


if __name__ == "__main__":
    tyro.cli(main)
