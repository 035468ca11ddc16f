"""The soft overlong punishment against DAPO's equation 13."""

import pytest

from grpo_eqx.rewards import soft_overlong_punishment


def punishment(length: int, limit: int, buffer: int) -> float:
    """That of one completion of a length in tokens."""
    [reward] = soft_overlong_punishment(limit, buffer)(
        prompts=["?"], completions=["!"], completion_ids=[list(range(length))]
    )
    return float(reward)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0.0),
        (15, 0.0),
        (16, 0.0),  # the last length that goes free
        (17, -1 / 4),
        (18, -2 / 4),
        (19, -3 / 4),
        (20, -1.0),  # the limit itself
        (21, -1.0),
    ],
)
def test_punishment_falls_linearly_over_the_buffer(length: int, expected: float) -> None:
    assert punishment(length, limit=20, buffer=4) == expected


def test_a_buffer_of_the_whole_length_punishes_from_the_first_token() -> None:
    assert [punishment(length, limit=4, buffer=4) for length in range(5)] == [
        0.0, -0.25, -0.5, -0.75, -1.0
    ]  # fmt: skip


def test_every_completion_is_punished_by_itself() -> None:
    rewards = soft_overlong_punishment(2, 1)(
        prompts=["?"] * 3, completions=["", "a", "ab"], completion_ids=[[], [5], [5, 6]]
    )
    assert list(rewards) == [0.0, 0.0, -1.0]
