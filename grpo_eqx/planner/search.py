"""Search for the largest value of a setting with which a run fits."""

import bisect
import dataclasses
from collections.abc import Callable, Sequence

import jax

from grpo_eqx.common.choices import Searchable
from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.exchange import least, raise_on_all_hosts
from grpo_eqx.planner.devices import Target, local_target
from grpo_eqx.planner.make_plan import TRAINING, UPDATING, Say, make_plan
from grpo_eqx.planner.plan import Found
from grpo_eqx.run.spec import RunSpec

MICRO_BATCH: Searchable = "micro_batch_size_per_device"
_MOST = {"num_generations": 1024, "prompts_per_step": 8192}
_LENGTH_STEP = 128
"""Step between completion lengths, in tokens: a TPU's tiles are whole multiples of it."""


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

    `None` where no size fits. With `below`, only smaller sizes count.
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
