"""Application of all rules to a run, during the run or after it."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_eqx.tracking.diagnosis import (
    evaluations,
    gradients,
    groups,
    lengths,
    machine,
    policy,
    rewards,
    tools,
)
from grpo_eqx.tracking.diagnosis.history import History, Row
from grpo_eqx.tracking.diagnosis.rule import Finding, Rule
from grpo_eqx.tracking.metrics_file import is_of_step

RULES: tuple[Rule, ...] = (
    rewards.NONE, rewards.ALL_MISSING, rewards.NEVER_FIRES, rewards.ALWAYS_FIRES,
    rewards.SUM_IS_CONSTANT, rewards.TOO_LARGE, rewards.FELL,
    groups.WITHOUT_VARIANCE, lengths.TRUNCATED, lengths.EXPLODED,
    tools.NEVER_CALLED, tools.CALLS_FAIL, tools.SLOW, policy.WITHOUT_TOKEN,
    policy.ENTROPY_COLLAPSED, policy.ENTROPY_EXPLODED,
    evaluations.EVALUATION_FALLS, policy.SAMPLER_GAP, policy.KL_BLEW_UP, policy.RATIOS_CLIPPED,
    gradients.SPIKES, gradients.IS_ZERO, gradients.SKIPPED, gradients.LOSS_NEAR_0, machine.PADDING,
    machine.IDLE_SLOTS, machine.IMBALANCE, machine.COMPILES,
)  # fmt: skip
"""All rules, in the order in which findings of the same step are told."""

_Key = tuple[str, str]


class Doctor:
    """Rules over a run that goes on. Each finding is told once."""

    def __init__(self, settings: Mapping[str, Any], past: Iterable[Row] = (), *, num_devices: int):
        """**Arguments:**

        - `settings`: the fields of the run's config, and descriptions of what was passed besides.
        - `past`: for a resumed run, metrics of earlier steps and evaluations, with the number of
          their step as `step`.
        - `num_devices`: devices of the run, over all hosts.
        """
        self._history = History(settings, num_devices)
        for metrics in past:
            if is_of_step(metrics):
                self._history.append(metrics)
            else:
                self._history.evaluations.append(metrics)
        self._told: set[_Key] = set()

    def step(self, metrics: Row) -> list[Finding]:
        """Returns new findings after a step; its metrics have its number as `step`."""
        self._history.append(metrics)
        return self._new()

    def evaluation(self, metrics: Row) -> list[Finding]:
        """Returns new findings after an evaluation; `step` in its metrics is the step before it."""
        self._history.evaluations.append(metrics)
        return self._new()

    def _new(self) -> list[Finding]:
        found = dict(_look(self._history, self._told))
        self._told |= found.keys()
        return list(found.values())


def diagnose(
    settings: Mapping[str, Any],
    steps: Sequence[Row],
    evaluations: Sequence[Row],
    *,
    num_devices: int | None = None,
) -> list[Finding]:
    """Finds what is wrong with a run, in the order of the first steps that show it.

    **Arguments:**

    - `settings`: the fields of the run's config, and descriptions of what was passed besides.
    - `steps`, `evaluations`: their metrics, oldest first, with the step's number as `step`. Metrics
      may be missing or NaN.
    - `num_devices`: devices of the run, over all hosts; without it, some rules are silent.
    """
    history, found = History(settings, num_devices), dict[_Key, Finding]()
    waiting = list(evaluations)[::-1]

    def note() -> None:
        for key, finding in _look(history):
            first = found.setdefault(key, finding)
            found[key] = dataclasses.replace(first, last_step=finding.step)

    def evaluate(until: float) -> None:
        while waiting and float(waiting[-1]["step"]) < until:
            history.evaluations.append(waiting.pop())
            note()

    for metrics in steps:
        evaluate(float(metrics["step"]))
        history.append(metrics)
        note()
    evaluate(float("inf"))
    return list(found.values())


def _look(history: History, told: Iterable[_Key] = ()) -> Iterator[tuple[_Key, Finding]]:
    """Yields findings of the rules that are not told yet."""
    if not history.steps:
        return
    for rule in RULES:
        for seen in rule.look(history):
            key = rule.name, seen.subject
            if key not in told:
                advice = rule.advice if seen.advice is None else seen.advice
                kind = rule.kind if seen.kind is None else seen.kind
                yield key, Finding(rule.name, history.step, seen.text, advice, kind)
