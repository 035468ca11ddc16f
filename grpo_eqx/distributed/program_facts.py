"""Facts of a process that decide what it compiles, besides the settings of its run."""

import os
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import jax

_COMPILERS = ("jax", "jaxlib", "libtpu", "equinox", "optax")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_OF_ONE_HOST = re.compile(
    "cache|log|dump|traceback|timeout|address|visible_devices|default_device|num_cpu_devices|"
    "profil|pprint|leak|warn|guard|preemption|distributed_debug"
)
"""Words in the names of JAX's options that may differ between hosts, as their devices may: numbers
of devices are compared later."""
_FLAGS_OF_ONE_HOST = re.compile("device_count|dump|cache")


def program_facts() -> dict[str, str]:
    """Returns the facts, by names that a user can look for.

    They are the versions of the compilers, XLA's flags, and JAX's options, by the environment
    variables that set them.
    """
    versions = {f"the version of {name}": installed_version(name) for name in _COMPILERS}
    return {
        **{name: found or "none" for name, found in versions.items()},
        **{name: " ".join(sorted(_flags(os.environ.get(name, "")))) or "none" for name in _FLAGS},
        **dict(_options()),
    }


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, `None` where there is none."""
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
