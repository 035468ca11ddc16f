"""A plan compiles what a run executes, and adds what lies beside it."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.loss_backends import DenseLoss
from grpo_eqx.models.cost import token_flops, update_flops
from grpo_eqx.planner import plan_config
from grpo_eqx.planner.devices import local_target
from grpo_eqx.planner.make_plan import TRAINING, make_plan
from grpo_eqx.planner.plan import Asked, Plan
from grpo_eqx.planner.routes import Route
from grpo_eqx.planner.step_time import Rates
from grpo_eqx.planner.trips import Expected
from grpo_eqx.planner.work import work_levels
from grpo_eqx.run.programs import make_programs
from grpo_eqx.run.to_compile import SAMPLING, run_programs
from grpo_eqx.sharding import RolloutLayout, RolloutSharding
from grpo_eqx.tracking.device_peaks import DevicePeaks

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"


def quiet(_: str) -> None:
    pass


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "programs"),
    [
        ({}, ["generate", "update", "evaluate"]),
        ({"num_iterations": 2}, ["generate", "score", "update", "evaluate"]),
        ({"top_entropy_quantile": 0.5}, ["generate", "score", "update", "evaluate"]),
        ({"beta": 0.1}, ["generate", "score_reference", "update", "evaluate"]),
        (
            {"beta": 0.1, "steps_per_generation": 2},
            ["generate", "score", "score_reference", "update", "evaluate"],
        ),
    ],
)
def test_the_programs_are_those_that_the_run_executes(
    tiny_run, one_device, settings, programs
) -> None:
    assert list(make_plan(tiny_run(**settings), one_device, quiet).programs) == programs


@pytest.mark.slow
def test_what_lies_beside_a_program_counts(tiny_run, one_device) -> None:
    plan = make_plan(tiny_run(beta=0.1, num_iterations=2), one_device, quiet)
    parameters, optimizer, reference = plan.resident.values()
    assert optimizer == pytest.approx(2 * parameters, rel=0.01)  # AdamW's moments
    assert parameters == reference  # float32 on a CPU
    elsewhere = {name: program.elsewhere_bytes for name, program in plan.programs.items()}
    assert elsewhere == {
        "generate": optimizer + reference,
        "score": optimizer + reference,
        "score_reference": parameters + optimizer,
        "update": reference,
        "evaluate": optimizer + reference,
    }
    for program in plan.programs.values():
        compiled = program.compiled
        parts = (
            compiled.argument_bytes, compiled.output_bytes, compiled.temporary_bytes,
            compiled.code_bytes,
        )  # fmt: skip
        assert compiled.peak_bytes == sum(parts)
    assert plan.peak_bytes == max(program.peak_bytes for program in plan.programs.values())


@pytest.mark.slow
def test_an_update_is_that_of_the_trainer(tmp_path) -> None:
    """The plan's figures are those of the program that training runs, whatever ends early."""
    settings = {"steps": 2, "prompts_per_step": 8, "num_generations": 4, "eval_problems": 8}
    settings |= {"data": str(PROBLEMS), "max_completion_length": 48, "output_dir": tmp_path / "run"}
    settings |= {"micro_batch_size_per_device": 1}
    cfg, backend = GRPOConfig(**settings), DenseLoss()
    trainer = GRPOTrainer(cfg, loss_backend=backend)
    plan = trainer.plan()
    assert plan_config(cfg, loss_backend=backend).to_json() == plan.to_json()
    ran, micro_batches = [], []

    def update(*arguments):
        ran.append(jitted.lower(*arguments).compile().memory_analysis())
        micro_batches.append(int(arguments[2].number))
        return jitted(*arguments)

    updater = trainer.programs.updater
    jitted, updater._jitted = updater._jitted, update
    update.lower = jitted.lower  # for compilation ahead
    trainer.fit()
    planned = plan.programs["update"].compiled
    assert plan.step_time is not None  # at rates that are measured, on a CPU
    assert max(micro_batches) < plan.rows.most_micro_batches
    assert set(trainer.programs.compiler.num_shapes) == set(plan.training)
    assert trainer.programs.compiler.num_shapes["update"] == 1
    assert len(ran) == 2
    for memory in ran:
        assert memory.temp_size_in_bytes == planned.temporary_bytes
        assert memory.argument_size_in_bytes == planned.argument_bytes


@pytest.mark.slow
def test_the_sharded_share_of_a_device(tiny_run) -> None:
    run = tiny_run(micro_batch_size_per_device=16)  # all of them
    whole = make_plan(run, local_target(jax.devices()[:1]), quiet, only=["update"])
    parts = make_plan(run, local_target(jax.devices()[:4]), quiet, only=["update"])
    assert parts.mesh == {"dp": 1, "fsdp": 4, "tp": 1}
    assert parts.resident["parameters"] < 0.3 * whole.resident["parameters"]
    assert parts.peak_bytes < 0.5 * whole.peak_bytes
    assert {each.kind for each in parts.programs["update"].compiled.exchanges} >= {"all-gather"}
    assert whole.programs["update"].compiled.exchanges == ()


def test_the_largest_arrays_are_named_with_their_source(tiny_run, one_device) -> None:
    plan = make_plan(tiny_run(), one_device, quiet, only=["update"])
    buffers = plan.programs["update"].compiled.buffers
    assert [b.num_bytes for b in buffers] == sorted((b.num_bytes for b in buffers), reverse=True)
    assert any(buffer.source.startswith("decoder.py:") for buffer in buffers)


@pytest.mark.slow
def test_devices_that_sample_hold_no_optimizer(tiny_run) -> None:
    """Other devices get the weights, and work meanwhile where completions may be a step old."""
    ahead = {"max_staleness": 1, "importance_sampling_mode": "token_truncate"}
    run = tiny_run(rollout_devices=4, **ahead)
    target = local_target(jax.devices()[:8])
    plan = make_plan(run, target, quiet, only=TRAINING)
    assert list(plan.programs) == ["send", "generate", "update"]
    assert (plan.num_devices, plan.rollout_devices, plan.mesh["fsdp"]) == (8, 4, 4)
    weights, own = plan.resident["sent_weights"], plan.programs
    assert plan.resident["parameters"] <= weights < 1.3 * plan.resident["parameters"]
    assert own["generate"].elsewhere_bytes == 0
    assert own["send"].elsewhere_bytes == plan.resident["optimizer_state"]
    sent = own["send"].compiled.levels[-1].work.received
    assert sum(sent.values()) == weights
    plan = dataclasses.replace(plan, peaks=DevicePeaks(1e11, 1e10))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    time, taking_turns = (
        x.step_time
        for x in (plan, dataclasses.replace(plan, settings={**plan.settings, "max_staleness": 0}))
    )
    assert time.total.least == max(time.sampling.least, time.training.least)
    send = time.programs["send"].total
    both = time.sampling.plus(time.training)
    assert taking_turns.total.least == pytest.approx(both.least - send.least)
    assert "4 of them sample, the others train" in str(plan)


@pytest.mark.slow
def test_turns_are_planned_with_what_a_session_holds(tiny_run, one_device) -> None:
    run = dataclasses.replace(tiny_run(max_num_seqs=8), acts=True)
    plan = make_plan(run, one_device, quiet, only=[*SAMPLING, "evaluate"])
    names = ["weights", "prefill", "slots", "decode", "extend", "admit"]
    assert list(plan.programs) == [*names, *(f"evaluate {name}" for name in names[:-1])]
    assert list(plan.training) == names
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    resident = sum(plan.resident.values())
    beside = {name: each.elsewhere_bytes - resident for name, each in plan.training.items()}
    assert beside["weights"] == -plan.resident["parameters"]
    assert beside["prefill"] == 0  # the weights that it reads are its own arguments
    assert beside["slots"] == beside["admit"] > beside["decode"] == beside["extend"] > 0
    asked = plan.for_asked(Asked(96, expected_turns=3, expected_observation_length=20))
    times = {name: each.time(asked.expected, RATES).parts for name, each in asked.training.items()}
    where = {name: {part.where: part.repeats.least for part in times[name]} for name in names}
    assert where["decode"]["each token"] == 2 * (96 - 40)
    assert where["extend"]["each read"] == 16 * 4
    assert not any("counted once" in each for parts in where.values() for each in parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "update"])
def test_loops_are_known_in_whatever_file_they_are_written(tiny_run, one_device, name) -> None:
    """In files of other names, on other lines, in functions that the code now calls for them."""
    run = tiny_run(max_num_seqs=8, micro_batch_size_per_device=2)
    trips = make_plan(run, one_device, quiet, only=[name]).programs[name].trips
    programs = make_programs(run, run.mesh(one_device.devices))
    (lowered,) = (x.lower() for x in run_programs(run, programs) if x.name == name)
    text = lowered.compile().as_text()
    here, elsewhere = (
        work_levels(each, lambda _: (Route("ici", 1), 0)) for each in (text, _moved(text))
    )
    assert {x.source.partition(":")[0] for level in elsewhere for x in level.loops} == {"moved.py"}
    expected = trips.repeats(here, Expected(64))
    assert list(trips.repeats(elsewhere, Expected(64)).values()) == list(expected.values())
    assert all("counted once" not in each.where for each in expected.values())
    assert len(expected) > 3


def _moved(text: str) -> str:
    text = re.sub(r"\w+\.py", "moved.py", text)
    text = re.sub(r"\bline=\d+", "line=1", text)
    return re.sub(r"/(\w+)/while\b", r"/jit(helper)/\1/while", text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": "3,1,1"}, "needs 3 devices, but 1 is available"),
        (
            {"prompts_per_step": 16384},
            "has 8192 problems to train on, and prompts_per_step is",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_one_line(tiny_run, one_device, settings, message) -> None:
    with pytest.raises(UserError, match=message) as error:
        make_plan(tiny_run(**settings), one_device, quiet)
    assert "\n" not in str(error.value)


class OverGroups(RolloutSharding):
    """Splits the completions of a prompt, of which an evaluation has one."""

    def layout(self, mesh, num_prompts, num_generations, num_slots=None):
        return RolloutLayout(mesh, (), ("fsdp",), "over groups")


def test_an_evaluation_that_cannot_be_laid_out_is_said_and_not_planned(tiny_run) -> None:
    run = tiny_run(eval_problems=8)
    passed = dataclasses.replace(run.passed, rollout_sharding=OverGroups())
    said = []
    plan = make_plan(
        dataclasses.replace(run, passed=passed), local_target(jax.devices()[:2]), said.append,
        only=["evaluate"],
    )  # fmt: skip
    assert not plan.programs
    (sentence,) = said
    assert sentence.startswith("no evaluation is planned: OverGroups.layout splits the completions")
    assert plan.settings["rollout_sharding"] == "OverGroups (passed)"
    assert plan.settings["loss_backend"] == "chunked"
    evaluates = dataclasses.replace(run, cfg=dataclasses.replace(run.cfg, eval_steps=5))
    with pytest.raises(UserError, match="OverGroups"):
        make_plan(
            dataclasses.replace(evaluates, passed=passed), local_target(jax.devices()[:2]), quiet,
            only=["evaluate"],
        )  # fmt: skip


RATES = Rates(DevicePeaks(1e12, 1e11), None)


def flops_of(program, length: int = 128) -> float:
    """FLOPs of a program in a step, on one device."""
    return sum(
        part.work.flops * part.repeats.least for part in program.time(Expected(length), RATES).parts
    )


@pytest.mark.slow
def test_times_count_every_pass(tiny_run, one_device) -> None:
    one = make_plan(tiny_run(beta=0.1), one_device, quiet).programs
    two = make_plan(tiny_run(beta=0.1, num_iterations=2), one_device, quiet).programs
    assert [one[name].runs for name in ("generate", "score_reference", "update")] == [1, 1, 1]
    assert (two["score"].runs, two["update"].runs) == (1, 2)
    assert one["evaluate"].time(Expected(128), RATES) is None
    # All of a scoring's products are an update's too, which has as many again for each gradient.
    assert flops_of(one["update"]) == pytest.approx(3 * flops_of(one["score_reference"]), rel=0.2)
    assert flops_of(two["update"]) == pytest.approx(2 * flops_of(one["update"]), rel=1e-3)


@pytest.mark.parametrize(("remat", "passes"), [("none", 3), ("full", 4)])
def test_an_update_does_the_flops_of_the_model(tiny_run, one_device, remat, passes) -> None:
    """And those of what is recomputed; of attention those of whole blocks, hidden keys included."""
    run = tiny_run(remat=remat, micro_batch_size_per_device=16, loss_backend="dense")
    plan = make_plan(run, one_device, quiet, only=["update"])
    parts = plan.programs["update"].time(Expected(128), RATES).parts
    counted = {part.where: part.work.flops * part.repeats.least for part in parts}
    attention = counted.pop("each pair of blocks")
    prompts, completions = np.full(4, 15), np.full((4, 4), 128)  # a prompt's last token is an input
    tokens = prompts.sum() + completions.sum()
    layers = 2 * run.model.num_layer_parameters * tokens
    head = 2 * run.model.num_head_parameters * completions.sum()
    # Rows have a little padding: of 2,168 positions 60 hold no token.
    assert sum(counted.values()) == pytest.approx(passes * layers + 3 * head, rel=0.04)
    whole = update_flops(run.model, prompts, completions)
    assert attention > whole - 3 * (layers + head)


@pytest.mark.slow
def test_decoding_does_the_flops_of_the_model(tiny_run, one_device) -> None:
    """And those of attention to the whole prompt, and to a whole block of the completion."""
    run = tiny_run()
    plan = make_plan(run, one_device, quiet, only=["generate"])
    parts = plan.programs["generate"].time(Expected(128), RATES).parts
    (token,) = (part for part in parts if part.where == "each token")
    model, keys = run.model, 16 + 128
    attention = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_size * keys
    assert token.work.flops == pytest.approx(16 * (token_flops(model) + attention), rel=0.02)
