"""Plans a run as a whole: with a search's result, or with a change that makes it fit."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from grpo_eqx.errors import UserError
from grpo_eqx.planner.devices import LOCAL, Target, find_target
from grpo_eqx.planner.make_plan import UPDATING, Say, make_plan
from grpo_eqx.planner.plan import Change, Plan
from grpo_eqx.planner.search import MICRO_BATCH, Searchable, largest_micro_batch, search, settled
from grpo_eqx.planner.slices import larger_slices
from grpo_eqx.planner.topologies import described_slice
from grpo_eqx.run_spec import RunSpec

_MOST_SLICES = 3


def plan_run(
    run: RunSpec,
    target: Target,
    say: Say,
    setting: Searchable | None = None,
    *,
    help_if_not: bool = True,
) -> Plan:
    """Plans a run; for a `setting`, finds its largest value that fits and plans the run with that.

    Where the run does not fit, the plan says what helps, unless `help_if_not` is off. Raises
    `UserError` where the mesh, the batches or the model do not fit the devices.
    """
    found, change = None, None
    if setting is not None:
        found, run = search(run, target, setting, say)
    run = settled(run, target, say)
    plan = make_plan(run, target, say)
    if help_if_not and not plan.fits and (found is None or found.largest is not None):
        change = find_change(run, target, plan, say)
    return dataclasses.replace(plan, found=found, change=change)


def find_change(run: RunSpec, target: Target, plan: Plan, say: Say) -> Change | None:
    """Finds what helps a run whose `plan` does not fit: other settings, else a larger slice.

    The settings change speed, not what is learned: micro-batches and slots, the largest that fit,
    and what the backward pass keeps.
    """
    settings: dict[str, Any] | None = {}
    if set(UPDATING) & set(plan.too_large):
        settings = _smaller_update(run, target, say)
    if settings is not None and "generate" in plan.too_large:
        fewer = _fewer_slots(run.changed(**settings), target, say)
        settings = None if fewer is None else settings | fewer
    if settings:
        better = make_plan(run.changed(**settings), target, say)
        if better.fits:
            return Change(settings, better)
    return _larger_slice(run, target, say)


def _smaller_update(run: RunSpec, target: Target, say: Say) -> dict[str, Any] | None:
    """Returns settings with the largest micro-batch with which the update fits, if any does."""
    size = run.cfg.micro_batch_size_per_device
    for settings in _lighter_passes(run):
        below = size if isinstance(size, int) and not settings else None
        largest = largest_micro_batch(run.changed(**settings), target, say, below)
        if largest is not None:
            return settings | {MICRO_BATCH: largest}
    return None


def _lighter_passes(run: RunSpec) -> Iterator[dict[str, Any]]:
    """Yields no changes, then changes that keep less for the backward pass."""
    settings: dict[str, Any] = {}
    yield settings
    if run.cfg.loss_backend == "dense" and run.passed.loss_backend is None:
        settings = settings | {"loss_backend": "chunked"}
        yield settings
    if run.cfg.remat not in ("auto", "full"):
        yield settings | {"remat": "full"}


def _fewer_slots(run: RunSpec, target: Target, say: Say) -> dict[str, Any] | None:
    """Halves the slots until generation fits; returns `None` if it never does."""
    slots = run.cfg.max_num_seqs or run.cfg.prompts_per_step * run.cfg.num_generations
    while slots % 2 == 0:
        slots //= 2
        settings = {"max_num_seqs": slots}
        say(f"trying max_num_seqs {slots}")
        try:
            plan = make_plan(run.changed(**settings), target, say, only=["generate"])
        except UserError:
            return None  # so few do not divide evenly
        if plan.fits:
            return settings
    return None


def _larger_slice(run: RunSpec, target: Target, say: Say) -> Change | None:
    if target.name == LOCAL:
        return None
    known = described_slice(target.name)
    for larger in larger_slices(known.name)[:_MOST_SLICES]:
        try:
            plan = make_plan(run, find_target(larger.name), say)
        except UserError:
            continue  # batches do not divide over so many devices
        if plan.fits:
            return Change({"topology": larger.name}, plan)
    return None
