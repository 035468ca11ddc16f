"""What is proposed for what bounds a program."""

import dataclasses

import pytest

from grpo_eqx.planner.advice import advice
from grpo_eqx.planner.plan import Asked, Found, Plan
from grpo_eqx.tracking.device_peaks import DevicePeaks


@pytest.mark.parametrize(
    ("program", "bound_by", "sharding", "settings", "words"),
    [
        ("generate", "links", "legacy", {}, "--rollout-sharding replicated"),
        ("generate", "links", "replicated", {}, None),
        ("generate", "links", "tensor:2", {}, None),
        ("generate", "memory", "replicated", {}, "--rollout-sharding tensor:2"),
        ("generate", "memory", "legacy", {"max_num_seqs": 8}, "--max-num-seqs"),
        ("generate", "memory", "maxtext", {}, "--rollout-sharding replicated"),
        ("generate", "memory", "replicated", {"rollout_sharding": "auto"}, None),
        ("generate", "arithmetic", "legacy", {}, None),
        ("update", "links", "legacy", {}, "--micro-batch-size-per-device"),
        ("update", "memory", "legacy", {}, None),  # of activations: there are many tokens
        ("update", "arithmetic", "legacy", {"remat": "full"}, "--remat dots"),
        ("update", "arithmetic", "legacy", {"remat": "none"}, None),
        ("score", "arithmetic", "legacy", {"remat": "full"}, None),
    ],
)
def test_a_setting_that_moves_it(
    plan_of, with_memory, program, bound_by, sharding, settings, words
) -> None:
    plan = plan_of({program: 1}, with_memory(2))
    plan = dataclasses.replace(
        plan,
        num_devices=8,
        mesh={"dp": 1, "fsdp": 8, "tp": 1},
        device_kind="TPU v6 lite",
        rollout_sharding=f"{sharding}: for a reason",
        settings={**plan.settings, "rollout_sharding": sharding, **settings},
    )
    said = advice(program, bound_by, plan)
    assert said is None if words is None else words in said


def test_nothing_is_advised_that_one_device_cannot_do(plan_of, with_memory) -> None:
    plan = dataclasses.replace(
        plan_of({"generate": 1}, with_memory(2)), rollout_sharding="replicated"
    )
    plan = dataclasses.replace(plan, settings={**plan.settings, "rollout_sharding": "replicated"})
    assert advice("generate", "memory", plan) is None


def test_micro_batches_are_not_to_be_larger_than_what_fills_them(plan_of, with_memory) -> None:
    plan = _sharded(plan_of({"update": 1}, with_memory(2)))
    number = plan.programs["update"].trips.number
    assert [number(length) for length in (48, 24, 12)] == [4, 2, 1]
    assert "--compare 2 4 8 has" in advice("update", "links", plan)
    assert "--compare 2 4 has" in advice("update", "links", plan.for_asked(Asked(24)))
    assert advice("update", "links", plan.for_asked(Asked(12))) is None


def test_no_micro_batch_is_to_be_larger_than_a_device_s_share(plan_of, with_memory) -> None:
    """Of two groups of 8, in micro-batches of 12."""
    plan = dataclasses.replace(
        _sharded(plan_of({"update": 1}, with_memory(2))), micro_batch_size=12
    )
    assert "--compare 12 16 has" in advice("update", "links", plan)


def test_small_micro_batches_read_mostly_weights(plan_of, with_memory) -> None:
    """Just below and just above the number of tokens at which arithmetic takes longer."""
    plan = plan_of({"update": 1, "score": 1}, with_memory(2))
    for name, most in (("update", 271 * 8 / 14), ("score", 271)):
        above, below = (
            dataclasses.replace(plan, peaks=DevicePeaks(times * most * 1e11, 1e11))
            for times in (1.1, 0.9)
        )
        assert "reads all weights" in advice(name, "memory", above)
        assert advice(name, "memory", below) is None


def test_no_larger_micro_batch_is_advised_than_the_largest_that_fits(plan_of, with_memory) -> None:
    plan = _sharded(plan_of({"update": 1}, with_memory(2)))
    settings = {**plan.settings, "micro_batch_size_per_device": "auto"}
    found = Found("micro_batch_size_per_device", 2, {2: True, 4: False}, 8)
    for fields in ({"settings": settings}, {"found": found}, {"hbm_bytes": 0}):
        assert advice("update", "links", dataclasses.replace(plan, **fields)) is None


def test_only_weights_that_are_split_are_gathered(plan_of, with_memory) -> None:
    assert advice("update", "links", plan_of({"update": 1}, with_memory(2))) is None


def _sharded(plan: Plan) -> Plan:
    return dataclasses.replace(plan, mesh={"dp": 1, "fsdp": 8, "tp": 1})
