"""Completions as a person reads them."""

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from grpo_eqx.tracking.completions_view import as_block, as_table, evenly, side_by_side, spread

NAN = float("nan")
HOSTILE = [
    "\x1b[2J\x1b]0;title\x07 escapes",
    "[bold red]markup[/] :smile:",
    "line\nline\r\n\ttab",
    "שלום עולם مرحبا \u202egnirts",
    "x" * 5000,
    "漢字" * 500,
]


def columns(completions: list[str], rewards: list[float]) -> dict[str, list[Any]]:
    n = len(completions)
    return {
        "step": [30] * n,
        "prompt_id": ["ab12cd34ef56"] * n,
        "prompt": ["How many?"] * n,
        "completion": completions,
        "rewards/correct": rewards,
        "rewards/format": [0.0] * n,
        "reward": rewards,
        "advantage": [0.7] * n,
        "length": [1234] * n,
        "truncated": [True] * n,
    }


def rows(completions: list[str], rewards: list[float]) -> list[dict[str, Any]]:
    table = columns(completions, rewards)
    return [{name: x[i] for name, x in table.items()} for i in range(len(completions))]


def printed(shown: RenderableType, width: int = 80, *, color: bool = False) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=color).print(shown)
    return file.getvalue().splitlines()


def test_a_spread_has_the_best_the_worst_and_those_between() -> None:
    assert spread([0.0, 1.0, 0.5, NAN, 1.0], 3) == [1, 2, 3]
    assert spread([0.0, 1.0], 9) == [1, 0]
    assert spread([0.0, 1.0], 1) == [1]
    right = [1.0] * 90 + [0.0] * 10
    assert [right[i] for i in spread(right, 10)] == [1.0] * 9 + [0.0]


def test_even_indices_have_both_ends() -> None:
    assert evenly(100, 4) == [0, 33, 66, 99]
    assert evenly(3, 4) == [0, 1, 2]


def test_a_table_has_prompts_completions_rewards_and_advantages() -> None:
    table = columns(["right", "wrong", "unknown"], [1.0, 0.0, NAN])
    assert printed(as_table(table, 2, 79, "utf-8")) == [
        "",
        "step 30: 2 of 3 completions, from the best to the worst",
        "",
        "prompt                  completion                            reward  advantage",
        "",
        "How many?               right                                      1      +0.70",
        "",
        "How many?               unknown                                 none      +0.70",
    ]


def test_a_block_has_logged_columns_below_the_completion() -> None:
    (row,) = rows(["right"], [1.0])
    logged = {"verdict": "[b]good", "score": 0.5, "missing": None, "tokens": ["right"]}
    acts = {"environment": "shelf", "tools/calls": 1, "tools/failures": 1}
    lines = printed(as_block({**row, **acts, **logged}, "utf-8", longest=80), 160)
    assert lines[0].endswith("1,234 tokens, 1 call (1 failed), truncated")
    below = ["  environment shelf", "  verdict [b]good", "  score 0.5", ""]
    assert lines[1:] == ["  How many?", "    right", *below]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("color", [True, False])
def test_hostile_completions_neither_act_nor_wrap(width: int, color: bool) -> None:
    rewards = [1.0] * len(HOSTILE)
    whole = rows(HOSTILE, rewards)
    steps = {10: whole[:3], 20: whole[3:]}
    for shown in (
        as_table(columns(HOSTILE, rewards), len(HOSTILE), width - 1, "utf-8"),
        side_by_side(steps, "utf-8", per_step=3, longest=400, width=width - 1),
        *(as_block(row, "utf-8", longest=400) for row in whole),
    ):
        lines = printed(shown, width)
        assert all(char.isprintable() for line in lines for char in line)
        assert max(map(cell_len, lines)) <= width
        assert all(line == line.rstrip() for line in lines)
    if color:
        text = "".join(printed(as_table(columns(HOSTILE, rewards), 9, 79, "utf-8"), color=True))
        assert "\x1b[2J" not in text
        assert "\x1b]" not in text


def test_a_block_has_each_reward_and_the_lines_of_the_completion() -> None:
    (row,) = rows(["5+34=39\n#### 39"], [1.0])
    assert printed(as_block(row, "utf-8", longest=400), 120) == [
        "step 30  prompt ab12cd34ef56  reward 1 (correct 1, format 0)  advantage "
        "+0.70  1,234 tokens, truncated",
        "  How many?",
        "    5+34=39",
        "    #### 39",
        "",
    ]


def test_steps_are_side_by_side_as_far_as_there_is_room() -> None:
    steps = {step: rows([f"at {step}", "worse"], [1.0, 0.0]) for step in (10, 20, 30)}
    lines = printed(side_by_side(steps, "utf-8", per_step=1, longest=400, width=79))
    assert lines == [
        "prompt ab12cd34ef56",
        "How many?",
        "",
        "step 10  mean reward 0.5 of 2           step 30  mean reward 0.5 of 2",
        "",
        "1  at 10                                1  at 30",
        "",
        "1 more step has no room: narrow them down with --steps",
    ]
    wider = printed(side_by_side(steps, "utf-8", per_step=1, longest=400, width=119), 120)
    assert "step 20" in wider[3]
