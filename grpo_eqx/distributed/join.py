"""Joins the processes of a run, and checks that they belong to one run."""

import dataclasses
import functools
import hashlib
from pathlib import Path

import jax

from grpo_eqx.config import GRPOConfig
from grpo_eqx.distributed.startup import initialize
from grpo_eqx.errors import RunError, UserError, first_line


def join_processes(cfg: GRPOConfig) -> None:
    """Joins this process with the others of its run, if there are any, before devices are touched.

    Raises `UserError`, in every process present, where processes are missing, or where config, code
    or the version of JAX differ; also, or `RunError`, where JAX has no devices.
    """
    facts = {
        **{field.name: repr(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)},
        "the version of JAX": jax.__version__,
        "the code of grpo_eqx": code_fingerprint(),
    }
    initialize(facts, require_processes=cfg.require_processes, timeout=cfg.start_timeout)
    _check_devices()


def _check_devices() -> None:
    """Raises an error that says what to do where JAX finds no devices.

    That is a `UserError` where they were asked for, and a `RunError` where another process has
    them, or they fail.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        chosen = jax.config.jax_platforms  # type: ignore[attr-defined]
        said = f" ({first_line(error)})" if str(error) else ""
        if not chosen or "in use" in str(error):
            raise RunError(
                f"JAX cannot use its devices{said}: end other processes that use them; "
                f"grpo-eqx doctor says more."
            ) from error
        raise UserError(
            f"JAX cannot use its devices with JAX_PLATFORMS={chosen}{said}: unset JAX_PLATFORMS, "
            f"or install what grpo-eqx doctor names."
        ) from error


@functools.cache
def code_fingerprint() -> str:
    """Returns a hash of all modules of this package."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
