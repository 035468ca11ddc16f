"""Values of flags: converted where they can be, and none missing or left over."""

import dataclasses
from pathlib import Path

import pytest
import tyro

from grpo_eqx.cli.flag_values import AS_SETTINGS, check_complete, refuse_assignments
from grpo_eqx.common.errors import UserError


@dataclasses.dataclass(frozen=True)
class Settings:
    """One flag of each kind."""

    number: float = 1.0
    words: tuple[str, ...] = ("a",)
    weights: tuple[float, ...] | None = None
    path: Path | None = None
    switch: bool = False


PLACEHOLDERS = {
    "number": "FLOAT", "words": "TEXT ...", "weights": "FLOAT ...", "path": "PATH", "switch": ""
}  # fmt: skip


def parsed(line: str) -> Settings:
    with AS_SETTINGS:
        return tyro.cli(Settings, args=line.split())


def test_values_have_the_types_of_their_flags() -> None:
    line = "--number 1e-6 --weights 1 2.5 --path a/b --words x y"
    assert parsed(line) == Settings(1e-6, ("x", "y"), (1.0, 2.5), Path("a/b"))


def test_values_of_no_type_stay_as_they_are_typed() -> None:
    settings = parsed("--number fast --weights 1 x")
    assert (settings.number, settings.weights) == ("fast", ("1", "x"))


def test_none_is_none_where_it_can_be() -> None:
    assert parsed("--path None --weights None") == Settings(path=None, weights=None)
    assert parsed("--number None").number == "None"


def test_switches_and_defaults_are_as_ever() -> None:
    assert parsed("") == Settings()
    assert parsed("--switch").switch is True
    assert parsed("--words").words == ()


@pytest.mark.parametrize(
    "line", ["", "--number 1", "--number=1 --switch", "--words a b --number -1", "--words --switch"]
)
def test_complete_lines_pass(line: str) -> None:
    check_complete(line.split(), PLACEHOLDERS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--number", "--number has no value"),
        ("--number --switch", "--number has no value"),
        ("--number 1 2", "--number takes one value: leave out '2'"),
        ("--number=1 2", "--number takes one value: leave out '2'"),
        ("--switch on", "--switch takes no value: leave out 'on'"),
        ("--no-switch on", "--no-switch takes no value"),
        ("-n 1", "'-n' is not a flag"),
    ],
)
def test_what_is_missing_or_left_over_is_named(line: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_complete(line.split(), PLACEHOLDERS)


def test_assignments_are_flags_without_dashes_except_for_variables_of_templates() -> None:
    refuse_assignments(["--chat-template-kwargs", "a=1", "b=2", "--seed", "3"], ["seed"])
    with pytest.raises(UserError, match="'seed=3' is not a flag: write --seed 3"):
        refuse_assignments(["--words", "a", "seed=3"], ["seed"])
