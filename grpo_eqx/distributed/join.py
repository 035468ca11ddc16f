"""Joins the processes of a run, and checks that they belong to one run."""

import dataclasses
import functools
import hashlib
from pathlib import Path

import jax

from grpo_eqx.config import GRPOConfig
from grpo_eqx.distributed.startup import initialize


def join_processes(cfg: GRPOConfig) -> None:
    """Joins this process with the others of its run, if there are any, before devices are touched.

    Raises `UserError`, in every process present, where processes are missing, or where config, code
    or the version of JAX differ.
    """
    facts = {
        **{field.name: repr(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)},
        "the version of JAX": jax.__version__,
        "the code of grpo_eqx": code_fingerprint(),
    }
    initialize(facts, require_processes=cfg.require_processes, timeout=cfg.start_timeout)


@functools.cache
def code_fingerprint() -> str:
    """Returns a hash of all modules of this package."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
