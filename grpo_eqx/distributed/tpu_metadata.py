"""Reads facts about this TPU VM from Google's metadata server."""

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from grpo_eqx.common.errors import UserError

HOST = "GCE_METADATA_HOST"
"""Environment variable with the server's address, if it is not the usual address."""
_USUAL_HOST = "metadata.google.internal"
_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
_TIMEOUT = 10.0


class Worker(NamedTuple):
    """Virtual machine that chips of a TPU are attached to."""

    hosts: list[str]
    """Addresses of all workers of the TPU."""
    number: int
    """Index of this worker among them."""


def worker(environment: Mapping[str, str]) -> Worker | None:
    """Returns this machine's place among a TPU's workers; `None` if it is not a TPU VM.

    Raises `UserError` if the metadata server should exist, but does not answer.
    """
    if not is_expected(environment):
        return None
    number = value("attributes/agent-worker-number", environment)
    endpoints = value("attributes/worker-network-endpoints", environment)
    if number is None or endpoints is None:
        return None  # a virtual machine without a TPU
    # Each endpoint is an address, or name:id:address.
    return Worker([end.split(":")[-1] for end in endpoints.split(",")], int(number))


def is_expected(environment: Mapping[str, str]) -> bool:
    """Returns whether this may be a TPU VM: a machine at Google with libtpu installed."""
    if "TPU_SKIP_MDS_QUERY" in environment:
        return False
    if HOST in environment:
        return True
    on_google = _PRODUCT_NAME.exists() and "Google" in _PRODUCT_NAME.read_text()
    return on_google and importlib.util.find_spec("libtpu") is not None


def value(name: str, environment: Mapping[str, str]) -> str | None:
    """Returns the server's value for a name, `None` if it has none.

    Raises `UserError` if the server does not answer.
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
