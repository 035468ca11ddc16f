"""Choice of the completions that a report shows: the best, the worst, and the most changed."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_eqx.tracking.checked_parquet import read_parquet
from grpo_eqx.tracking.completions_view import calls_in_words, evenly, is_logged
from grpo_eqx.tracking.safe_console import cut_in_the_middle, literal

_SHOWN = 3
"""Completions of each kind."""
_LONGEST = 1500
"""Most characters of a text that are shown."""
_MOST_TABLES = 40
"""Most tables, evenly chosen, that are searched for prompts that were sampled again."""

_COLUMNS = "prompt", "reward", "advantage", "length", "truncated"


@dataclasses.dataclass(frozen=True)
class Example:
    """Completion of a prompt, and its rewards."""

    step: int
    row: int
    """Place in the table of its step."""
    prompt: str
    completion: str
    """Text of the completion; empty until it is chosen."""
    reward: float
    advantage: float
    length: int | None
    truncated: bool
    rewards: Mapping[str, float]
    """The reward of each function."""
    calls: str = ""
    """Its calls of tools in words; empty until it is chosen, and without tools."""
    logged: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Values of columns that functions have logged; empty until it is chosen."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Typical completions of an early and a late step, of one prompt if one was sampled again."""

    before: Example
    after: Example
    mean_before: float
    """Mean reward of the prompt's group, or of the whole step."""
    mean_after: float

    @property
    def same_prompt(self) -> bool:
        return self.before.prompt == self.after.prompt


@dataclasses.dataclass(frozen=True)
class Examples:
    """Completions of a run to read."""

    step: int | None
    """Step of the best and the worst completions; `None` without tables."""
    best: Sequence[Example] = ()
    worst: Sequence[Example] = ()
    changes: Sequence[Change] = ()


def choose_examples(tables: Mapping[int, Path], gaps: list[str]) -> Examples:
    """Chooses completions of a run.

    **Arguments:**

    - `tables`: tables of completions by step, oldest first.
    - `gaps`: a list, to which a sentence is added for each unreadable table.

    The best and the worst completions are from the last table, one per prompt, by reward and then
    by advantage: right where others of the group were wrong, or the reverse. The most changed
    prompts are prompts of several tables, by the change in their mean reward. If no prompt was
    sampled again, a typical completion of the first table is compared with one of the last.
    """
    steps = list(tables)
    chosen = [steps[i] for i in evenly(len(steps), _MOST_TABLES)]
    # The texts of all completions may take gigabytes: they are read later, for chosen examples.
    read = {step: _examples(tables[step], step, gaps) for step in chosen}
    rows = {step: examples for step, examples in read.items() if examples}
    if not rows:
        return Examples(None)
    last = max(rows)
    texts = _Texts(tables, gaps)
    rows[last] = [texts.filled(x) for x in rows[last]]
    best = _of_different_prompts(sorted(rows[last], key=lambda x: (-x.reward, -x.advantage)))
    shown = {(each.prompt, each.completion) for each in best}
    others = [
        x for x in rows[last]
        if x.reward < best[0].reward and (x.prompt, x.completion) not in shown
    ]  # fmt: skip
    worst = sorted(others, key=lambda x: (x.reward, x.advantage))
    changes = [
        dataclasses.replace(x, before=texts.filled(x.before), after=texts.filled(x.after))
        for x in _changes(rows)
    ]
    return Examples(last, best, _of_different_prompts(worst), changes)


def _examples(path: Path, step: int, gaps: list[str]) -> list[Example]:
    """Reads a table's completions that have a reward, without their texts."""
    try:
        rows = read_parquet(path, _shown).to_pylist()
        examples = [_example(row, step, number) for number, row in enumerate(rows)]
    except (KeyError, TypeError, ValueError) as error:
        gaps.append(_gap(path, error))
        return []
    return [example for example in examples if math.isfinite(example.reward)]


class _Texts:
    """Texts of completions, and what was logged of them.

    A table is read once, when its first text is needed.
    """

    def __init__(self, tables: Mapping[int, Path], gaps: list[str]):
        self._tables, self._gaps = tables, gaps
        self._read: dict[int, list[dict[str, Any]]] = {}

    def filled(self, example: Example) -> Example:
        """Returns an example with its text, which is empty if it cannot be read."""
        if example.step not in self._read:
            self._read[example.step] = self._of(self._tables[example.step])
        rows = self._read[example.step]
        if not rows:
            return example
        row = rows[example.row]
        return dataclasses.replace(
            example,
            completion=str(row["completion"]),
            calls=calls_in_words(row),
            logged={
                literal(name, newlines=False).plain: str(x)
                for name, x in row.items()
                if is_logged(name) and x is not None
            },
        )

    def _of(self, path: Path) -> list[dict[str, Any]]:
        try:
            return read_parquet(path, _of_chosen).to_pylist()
        except ValueError as error:
            self._gaps.append(_gap(path, error))
            return []


def _gap(path: Path, error: Exception) -> str:
    reason = str(error).splitlines()[0][:200]
    return f"{path.name} cannot be read ({reason}): its completions are not shown."


def _shown(columns: Sequence[str]) -> list[str]:
    """Returns the columns to read: others, such as tokens, may be large."""
    if "completion" not in columns:
        raise ValueError("it has no column 'completion'")
    return [name for name in columns if name in _COLUMNS or name.startswith("rewards/")]


def _of_chosen(columns: Sequence[str]) -> list[str]:
    """Returns the columns to read for chosen examples."""
    return [
        name
        for name in columns
        if name == "completion" or name.startswith("tools/") or is_logged(name)
    ]


def _example(row: Mapping[str, Any], step: int, number: int) -> Example:
    return Example(
        step=step,
        row=number,
        prompt=str(row["prompt"]),
        completion="",
        reward=_number(row["reward"]),
        advantage=0.0 if row.get("advantage") is None else float(row["advantage"]),
        length=row.get("length"),
        truncated=bool(row.get("truncated")),
        rewards={
            name.removeprefix("rewards/"): _number(value)
            for name, value in row.items()
            if name.startswith("rewards/")
        },
    )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _of_different_prompts(examples: Sequence[Example]) -> list[Example]:
    """Returns the first few examples, one of each prompt."""
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(example.prompt, example)
    return list(first.values())[:_SHOWN]


def _changes(rows: Mapping[int, Sequence[Example]]) -> list[Change]:
    first, last = min(rows), max(rows)
    if first == last:
        return []
    steps_of: dict[str, list[int]] = {}
    for step, examples in rows.items():
        for prompt in dict.fromkeys(x.prompt for x in examples):
            steps_of.setdefault(prompt, []).append(step)
    again = [
        _change(rows[steps[0]], rows[steps[-1]], lambda x, p=prompt: x.prompt == p)  # type: ignore[misc]
        for prompt, steps in steps_of.items()
        if len(steps) > 1
    ]
    if not again:
        return [_change(rows[first], rows[last], lambda _: True)]
    return sorted(again, key=lambda x: -abs(x.mean_after - x.mean_before))[:_SHOWN]


def _change(
    before: Sequence[Example], after: Sequence[Example], counts: Callable[[Example], bool]
) -> Change:
    early, late = [x for x in before if counts(x)], [x for x in after if counts(x)]
    return Change(_typical(early), _typical(late), _mean(early), _mean(late))


def _mean(examples: Sequence[Example]) -> float:
    return fmean(x.reward for x in examples)


def _typical(examples: Sequence[Example]) -> Example:
    """Returns the completion whose reward, and then length, is nearest to the means."""
    reward, length = _mean(examples), fmean(x.length or 0 for x in examples)
    return min(examples, key=lambda x: (abs(x.reward - reward), abs((x.length or 0) - length)))


def shortened(text: str) -> str:
    """Returns a text; of a long text, the start, and the end, where the answer usually is."""
    return cut_in_the_middle(text, _LONGEST).plain
