"""Calls of the trainer as people make them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.common.errors import UserError
from grpo_eqx.loop.trainer_arguments import as_config, with_trl_names

GIVEN = {"cfg": None, "tokenizer": None, "train_data": None, "eval_data": None}


def test_trls_names_stand_for_ours() -> None:
    cfg, rows = GRPOConfig(), [{"question": "x"}]
    assert with_trl_names(GIVEN, {}) == GIVEN
    others = {"args": cfg, "train_dataset": rows, "eval_dataset": rows, "processing_class": "t"}
    assert with_trl_names(GIVEN, others) == {
        "cfg": cfg, "tokenizer": "t", "train_data": rows, "eval_data": rows
    }  # fmt: skip


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"args": 1, "config": 2}, "config and cfg are the same argument: pass one of them"),
        ({"tools": []}, "GRPOTrainer has no argument tools: completions are single turns"),
        ({"peft_config": 1}, "set lora_rank"),
        ({"learning_rate": 1}, r"it is a setting: GRPOConfig\(learning_rate=...\)"),
        ({"max_steps": 3}, "it is none of the settings either; use steps"),
        ({"train_datset": []}, "use train_dataset"),
        ({"xyz": 1}, "its docstring lists all"),
    ],
)
def test_other_arguments_are_answered(others: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_trl_names(GIVEN, others)


class Torch:
    """Stands for a model of transformers."""

    __module__ = "transformers.models.qwen2"


@pytest.mark.parametrize(
    ("cfg", "model", "message"),
    [
        ("Qwen/Qwen2.5-0.5B", None, r"as in GRPOTrainer\(model='Qwen/Qwen2.5-0.5B'\)"),
        ({"steps": 3}, None, r"the config is a dict: pass GRPOConfig\(\*\*that\)"),
        (None, Torch(), "the model is a Torch of torch: pass the folder"),
    ],
    ids=["name", "dict", "torch"],
)
def test_what_is_no_config_or_model_is_refused(cfg: Any, model: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_config(cfg, model)


def test_what_is_none_is_not_given() -> None:
    others = {"peft_config": None, "tools": None, "eval_dataset": None, "args": None}
    assert with_trl_names(GIVEN, others) == GIVEN


def test_a_model_and_data_can_be_passed_by_their_names() -> None:
    named = as_config(None, None, Path("a.jsonl"), "openai/gsm8k:test")
    assert (named.data, named.eval_data) == ("a.jsonl", "openai/gsm8k:test")
    assert as_config(None, None, [{"question": "x"}]) == GRPOConfig()
    assert as_config(None, "Qwen/Qwen2.5-3B").model == "Qwen/Qwen2.5-3B"
    assert as_config(GRPOConfig(steps=3), Path("folder")) == GRPOConfig(steps=3, model="folder")


QUICK_STARTS = {
    "text": """
from datasets import load_dataset
from grpo_eqx import GRPOConfig, GRPOTrainer

dataset = load_dataset("json", data_files="tldr.jsonl", split="train")

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

training_args = GRPOConfig(output_dir="Qwen2-0.5B-GRPO")
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=reward_len,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
""",
    "conversation": """
from datasets import load_dataset
from grpo_eqx import GRPOTrainer

def accuracy_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(gold in content) for gold, content in zip(solution, contents)]

dataset = load_dataset("json", data_files="deepmath.jsonl", split="train")

trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
""",
}
"""The first example of TRL's documentation, in its earlier and its present form."""

ROWS = {
    "tldr.jsonl": '{{"prompt": "Summarize {i}: ", "completion": "{i}"}}',
    "deepmath.jsonl": (
        '{{"prompt": [{{"role": "user", "content": "What is {i}?"}}], "solution": "{i}"}}'
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUICK_STARTS)
def test_trls_quick_start_runs(kind: str, small_model: Path, tmp_path: Path) -> None:
    for name, row in ROWS.items():
        (tmp_path / name).write_text("".join(row.format(i=i) + "\n" for i in range(40)))
    short = (  # only the defaults are others than a user's
        "import grpo_eqx\n"
        "grpo_eqx.GRPOConfig.__init__.__kwdefaults__.update(steps=2, max_completion_length=8)\n"
        f"MODEL = {str(small_model)!r}\n"
    )
    script = tmp_path / "train.py"
    script.write_text(short + QUICK_STARTS[kind])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "36 problems, 4 held out" in done.stdout + done.stderr
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1
