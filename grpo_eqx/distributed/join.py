"""Joins the processes of a run, and checks that they belong to one run."""

import dataclasses
import functools
import hashlib
from pathlib import Path

import jax

from grpo_eqx.config import GRPOConfig
from grpo_eqx.distributed.startup import initialize
from grpo_eqx.errors import UserError, first_line


def join_processes(cfg: GRPOConfig) -> None:
    """Joins this process with the others of its run, if there are any, before devices are touched.

    Raises `UserError`, in every process present, where processes are missing, or where config, code
    or the version of JAX differ; also where JAX has no devices.
    """
    facts = {
        **{field.name: repr(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)},
        "the version of JAX": jax.__version__,
        "the code of grpo_eqx": code_fingerprint(),
    }
    initialize(facts, require_processes=cfg.require_processes, timeout=cfg.start_timeout)
    _check_devices()


def _check_devices() -> None:
    """Raises `UserError` where JAX finds no devices, as for a platform that is not there."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        chosen = jax.config.jax_platforms  # type: ignore[attr-defined]
        asked = f" with JAX_PLATFORMS={chosen}" if chosen else ""
        said = f" ({first_line(error)})" if str(error) else ""
        raise UserError(
            f"JAX cannot use its devices{asked}{said}: unset JAX_PLATFORMS, or "
            f"install what grpo-eqx doctor names."
        ) from error


@functools.cache
def code_fingerprint() -> str:
    """Returns a hash of all modules of this package."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
