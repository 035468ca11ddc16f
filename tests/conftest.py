"""Test set-up: eight CPU devices, and shapes and types checked at every call."""

import os

# Before jax is imported: tests of sharding need more than one device, and nearly all of the tests'
# time is compilation, which less optimisation halves.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # no test writes to the home folder
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"

from jaxtyping import install_import_hook

with install_import_hook("grpo_eqx", "beartype.beartype"):
    import grpo_eqx  # noqa: F401

import jax
import pytest
from hypothesis import settings

settings.register_profile("grpo_eqx", deadline=None, derandomize=True)
settings.load_profile("grpo_eqx")


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
