"""Lines that say what a run is doing, and the phases behind them."""

import re

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.tracking.phases import PHASES, Phase
from grpo_eqx.tracking.stages import Stages, track_on_terminal


def test_an_error_is_the_last_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    stages = Stages()
    stages.say("loading")
    with pytest.raises(UserError, match="damaged"), stages.silent_after_errors():
        raise UserError("The weights are damaged.")
    stages.say("compiling, in a thread that the error did not end")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\[ +\d s\] loading", line)


def test_what_lasts_is_a_phase_until_it_ends() -> None:
    with Stages().lasting("evaluating on 512 problems"):
        assert PHASES.latest is not None
        assert str(PHASES.latest).startswith("evaluating on 512 problems, ")
    assert PHASES.latest is None


def test_of_several_phases_the_one_that_began_last_is_the_latest() -> None:
    outer, inner = Phase("evaluating"), Phase("compiling generate", before=90.0)
    with PHASES.lasting(outer):
        with PHASES.lasting(inner):
            assert str(PHASES.latest).endswith(" s; took 2 min before")
        PHASES.end(inner)  # it has ended
        assert PHASES.latest is outer


def test_a_loop_says_how_far_it_is_while_a_display_is_on() -> None:
    said = []
    with PHASES.shown():
        for _ in track_on_terminal(range(0, 60, 20), "completing prompts"):
            said.append(str(PHASES.latest).partition(",")[0])
    assert said == [f"completing prompts {done} of 3" for done in range(3)]
    assert PHASES.latest is None
