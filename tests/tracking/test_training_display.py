"""What is shown of a run: lines where it is piped, a dashboard on a terminal."""

import io
import logging
import re
import sys

import pytest
from rich.console import Console

from grpo_eqx.tracking.phases import PHASES, Phase
from grpo_eqx.tracking.stages import Stages
from grpo_eqx.tracking.training_display import TrainingDisplay

NAN = float("nan")


class FakeTerminal(io.StringIO):
    """Output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def metrics(seconds: float = 1.0, compiling: float = 0.0, **others: float) -> dict[str, float]:
    return {
        "reward": 0.5,
        "completions/mean_length": 7.0,
        "step_time": seconds + compiling,
        "compile/num_programs": float(compiling > 0),
        "compile/seconds": compiling,
        **others,
    }


def terminal(file: io.StringIO, width: int = 80, **options: bool) -> Console:
    return Console(file=file, force_terminal=True, width=width, height=24, **options)


def last_frame(shown: str) -> list[str]:
    """The five lines that were drawn last, without escape sequences."""
    lines = without_escapes(shown).replace("\r", "").splitlines()
    start = max(i for i, line in enumerate(lines) if re.match(r"step \d+ of", line))
    return lines[start : start + 5]


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)


def test_compilation_does_not_count_in_the_time_left() -> None:
    shown = io.StringIO()
    with TrainingDisplay(102, Console(file=shown, width=200)) as display:
        display.step(1, metrics(2.0, compiling=95.0))
        display.step(2, metrics(2.0))
        display.step(102, metrics(2.0, compiling=50.0))
    first, last = shown.getvalue().splitlines()
    assert first == "step 1/102  reward 0.500  length 7.0  97.00 s (compiling took 95 s)"
    assert last.endswith("52.00 s (compiling took 50 s)  0 s left")


def test_the_time_left_is_that_of_a_usual_step() -> None:
    shown = io.StringIO()
    with TrainingDisplay(110, terminal(shown, 200)) as display:
        for step in range(1, 11):
            display.step(step, metrics(300.0 if step == 5 else 3.0))
    assert "  5 min left" in shown.getvalue()


def test_piped_output_is_whole_lines_without_escapes() -> None:
    shown = io.StringIO()
    with TrainingDisplay(2, Console(file=shown)) as display:
        display.note("a [bold] note")
        display.step(1, metrics(reward=NAN))
        display.step(2, metrics())
    note, first, last = shown.getvalue().splitlines()
    assert note == "a [bold] note"
    assert first == "step 1/2  reward nan  length 7.0  1.00 s  1 s left"
    assert last == "step 2/2  reward 0.500  length 7.0  1.00 s  0 s left"


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    shown = io.StringIO()
    with TrainingDisplay(1, terminal(shown)) as display:
        display.step(1, metrics())
    assert shown.getvalue() == "step 1/1  reward 0.500  length 7.0  1.00 s  0 s left\n"


def test_what_is_last_shown_stays_and_the_cursor_is_shown_below_it() -> None:
    shown = io.StringIO()
    with TrainingDisplay(2, terminal(shown)) as display:
        display.step(1, metrics())
        display.step(2, metrics(reward=0.75))
    assert "\x1b[?25l" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[?25h")
    bar, reward, *_ = last_frame(shown.getvalue())
    assert bar.startswith("step 2 of 2  ━━━━")
    assert bar.endswith("━  done")
    assert reward.startswith("reward 0.750")


def test_the_last_line_of_a_run_that_is_stopped_is_printed_once() -> None:
    shown = io.StringIO()
    with TrainingDisplay(9, Console(file=shown, width=200)) as display:
        for step in (1, 2, 3):
            display.step(step, metrics())
        display.stopped()
        display.stopped()
    first, last = shown.getvalue().splitlines()
    assert first.startswith("step 1/9")
    assert last == "step 3/9  reward 0.500  length 7.0  1.00 s"


def test_a_display_of_a_run_that_is_stopped_has_no_time_left() -> None:
    shown = io.StringIO()
    with TrainingDisplay(900, terminal(shown)) as display:
        display.step(1, metrics())
        assert last_frame(shown.getvalue())[0].endswith("  15 min left")
        display.stopped()
    assert last_frame(shown.getvalue())[0].endswith("  stopped")


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    shown, before = io.StringIO(), (sys.stdout, sys.stderr)
    with pytest.raises(KeyboardInterrupt), TrainingDisplay(2, terminal(shown)):
        raise KeyboardInterrupt
    assert shown.getvalue().endswith("\x1b[?25h")
    assert (sys.stdout, sys.stderr) == before
    assert not PHASES.are_shown


@pytest.mark.parametrize("color", [True, False])
def test_all_that_is_printed_goes_above_the_display(
    color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = FakeTerminal()
    handler = logging.StreamHandler(shown)  # as libraries make them, before the display is on
    logger = logging.getLogger("tests.display")
    logger.addHandler(handler)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    console = Console(width=80, height=24, no_color=not color, force_terminal=True)
    with TrainingDisplay(9, console) as display:
        display.note("a note")
        print("printed by a reward")
        Stages().say("a stage")  # after the seconds since its start
        logger.warning("logged")
    logger.removeHandler(handler)
    assert handler.stream is shown
    for text in ("a note", "printed by a reward", "a stage", "logged"):
        before, _, after = shown.getvalue().partition(text)
        assert re.sub(r"\[ +\d s\] $", "", before).endswith("\r\x1b[J"), (
            text
        )  # where the display was is empty
        assert without_escapes(after).lstrip().startswith("step 0 of 9"), text


def test_errors_stay_apart_where_only_they_are_redirected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown, file = FakeTerminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", file)
    with TrainingDisplay(9, Console(width=80, height=24, force_terminal=True)):
        print("a warning", file=sys.stderr)
    assert file.getvalue() == "a warning\n"


def test_a_program_that_compiles_is_a_phase_with_the_time_it_took_before() -> None:
    shown = io.StringIO()
    with TrainingDisplay(9, terminal(shown)) as display:
        with PHASES.lasting(Phase("compiling update", before=41.0)):
            display.note("meanwhile")
            phase = last_frame(shown.getvalue())[4]
            assert re.fullmatch(r"compiling update, \d s; took 41 s before", phase)
        display.step(1, metrics())
        assert "compiling" not in "".join(last_frame(shown.getvalue()))


def test_a_run_that_is_resumed_shows_its_earlier_rewards() -> None:
    shown = io.StringIO()
    with TrainingDisplay(9, terminal(shown), done=2, rewards=[0.25, 1.0]) as display:
        display.step(3, metrics())
    assert any("0.250 to 1.000" in line for line in last_frame(shown.getvalue()))
