"""The table of a step's completions."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.generation import Completions
from grpo_eqx.rewards import Rewards
from grpo_eqx.tracking.completions_table import completions_columns, write_completions


@pytest.mark.parametrize("name", ["exp:1", "file:1", "é"])
def test_its_folder_may_have_any_name(
    name: str, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ChatTokenizer.from_pretrained(small_model, None)
    written = np.array([[1, 2]])
    completions = Completions([[[5], [6, 7]]], np.array([[True, False]]), written, tokenizer)
    rewards = Rewards.of(["correct"], np.array([[[1.0, 0.0]]]), [1.0])
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    path = Path(name) / "step_1.parquet"
    columns = completions_columns(1, [Prompt("1 + 1?", {})], completions, rewards, rewards.total)
    write_completions(path, columns)
    with path.open("rb") as file:
        rows = pq.read_table(file).to_pylist()
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert [row["truncated"] for row in rows] == [False, True]
