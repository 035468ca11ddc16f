"""Inputs that cannot work are refused by the command, in one line, before anything is trained."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_eqx.cli.main import main
from grpo_eqx.common.errors import EXIT_USER_ERROR

from .conftest import PROBLEMS

Refused = Callable[..., str]
NORM, GATE = "model.norm.weight", "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_model: Path,
    tmp_path: Path,
) -> Refused:
    """Runs `grpo-eqx train` with flags that it refuses; returns the line that it ends with."""

    def run(**flags: Any) -> str:
        named = {
            "model": small_model, "data": PROBLEMS, "output_dir": tmp_path / "run",
            "max_completion_length": 8, **flags,
        }  # fmt: skip
        pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in named.items()]
        monkeypatch.setattr(sys, "argv", ["grpo-eqx", "train", *sum(pairs, ())])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == EXIT_USER_ERROR
        assert not (tmp_path / "run").exists()
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error.splitlines()[-1] if error.startswith("error: ") else error

    return run


@pytest.fixture
def folder(small_model: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be spoiled."""
    return Path(shutil.copytree(small_model, tmp_path / "model"))


def rewrite(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# Weights


def truncate(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1000])


def drop(weights: Path) -> None:
    save_file({name: x for name, x in load_file(weights).items() if name != NORM}, weights)


def add(weights: Path) -> None:
    save_file({**load_file(weights), "model.extra.weight": np.zeros(2, np.float32)}, weights)


def transpose(weights: Path) -> None:
    tensors = load_file(weights)
    save_file({**tensors, GATE: tensors[GATE].T.copy()}, weights)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (truncate, "inside tensor 'model."),
        (drop, f"'{NORM}' is missing"),
        (add, "model.extra.weight"),
        (transpose, GATE),
    ],
)
def test_weights_are_refused_by_the_name_of_the_tensor(
    refused: Refused, folder: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(folder / "model.safetensors")
    assert named in refused(model=folder)


def test_pickled_weights_are_refused(refused: Refused, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle, which is never loaded" in refused(model=folder)


def test_a_models_own_code_is_never_run(refused: Refused, folder: Path, tmp_path: Path) -> None:
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass T: ...")
    rewrite(folder / "config.json", model_type="custom", auto_map={"AutoConfig": "code.T"})
    rewrite(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.T", None]})
    assert "custom" in refused(model=folder)
    assert not (tmp_path / "ran").exists()


# Tokenizers


def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_refused(
    refused: Refused, folder: Path
) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = 1 + max(token["id"] for token in tokenizer["added_tokens"])
    size = max(size, len(tokenizer["model"]["vocab"]))
    token = {**tokenizer["added_tokens"][0], "id": size, "content": "another", "special": False}
    tokenizer["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert f"has {size + 1} tokens, but the model's vocabulary has" in refused(model=folder)


def test_an_end_of_sequence_of_another_tokenizer_is_refused(refused: Refused, folder: Path) -> None:
    rewrite(folder / "generation_config.json", eos_token_id=151645)
    assert "eos_token_id is 151645, but the tokenizer's" in refused(model=folder)


def test_padding_of_another_tokenizer_is_refused(refused: Refused, folder: Path) -> None:
    """It would be a new token, for which the model has no embedding."""
    rewrite(folder / "tokenizer_config.json", pad_token="<|of another|>")
    assert "but the model's vocabulary has" in refused(model=folder)


def test_a_chat_template_that_fails_is_refused(refused: Refused, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no user messages') }}")
    line = refused(model=folder)
    assert "chat template cannot render a user message (no user messages)" in line


def test_a_folder_without_a_tokenizer_is_refused(refused: Refused, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    assert "contains no tokenizer: copy tokenizer.json" in refused(model=folder)


def test_questions_need_a_chat_template(refused: Refused, folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    line = refused(model=folder)
    assert "the problems are messages, and the tokenizer has no chat template: set" in line
    assert "cannot be read" in refused(model=folder, chat_template=tmp_path / "missing.jinja")
    assert "without a template there are no messages" in refused(
        model=folder, chat_template="none", system_prompt="Think."
    )


# Problems


def test_problems_that_are_empty_or_too_few_are_refused_with_both_numbers(
    refused: Refused, tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.touch()
    assert "is empty" in refused(data=few)
    few.write_text("".join(PROBLEMS.read_text().splitlines(keepends=True)[:6]))
    line = refused(data=few, eval_problems=1)
    assert "has 5 problems to train on, and prompts_per_step is 16" in line


def test_prompts_that_are_too_long_are_refused_unless_some_may_be_dropped(refused: Refused) -> None:
    assert "tokens, and max_prompt_length is 5" in refused(max_prompt_length=5)
    assert "no usable problems" in refused(max_prompt_length=5, overlong_prompts="drop")


# Settings


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_generations": 1}, "num_generations is 1"),
        ({"prompts_per_step": 3, "steps_per_generation": 2}, "prompts_per_step"),
        ({"mesh": "3,1,1"}, "mesh 3,1,1"),
        ({"mesh": "8,1,1", "prompts_per_step": 3}, "3 prompts with 8 completions each cannot"),
        ({"learning_rat": 1e-3}, "learning_rat is an unknown setting: did you mean learning_rate?"),
        ({"per_device_train_batch_size": 4}, "use prompts_per_step"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    refused: Refused, flags: Mapping[str, Any], said: str
) -> None:
    assert said in refused(**flags)
