"""The rules over a run, while it goes on and after."""

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
)
from grpo_eqx.tracking.diagnosis.history import History, Row
from grpo_eqx.tracking.diagnosis.rule import Finding, Rule
from grpo_eqx.tracking.metrics_file import is_of_step

RULES: tuple[Rule, ...] = (
    rewards.NONE, rewards.NEVER_FIRES, rewards.ALWAYS_FIRES, rewards.SUM_IS_CONSTANT,
    rewards.TOO_LARGE, rewards.FELL, groups.WITHOUT_VARIANCE, lengths.TRUNCATED, lengths.EXPLODED,
    policy.WITHOUT_TOKEN, policy.ENTROPY_COLLAPSED, policy.ENTROPY_EXPLODED,
    evaluations.EVALUATION_FALLS, policy.SAMPLER_GAP, policy.KL_BLEW_UP, policy.RATIOS_CLIPPED,
    gradients.SPIKES, gradients.IS_ZERO, gradients.SKIPPED, gradients.LOSS_NEAR_0, machine.PADDING,
    machine.IDLE_SLOTS, machine.IMBALANCE, machine.COMPILES,
)  # fmt: skip
"""All rules, in the order in which their findings are told where they come from one step."""

_Key = tuple[str, str]


class Doctor:
    """Rules over a run that goes on, each of which tells what it finds once."""

    def __init__(self, settings: Mapping[str, Any], past: Iterable[Row] = (), *, num_devices: int):
        """**Arguments:** the fields of the run's config; the metrics of its earlier steps and
        evaluations, with their step's number as `step`, if it is resumed; the number of the run's
        devices, over all hosts.
        """
        self._history = History(settings, num_devices)
        for metrics in past:
            if is_of_step(metrics):
                self._history.append(metrics)
            else:
                self._history.evaluations.append(metrics)
        self._told: set[_Key] = set()

    def step(self, metrics: Row) -> list[Finding]:
        """Returns what is new after a step, whose number is among its metrics as `step`."""
        self._history.append(metrics)
        return self._new()

    def evaluation(self, metrics: Row) -> list[Finding]:
        """Returns what is new after an evaluation, with the step before it as `step`."""
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
    """Finds what is wrong with a run, in the order in which it was first seen.

    **Arguments:** the fields of its config; the metrics of its steps, and of its evaluations, each
    oldest first and with its step's number as `step`; the number of the run's devices, over all
    hosts, without which some rules are silent. Metrics may be missing or NaN.
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
    """Yields what the rules see now, and have not told."""
    if not history.steps:
        return
    for rule in RULES:
        for seen in rule.look(history):
            key = rule.name, seen.subject
            if key not in told:
                advice = rule.advice if seen.advice is None else seen.advice
                kind = rule.kind if seen.kind is None else seen.kind
                yield key, Finding(rule.name, history.step, seen.text, advice, kind)
