"""Plans a run, with settings that make it fit where it does not."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, get_args

import jax
import optax

from grpo_eqx.common.choices import LOCAL, Searchable
from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.tpu_slices import larger_slices
from grpo_eqx.loss_backends import LossBackend
from grpo_eqx.planner.devices import Target, described_slice, find_target
from grpo_eqx.planner.make_plan import TRAINING, UPDATING, Say, make_plan
from grpo_eqx.planner.plan import Change, Plan
from grpo_eqx.planner.search import MICRO_BATCH, largest_micro_batch, search, settled
from grpo_eqx.run.passed import Passed
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.run.to_compile import EVALUATE, SAMPLING
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding import Mesh, RolloutSharding
from grpo_eqx.tracking.device_peaks import DevicePeaks, measured_peaks

_MOST_SLICES = 3
"""Number of larger slices that are tried."""


def plan_config(
    cfg: GRPOConfig,
    topology: str = LOCAL,
    search: Searchable | None = None,
    *,
    optimizer: optax.GradientTransformation | None = None,
    mesh: Mesh | None = None,
    rollout_sharding: RolloutSharding | None = None,
    loss_backend: LossBackend | None = None,
) -> Plan:
    """Plans the run of a config and objects, as `GRPOTrainer.plan` does, without loading weights.

    **Arguments:**

    - `cfg`: the settings.
    - `topology`: a TPU type or grid, or `local`.
    - `search`: a setting, to find the largest value with which the run fits.
    - `optimizer`, `mesh`, `rollout_sharding`, `loss_backend`: what a `GRPOTrainer` would be passed
      in place of settings.

    Of the model only `config.json` is read. Raises `UserError` where the mesh, the batches or the
    model do not fit the devices, and for objects that no run could use.
    """
    passed = Passed(
        optimizer=optimizer,
        mesh=mesh,
        rollout_sharding=rollout_sharding,
        loss_backend=loss_backend,
    )
    run = RunSpec.describe(cfg, passed)
    return plan_run(run, find_target(topology), _say, search)


def _say(text: str) -> None:
    print_clean(text, file=sys.stderr)


def plan_run(
    run: RunSpec,
    target: Target,
    say: Say,
    setting: Searchable | None = None,
    *,
    help_if_not: bool = True,
    evaluates: bool = True,
) -> Plan:
    """Plans a run; for a `setting`, finds its largest value that fits and plans the run with that.

    Where the run does not fit, the plan says what helps, unless `help_if_not` is off. Without
    `evaluates`, it is of training alone. Raises `UserError` where the mesh, the batches or the
    model do not fit the devices.
    """
    if setting is not None and setting not in get_args(Searchable):
        raise UserError(f"search is {setting!r}: use {' or '.join(get_args(Searchable))}.")
    found, change = None, None
    if setting is not None:
        found, run = search(run, target, setting, say)
    is_auto = run.cfg.micro_batch_size_per_device == "auto"
    run = settled(run, target, say)
    plan = make_plan(run, target, say, only=(*TRAINING, EVALUATE) if evaluates else TRAINING)
    if help_if_not and not plan.fits and (found is None or found.largest is not None):
        change = find_change(run, target, plan, say)
    settings = {**plan.settings, MICRO_BATCH: "auto"} if is_auto else plan.settings
    plan = dataclasses.replace(plan, found=found, change=change, settings=settings)
    return plan if plan.peaks is not None else _with_measured_peaks(plan, target, say)


def _with_measured_peaks(plan: Plan, target: Target, say: Say) -> Plan:
    """Adds what a CPU of this machine reaches, as no vendor states it."""
    if target.devices[0].platform != "cpu":
        return plan
    say("measuring this machine's rates")
    whole = measured_peaks()
    # Those of a process are its threads.
    share = sum(device.process_index == jax.process_index() for device in target.devices)
    peaks = DevicePeaks(whole.flops_per_second / share, whole.bytes_per_second / share)
    change = plan.change
    if change is not None:
        change = dataclasses.replace(change, plan=dataclasses.replace(change.plan, peaks=peaks))
    return dataclasses.replace(plan, peaks=peaks, change=change)


def find_change(run: RunSpec, target: Target, plan: Plan, say: Say) -> Change | None:
    """Finds what helps a run whose `plan` does not fit: other settings, else a larger slice.

    The settings change speed, not what is learned: micro-batches and slots, the largest that fit,
    and what the backward pass keeps.
    """
    settings: dict[str, Any] | None = {}
    if set(UPDATING) & set(plan.too_large):
        settings = _smaller_update(run, target, say)
    if settings is not None and set(SAMPLING) & set(plan.too_large):
        fewer = _fewer_slots(run.changed(**settings), target, say)
        settings = None if fewer is None else settings | fewer
    if settings:
        better = make_plan(run.changed(**settings), target, say)
        if better.fits:
            return Change(settings, better)
    return _larger_slice(run, target, say)


def _smaller_update(run: RunSpec, target: Target, say: Say) -> dict[str, Any] | None:
    """Returns settings with the largest micro-batch with which the update fits, if any does."""
    present = run.micro_batch_size(run.build_mesh(target.devices))
    for settings in _lighter_passes(run):
        below = None if settings else present
        largest = largest_micro_batch(run.changed(**settings), target, say, below)
        if largest is not None:
            return settings | {MICRO_BATCH: largest}
    return None


def _lighter_passes(run: RunSpec) -> Iterator[dict[str, Any]]:
    """Yields the run without changes, then with changes that keep less for the backward pass."""
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
            plan = make_plan(run.changed(**settings), target, say, only=SAMPLING)
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
