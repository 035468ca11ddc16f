"""Joins the processes of a run, and checks that they belong to one run."""

import dataclasses
import functools
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax

from grpo_eqx.config import GRPOConfig
from grpo_eqx.distributed.startup import initialize
from grpo_eqx.errors import RunError, UserError, first_line

_PARSE_XLA_FLAGS = """
from jaxlib import xla_client
xla_client.CompileOptions().executable_build_options.debug_options
"""


def join_processes(cfg: GRPOConfig) -> None:
    """Joins this process with the others of its run, if there are any, before devices are touched.

    Raises, in every process present, `RunError` where processes are missing, and `UserError` where
    config, code or the version of JAX differ; also either where JAX has no devices.
    """
    check_xla_flags()
    facts = {
        **{field.name: repr(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)},
        "the version of JAX": jax.__version__,
        "the code of grpo_eqx": code_fingerprint(),
    }
    initialize(facts, require_processes=cfg.require_processes, timeout=cfg.start_timeout)
    _check_devices()


@functools.cache
def check_xla_flags() -> None:
    """Raises `UserError` where XLA_FLAGS has a flag that XLA refuses: it would abort the process.

    Another process parses them, in a quarter of a second.
    """
    if not os.environ.get("XLA_FLAGS"):
        return
    parse = [sys.executable, "-c", _PARSE_XLA_FLAGS]
    said = subprocess.run(parse, capture_output=True, text=True, errors="replace").stderr
    if refused := re.search(r"Unknown flags? in XLA_FLAGS: .*|Couldn't interpret value .*", said):
        reason = refused[0].strip(" .")
        raise UserError(f"XLA refuses XLA_FLAGS ({reason}): correct it, or unset it.")


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
