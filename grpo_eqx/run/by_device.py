"""Choices by kind of device: what `auto` means, and forms that no setting names."""

import sys

import jax
import jax.numpy as jnp

from grpo_eqx.common.choices import Remat
from grpo_eqx.common.errors import UserError
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.device_memory import usable_bytes

_TOKENS = 8192
"""Tokens of a micro-batch that keep an accelerator busy, without its links as the bottleneck."""
_TOKENS_ON_CPU = 1024
_LANES = 128
"""Elements of a TPU's vectors. Stored heads fill whole ones: where heads of 64 did not, XLA laid
the cache out by positions, and copied all of it in every layer to write a single one. So do rows of
tokens: where rows of 4,351 did not, every change between rows and a list of all tokens shifted the
data within its vectors, and four rows at a time took several times as long to compile as one."""


def compute_dtype(cfg: GRPOConfig, mesh: jax.sharding.Mesh) -> jnp.dtype:
    """Returns the dtype that layers compute in; raises `UserError` for one that devices lack."""
    is_cpu = on_cpu(mesh)
    for name in ("dtype", "rollout_dtype"):
        if is_cpu and getattr(cfg, name) == "bfloat16":
            raise UserError(
                f"{name} is bfloat16, but the devices are CPUs, whose compiler lacks bfloat16 "
                f"products with float32 results: use auto."
            )
    return jnp.dtype(cfg.dtype if cfg.dtype != "auto" else "float32" if is_cpu else "bfloat16")


def default_remat(mesh: jax.sharding.Mesh) -> Remat:
    """Returns what the backward pass recomputes: everything, where memory is a device's own."""
    return "none" if on_cpu(mesh) else "full"


def on_cpu(mesh: jax.sharding.Mesh) -> bool:
    """Whether the devices are CPUs."""
    return _platform(mesh) == "cpu"


def _platform(mesh: jax.sharding.Mesh) -> str:
    return mesh.devices.flat[0].platform


def vector_size(mesh: jax.sharding.Mesh) -> int:
    """Returns the divisor of sizes that must fill whole vectors."""
    return _LANES if _platform(mesh) == "tpu" else 1


def tokens_per_micro_batch(mesh: jax.sharding.Mesh) -> int:
    """Returns the tokens that a device processes at a time."""
    return _TOKENS_ON_CPU if on_cpu(mesh) else _TOKENS


def device_bytes(mesh: jax.sharding.Mesh) -> int:
    """Returns the memory of each device; without limit where JAX does not report it."""
    try:
        return usable_bytes(list(mesh.devices.flat))
    except UserError:
        return sys.maxsize
