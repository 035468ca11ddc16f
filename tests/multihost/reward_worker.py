"""One process of several whose reward functions fail or log; ends with 0 where all agree.

python reward_worker.py
"""

from typing import Any

import jax
import numpy as np
import pytest

from grpo_eqx.common.errors import RewardError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.distributed.startup import initialize
from grpo_eqx.models.pretrained import model_folder
from grpo_eqx.rewards import RewardLimits, RewardRunner
from grpo_eqx.rollout.rollout import Rollout, rewarded

PROMPTS = [Prompt(str(p), {"number": p}) for p in range(6)]


def judge(*, prompts: list[str], number: list[int], **columns: object) -> list[float]:
    """Fails on prompt 4, which is the last process's."""
    return [float("nan") if n == 4 else float(n) for n in number]


def two_completions_of_each() -> Rollout:
    tokenizer = ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))
    groups = [
        [Trajectory([4], Address(0, p, s), np.array([s + 1])) for s in range(2)]
        for p in range(len(PROMPTS))
    ]
    return Rollout(PROMPTS, groups, tokenizer)


def share(most: float) -> np.ndarray:
    """Which completions are dropped, in every process."""
    limits = RewardLimits(failures="drop", max_failed=most)
    rewards = rewarded(RewardRunner({"judge": judge}, limits=limits), two_completions_of_each())
    np.testing.assert_array_equal(np.isnan(rewards.total), rewards.dropped)
    return rewards.dropped


def logs(*, prompts: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
    """Logs one column in every process, and one in the last."""
    log_extra("asked", prompts)
    log_metric("first", float(prompts[0]))
    if "5" in prompts:
        log_extra("last", [int(text) for text in prompts])
        log_metric("last", 7.0)
    return [0.0] * len(prompts)


def check_logged() -> None:
    """Every process has what all have logged, each for its own completions."""
    logged = rewarded(RewardRunner({"logs": logs}, max_steps=1), two_completions_of_each()).logged
    assert logged is not None
    asked = [str(p) for p in range(6) for _ in range(2)]
    assert logged.table() == {"asked": asked, "last": [None] * 6 + [3, 3, 4, 4, 5, 5]}
    assert logged.means() == {"first": (0 + 3) / 2, "last": 7.0}


if __name__ == "__main__":
    initialize()
    assert jax.process_count() == 2
    assert share(0.2).tolist() == [[False] * 2] * 4 + [[True] * 2] + [[False] * 2]
    with pytest.raises(RewardError, match="judge failed on 2 of 12 completions"):
        share(0.1)
    check_logged()
