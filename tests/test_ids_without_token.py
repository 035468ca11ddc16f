"""Rows of a model's head for which its tokenizer has no token: said, counted and diagnosed."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.loop.metric_names import metric_names
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.pretrained import model_folder, save_pretrained
from grpo_eqx.tracking.metrics import OF_THE_MACHINE, id_metrics

COUNT = "completions/num_ids_without_token"
PROBLEMS = Path(__file__).with_name("problems.jsonl")


def test_they_are_what_the_vocabulary_lacks() -> None:
    embedded = ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))
    assert embedded.ids_without_token(448) == frozenset()
    assert embedded.ids_without_token(451) == {448, 449, 450}
    with_holes = Tokenizer(models.WordLevel({"end": 0, "a": 2, "b": 5}, unk_token="end"))
    holed = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=with_holes, eos_token="end"))
    assert holed.ids_without_token(6) == {1, 3, 4}


def test_they_are_counted_only_where_there_are_any() -> None:
    assert id_metrics(
        [np.array([1, 448, 448]), np.array([3, 450])], frozenset({448, 449, 450})
    ) == {COUNT: 3.0}
    assert id_metrics([np.array([1, 2])], frozenset({448})) == {COUNT: 0.0}
    assert id_metrics([np.array([1, 2])], frozenset()) == {}


@pytest.mark.slow
def test_a_run_says_how_many_there_are_and_counts_those_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random model draws all ids alike."""
    folder = shutil.copytree(model_folder("tiny_qwen2"), tmp_path / "padded")
    config = Qwen2Config(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    save_pretrained(Qwen2.init(config, jax.random.key(0)), folder)
    cfg = GRPOConfig(
        model=str(folder), data=str(PROBLEMS), steps=1, prompts_per_step=8, num_generations=4,
        max_completion_length=8, eval_problems=8, output_dir=str(tmp_path / "run"),
        metric_for_best_model=COUNT, greater_is_better=False,
    )  # fmt: skip
    trainer = GRPOTrainer(cfg)
    (metrics,) = trainer.fit().history
    drawn = metrics[COUNT]
    assert 0 < drawn < metrics["completions/mean_length"] * 32 / 3
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "note: the tokenizer has no token for 64 of the model's 512 ids" in printed
    assert f"{drawn:.0f} ids for which the tokenizer has no token" in printed
    known = metric_names(
        trainer.cfg, trainer.rewards, trainer.programs.updater.options.objective,
        trainer._run.passes, trainer._run.model, trainer.tokenizer.ids_without_token(512),
    )  # fmt: skip
    assert {name for name in metrics if not name.startswith(OF_THE_MACHINE)} == {"step", *known}
