"""One process of several whose reward function fails in some; ends with 0 where all agree.

python reward_worker.py
"""

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


def share(most: float) -> np.ndarray:
    """Which completions are dropped, in every process."""
    tokenizer = ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))
    groups = [
        [Trajectory([4], Address(0, p, s), np.array([s + 1])) for s in range(2)]
        for p in range(len(PROMPTS))
    ]
    rollout = Rollout(PROMPTS, groups, tokenizer)
    limits = RewardLimits(failures="drop", max_failed=most)
    rewards = rewarded(RewardRunner({"judge": judge}, limits=limits), rollout)
    np.testing.assert_array_equal(np.isnan(rewards.total), rewards.dropped)
    return rewards.dropped


if __name__ == "__main__":
    initialize()
    assert jax.process_count() == 2
    assert share(0.2).tolist() == [[False] * 2] * 4 + [[True] * 2] + [[False] * 2]
    with pytest.raises(RewardError, match="judge failed on 2 of 12 completions"):
        share(0.1)
