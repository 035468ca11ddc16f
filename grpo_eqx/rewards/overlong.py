"""DAPO's soft penalty on completions close to the length limit."""

from collections.abc import Sequence
from typing import Any

from grpo_eqx.common.choices import SOFT_OVERLONG as SOFT_OVERLONG
from grpo_eqx.rewards.runner import RewardFunc


def soft_overlong_punishment(max_completion_length: int, buffer: int) -> RewardFunc:
    """Builds a reward that falls from 0 to -1 over the last `buffer` tokens before the limit.

    Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13).

    **Arguments:**

    - `max_completion_length`, `buffer`: the limit and the buffer in tokens, with `0 < buffer <=
      max_completion_length`.
    """

    def soft_overlong(*, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        free = max_completion_length - buffer
        return [max(-1.0, min(0.0, (free - len(ids)) / buffer)) for ids in completion_ids]

    assert soft_overlong.__name__ == SOFT_OVERLONG
    return soft_overlong
