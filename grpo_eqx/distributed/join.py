"""Joins the processes of a run, and checks that they belong to one run."""

import dataclasses
import functools
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.startup import check_devices, initialize
from grpo_eqx.settings.config import GRPOConfig

_PARSE_XLA_FLAGS = """
from jaxlib import xla_client
xla_client.CompileOptions().executable_build_options.debug_options
"""


def join_processes(cfg: GRPOConfig) -> None:
    """Joins this process with the others of its run, if there are any, before devices are touched.

    Raises, in every process present, `RunError` where processes are missing, and `UserError` where
    config, code or what decides JAX's programs differ; also either where JAX has no devices.
    """
    check_xla_flags()
    facts = {
        **{field.name: repr(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)},
        "the code of grpo_eqx": code_fingerprint(),
    }
    initialize(facts, require_processes=cfg.require_processes, timeout=cfg.start_timeout)
    check_devices()  # for a process alone


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


@functools.cache
def code_fingerprint() -> str:
    """Returns a hash of all modules of this package."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
