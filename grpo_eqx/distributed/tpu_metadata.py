"""Reads what Google's metadata server tells a TPU VM about itself."""

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from grpo_eqx.common.errors import UserError

HOST = "GCE_METADATA_HOST"
"""Environment variable with the server's address, where it is not the usual one."""
_USUAL_HOST = "metadata.google.internal"
_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
_TIMEOUT = 10.0


class Worker(NamedTuple):
    """One of the virtual machines that a TPU's chips are attached to."""

    hosts: list[str]
    """Addresses of all of them."""
    number: int
    """Index of this machine among them."""


def worker(environment: Mapping[str, str]) -> Worker | None:
    """Returns the worker that this machine is; `None` where it is no TPU VM.

    Raises `UserError` where the server, on a machine that should have one, does not answer.
    """
    if not is_expected(environment):
        return None
    number = value("attributes/agent-worker-number", environment)
    endpoints = value("attributes/worker-network-endpoints", environment)
    if number is None or endpoints is None:
        return None  # a virtual machine without a TPU
    # Each is an address, or name:id:address.
    return Worker([end.split(":")[-1] for end in endpoints.split(",")], int(number))


def is_expected(environment: Mapping[str, str]) -> bool:
    """Returns whether this can be a TPU VM: a machine of Google's with libtpu installed."""
    if "TPU_SKIP_MDS_QUERY" in environment:
        return False
    if HOST in environment:
        return True
    on_google = _PRODUCT_NAME.exists() and "Google" in _PRODUCT_NAME.read_text()
    return on_google and importlib.util.find_spec("libtpu") is not None


def value(name: str, environment: Mapping[str, str]) -> str | None:
    """Returns what the server has under a name of this instance, `None` if it has nothing.

    Raises `UserError` where it does not answer.
    """
    host = environment.get(HOST, _USUAL_HOST)
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise _unanswered(host, error) from error
    except OSError as error:
        raise _unanswered(host, error) from error


def _unanswered(host: str, error: OSError) -> UserError:
    return UserError(
        f"the metadata server {host} did not say which TPU worker this is ({error}): try again, or "
        f"set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID on every worker."
    )
