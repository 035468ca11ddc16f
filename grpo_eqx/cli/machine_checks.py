"""Checks of a machine before a run: packages, devices, caches, services, disk and processes."""

import json
import netrc
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import jax
from packaging.requirements import Requirement

from grpo_eqx.common.errors import UserError, first_line
from grpo_eqx.distributed.cluster import declared_by, find_cluster
from grpo_eqx.distributed.program_facts import check_xla_flags, installed_version
from grpo_eqx.distributed.tpu_runtime import has_tpu
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.cost import num_parameters
from grpo_eqx.models.pretrained import hub_model, is_local, model_folder
from grpo_eqx.models.registry import published_config, read_config
from grpo_eqx.settings.types import refuse_address
from grpo_eqx.training.compilation import cache_folder

_NETWORK_SECONDS = 4.0
_CHECK_SECONDS = 5.0
"""Seconds that a check may take, because looking up an address has no limit of its own."""
_DEVICE_SECONDS = 60.0
_SHOWN = ("grpo_eqx", "jax", "jaxlib", "libtpu", "orbax-checkpoint", "numpy", "wandb")
_CHECKPOINT_BYTES = 3 * 4
"""Bytes per parameter: the parameter and two moments of AdamW, in float32."""
_CHECKPOINTS = 3
"""Checkpoints on disk while another is written, with the default `save_total_limit`."""
_OPEN_FILES = 1024
_LIST_DEVICES = """
import json, jax
for device in jax.local_devices():
    memory = (device.memory_stats() or {}).get("bytes_limit")
    print(json.dumps([device.platform, device.device_kind, memory]))
"""


class Check(NamedTuple):
    """Result of a check."""

    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""
    """Advice, unless the status is ok."""


def run_checks(output_dir: Path, model: str) -> Iterator[tuple[str, Check]]:
    """Runs all checks at the same time, and yields their names and results in order.

    **Arguments:**

    - `output_dir`: the folder for runs.
    - `model`: the model whose checkpoints must fit the disk.
    """
    checks: dict[str, Callable[[], Check]] = {
        "packages": packages,
        "devices": devices,
        "compilation cache": compilation_cache,
        "Hugging Face hub": hugging_face_hub,
        "Weights & Biases": weights_and_biases,
        "output folder": lambda: output_folder(output_dir),
        "disk": lambda: disk(output_dir, model),
        "open files": open_files,
        "processes": processes,
    }
    limits = {"devices": _DEVICE_SECONDS + _CHECK_SECONDS}
    started = {name: _start(check) for name, check in checks.items()}
    for name, result in started.items():
        yield name, result(limits.get(name, _CHECK_SECONDS))


def packages() -> Check:
    """Checks that installed packages have the versions that they require of each other."""
    found = {name: each for name in _SHOWN if (each := installed_version(name)) is not None}
    listed = f"Python {sys.version.split()[0]}, {', '.join(map(' '.join, found.items()))}"
    if "grpo_eqx" not in found:
        return Check("warn", f"{listed}: grpo_eqx is not installed", "pip install -e .")
    for package in ("grpo_eqx", "jax"):
        for requirement in map(Requirement, requires(package) or ()):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            own = installed_version(requirement.name)
            if own is None or not requirement.specifier.contains(own, prereleases=True):
                text = f"{package} {installed_version(package)} needs {requirement.name}"
                has = "which is not installed" if own is None else f"but {own} is installed"
                return Check(
                    "fail",
                    f"{text}{requirement.specifier}, {has}",
                    f'pip install "{requirement.name}{requirement.specifier}"',
                )
    if found["jax"] != found["jaxlib"]:
        return Check("warn", f"{listed}: jax and jaxlib differ", "pip install -U jax jaxlib")
    return Check("ok", listed)


def devices() -> Check:
    """Lists this host's devices, in another process, because a backend may abort its process."""
    check_xla_flags()
    present = accelerator(Path("/dev"))
    try:
        listing = subprocess.run(
            [sys.executable, "-c", _LIST_DEVICES],
            capture_output=True, text=True, timeout=_DEVICE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Check(
            "fail",
            f"JAX did not find its devices within {_DEVICE_SECONDS:g} s",
            "end other processes that use them; on a pod, start this on all hosts",
        )
    chosen = os.environ.get("JAX_PLATFORMS")
    install = f'pip install -U "jax[{_EXTRAS[present]}]"' if present is not None else "unset it"
    if listing.returncode != 0:
        lines = listing.stderr.strip().splitlines() or [f"exit code {listing.returncode}"]
        wanted = "" if chosen is None else f" with JAX_PLATFORMS={chosen}"
        fix = "unset JAX_PLATFORMS, or install the plugin of JAX for it" if chosen else install
        return Check("fail", f"JAX cannot use its devices{wanted}: {lines[-1]}", fix)
    found = [json.loads(line) for line in listing.stdout.splitlines()]
    platform, kind, memory = found[0]
    gib = "" if memory is None else f" with {memory / 2**30:.0f} GiB each"
    listed = f"{len(found)} x {platform}" + ("" if kind == platform else f" ({kind})") + gib
    if platform != "cpu" or present is None:
        return Check("ok", listed)
    if chosen is not None:
        return Check(
            "warn",
            f"{listed}, because JAX_PLATFORMS is {chosen}, on a machine with a {present}",
            "unset JAX_PLATFORMS",
        )
    return Check("fail", f"{listed}, on a machine with a {present}", install)


_EXTRAS = {"GPU": "cuda13", "TPU": "tpu"}


def accelerator(device_files: Path) -> Literal["GPU", "TPU"] | None:
    """Returns the kind of accelerator for which the kernel has device files."""
    if any(device_files.glob("nvidia[0-9]*")):
        return "GPU"
    return "TPU" if has_tpu(device_files) else None


def compilation_cache() -> Check:
    """Checks that compiled programs can be kept, and that other users cannot write them."""
    settings: Any = jax.config  # its attributes are created at run time
    if not settings.jax_enable_compilation_cache:
        return Check("ok", "off (JAX_ENABLE_COMPILATION_CACHE)")
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = cache_folder("jax") if chosen is None else Path(chosen)
    fix = "set JAX_COMPILATION_CACHE_DIR to a writable folder"
    if "://" in str(folder):
        return Check("ok", f"{folder} (not on this machine)")
    if (problem := unwritable(folder)) is not None:
        return Check("warn", f"every run compiles anew: {problem}", fix)
    if folder.exists() and folder.stat().st_mode & stat.S_IWOTH:
        return Check(
            "warn",
            f"others can write to {folder}, from which programs are run",
            f"chmod o-w {folder}",
        )
    return Check("ok", str(folder))


def hugging_face_hub() -> Check:
    """Checks that the hub answers; tells whether there is a token, but does not show it."""
    from huggingface_hub import constants, get_token

    token = "with a token" if get_token() else "without a token: public repositories only"
    if constants.HF_HUB_OFFLINE:
        return Check("ok", "offline (HF_HUB_OFFLINE): what is cached can be used")
    return _reached(
        constants.ENDPOINT,
        token,
        "check the network and HF_ENDPOINT; with HF_HUB_OFFLINE=1, cached models are used",
    )


def weights_and_biases() -> Check:
    """Checks that Weights & Biases answers and has a key, as `--wandb online` needs."""
    if installed_version("wandb") is None:
        return Check("ok", "not installed")
    if os.environ.get("WANDB_MODE") == "offline":
        return Check("ok", "offline (WANDB_MODE)")
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not os.environ.get("WANDB_API_KEY") and not _netrc_has(urlsplit(url).hostname or ""):
        return Check(
            "warn", "not logged in, which --wandb online needs", "wandb login, or --wandb offline"
        )
    return _reached(url, "logged in", "check the network and WANDB_BASE_URL, or --wandb offline")


def _netrc_has(host: str) -> bool:
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return path.exists() and netrc.netrc(path).authenticators(host) is not None
    except netrc.NetrcParseError:  # its message may hold a password
        raise UserError(f"{path} is not a valid netrc file: write it anew, or delete it.") from None


def _reached(url: str, more: str, fix: str) -> Check:
    """Checks that a server answers a request for headers in any way."""
    parts = urlsplit(url)  # a user and a password in it are left out
    server = (parts.hostname or "") + ("" if parts.port is None else f":{parts.port}")
    request = urllib.request.Request(f"{parts.scheme}://{server}{parts.path}", method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_NETWORK_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError as error:
        return Check("warn", f"{server} cannot be reached ({first_line(error)}), {more}", fix)
    return Check("ok", f"{server} answers, {more}")


def output_folder(folder: Path) -> Check:
    """Checks that runs can be written."""
    refuse_address("output_dir", folder)
    problem = unwritable(folder)
    if problem is None:
        return Check("ok", f"{folder} can be written")
    return Check("fail", problem, "choose another --output-dir, or change who may write there")


def unwritable(folder: Path) -> str | None:
    """Returns why a folder, which may not exist yet, cannot be written; `None` if it can."""
    existing = _existing(folder)
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return f"{existing} cannot be written ({error.strerror})"
    return None


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def disk(folder: Path, model: str) -> Check:
    """Compares the free space with the size of a model's checkpoints."""
    free = shutil.disk_usage(_existing(folder)).free
    has = f"{free / 2**30:.1f} GiB free in {folder}"
    config = _config_at_hand(model)
    if config is None:
        unknown = f"the size of a checkpoint of {model} is not known without a download"
        return Check("ok", f"{has}; {unknown}")
    size = _CHECKPOINT_BYTES * num_parameters(config)
    text = f"{has}; a checkpoint of {model} takes {_memory(size)}"
    fix = "make room, or choose an --output-dir on a larger disk"
    if free < size:
        return Check("fail", text, fix)
    if free < _CHECKPOINTS * size:
        return Check("warn", f"{text}, and up to {_CHECKPOINTS} are on disk at a time", fix)
    return Check("ok", text)


def _memory(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _config_at_hand(model: str) -> ModelConfig | None:
    """Returns a model's config if it is known without a download."""
    if is_local(model):
        return read_config(model_folder(model) / "config.json")
    name = hub_model(model)
    if (published := published_config(model)) is not None:
        return published
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name.repository, "config.json", revision=name.revision)
    return read_config(path) if isinstance(path, str) else None


def open_files() -> Check:
    """Checks the limit on open files: a checkpoint has many files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return Check("ok", "no limit")
    if limit < _OPEN_FILES:
        return Check("warn", f"at most {limit} at a time", f"ulimit -n {4 * _OPEN_FILES}")
    return Check("ok", f"at most {limit} at a time")


def processes() -> Check:
    """Lists the processes that a run would have if it started here, without joining them."""
    cluster = find_cluster()
    if cluster is None:
        return Check("ok", "one: no launcher declares others")
    hosts = f" on {', '.join(cluster.hosts)}" if cluster.hosts else ""
    return Check(
        "ok",
        f"this is {cluster.process_id} of {cluster.num_processes}{hosts}, which meet at "
        f"{cluster.coordinator}, declared by {declared_by()}",
    )


def _start(check: Callable[[], Check]) -> Callable[[float], Check]:
    """Starts a check in a thread; returns a function that waits some seconds for its result."""
    results: list[Check] = []
    thread = threading.Thread(target=lambda: results.append(_caught(check)), daemon=True)
    thread.start()

    def result(seconds: float) -> Check:
        thread.join(seconds)
        if results:
            return results[0]
        return Check("warn", f"no answer within {seconds:g} s", "check the network, and its disks")

    return result


def _caught(check: Callable[[], Check]) -> Check:
    """Runs a check; an error counts as a failure."""
    try:
        return check()
    except UserError as error:  # its message has the fix
        return Check("fail", first_line(error))
    except Exception as error:
        return Check(
            "fail",
            f"this check ended with {type(error).__name__}: {first_line(error)}",
            "report it as a bug of grpo_eqx doctor",
        )
