"""What users set of JAX itself changes nothing that a run draws or learns."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "data": str(Path(__file__).with_name("problems.jsonl")),
    "steps": 2,
    "prompts_per_step": 8,
    "num_generations": 4,
    "max_num_seqs": 8,  # fewer than completions, so that slots are refilled
    "max_completion_length": 24,
    "kv_cache_dtype": "int8",
    "eval_problems": 8,
    "log_completions_steps": 0,
}


class Run(NamedTuple):
    completion_ids: list[list[int]]
    history: list[dict[str, float]]
    dtypes: set[str]


def make_run(folder: Path) -> Run:
    seen: list[list[int]] = []

    def length(*, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.extend(list(ids) for ids in completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    trainer = GRPOTrainer(GRPOConfig(**SETTINGS, output_dir=folder), reward_funcs=[length])
    history = [dict(metrics) for metrics in trainer.fit().history]
    dtypes = {str(x.dtype) for x in jax.tree.leaves((trainer.state.model, trainer.state.opt_state))}
    _trial, *of_steps = seen  # `fit` first tries the function on one completion
    return Run(of_steps, history, dtypes)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("usual"))
    assert len(run.completion_ids) == 2 * 32
    assert len({len(ids) for ids in run.completion_ids}) > 5
    return run


@pytest.mark.grid
@pytest.mark.parametrize(
    "setting",
    [
        jax.default_prng_impl("rbg"),
        pytest.param(jax.default_prng_impl("unsafe_rbg"), marks=pytest.mark.long),
        jax.threefry_partitionable(False),
        jax.enable_x64(True),
    ],
    ids=["rbg", "unsafe_rbg", "not partitionable", "x64"],
)
def test_a_run_is_the_same(
    setting: AbstractContextManager[None], usual: Run, tmp_path: Path
) -> None:
    with setting:
        run = make_run(tmp_path)
    assert run.completion_ids == usual.completion_ids
    assert run.dtypes == usual.dtypes == {"float32", "int32"}
    for metrics, expected in zip(run.history, usual.history, strict=True):
        for name in ("reward", "loss", "entropy", "grad_norm"):
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-4, atol=1e-6)
