"""A source of problems is a class as people write it."""

import dataclasses
import functools

import pytest

from grpo_eqx.data.load import load_data
from grpo_eqx.data.prompts import Prompt, PromptSource


class Counted(PromptSource):
    """With an `__init__`, and without a name."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    @functools.cache  # noqa: B019 -- as people write it
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(f"{index}?", {})


class Named(Counted):
    name = "a name of the class"


class Set(Counted):
    """With a name that its `__init__` gives."""

    def __init__(self, size: int):
        super().__init__(size)
        self.name = f"{size} numbers"


@dataclasses.dataclass
class Fields(PromptSource):
    """With fields, and no name."""

    size: int

    def __post_init__(self) -> None:
        self.texts = [f"{i}?" for i in range(self.size)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(self.texts[index], {})


@dataclasses.dataclass(kw_only=True)
class More(Fields):
    name: str
    more: int = 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (Counted(20), "Counted"),
        (Named(20), "a name of the class"),
        (Set(20), "20 numbers"),
        (Fields(20), "Fields"),
        (More(name="a field", size=20), "a field"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_source_needs_no_more_than_its_two_methods(source: PromptSource, name: str) -> None:
    train, heldout = load_data(source, None, 2)
    assert (len(train), len(heldout), heldout[1].text) == (18, 2, "19?")
    assert (str(train), str(heldout)) == (name, f"the last 2 of {name}")
