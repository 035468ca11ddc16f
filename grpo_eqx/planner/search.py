"""Plans a run with settings that fit: with the largest value of one, or with what makes it fit."""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import jax

from grpo_eqx.common.choices import LOCAL, Searchable
from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.exchange import least, raise_on_all_hosts
from grpo_eqx.distributed.tpu_slices import larger_slices
from grpo_eqx.planner.devices import Target, find_target, local_target
from grpo_eqx.planner.make_plan import TRAINING, UPDATING, Say, make_plan
from grpo_eqx.planner.plan import Change, Found, Plan
from grpo_eqx.planner.topologies import described_slice
from grpo_eqx.run.programs import EVALUATE
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.tracking.device_peaks import DevicePeaks, measured_peaks

MICRO_BATCH: Searchable = "micro_batch_size_per_device"
_MOST = {"num_generations": 1024, "prompts_per_step": 8192}
_LENGTH_STEP = 128
"""Step between completion lengths, in tokens: a TPU's tiles are whole multiples of it."""
_MOST_SLICES = 3
"""Number of larger slices that are tried."""


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
    present = run.micro_batch_size(run.build_mesh(target.devices))
    for settings in _lighter_passes(run):
        below = None if settings else present
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


def search(run: RunSpec, target: Target, setting: Searchable, say: Say) -> tuple[Found, RunSpec]:
    """Finds, by bisection, a setting's largest value that fits; returns the run with it as well.

    Where none fits, the run has the smallest.

    Micro-batches are judged by the programs that run in them, whether or not decoding fits.
    Memory is assumed to grow with the value; micro-batches that are `auto` count as one completion.
    Completion lengths are tried in steps of 128, other settings wherever batches divide evenly.
    """
    values = _values(run, target, setting)
    only = UPDATING if setting == MICRO_BATCH else TRAINING
    tried: dict[int, bool] = {}

    def fits(value: int) -> bool:
        say(f"trying {setting} {value}")
        changed = run.changed(**{setting: value})
        if changed.cfg.micro_batch_size_per_device == "auto":
            changed = changed.changed(**{MICRO_BATCH: 1})
        tried[value] = make_plan(changed, target, say, only=only, stop_early=True).fits
        return tried[value]

    present = getattr(run.cfg, setting)
    largest = largest_that_fits(values, present if isinstance(present, int) else None, fits)
    found = Found(setting, largest, dict(sorted(tried.items())), values[-1])
    return found, run.changed(**{setting: values[0] if largest is None else largest})


def largest_that_fits(
    values: Sequence[int], start: int | None, fits: Callable[[int], bool]
) -> int | None:
    """Returns the largest of ascending values that fits, given that all below one that fits do too.

    Doubles or halves from `start`, by default the last, until the answer is between two values,
    and then bisects. `None`: not even the first fits.
    """
    low, high = -1, len(values)  # values[low] fits and values[high] does not
    probe = high - 1
    if start is not None:
        probe = max((i for i, value in enumerate(values) if value <= start), default=0)
    while high - low > 1:
        if fits(values[probe]):
            low = probe
        else:
            high = probe
        if high == len(values):
            probe = max(low + 1, bisect.bisect_right(values, 2 * values[low]) - 1)
        elif low < 0:
            probe = max(0, bisect.bisect_right(values, values[high] // 2) - 1)
        else:
            probe = (low + high) // 2
    return None if low < 0 else values[low]


def _values(run: RunSpec, target: Target, setting: Searchable) -> list[int]:
    """Returns the values with which batches divide evenly, ascending."""
    if setting == MICRO_BATCH:
        mesh = run.changed(**{MICRO_BATCH: None}).mesh(target.devices)
        return run.micro_batch_sizes(mesh)
    mesh = run.build_mesh(target.devices)
    values, refusals = [], list[UserError]()
    for value in _grid(run, setting):
        try:
            run.changed(**{setting: value}).check_batches(mesh)
            values.append(value)
        except UserError as error:
            refusals.append(error)
    if not values:
        raise refusals[-1]
    return values


def _grid(run: RunSpec, setting: Searchable) -> Sequence[int]:
    if setting != "max_completion_length":
        return range(1, _MOST[setting] + 1)
    longest = run.model.max_position_embeddings - run.prompts.train
    steps = range(_LENGTH_STEP, longest + 1, _LENGTH_STEP)
    return steps or [longest]


def largest_micro_batch(
    run: RunSpec, target: Target, say: Say, below: int | None = None
) -> int | None:
    """Returns the largest micro-batch with which updates and scores fit, whatever else does not.

    **Arguments:** `below`: only smaller sizes count. **Returns:** `None` where no size fits.
    """
    sizes = [x for x in _values(run, target, MICRO_BATCH) if below is None or x < below]

    def fits(size: int) -> bool:
        say(f"trying {MICRO_BATCH} {size}")
        changed = run.changed(**{MICRO_BATCH: size})
        return make_plan(changed, target, say, only=UPDATING, stop_early=True).fits

    return largest_that_fits(sizes, None, fits)


def fitting(run: RunSpec, devices: Sequence[jax.Device], say: Say) -> RunSpec:
    """Returns the run with `auto` micro-batches replaced by the largest that fit the devices.

    These are the attached devices of all processes. Raises `UserError` where no size fits.
    """
    if run.cfg.micro_batch_size_per_device != "auto":
        return run
    target = local_target(devices)
    target = dataclasses.replace(target, usable_bytes=least(target.usable_bytes))
    largest = least(raise_on_all_hosts(lambda: largest_micro_batch(run, target, say)) or 0)
    if largest == 0:
        plan = make_plan(run.changed(**{MICRO_BATCH: 1}), target, say, only=UPDATING)
        raise UserError(f"{MICRO_BATCH} is auto, and no size fits. {plan.verdict}")
    say(f"{MICRO_BATCH} auto: {largest}")
    return run.changed(**{MICRO_BATCH: largest})


def settled(run: RunSpec, target: Target, say: Say) -> RunSpec:
    """Returns the run with `auto` micro-batches replaced by the largest that fit.

    They have one completion where not even that fits.
    """
    if run.cfg.micro_batch_size_per_device != "auto":
        return run
    return run.changed(**{MICRO_BATCH: largest_micro_batch(run, target, say) or 1})
