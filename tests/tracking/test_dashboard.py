"""The lines of the live display: what they say, and that they fit."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_eqx.tracking import dashboard
from grpo_eqx.tracking.dashboard import Dashboard, direction, sparkline
from grpo_eqx.tracking.phases import PHASES, Phase

METRICS = {
    "reward": 0.531,
    "completions/mean_length": 19.24,
    "completions/clipped_ratio": 0.125,
    "entropy": 0.4123,
    "step_time": 1.074,
    "perf/tokens_per_second/rollout": 5312.4,
}


def lines(board: Dashboard, width: int) -> list[str]:
    return [line.plain for line in board.lines(width)]


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Dashboard:
    monkeypatch.setattr(dashboard, "memory_in_use", lambda: ("memory", "71.2/78 GiB"))
    rewards = [0.3 + 0.01 * step for step in range(37)]
    now = time.monotonic()
    return Dashboard(
        150, 37, rewards, metrics=METRICS, seconds_left=145.0, stepped=now - 20, began=now - 700
    )


def test_at_80_columns_it_says_all_that_is_known(board: Dashboard) -> None:
    bar, reward, completions, machine, phase = lines(board, 79)
    assert bar == f"step 37 of 150  {'━' * 12}╸{'─' * 38}  2 min left"
    course = "▁▁▁▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇███"
    assert reward == f"reward 0.531 ↗  {course}{' ' * 12}0.300 to 0.660"
    assert completions == "length 19.2        truncated 12.5%    entropy 0.412"
    assert machine.startswith(
        "step time 1.07 s   tokens/s 5,312     memory 71.2/78 GiB elapsed 12 min"
    )
    assert phase == ""


def test_the_time_left_stands_still_during_an_evaluation(
    board: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    board.seconds_left, board.stepped = 80.0, now
    with monkeypatch.context() as patched:
        patched.setattr(dashboard.time, "monotonic", lambda: now + 20)
        assert lines(board, 79)[0].endswith("  60 s left")
        with PHASES.lasting(Phase("evaluating after step 37", total=9)):
            patched.setattr(dashboard.time, "monotonic", lambda: now + 320)
            assert lines(board, 79)[0].endswith("  60 s left")
        patched.setattr(dashboard.time, "monotonic", lambda: now + 330)
        assert lines(board, 79)[0].endswith("  50 s left")


def test_the_kl_is_shown_where_it_is_logged(board: Dashboard) -> None:
    board.metrics = {**METRICS, "kl": 0.00213}
    assert lines(board, 79)[2].endswith("entropy 0.412      KL 0.0021")


def test_what_is_not_known_or_no_number_is_a_dash(board: Dashboard) -> None:
    board.rewards, board.metrics = [float("nan")], {"reward": float("nan"), "kl": float("inf")}
    board.seconds_left = None
    bar, reward, completions, machine, _ = lines(board, 79)
    assert bar.endswith("  time left unknown")
    assert reward.rstrip() == "reward -"
    assert completions == "length -           truncated -        entropy -          KL -"
    assert machine.startswith("step time -        tokens/s - ")


def test_a_program_that_compiles_is_named(board: Dashboard) -> None:
    began = time.monotonic() - 120
    with PHASES.lasting(Phase("compiling update", before=41.0, began=began)):
        assert lines(board, 79)[4] == "compiling update, 2 min; took 41 s before"


@pytest.mark.parametrize("width", [1, 20, 59, 79, 119, 300])
@pytest.mark.parametrize("done", [0, 75, 1_000_000])
def test_it_is_never_wider_than_it_may_be(board: Dashboard, width: int, done: int) -> None:
    board.done = done
    board.steps = max(150, done)
    board.rewards = [0.5 + step % 7 for step in range(1000)]
    widest = max(len(line) for line in lines(board, width))
    narrowest_bar = len("step 1,000,000 of 1,000,000    time left unknown")
    assert widest <= max(width, narrowest_bar)  # which is then cut at the edge
    if width >= 79:
        assert widest <= min(width, 120)


def test_an_output_without_unicode_gets_ascii(board: Dashboard) -> None:
    board.ascii_only = True
    assert all(line.isascii() for line in lines(board, 79))


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([0.0, NAN, 1.0], "▁ █"),
        ([2.0, 2.0], "▅▅"),
        ([NAN, NAN], "  "),
        ([], ""),
        ([0.0, 1.0, float("inf")], "▁█ "),
    ],
)
def test_the_lowest_is_low_and_the_highest_high(values: list[float], drawn: str) -> None:
    assert sparkline(values, 10) == drawn


def test_more_values_than_characters_are_drawn_by_their_means() -> None:
    assert sparkline([0.0, 2.0, 5.0, 7.0, 10.0, 12.0], 3) == "▁▅█"
    assert sparkline([0.0, NAN, 7.0, 7.0], 2) == "▁█"


@given(st.lists(st.floats()), st.integers(0, 100))
def test_any_values_have_room_and_are_encodable(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= max(1, width)
    assert sparkline(values, width, ascii_only=True).isascii()


def test_a_trend_is_told_from_noise() -> None:
    noise = np.random.default_rng(0).normal(size=(200, 20))
    rise = np.linspace(0, 6, 20)
    told = [direction(row.tolist()) for row in noise]
    assert sum(each != 0 for each in told) < 0.12 * len(told)
    assert np.mean([direction((row + rise).tolist()) == 1 for row in noise]) > 0.95
    assert np.mean([direction((row - rise).tolist()) == -1 for row in noise]) > 0.95


def test_too_few_values_have_no_direction() -> None:
    assert direction([0.0, 1.0, 2.0, NAN, 3.0, 4.0]) is None
    assert direction([0.5] * 6) == 0
