"""Settings that move what bounds the time of a program."""

import math

from grpo_eqx.generation.local_sampler import GENERATE
from grpo_eqx.generation.turn_programs import DECODE
from grpo_eqx.models.cost import WeightCost
from grpo_eqx.planner.make_plan import UPDATING
from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.search import MICRO_BATCH
from grpo_eqx.planner.step_time import Resource
from grpo_eqx.planner.trips import MicroBatches
from grpo_eqx.training.updater import UPDATE

_MOST_SIZES = 3
"""Most sizes of micro-batches to compare with: each takes minutes to plan."""


def advice(program: str, bound_by: Resource, plan: Plan) -> str | None:
    """Returns what to try where a program is bound so; `None` where no setting is known to help.

    It changes speed, not what is learned, and may take more memory.
    """
    if program in (GENERATE, DECODE):
        return _for_decoding(bound_by, plan)
    if program not in UPDATING:
        return None
    return _for_micro_batches(program, bound_by, plan)


def _for_decoding(bound_by: Resource, plan: Plan) -> str | None:
    settings, strategy = plan.settings, plan.rollout_sharding.partition(":")[0]
    if bound_by == "links":
        if strategy in ("replicated", "tensor"):
            return None
        return "try --rollout-sharding replicated, or tensor:2 where that does not fit"
    if bound_by == "arithmetic":
        return None
    if settings["max_num_seqs"] is not None:
        return "try a larger --max-num-seqs, as weights are read once for all completions"
    if settings["rollout_sharding"] == "auto":
        return None  # the fastest by an estimate already
    if strategy == "replicated" and plan.num_devices % 2 == 0:
        return (
            "try --rollout-sharding tensor:2, by which each device reads half of the weights, but "
            "waits for another: --compare replicated tensor:2 has both"
        )
    if strategy == "maxtext" and plan.num_devices > 1:
        return "try --rollout-sharding replicated, by which devices decode fewer completions each"
    return None


def _for_micro_batches(program: str, bound_by: Resource, plan: Plan) -> str | None:
    if bound_by != "arithmetic":
        gathers = bound_by == "links" and plan.mesh["fsdp"] > 1
        reads = bound_by == "memory" and _reads_mostly_weights(program, plan)
        sizes = _larger_sizes(program, plan)
        if not (gathers or reads) or not sizes:
            return None
        return (
            f"try a larger --micro-batch-size-per-device, as each micro-batch "
            f"{'gathers' if gathers else 'reads'} all weights: --compare {plan.micro_batch_size} "
            f"{' '.join(map(str, sizes))} has the times"
        )
    recomputes = program == UPDATE and plan.settings["remat"] in ("auto", "full")
    if recomputes and plan.device_kind != "cpu":
        return "try --remat dots if there is memory for it, which recomputes less"
    return None


def _micro_batches(program: str, plan: Plan) -> MicroBatches:
    trips = plan.programs[program].trips
    assert isinstance(trips, MicroBatches)
    return trips


def _larger_sizes(program: str, plan: Plan) -> list[int]:
    """Returns a few larger sizes of micro-batches, up to one with which there is a single one.

    Empty where the plan already has the largest that fits, or does not fit.
    """
    found, size, trips = plan.found, plan.micro_batch_size, _micro_batches(program, plan)
    is_largest = found is not None and found.setting == MICRO_BATCH
    if is_largest or plan.settings[MICRO_BATCH] == "auto" or program in plan.too_large:
        return []
    # Devices are dealt whole groups, as far as rows hold them.
    of_device = math.ceil(trips.num_prompts / trips.rows.num_shards) * trips.num_generations
    most = min(size * trips.number(plan.expected.length), of_device)
    return [] if most <= size else sorted({min(size << i, most) for i in range(1, 1 + _MOST_SIZES)})


def _reads_mostly_weights(program: str, plan: Plan) -> bool:
    """Returns whether a micro-batch has so few tokens that reading weights takes longest.

    With more, it reads mostly activations, of which larger micro-batches have as many.
    """
    assert plan.peaks is not None
    rows = _micro_batches(program, plan).rows
    cost = WeightCost.of_score()
    if program == UPDATE:
        cost = WeightCost.of_update(frozen=plan.settings["lora_rank"] is not None)
    rate = plan.peaks.flops_per_second / plan.peaks.bytes_per_second
    return cost.flops * rows.width * rows.num_rows // rows.num_shards < cost.num_bytes * rate
