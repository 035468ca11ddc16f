"""A small model planned for described TPUs."""

import dataclasses

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.planner.devices import find_target
from grpo_eqx.planner.make_plan import make_plan
from grpo_eqx.planner.plan_run import plan_run
from grpo_eqx.planner.step_time import Rates
from grpo_eqx.run.to_compile import SAMPLING
from grpo_eqx.tracking.device_links import link_rates

pytestmark = pytest.mark.topology


@pytest.fixture(autouse=True)
def _needs_the_compiler() -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")


@pytest.mark.grid
@pytest.mark.parametrize(
    ("topology", "hosts", "loss_backend", "rollout_sharding"),
    [
        ("v6e:2x4", 1, "pallas", "maxtext"),
        ("v6e:4x4", 4, "chunked", "legacy"),
        pytest.param("v6e:2x4", 1, "chunked", "maxtext", marks=pytest.mark.long),
        pytest.param("v6e:4x4", 4, "pallas", "legacy", marks=pytest.mark.long),
    ],
)
def test_a_small_model_fits(
    tiny_run, said, topology, hosts, loss_backend, rollout_sharding
) -> None:
    run = tiny_run(
        prompts_per_step=16, loss_backend=loss_backend, rollout_sharding=rollout_sharding
    )
    plan = plan_run(run, find_target(topology), print)
    assert plan.fits
    assert plan.num_hosts == hosts
    assert plan.rollout_sharding.startswith(rollout_sharding)
    assert 0 < plan.peak_bytes < 2**30 < plan.hbm_bytes
    assert 0 < plan.step_time.total.least < plan.step_time.total.most
    for time in plan.step_time.programs.values():
        assert all("counted once" not in part.where for part in time.parts)
        assert time.seconds.links.least > 0


def test_turns_send_as_much_for_a_token_as_a_single_turn(tiny_run, said) -> None:
    """Besides how many turns have ended. And they take little more memory."""
    run = tiny_run(prompts_per_step=16, rollout_sharding="tensor:2")
    target = find_target("v6e:2x4")
    single, turns = (
        make_plan(each, target, said.append, only=SAMPLING)
        for each in (run, dataclasses.replace(run, acts=True))
    )
    rates = Rates(single.peaks, link_rates(single.device_kind))
    of_token = [
        sum(part.work.received.values())
        for program in (single.programs["generate"], turns.programs["decode"])
        for part in program.time(single.expected, rates).parts
        if part.where == "each token"
    ]
    assert 1000 < of_token[0] <= of_token[1] <= of_token[0] + 16
    assert turns.peak_bytes < 1.1 * single.peak_bytes
    assert all(
        "counted once" not in part.where for part in turns.step_time.programs["decode"].parts
    )


def test_weights_for_turns_are_exchanged_layer_by_layer(tiny_run, said) -> None:
    """Exchanged whole, the largest stack would be in memory twice."""
    run = tiny_run(prompts_per_step=16, rollout_sharding="tensor:2")
    layers, hidden, width = 24, 512, 8192
    model = dataclasses.replace(
        run.model, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=width
    )
    run = dataclasses.replace(run, model=model, acts=True)
    plan = make_plan(run, find_target("v6e:2x4"), said.append, only=("weights",))
    stack = layers * hidden * width // 2 * 2  # bytes of half a stack in bfloat16
    assert plan.programs["weights"].compiled.temporary_bytes < 0.9 * stack


def test_what_the_compiler_refuses_is_an_answer(tiny_run, said) -> None:
    run = tiny_run(
        prompts_per_step=64, num_generations=64, max_completion_length=2048, loss_backend="dense",
        micro_batch_size_per_device=512, eval_problems=8,
    )  # fmt: skip
    wide = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=2**15))
    plan = plan_run(wide, find_target("v6e-8"), said.append, help_if_not=False)
    update = plan.programs["update"]
    assert not plan.fits
    assert not update.compiled.accepted
    assert update.peak_bytes > plan.hbm_bytes
    assert update.compiled.temporary_bytes is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": "3,1,1"}, "needs 3 devices, but 8 are available"),
        ({"mesh": "1,8,1", "prompts_per_step": 3}, "cannot be split evenly over dp=1 x fsdp=8"),
        ({"mesh": "1,8,1", "rollout_sharding": "legacy", "max_num_seqs": 3}, "must split 3 slots"),
    ],
)
def test_what_does_not_fit_the_devices_is_one_line(tiny_run, said, settings, message) -> None:
    with pytest.raises(UserError, match=message) as error:
        plan_run(tiny_run(**settings), find_target("v6e-8"), said.append)
    assert "\n" not in str(error.value)
