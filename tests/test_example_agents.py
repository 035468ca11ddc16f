"""`examples/calculator.py` and `examples/higher_lower.py` as a person runs them."""

import re
import runpy
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
CALCULATOR = runpy.run_path(str(EXAMPLES / "calculator.py"))
GAME = runpy.run_path(str(EXAMPLES / "higher_lower.py"))
SHORT = [
    "--steps", "2", "--eval-problems", "8", "--prompts-per-step", "2", "--num-generations", "8",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calculator", "higher_lower"])
def test_a_short_run_prints_what_was_learned(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *SHORT, "--output-dir", "out"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"before: \d\.\d+, after: \d\.\d+, in \d+ s$", done.stdout, re.MULTILINE)


def test_the_calculator_solves_the_problems() -> None:
    for problem in islice(CALCULATOR["problems"](), 50):
        assert str(CALCULATOR["calculate"](problem["expression"])) == problem["answer"]


@pytest.mark.parametrize("expression", ["12 times 3", "12*34+", "", "(1+2)*3", "2**9", "1.5*2"])
def test_what_the_calculator_cannot_read_is_an_error(expression: str) -> None:
    with pytest.raises(ValueError, match="write whole numbers"):
        CALCULATOR["calculate"](expression)


def test_held_out_problems_have_other_numbers() -> None:
    def numbers(*, heldout: bool) -> set[str]:
        problems = islice(CALCULATOR["problems"](heldout=heldout), 500)
        return {re.split("[-+]", each["expression"])[0] for each in problems}

    assert not numbers(heldout=True) & numbers(heldout=False)


def test_a_game_is_won_by_halving() -> None:
    for seed in range(30):
        game = GAME["HigherLower"]()
        game.reset(seed)
        low, high, step = 1, GAME["LARGEST"], None
        while step is None or not step.done:
            guess = (low + high) // 2
            step = game.step(str(guess))
            if step.observation == "Higher.":
                low = guess + 1
            else:
                high = guess - 1
        assert step.reward == 1.0


def test_a_game_ends_with_what_is_no_number() -> None:
    game = GAME["HigherLower"]()
    game.reset(0)
    assert game.step("seven") == (None, 0.0, True)
