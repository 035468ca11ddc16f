"""Facts of a process that decide which programs it compiles, besides the run's settings."""

import functools
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from grpo_eqx.common.errors import UserError

_COMPILERS = ("jax", "jaxlib", "libtpu", "equinox", "optax")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_OF_ONE_HOST = re.compile(
    "cache|log|dump|traceback|timeout|address|visible_devices|default_device|num_cpu_devices|"
    "profil|pprint|leak|warn|guard|preemption|distributed_debug"
)
"""Words in the names of JAX's options that may differ between hosts."""
_FLAGS_OF_ONE_HOST = re.compile("device_count|dump|cache")
_PARSE_XLA_FLAGS = """
from jaxlib import xla_client
xla_client.CompileOptions().executable_build_options.debug_options
"""


def program_facts() -> dict[str, str]:
    """Returns the versions of compilers, XLA's flags, and JAX's options.

    Flags and options have the names of the environment variables that set them.
    """
    versions = {f"the version of {name}": installed_version(name) for name in _COMPILERS}
    return {
        **{name: found or "none" for name, found in versions.items()},
        **{name: " ".join(sorted(_flags(os.environ.get(name, "")))) or "none" for name in _FLAGS},
        **dict(_options()),
    }


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, `None` for a missing package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _options() -> Iterator[tuple[str, str]]:
    for name, value in sorted(jax.config.values.items()):
        if not _OF_ONE_HOST.search(name):
            yield name.upper(), str(value)


def _flags(text: str) -> Iterator[str]:
    return (flag for flag in text.split() if not _FLAGS_OF_ONE_HOST.search(flag.partition("=")[0]))


@functools.cache
def check_xla_flags() -> None:
    """Raises `UserError` for a flag in XLA_FLAGS that XLA refuses, and would abort the process for.

    Another process parses the flags, which takes a quarter of a second.
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
