"""The command `grpo-eqx export`."""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.cli.main import main
from grpo_eqx.data import ChatTokenizer
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.pretrained import from_pretrained

pytestmark = pytest.mark.slow

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Export = Callable[..., Outcome]


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Export:
    """Runs `grpo-eqx export ...`."""

    def call(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["grpo-eqx", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, *capsys.readouterr())

    return call


def words(*, completions: list[str], **columns: object) -> list[float]:
    """A reward that an untrained model does not always get alike."""
    return [float(len(set(text.split()))) for text in completions]


def settings(model: Path, folder: Path) -> GRPOConfig:
    return GRPOConfig(
        model=str(model), data=str(PROBLEMS), steps=2, prompts_per_step=8, num_generations=4,
        max_completion_length=4, eval_problems=8, save_steps=1, learning_rate=1e-3,
        output_dir=folder,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    GRPOTrainer(settings(small_model, folder), reward_funcs=[words]).fit()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be spoilt."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def spoil(checkpoint: Path) -> None:
    """Cuts the files of a checkpoint's arrays in half."""
    for file in checkpoint.glob("state/**/d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_last_checkpoint_is_the_runs_own_model_in_every_byte(
    export: Export, finished: Path, tmp_path: Path
) -> None:
    before = sorted(finished.rglob("*"))
    done = export(finished, "--output", tmp_path / "model")
    assert (done.code, done.err) == (0, "")
    (line,) = done.out.splitlines()
    assert "parameters of " in line
    assert "step_2 in float32" in line
    assert contents(tmp_path / "model") == contents(finished / "model")
    assert sorted(finished.rglob("*")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_named_step_is_another_model_which_loads_too(
    export: Export, finished: Path, small_model: Path, tmp_path: Path
) -> None:
    done = export(finished / "checkpoints" / "step_1", "--output", tmp_path / "model")
    assert done.code == 0
    model, last = from_pretrained(tmp_path / "model"), from_pretrained(finished / "model")
    assert not np.array_equal(model.embed_tokens, last.embed_tokens)
    tokenizer = ChatTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.fingerprint() == ChatTokenizer.from_pretrained(small_model).fingerprint()


def test_a_tokenizer_that_was_passed_and_a_template_of_the_settings_are_exported(
    export: Export, small_model: Path, tmp_path: Path
) -> None:
    """With ends that the tokenizer itself does not name."""
    folder = shutil.copytree(small_model, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    cfg = settings(folder, tmp_path / "run")
    cfg = dataclasses.replace(cfg, steps=1, chat_template=str(template))
    own = AutoTokenizer.from_pretrained(folder)
    GRPOTrainer(cfg, reward_funcs=[words], processing_class=own).fit()
    assert export(tmp_path / "run", "--output", tmp_path / "exported").code == 0
    assert contents(tmp_path / "exported") == contents(tmp_path / "run" / "model")
    exported = ChatTokenizer.from_pretrained(tmp_path / "exported")
    assert exported.eos_ids == (7, 8, 2)
    assert exported.tokenizer.chat_template == template.read_text()


def test_bfloat16_rounds_every_tensor(export: Export, finished: Path, tmp_path: Path) -> None:
    done = export(finished, "--output", tmp_path / "model", "--dtype", "bfloat16")
    assert done.code == 0
    rounded = load_file(tmp_path / "model" / "model.safetensors")
    for name, value in load_file(finished / "model" / "model.safetensors").items():
        np.testing.assert_array_equal(rounded[name], value.astype(ml_dtypes.bfloat16))


@pytest.mark.parity
def test_transformers_loads_the_same_tensors(
    export: Export, finished: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    assert export(finished, "--output", tmp_path / "model").code == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    found, expected = load(tmp_path / "model"), load(finished / "model")
    for name, value in expected.state_dict().items():
        assert found.state_dict()[name].equal(value), name
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").eos_token is not None


def in_a_process(*arguments: str | Path, shell: str = "true") -> Outcome:
    """Runs the command after a line of shell, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "grpo_eqx.cli.main", "export", *arguments]
    done = subprocess.run(
        ["sh", "-c", f'{shell}; exec "$@"', "sh", *command],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_of_a_run_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    run: Path, tmp_path: Path
) -> None:
    spoil(run / "checkpoints" / "step_2")
    refused = in_a_process(run / "checkpoints" / "step_2", "--output", tmp_path / "model")
    assert refused.code == 2
    assert "Give the run folder instead" in refused.err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    done = in_a_process(run, "--output", tmp_path / "model")
    assert done.code == 0
    assert "warning: cannot read the checkpoint" in done.err
    assert "step_1 in float32" in done.out
    spoil(run / "checkpoints" / "step_1")
    none = in_a_process(run, "--output", tmp_path / "other")
    assert none.code == 2
    assert "none of the 2 checkpoints" in none.err


def test_what_an_unfinished_save_has_written_is_left_alone(
    export: Export, run: Path, tmp_path: Path
) -> None:
    """The run may be writing it at this moment."""
    saving = run / "checkpoints" / "step_3.orbax-checkpoint-tmp"
    saving.mkdir()
    done = export(run, "--output", tmp_path / "model")
    assert done.code == 0
    assert "step_2 in float32" in done.out
    assert saving.is_dir()


def test_what_cannot_be_exported_is_one_line(
    export: Export, finished: Path, tmp_path: Path
) -> None:
    nowhere = export(tmp_path, "--output", tmp_path / "model")
    assert "has no checkpoints: use a run folder or a checkpoint such as" in nowhere.err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    full = export(finished, "--output", tmp_path / "full")
    assert "exists and is not an empty folder: choose another, or delete it first." in full.err
    inside_a_file = export(finished, "--output", tmp_path / "full" / "file" / "model")
    assert "cannot be written (Not a directory)" in inside_a_file.err
    for done in (nowhere, full, inside_a_file):
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    (tmp_path / "empty").mkdir()
    assert export(finished, "--output", tmp_path / "empty").code == 0


def test_of_several_hosts_the_first_one_exports(
    export: Export, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    for process, written in (("1", False), ("0", True)):
        monkeypatch.setenv("JAX_PROCESS_ID", process)
        done = export(finished, "--output", tmp_path / "out")
        assert done.code == 0, done.err
        assert (tmp_path / "out").exists() is written


def test_a_disk_without_room_is_one_line(finished: Path, tmp_path: Path) -> None:
    """Files that may not grow past a size are refused as on a full disk."""
    done = in_a_process(finished, "--output", tmp_path / "m", shell="ulimit -f 4")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert "cannot be written (" in line
    assert not (tmp_path / "m").exists()


def test_a_model_that_has_moved_is_given(export: Export, small_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small_model, tmp_path / "before"))
    GRPOTrainer(settings(model, tmp_path / "run"), reward_funcs=[words]).fit()
    model.rename(tmp_path / "after")
    missing = export(tmp_path / "run", "--output", tmp_path / "model")
    assert missing.code == 2
    assert "needs its model" in missing.err
    assert missing.err.endswith("as --model FOLDER.\n")
    flags = ["--output", tmp_path / "model", "--model", tmp_path / "after"]
    assert export(tmp_path / "run", *flags).code == 0
    assert contents(tmp_path / "model") == contents(tmp_path / "run" / "model")


def test_a_model_or_tokenizer_that_was_passed_must_be_given(
    export: Export, small_model: Path, tmp_path: Path
) -> None:
    tokenizer = ChatTokenizer.from_pretrained(small_model, "Please.")
    config = Qwen2Config(
        vocab_size=len(tokenizer.tokenizer), hidden_size=16, intermediate_size=24,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = Qwen2.init(config, jax.random.key(0))
    cfg = settings(small_model, tmp_path / "run")
    trainer = GRPOTrainer(cfg, model=model, tokenizer=tokenizer, reward_funcs=[words])
    trainer.fit()
    run, flags = tmp_path / "run", ["--output", tmp_path / "model"]
    unsaid = export(run, *flags)
    assert "is not the tokenizer that the run used: one was passed to GRPOTrainer" in unsaid.err
    another = export(run, *flags, "--model", small_model)
    assert f"is of another model than '{small_model}' (embed_tokens is" in another.err
    assert (unsaid.code, another.code) == (2, 2)
    done = export(run, *flags, "--model", run / "model")
    assert done.code == 0
    assert contents(tmp_path / "model") == contents(run / "model")
