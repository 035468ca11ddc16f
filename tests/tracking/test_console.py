"""What is shown of a run, and the time that is left."""

import io

import pytest
from rich.console import Console

from grpo_eqx.errors import UserError
from grpo_eqx.tracking.console import Stages, TrainingDisplay, readable_seconds


def metrics(seconds: float, compiling: float = 0.0) -> dict[str, float]:
    return {
        "reward": 0.5,
        "completions/mean_length": 7.0,
        "step_time": seconds + compiling,
        "compile/num_programs": float(compiling > 0),
        "compile/seconds": compiling,
    }


def test_compilation_does_not_count_in_the_time_left() -> None:
    shown = io.StringIO()
    with TrainingDisplay(102, Console(file=shown, width=200)) as display:
        display.step(1, metrics(2.0, compiling=95.0))
        display.step(2, metrics(2.0))
        display.step(102, metrics(2.0, compiling=50.0))
    first, last = shown.getvalue().splitlines()
    assert first == "step 1/102  reward 0.500  length 7.0  97.00 s (95 s of them compiling)"
    assert last.endswith("52.00 s (50 s of them compiling)  0 s left")


def test_the_time_left_is_that_of_a_usual_step() -> None:
    shown = io.StringIO()
    with TrainingDisplay(110, Console(file=shown, width=200, force_terminal=True)) as display:
        for step in range(1, 11):
            display.step(step, metrics(300.0 if step == 5 else 3.0))
    assert ", 5 min left" in shown.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (89.0, "89 s"), (90.0, "2 min"), (3600.0, "60 min"), (11100.0, "3 h 5 min")],
)
def test_durations_are_as_people_say_them(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text


def test_an_error_is_the_last_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    stages = Stages()
    stages.say("loading")
    with pytest.raises(UserError, match="damaged"), stages.silent_after_errors():
        raise UserError("The weights are damaged.")
    stages.say("compiling, in a thread that the error did not end")
    assert capsys.readouterr().err.splitlines() == ["[  0 s] loading"]
