"""Whatever is in a file that is read, a command ends with a result or with one sentence."""

import contextlib
import dataclasses
import io
import json
import time
import unicodedata
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from grpo_eqx import GRPOConfig
from grpo_eqx.checkpoint.saved import FACTS, digest
from grpo_eqx.cli.main import run as run_command
from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.common.random_keys import make_key
from grpo_eqx.data.jsonl import read_jsonl
from grpo_eqx.data.token_files import TokenFiles
from grpo_eqx.evaluation.results_file import ResultsFile
from grpo_eqx.evaluation.subject import Subject
from grpo_eqx.launch.tpu_vm.sync_env import check_env_file
from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.models.lora import Lora, with_adapters
from grpo_eqx.models.peft import SavedAdapter
from grpo_eqx.models.pretrained import (
    find_config,
    from_pretrained,
    model_folder,
    save_pretrained,
)
from grpo_eqx.models.registry import init_model
from grpo_eqx.models.tensor_files import INDEX, open_all
from grpo_eqx.settings.embedded import EMBEDDED_MODEL
from grpo_eqx.settings.files import read_settings
from grpo_eqx.tracking.completions_table import write_completions
from grpo_eqx.tracking.report.ending import find_ending
from grpo_eqx.tracking.run_folder import RunFolder

from .cli.test_inspect import columns
from .mutations import clear, put
from .tracking.report.synthetic_run import write_run

pytestmark = pytest.mark.slow
_MOST_S = 10.0
"""Seconds of computing that a case may take."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A file that is read."""

    file: str
    """Its path in the corpus."""
    read: Callable[[Path], object]
    """Reads it, given the folder of the corpus."""
    cases: int
    pipe: bool = True
    """Whether it may be a pipe, which is not waited for."""


def command(*arguments: str) -> Callable[[Path], object]:
    """A command of `grpo-eqx`, in whose arguments a path in the corpus begins with @."""

    def call(corpus: Path) -> None:
        run_command([str(corpus / each[1:]) if each[:1] == "@" else each for each in arguments])

    return call


def evaluated(corpus: Path) -> None:
    """Continues an evaluation that had written all of its lines."""
    with ResultsFile(corpus / "results.json", {"model": "x"}) as file:
        file.resume([], 0)


def of_checkpoint(corpus: Path) -> None:
    Subject.find(str(corpus / "run/checkpoints/step_2"))


def weights(corpus: Path) -> None:
    with ExitStack() as stack:
        open_all(corpus / "shards", stack)


def tokens(corpus: Path) -> None:
    TokenFiles.read(corpus / "model").tokenizer()


def table(corpus: Path) -> None:
    run_command(["inspect", str(corpus / "run")])


def loaded(corpus: Path) -> None:
    from_pretrained(corpus / "whole")


def adapted(corpus: Path) -> None:
    from_pretrained(corpus / "adapted")


START = "--print-config", "--output-dir", "@started"
EXPORT = "export", "@run", "--output", "@exported"

KINDS = [
    Kind("settings.yaml", lambda corpus: read_settings(corpus / "settings.yaml"), 250, False),
    Kind("settings.json", lambda corpus: read_settings(corpus / "settings.json"), 250, False),
    Kind("data.jsonl", lambda corpus: read_jsonl(corpus / "data.jsonl"), 250, False),
    Kind("model/config.json", lambda corpus: find_config(str(corpus / "model")), 420),
    Kind("model/generation_config.json", lambda corpus: TokenFiles.read(corpus / "model"), 150),
    Kind("model/tokenizer.json", tokens, 30),
    Kind("model/tokenizer_config.json", tokens, 50),
    Kind("model/chat_template.jinja", tokens, 15),
    Kind("model/special_tokens_map.json", tokens, 15),
    Kind(f"shards/{INDEX}", weights, 150),
    Kind("shards/a.safetensors", weights, 150),
    Kind("adapter/adapter_config.json", lambda corpus: SavedAdapter.read(corpus / "adapter"), 250),
    Kind("adapter/adapter_config.json", lambda corpus: model_folder(corpus / "adapter"), 50),
    Kind("run/metrics.jsonl", command("check", "@run"), 150),
    Kind("run/config.json", command("check", "@run"), 150),
    Kind("run/passed.json", command("check", "@run"), 50),
    Kind("run/layout.json", command("check", "@run"), 50),
    Kind("run/metrics.jsonl", command("report", "@run", "--output", "@report.html"), 3),
    Kind("run/config.json", command("report", "@run", "--output", "@report.html"), 3),
    Kind("run/layout.json", command("report", "@run", "--output", "@report.html"), 3),
    Kind("run/plan.json", command("report", "@run", "--output", "@report.html"), 3),
    Kind("run/completions/step_000001.parquet", table, 200),
    Kind("run/config.json", table, 30),
    Kind("run/stopped.json", lambda corpus: find_ending(RunFolder(corpus / "run"), 2, 3), 40),
    Kind("run/.lock", lambda corpus: find_ending(RunFolder(corpus / "run"), 2, 3), 40),
    Kind("run/config.json", lambda corpus: Subject.find(str(corpus / "run")), 50),
    Kind(f"run/checkpoints/step_2/{FACTS}/metadata", of_checkpoint, 100),
    Kind("results.json", evaluated, 100),
    Kind("results.jsonl", evaluated, 30),
    Kind("whole/config.json", loaded, 8),
    Kind("whole/model.safetensors", loaded, 6),
    Kind("adapted/adapter_config.json", adapted, 6),
    Kind("adapted/adapter_model.safetensors", adapted, 6),
    Kind("whole/config.json", command("train", "--model", "@whole", *START), 4),
    Kind("settings.yaml", command("train", "--config", "@settings.yaml", *START), 8, False),
    Kind("adapted/adapter_config.json", command("train", "--model", "@adapted", *START), 3),
    Kind(f"run/checkpoints/step_2/{FACTS}/metadata", command(*EXPORT), 8),
    Kind("whole/config.json", command(*EXPORT, "--model", "@whole"), 6),
    Kind("env", lambda corpus: check_env_file(corpus / "env"), 50),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small whole files of each kind."""
    corpus = tmp_path_factory.mktemp("corpus")
    cfg = dataclasses.asdict(GRPOConfig().resolved())
    (corpus / "settings.json").write_text(json.dumps(cfg, default=str))
    (corpus / "settings.yaml").write_text("steps: 3\nreward_funcs: &a [correct]\nmodel: x\n")
    rows = [{"question": "1+1?", "answer": "2", "level": [i, {"a": None}]} for i in range(3)]
    rows[2] = {"prompt": [{"role": "user", "content": "hi"}], "answer": "2"}
    (corpus / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    model = corpus / "model"
    model.mkdir()
    for path in model_folder(EMBEDDED_MODEL).iterdir():
        if path.suffix != ".safetensors":
            (model / path.name).write_bytes(path.read_bytes())
    for name in ("generation_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if not (model / name).exists():
            (model / name).write_text("{}")
    shards = corpus / "shards"
    shards.mkdir()
    for name in "ab":
        save_file({name: np.zeros((2, 3), np.float32)}, shards / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in "ab"}
    (shards / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = Qwen2Config(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=448,
    )
    whole = init_model(config, make_key(0))
    adapter_model = with_adapters(whole, Lora(rank=2, alpha=4.0), make_key(1))
    save_pretrained(whole, corpus / "whole")
    save_pretrained(adapter_model, corpus / "adapted", base=str(corpus / "whole"))
    for path in model.iterdir():
        if not (corpus / "whole" / path.name).exists():
            for name in ("whole", "adapted"):
                (corpus / name / path.name).write_bytes(path.read_bytes())
    (corpus / "adapted/config.json").write_bytes((corpus / "whole/config.json").read_bytes())
    (corpus / "adapter").mkdir()
    adapter = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "x",
        "target_modules": ["q_proj"], "use_rslora": False, "revision": None, "bias": "none",
        "init_lora_weights": True, "rank_pattern": {}, "modules_to_save": None,
    }  # fmt: skip
    (corpus / "adapter/adapter_config.json").write_text(json.dumps(adapter))
    run = write_run(corpus / "run", steps=3, every=2)
    (run / "completions/step_000001.parquet").unlink(missing_ok=True)
    write_completions(run / "completions/step_000001.parquet", columns(1))
    (run / "passed.json").write_text(json.dumps({"model": "Qwen2, passed to GRPOTrainer"}))
    (run / "plan.json").write_text("{}")
    (run / "stopped.json").write_text(json.dumps({"reason": "enough"}))
    facts = run / f"checkpoints/step_2/{FACTS}"
    facts.mkdir(parents=True)
    saved = {"config": json.loads((run / "config.json").read_text()), "fingerprints": {}}
    saved |= {"shapes": {}, "checksums": {}, "counters": {"step": 2}}
    (facts / "metadata").write_text(json.dumps({"facts": saved, "sha256": digest(saved)}))
    with ResultsFile(corpus / "results.json", {"model": "x"}):
        pass
    (corpus / "env").write_text("A=1\n")
    (corpus / "env").chmod(0o600)
    return corpus


def ended(call: Callable[[Path], object], corpus: Path) -> None:
    """Makes a call; fails unless it ends in time with a result or one sentence."""
    began, out = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            call(corpus)
        except (UserError, RunError) as error:
            print(str(error) or "\0")  # an error says what is wrong
        except SystemExit:
            pass
    assert time.process_time() - began < _MOST_S
    spaces = "\n", "\t", "\u200d"  # the last one joins emoji
    raw = [
        char
        for char in out.getvalue()
        if not (char.isprintable() or char in spaces or unicodedata.category(char) == "Zs")
    ]
    assert not raw, "what is printed cannot steer a terminal"


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.file}-{kind.cases}")
def test_whatever_is_in_a_file_is_a_result_or_a_sentence(corpus: Path, kind: Kind) -> None:
    path = corpus / kind.file
    content = path.read_bytes()

    @settings(
        max_examples=kind.cases,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        try:
            put(data.draw, path, content, pipe=kind.pipe)
            ended(kind.read, corpus)
        finally:
            clear(path)
            path.write_bytes(content)
            path.chmod(0o600)

    with contextlib.suppress(AssertionError):  # of the time, as this imports what it needs
        ended(kind.read, corpus)
    check()


def test_there_are_two_thousand_cases() -> None:
    assert sum(kind.cases for kind in KINDS) >= 2000
