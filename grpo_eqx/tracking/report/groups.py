"""Runs of a report by what tells them apart: seeds of the same settings are one group."""

import dataclasses
import json
from collections.abc import Sequence

from grpo_eqx.tracking.report.reading import ReportedRun
from grpo_eqx.tracking.report.settings import OF_SEEDS


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of the same settings but for their seeds, drawn as one line."""

    runs: Sequence[ReportedRun]
    index: int
    """Its place among the groups, which chooses its color."""

    @property
    def name(self) -> str:
        first = self.runs[0].name
        return first if len(self.runs) == 1 else f"{first} ({len(self.runs)} seeds)"

    @property
    def last_steps(self) -> list[int]:
        """The steps at which its runs end, each once, in ascending order."""
        return sorted({run.last_step for run in self.runs})


def grouped(runs: Sequence[ReportedRun]) -> list[Group]:
    """Returns the groups of runs, in the order of their first ones.

    Runs with equal seeds too are the same run twice, such as on two machines, and stay apart, as do
    those whose settings could not be read.
    """
    members: dict[str, list[ReportedRun]] = {}
    for place, run in enumerate(runs):
        others = {name: x for name, x in run.settings.items() if name not in OF_SEEDS}
        key = json.dumps(others, sort_keys=True, default=str) if others else f"unknown {place}"
        seeds = [other.settings.get("seed") for other in members.get(key, ())]
        if run.settings.get("seed") in seeds:
            key += f" again {place}"
        members.setdefault(key, []).append(run)
    return [Group(each, index) for index, each in enumerate(members.values())]
