"""Whatever way the tokenizer takes, all ends that model files and tokenizer name count."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.models.pretrained import from_pretrained, model_folder

PROBLEMS = Path(__file__).with_name("problems.jsonl")
TURN = 2
"""Id of the end that the embedded tokenizer names itself."""
Pass = Callable[[Path], dict[str, Any]]
"""Returns arguments of `GRPOTrainer` that name a model's folder and bring its tokenizer."""


def of_transformers(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def without_own_end(folder: Path) -> Any:
    tokenizer = of_transformers(folder)
    tokenizer.eos_token = None
    return tokenizer


WAYS: dict[str, Pass] = {
    "name": lambda folder: {"model": str(folder)},
    "path": lambda folder: {"model": folder},
    "processing_class": lambda folder: {
        "model": folder, "processing_class": of_transformers(folder)
    },
    "tokenizer": lambda folder: {"model": str(folder), "tokenizer": of_transformers(folder)},
    "ChatTokenizer": lambda folder: {
        "model": folder, "tokenizer": ChatTokenizer(of_transformers(folder))
    },
    "ChatTokenizer of another folder": lambda folder: {
        "model": folder, "tokenizer": ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))
    },
    "a model with its tokenizer": lambda folder: {
        "model": from_pretrained(folder), "processing_class": of_transformers(folder)
    },
    "a tokenizer without an end": lambda folder: {
        "model": folder, "processing_class": without_own_end(folder)
    },
    "ChatTokenizer without an end": lambda folder: {
        "model": folder, "tokenizer": ChatTokenizer(without_own_end(folder))
    },
}  # fmt: skip


def with_ends(model: Path, folder: Path, of_generation: Any, of_config: Any) -> Path:
    """A copy of a model whose files name these ends."""
    shutil.copytree(model, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "eos_token_id": of_config}))
    if of_generation == "no file":
        (folder / "generation_config.json").unlink()
    else:
        generation = {"eos_token_id": of_generation, "temperature": 0.5}
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def config(output: Path, **settings: Any) -> GRPOConfig:
    return GRPOConfig(
        data=str(PROBLEMS), steps=1, prompts_per_step=8, num_generations=2, eval_problems=8,
        output_dir=str(output), **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("of_generation", "of_config", "way", "ids"),
    [
        ([7, 8], 5, "name", (7, 8, 5, TURN)),
        (1, None, "path", (1, TURN)),
        (None, [5, TURN], "name", (5, TURN)),
        (1, None, "processing_class", (1, TURN)),
        ([1, TURN], 1, "processing_class", (1, TURN)),
        (None, 5, "processing_class", (5, TURN)),
        ("no file", [5, 6], "tokenizer", (5, 6, TURN)),
        ([7, 7], 7, "tokenizer", (7, TURN)),
        (1, 5, "ChatTokenizer", (1, 5, TURN)),
        ("no file", None, "ChatTokenizer", (TURN,)),
        (1, 5, "ChatTokenizer of another folder", (1, 5, TURN)),
        ([], 5, "a model with its tokenizer", (5, TURN)),
        ([9], 1, "a tokenizer without an end", (9, 1, TURN)),
        ([9], 1, "ChatTokenizer without an end", (9, 1, TURN)),
    ],
)
def test_ends_are_all_that_files_and_tokenizer_name_and_the_export_has_them(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_generation: Any,
    of_config: Any,
    way: str,
    ids: tuple[int, ...],
) -> None:
    monkeypatch.setattr(GRPOTrainer, "_load_model", lambda *_: None)
    folder = with_ends(small_model, tmp_path / "model", of_generation, of_config)
    tokenizer = GRPOTrainer(config(tmp_path / "run"), **WAYS[way](folder)).tokenizer
    assert tokenizer.eos_ids == ids
    tokenizer.save_pretrained(tmp_path / "export")
    written = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert written["eos_token_id"] == (list(ids) if len(ids) > 1 else ids[0])
    assert written.get("temperature") == (None if of_generation == "no file" else 0.5)
    assert ChatTokenizer.from_pretrained(tmp_path / "export").eos_ids == ids


@pytest.mark.slow
def test_completions_end_at_a_turns_end_that_the_tokenizer_alone_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_ends(model_folder("tiny_qwen2"), tmp_path / "model", 1, None)
    trainer = GRPOTrainer(
        config(tmp_path / "run", max_completion_length=48),
        model=folder,
        processing_class=of_transformers(folder),
    )
    (metrics,) = trainer.fit().history
    assert metrics["completions/clipped_ratio"] < 0.5
    printed = "".join(capsys.readouterr())
    assert "completions end at '<|im_start|>' (1) or '<|im_end|>' (2)" in printed
    exported = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert exported["eos_token_id"] == [1, TURN]
