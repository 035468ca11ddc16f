"""Settings that move what bounds the time of a program."""

import math

from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.search import MICRO_BATCH
from grpo_eqx.planner.step_time import Resource
from grpo_eqx.planner.trips import MicroBatches
from grpo_eqx.training.programs import GENERATE, UPDATE

_SHARDING = "--rollout-sharding"


def advice(program: str, bound_by: Resource, plan: Plan) -> str | None:
    """Returns what to try where a program is bound so; `None` where no setting is known to help.

    It changes speed, not what is learned, and may take more memory.
    """
    if program == GENERATE:
        return _for_generate(bound_by, plan)
    return _for_micro_batches(program, bound_by, plan)


def _for_generate(bound_by: Resource, plan: Plan) -> str | None:
    settings, strategy = plan.settings, plan.rollout_sharding.partition(": ")[0]
    if bound_by == "links":
        if strategy in ("replicated", "tensor"):
            return None
        return f"try {_SHARDING} replicated, or tensor:2 where that does not fit"
    if bound_by == "arithmetic":
        return None
    if settings["max_num_seqs"] is not None:
        return "try a larger --max-num-seqs, as weights are read once for all completions"
    if settings["rollout_sharding"] == "auto":
        return None  # the fastest by an estimate already
    if strategy == "replicated" and plan.num_devices % 2 == 0:
        return (
            f"try {_SHARDING} tensor:2, by which each device reads half of the weights, but waits "
            f"for another: --compare replicated tensor:2 has both"
        )
    if strategy == "maxtext" and plan.num_devices > 1:
        return f"try {_SHARDING} replicated, by which devices decode fewer completions each"
    return None


def _for_micro_batches(program: str, bound_by: Resource, plan: Plan) -> str | None:
    if bound_by != "arithmetic":
        is_largest = plan.settings[MICRO_BATCH] == "auto"
        sizes = [] if is_largest else _larger_sizes(program, plan)
        if not sizes or (bound_by == "memory" and not _reads_mostly_weights(plan)):
            return None
        gathers = "gathers" if bound_by == "links" else "reads"
        return (
            f"try a larger --micro-batch-size-per-device, as each micro-batch {gathers} all "
            f"weights: --compare {plan.micro_batch_size} {' '.join(map(str, sizes))} has the times"
        )
    recomputes = program == UPDATE and plan.settings["remat"] in ("auto", "full")
    if recomputes and plan.device_kind != "cpu":
        return "try --remat dots if there is memory for it, which recomputes less"
    return None


def _larger_sizes(program: str, plan: Plan) -> list[int]:
    """Returns larger sizes of micro-batches, up to the one with which there is a single one.

    Beyond that, a micro-batch holds more padding.
    """
    trips = plan.programs[program].trips
    assert isinstance(trips, MicroBatches)
    size, completions = plan.micro_batch_size, trips.num_prompts * trips.num_generations
    number = trips.number(plan.completion_length)
    most = min(number * size, math.ceil(completions / plan.rows.num_shards))
    doubled = [size << i for i in range(1, most.bit_length()) if size << i < most]
    return [*doubled, most] if most > size else []


def _reads_mostly_weights(plan: Plan) -> bool:
    """Returns whether a micro-batch has so few tokens that reading weights takes longest.

    With more, what is read are activations, of which larger micro-batches have as many.
    """
    assert plan.peaks is not None
    tokens = plan.rows.width * plan.rows.num_rows // plan.rows.num_shards
    # Each bfloat16 weight, two bytes, takes part in two FLOPs a token.
    return tokens < plan.peaks.flops_per_second / plan.peaks.bytes_per_second
