"""Word problems that the project makes itself: one to three steps, integer answers.

Every problem is a pure function of `(seed, split, index)`. Its split depends on its template and
numbers alone, so no held-out problem is a training problem with other names.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import equinox as eqx
import numpy as np

from grpo_eqx.data.prompts import Prompt, PromptSource

Split = Literal["train", "heldout"]

_HELDOUT_SHARE = 5  # one in five combinations of template and numbers is held out
_NAMES = ("Tom", "Mia", "Sam", "Ann", "Leo", "Eva", "Ben", "Ivy")
_THINGS = ("apples", "books", "cards", "coins", "shells", "pens", "stamps", "cakes")


@dataclasses.dataclass(frozen=True)
class Result:
    """A reference to the result of an earlier step, by its position."""

    step: int


Operand = int | Result


@dataclasses.dataclass(frozen=True)
class Step:
    """One calculation, `left op right`."""

    left: Operand
    op: Literal["+", "-", "*", "/"]
    right: Operand


@dataclasses.dataclass(frozen=True)
class WordProblem:
    """A question and the steps that answer it."""

    template: str
    question: str
    steps: tuple[Step, ...]

    def solve(self, slips: Sequence[int] = ()) -> list[str]:
        """The worked lines, `a+b=c` each. `slips[i]` is added to the result of step `i`."""
        results: list[int] = []
        lines = []
        for i, step in enumerate(self.steps):
            left, right = (
                results[x.step] if isinstance(x, Result) else x for x in (step.left, step.right)
            )
            result = _OPERATIONS[step.op](left, right) + (slips[i] if slips else 0)
            results.append(result)
            lines.append(f"{left}{step.op}{right}={result}")
        return lines

    @property
    def answer(self) -> int:
        return int(self.solve()[-1].rsplit("=", 1)[1])

    @property
    def solution(self) -> str:
        """The worked solution in GSM8K's form, ending in `#### answer`."""
        return "\n".join([*self.solve(), f"#### {self.answer}"])

    @property
    def is_heldout(self) -> bool:
        numbers = repr((self.template, self.steps)).encode()
        return hashlib.blake2b(numbers, digest_size=8).digest()[0] % _HELDOUT_SHARE == 0


class WordProblems(PromptSource):
    """The embedded problems of one split: `source[index]`, the same on every machine."""

    split: Split = "train"
    size: int = 8192
    seed: int = 0
    name: str = eqx.field(init=False)

    def __post_init__(self) -> None:
        self.name = f"embedded word problems ({self.split})"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return _prompt(self.seed, self.split, index)

    def problem(self, index: int) -> WordProblem:
        """The problem itself, with its steps."""
        return _problem(self.seed, self.split, index)


@functools.cache  # of all that a process reads: thousands, a kilobyte each
def _prompt(seed: int, split: Split, index: int) -> Prompt:
    problem = _problem(seed, split, index)
    return Prompt(problem.question, {"answer": problem.solution})


def _problem(seed: int, split: Split, index: int) -> WordProblem:
    rng = np.random.default_rng([seed, split == "heldout", index])
    while True:
        template = _TEMPLATES[rng.integers(len(_TEMPLATES))]
        problem = template(rng)
        if problem.is_heldout == (split == "heldout"):
            return problem


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,  # templates divide without remainder
}

_Template = Callable[[np.random.Generator], WordProblem]
_TEMPLATES: list[_Template] = []


def _template(function: _Template) -> _Template:
    _TEMPLATES.append(function)
    return function


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    """A uniform integer, both ends included."""
    return int(rng.integers(low, high + 1))


def _people(rng: np.random.Generator) -> tuple[str, str]:
    first, second = rng.choice(len(_NAMES), size=2, replace=False)
    return _NAMES[first], _NAMES[second]


def _thing(rng: np.random.Generator) -> str:
    return _THINGS[rng.integers(len(_THINGS))]


@_template
def _gift(rng: np.random.Generator) -> WordProblem:
    (who, other), thing = _people(rng), _thing(rng)
    a, b = _between(rng, 5, 60), _between(rng, 3, 39)
    question = (
        f"{who} has {a} {thing}. {other} gives {who} {b} more. "
        f"How many {thing} does {who} have now?"
    )
    return WordProblem("gift", question, (Step(a, "+", b),))


@_template
def _sale(rng: np.random.Generator) -> WordProblem:
    (who, _), thing = _people(rng), _thing(rng)
    a = _between(rng, 20, 99)
    b = _between(rng, 3, a - 5)
    question = f"{who} had {a} {thing} and sold {b} of them. How many {thing} are left?"
    return WordProblem("sale", question, (Step(a, "-", b),))


@_template
def _boxes(rng: np.random.Generator) -> WordProblem:
    (who, _), thing = _people(rng), _thing(rng)
    a, b = _between(rng, 2, 9), _between(rng, 3, 12)
    question = (
        f"{who} buys {a} boxes with {b} {thing} in each box. "
        f"How many {thing} does {who} buy in total?"
    )
    return WordProblem("boxes", question, (Step(a, "*", b),))


@_template
def _sharing(rng: np.random.Generator) -> WordProblem:
    (who, _), thing = _people(rng), _thing(rng)
    each, friends, kept = _between(rng, 2, 12), _between(rng, 2, 9), _between(rng, 1, 9)
    total = each * friends + kept
    question = (
        f"{who} has {total} {thing}, keeps {kept} and shares the rest equally among "
        f"{friends} friends. How many {thing} does each friend get?"
    )
    return WordProblem("sharing", question, (Step(total, "-", kept), Step(Result(0), "/", friends)))


@_template
def _times_as_many(rng: np.random.Generator) -> WordProblem:
    (who, other), thing = _people(rng), _thing(rng)
    a, times = _between(rng, 3, 15), _between(rng, 2, 5)
    question = (
        f"{who} has {a} {thing}. {other} has {times} times as many. "
        f"How many {thing} do they have together?"
    )
    return WordProblem("times", question, (Step(a, "*", times), Step(Result(0), "+", a)))


@_template
def _two_changes(rng: np.random.Generator) -> WordProblem:
    (who, other), thing = _people(rng), _thing(rng)
    a, b = _between(rng, 10, 50), _between(rng, 5, 40)
    c = _between(rng, 3, a + b - 4)
    question = (
        f"{who} had {a} {thing}, found {b} more and then gave {c} to {other}. "
        f"How many {thing} does {who} have now?"
    )
    return WordProblem("changes", question, (Step(a, "+", b), Step(Result(0), "-", c)))


@_template
def _change_of_a_note(rng: np.random.Generator) -> WordProblem:
    (who, _), thing = _people(rng), _thing(rng)
    count, price, paid = _between(rng, 2, 9), _between(rng, 2, 9), 100
    question = (
        f"{who} buys {count} {thing} for ${price} each and pays with ${paid}. "
        f"How many dollars does {who} get back?"
    )
    return WordProblem("note", question, (Step(count, "*", price), Step(paid, "-", Result(0))))


@_template
def _two_kinds(rng: np.random.Generator) -> WordProblem:
    (who, _), thing = _people(rng), _thing(rng)
    a, b, c, d = (_between(rng, 2, 9) for _ in range(4))
    question = (
        f"{who} has {a} bags of {b} {thing} and {c} boxes of {d} {thing}. "
        f"How many {thing} does {who} have?"
    )
    steps = (Step(a, "*", b), Step(c, "*", d), Step(Result(0), "+", Result(1)))
    return WordProblem("kinds", question, steps)


@_template
def _week(rng: np.random.Generator) -> WordProblem:
    (who, _), thing = _people(rng), _thing(rng)
    daily, days = _between(rng, 3, 9), _between(rng, 3, 9)
    start, gone = _between(rng, 5, 30), _between(rng, 2, 12)
    question = (
        f"{who} has {start} {thing} and makes {daily} more every day for {days} days. "
        f"Then {gone} break. How many {thing} are left?"
    )
    steps = (Step(daily, "*", days), Step(start, "+", Result(0)), Step(Result(1), "-", gone))
    return WordProblem("week", question, steps)


@_template
def _three_people(rng: np.random.Generator) -> WordProblem:
    (who, other), thing = _people(rng), _thing(rng)
    a, more, fewer = _between(rng, 8, 30), _between(rng, 2, 15), _between(rng, 1, 7)
    question = (
        f"{who} has {a} {thing}. {other} has {more} more than {who}. Max has {fewer} fewer than "
        f"{who}. How many {thing} do {other} and Max have together?"
    )
    steps = (Step(a, "+", more), Step(a, "-", fewer), Step(Result(0), "+", Result(1)))
    return WordProblem("people", question, steps)
