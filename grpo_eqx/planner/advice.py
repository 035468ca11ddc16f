"""Settings that move what bounds the time of a program."""

import math

from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.step_time import Resource
from grpo_eqx.planner.trips import MicroBatches
from grpo_eqx.training.programs import GENERATE, UPDATE


def advice(program: str, bound_by: Resource, plan: Plan) -> str | None:
    """Returns what to try where a program is bound so; `None` where no setting is known to help.

    It changes speed, not what is learned, and may take more memory.
    """
    if program == GENERATE:
        return _for_generate(bound_by, plan)
    return _for_micro_batches(program, bound_by, plan)


def _for_generate(bound_by: Resource, plan: Plan) -> str | None:
    settings, strategy = plan.settings, plan.rollout_sharding.partition(":")[0]
    if bound_by == "links":
        if strategy in ("replicated", "tensor"):
            return None
        return "try --rollout-sharding replicated, or tensor:2 where that does not fit"
    if bound_by == "arithmetic":
        return None
    if settings["max_num_seqs"] is not None:
        return "try a larger --max-num-seqs, as weights are read once for all completions"
    if strategy == "replicated" and plan.num_devices % 2 == 0:
        return "try --rollout-sharding tensor:2, by which each device reads half of the weights"
    if strategy == "maxtext" and plan.num_devices > 1:
        return "try --rollout-sharding replicated, by which devices decode fewer completions each"
    return None


def _for_micro_batches(program: str, bound_by: Resource, plan: Plan) -> str | None:
    if bound_by != "arithmetic":
        trips = plan.programs[program].trips
        assert isinstance(trips, MicroBatches)
        number = trips.number(plan.completion_length)
        if number == 1:
            return None
        completions = trips.num_prompts * trips.num_generations
        most = min(number * plan.micro_batch_size, math.ceil(completions / plan.rows.num_shards))
        gathers = "gathers and reads" if plan.num_devices > 1 else "reads"
        return (
            f"try a larger --micro-batch-size-per-device, up to {most} "
            f"(auto: the largest that fits at full length), as each micro-batch {gathers} all "
            f"weights; beyond that, one holds more padding"
        )
    recomputes = program == UPDATE and plan.settings["remat"] in ("auto", "full")
    if recomputes and plan.device_kind != "cpu":
        return "try --remat dots if there is memory for it, which recomputes less"
    return None
