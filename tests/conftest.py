"""Test set-up: eight CPU devices, and shapes and types checked at every call of fast tests."""

import math
import os
import shutil
import subprocess
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

# Before jax is imported: tests of sharding need more than one device, and nearly all of the tests'
# time is compilation, which less optimization halves. XLA's older emitters, which jaxlib 0.12 no
# longer has, take a quarter of the rest.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"
# XLA launches and runs programs in a pool of a thread a device. Once 32 wait for a collective, as
# where sharded trees are compared leaf by leaf, launches hold threads that the collective needs.
os.environ["PJRT_NPROC"] = "16"
# Many tests compile the same programs, in all of pytest's workers and in processes that they start.
# The folder goes with the process that pytest was started in.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="grpo_eqx_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["WANDB_DATA_DIR"] = tempfile.mkdtemp(prefix="grpo_eqx_tests_wandb_")

from jaxtyping import install_import_hook

with ExitStack() as hook:
    hook.enter_context(install_import_hook("grpo_eqx", "beartype.beartype"))
    hook.pop_all()  # it stays: much is imported at first use

import datasets
import huggingface_hub
import jax
import jaxtyping
import pytest
from hypothesis import settings

from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.models import hub
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.pretrained import model_folder, save_pretrained
from grpo_eqx.tracking.memory import peak_resident_bytes

jax.devices()  # has made its pool
del os.environ["PJRT_NPROC"]  # processes that tests start have the pool of a user's


def pytest_configure(config: pytest.Config) -> None:
    """Shares compiled programs, except those for described TPUs: JAX cannot read these back."""
    if config.option.markexpr.startswith("topology"):
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        jax.config.update("jax_enable_compilation_cache", False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps a part of each grid, a different one for each commit, and marks the rest `long`.

    A grid is a test with parameters, or tests whose marks have one name, such as those of a file
    that starts many processes; a quarter of it stays. The slow tests of a file that are no grid are
    one too, of which half stay. At least one case stays, and one that is not slow if there is any.
    A test's name and the commit decide, so that all workers agree and a failure can be repeated.
    """
    commit = _commit()
    grids = defaultdict(list)
    for item in items:
        mark, is_slow = item.get_closest_marker("grid"), bool(item.get_closest_marker("slow"))
        if item.get_closest_marker("long") is not None:
            continue
        if mark is not None:
            name = mark.args or item.nodeid.partition("[")[0]
            grids[name, is_slow, 4].append(item)
        elif is_slow:
            grids[item.nodeid.partition("::")[0], is_slow, 2].append(item)
    for (*_, parts), cases in grids.items():
        cases.sort(key=lambda item: zlib.crc32(f"{commit} {item.nodeid}".encode()))
        for item in cases[math.ceil(len(cases) / parts) :]:
            item.add_marker(pytest.mark.long)


def _commit() -> str:
    """Returns the commit that is tested; nothing outside a git checkout."""
    try:
        command = ["git", "-C", os.path.dirname(__file__), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out the check of shapes and types in slow tests, of whose time it takes a fifth."""
    is_slow = item.get_closest_marker("slow") is not None
    jaxtyping.config.update("jaxtyping_disable", is_slow)


settings.register_profile("grpo_eqx", deadline=None, derandomize=True)
settings.load_profile("grpo_eqx")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model that compiles and steps quickly, in sizes that 16 devices divide."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))
    config = Qwen2Config(
        vocab_size=len(tokenizer.tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    save_pretrained(Qwen2.init(config, jax.random.key(0), std=0.2), folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def add_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds a commit of a repository to what this machine has of the Hugging Face hub.

    **Arguments:** model or dataset; the repository's name; a folder with its files; the commit;
    branches and tags that point to it.
    """
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(hub, "_snapshots", {})  # as in a new process

    def add(kind: str, name: str, files: Path, commit: str, *refs: str) -> None:
        repository = tmp_path / "hub" / f"{kind}s--{name.replace('/', '--')}"
        shutil.copytree(files, repository / "snapshots" / commit)
        for ref in refs:
            (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
            (repository / "refs" / ref).write_text(commit)

    return add


@pytest.fixture(autouse=True, scope="module")
def _few_programs() -> Iterator[None]:
    """Forgets compiled programs after a module, once they are many: all would take gigabytes."""
    yield
    if peak_resident_bytes() > 2 * 2**30:
        jax.clear_caches()


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
