"""The command `grpo-eqx inspect`."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.launch.subcommand import Subcommand

if TYPE_CHECKING:
    from rich.console import Console

    from grpo_eqx.tracking.recorded_completions import Match, RecordedCompletions, Wanted

_SHOWN, _PER_STEP = 10, 3
_LONGEST = 1200
"""Most characters of a text that are shown."""
_LONGEST_BESIDE_OTHERS = 400
_MOST_PROMPTS_NAMED = 5
_INDENT = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect(Subcommand):
    """Show completions of a run: the best, the worst, those of some steps or of one prompt.

    grpo-eqx inspect RUN [--steps 10:50] [--worst 5] [--truncated] [--text REGEX] ...

    Conditions add up. Of more than --limit completions, as many are shown, spread evenly over the
    steps. Reads the tables that the run wrote, also while it goes on.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    steps: str | None = None
    """Steps: 10:50, 10: (from 10 on), :50 or 50."""
    min_reward: float | None = None
    """Completions with at least this reward."""
    max_reward: float | None = None
    """Completions with at most this reward."""
    best: int | None = None
    """The N with the highest rewards, best first; of equal ones, the newest."""
    worst: int | None = None
    """The N with the lowest rewards, worst first; of equal ones, the newest."""
    truncated: bool = False
    """Completions that were cut off at max_completion_length."""
    text: str | None = None
    """Completions in which this regular expression is found."""
    prompt: str | None = None
    """Completions of one prompt: a part of its text, or the start of its id. They are side by side
    over steps, and one below the other with --best, --worst or --logps."""
    logps: bool = False
    """Show each token's probability: in colors on a terminal, else in digits."""
    limit: int | None = None
    """Completions to show, 10 by default; of one prompt in each step, 3 by default. 0: all."""
    json: bool = False
    """Print JSON instead, a line for each completion: all of them, unless there is a --limit."""

    def run(self, command: tuple[str, ...]) -> int:
        from grpo_eqx.tracking.recorded_completions import RecordedCompletions
        from grpo_eqx.tracking.recorded_run import RecordedRun
        from grpo_eqx.tracking.safe_console import safe_console

        wanted = self._wanted()
        run = RecordedRun.read(self.folder)
        if run.gaps is not None:
            _warn(f"warning: {run.gaps}")
        recorded = RecordedCompletions(run, _warn)
        found = recorded.find(wanted)
        if self.prompt is not None:
            _refuse_several(recorded, found, self.prompt)
        console = safe_console(highlight=False)
        if self.json:
            self._print_json(recorded, self._chosen(found, self.limit or 0))
        elif self.prompt is not None and not (self.logps or self.best or self.worst):
            self._print_side_by_side(recorded, found, console)
        else:
            self._print_blocks(recorded, found, console)
        return 0

    def _wanted(self) -> "Wanted":
        """Returns the conditions; raises `UserError` for invalid flags."""
        from grpo_eqx.tracking.recorded_completions import Wanted

        for name in ("best", "worst", "limit"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "limit" else 1):
                raise UserError(f"--{name} is {value}: give a number of completions.")
        if self.best is not None and self.worst is not None:
            raise UserError("--best and --worst are both given: ask for one at a time.")
        if self.limit is not None and (self.best or self.worst):
            flag = "best" if self.best else "worst"
            raise UserError(f"--{flag} and --limit both say how many: leave out one of them.")
        low, high = self.min_reward, self.max_reward
        if low is not None and high is not None and low > high:
            raise UserError(
                f"--min-reward {low:g} is above --max-reward {high:g}: no reward is both."
            )
        first, last = _range_of(self.steps)
        return Wanted(
            first=first,
            last=last,
            min_reward=self.min_reward,
            max_reward=self.max_reward,
            truncated=self.truncated,
            text=_pattern_of(self.text),
            prompt=self.prompt,
        )

    def _chosen(self, found: "Sequence[Match]", most: int) -> "list[Match]":
        """Returns the completions to show, in their order; `most` is 0 for all."""
        from grpo_eqx.tracking.completions_view import evenly

        number = self.best or self.worst
        if number is None:
            return [found[i] for i in evenly(len(found), most or len(found))]
        sign = -1 if self.best else 1
        return sorted(_rewarded(found), key=lambda x: (sign * x.reward, -x.step, x.row))[:number]

    def _print_blocks(
        self, recorded: "RecordedCompletions", found: "Sequence[Match]", console: "Console"
    ) -> None:
        from grpo_eqx.tracking.completions_view import as_block
        from grpo_eqx.tracking.heat_strip import legend

        chosen = self._chosen(found, _SHOWN if self.limit is None else self.limit)
        for row in recorded.rows(chosen, with_tokens=self.logps):
            heat = self._heat(row, console) if self.logps else None
            console.print(as_block(row, console.encoding, longest=_LONGEST, heat=heat))
        if self.logps:
            console.print(legend(colored=_is_colored(console)))
        print_clean(self._count(chosen, found))

    def _heat(self, row: Mapping[str, Any], console: "Console") -> Any:
        from grpo_eqx.tracking.heat_strip import heat_strip

        if row.get("token_logps") is None:
            raise UserError(
                f"the table of step {row['step']} has no log-probs of tokens: leave out --logps."
            )
        return heat_strip(
            row["tokens"],
            row["token_logps"],
            colored=_is_colored(console),
            width=console.width - _INDENT,
            encoding=console.encoding,
        )

    def _count(self, chosen: "Sequence[Match]", found: "Sequence[Match]") -> str:
        """Says how many completions match, and how to see the others."""
        from grpo_eqx.tracking.recorded_completions import steps_in_words

        without = ""
        if self.best or self.worst:
            number = len(found) - len(_rewarded(found))
            without = f"; {number:,} without a reward" if number else ""
            found = _rewarded(found)
        if len(chosen) == len(found):
            return f"{len(found):,} completion{'' if len(found) == 1 else 's'}{without}"
        how = "--limit 0 shows all"
        where = f", spread evenly over {steps_in_words(match.step for match in found)}"
        if self.best or self.worst:
            where, how = "", f"--{'best' if self.best else 'worst'} {len(found)} shows all"
        return f"{len(chosen):,} of {len(found):,} completions that match{where}; {how}{without}"

    def _print_side_by_side(
        self, recorded: "RecordedCompletions", found: "Sequence[Match]", console: "Console"
    ) -> None:
        from grpo_eqx.tracking.completions_view import side_by_side

        rows = list(recorded.rows(found, with_tokens=False))
        steps: dict[int, list[Mapping[str, Any]]] = {}
        for row in rows:
            steps.setdefault(row["step"], []).append(row)
        most = _PER_STEP if self.limit is None else self.limit or len(rows)
        view = side_by_side(
            steps,
            console.encoding,
            per_step=most,
            longest=_LONGEST_BESIDE_OTHERS,
            width=console.width - 1,
        )
        console.print(view)

    def _print_json(self, recorded: "RecordedCompletions", chosen: "Sequence[Match]") -> None:
        for row in recorded.rows(chosen, with_tokens=self.logps):
            print_clean(json.dumps({name: _finite(x) for name, x in row.items()}))


def _warn(text: str) -> None:
    print_clean(text, file=sys.stderr)


def _rewarded(found: "Sequence[Match]") -> "list[Match]":
    return [each for each in found if not math.isnan(each.reward)]


def _range_of(steps: str | None) -> tuple[int | None, int | None]:
    if steps is None:
        return None, None
    match = re.fullmatch(r"(\d*)(:?)(\d*)", steps.strip())
    if match is None or not any(match.group(1, 3)):
        raise UserError(f"--steps is {steps!r}: use 10:50, 10: (from 10 on), :50 or 50.")
    first, colon, last = match.groups()
    if not colon:
        return int(first), int(first)
    low, high = int(first) if first else None, int(last) if last else None
    if low is not None and high is not None and low > high:
        raise UserError(f"--steps is {steps!r}, which ends before it begins: use {high}:{low}.")
    return low, high


def _pattern_of(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise UserError(
            f"--text {text!r} is not a regular expression ({error}): put a backslash before "
            f"characters such as ( or *."
        ) from error


def _refuse_several(recorded: "RecordedCompletions", found: "Sequence[Match]", asked: str) -> None:
    """Raises `UserError`, which names some prompts, for completions of several prompts."""
    prompts: dict[str, Match] = {}
    for match in found:
        prompts.setdefault(match.prompt_id, match)
    if len(prompts) == 1:
        return
    rows = recorded.rows(list(prompts.values())[:_MOST_PROMPTS_NAMED], with_tokens=False)
    named = "; ".join(f"{row['prompt_id']} {row['prompt'][:40]!r}" for row in rows)
    dots = "; ..." if len(prompts) > _MOST_PROMPTS_NAMED else ""
    raise UserError(
        f"--prompt {asked!r} is in {len(prompts)} prompts: give more of the text, or an id "
        f"({named}{dots})."
    )


def _is_colored(console: "Console") -> bool:
    return console.color_system is not None and not console.no_color


def _finite(value: Any) -> Any:
    """Returns a value with `None` for numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_finite(x) for x in value] if isinstance(value, list) else value
