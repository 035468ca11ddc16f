"""What a plan says of its programs, in words and as JSON."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from grpo_eqx.planner import Change, Found, Plan
from grpo_eqx.planner.compiled_program import CompiledProgram, Exchange
from grpo_eqx.planner.hlo import Buffer
from grpo_eqx.planner.report import print_plan
from grpo_eqx.planner.routes import Route
from grpo_eqx.planner.work import Level, Loop, Work

GiB = 2**30


@pytest.fixture
def fitting(plan_of, with_memory) -> Plan:
    return plan_of({"generate": 2 * GiB, "update": 3 * GiB}, with_memory(4 * GiB))


@pytest.fixture
def failing(plan_of, with_memory, fitting) -> Plan:
    plan = plan_of({"generate": 2 * GiB, "update": 5 * GiB}, with_memory(4 * GiB))
    return dataclasses.replace(plan, change=Change({"micro_batch_size_per_device": 2}, fitting))


def test_a_run_fits_where_all_its_programs_do(fitting, failing) -> None:
    assert (fitting.fits, fitting.too_large, fitting.peak_bytes) == (True, (), 3 * GiB)
    assert (failing.fits, failing.too_large, failing.peak_bytes) == (False, ("update",), 5 * GiB)


def test_training_can_do_without_evaluations(plan_of, with_memory) -> None:
    plan = plan_of({"update": GiB, "evaluate": 9 * GiB}, with_memory(4 * GiB))
    assert (plan.fits, plan.too_large, plan.peak_bytes) == (True, ("evaluate",), GiB)
    assert plan.verdict.endswith(
        "Evaluation does not fit: lower max_num_seqs or max_prompt_length."
    )


def test_what_lies_elsewhere_counts(fitting) -> None:
    update = dataclasses.replace(fitting.programs["update"], elsewhere_bytes=2 * GiB)
    plan = dataclasses.replace(fitting, programs={"update": update})
    assert plan.too_large == ("update",)


def test_what_the_compiler_refuses_does_not_fit(fitting) -> None:
    update = fitting.programs["update"]
    refused = dataclasses.replace(update.compiled, accepted=False)
    programs = {"update": dataclasses.replace(update, compiled=refused)}
    assert not dataclasses.replace(fitting, programs=programs).fits


def test_the_verdict(fitting, failing) -> None:
    assert fitting.verdict == (
        "The run fits the local devices: memory peaks at 3.00 GiB of 4.00 GiB per device, in "
        "update."
    )
    assert failing.verdict == (
        "The run does not fit the local devices: update needs 5.00 GiB per device, but only "
        "4.00 GiB is usable. It fits with --micro-batch-size-per-device 2, at 3.00 GiB per device."
    )
    found = Found("num_generations", 8, {8: True, 9: False}, 1024)
    searched = dataclasses.replace(fitting, found=found, topology="v6e-8")
    assert searched.verdict.startswith("The run fits v6e-8: ")
    assert searched.verdict.endswith("The largest num_generations that fits is 8.")


def test_json_has_it_all_and_gives_it_back(fitting, failing) -> None:
    compiled = CompiledProgram(
        5 * GiB, 1, 2, 3, 4, accepted=True, seconds=1.5,
        buffers=(Buffer(7, "f32[7]", "mul", "decoder.py:3"),),
        exchanges=(Exchange("all-gather", 2, 64),),
        levels=(Level((Loop("w", None, "engine.py:7"),), Work(5.0, 6.0, {Route("ici", 2): 7.0})),),
    )  # fmt: skip
    update = dataclasses.replace(failing.programs["update"], compiled=compiled)
    found = Found("num_generations", 8, {8: True, 9: False}, 1024)
    plan = dataclasses.replace(failing, programs={"update": update}, found=found)
    fields = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(fields) == plan
    assert (fields["fits"], fields["peak_bytes"], fields["hbm_bytes"]) == (False, 5 * GiB, 4 * GiB)
    assert fields["programs"]["update"]["peak_bytes"] == 5 * GiB
    assert fields["largest"] == 8
    assert fields["change"]["plan"]["fits"]
    assert json.loads(json.dumps(fitting.to_json()))["largest"] is None


def test_the_report_has_every_program_and_ends_with_the_verdict(failing) -> None:
    out = io.StringIO()
    found = Found("num_generations", 8, {8: True, 9: False}, 1024)
    plan = dataclasses.replace(failing, found=found)
    print_plan(plan, Console(file=out, width=80))
    assert str(plan).splitlines()[0] == out.getvalue().splitlines()[0]
    text = out.getvalue()
    for expected in ("generate", "update", "5.00", "125%", "1.00–1.20 s", "num_generations"):
        assert expected in text
    words = " ".join(text.split())
    assert words.endswith(plan.verdict)
    assert "4 micro-batches or fewer of 1 row of 271 tokens" in words
    assert "(micro_batch_size_per_device 2, by default)" in words


@pytest.mark.parametrize(
    ("once", "in_the_loop", "said"),
    [
        (0.0, 1e12, "the links (100% of what it receives in the loop of mine.py:3)"),
        (1e12, 1e12, "the links (50% of what it receives in the loop of mine.py:3)"),
        (2e12, 1e12, "update is bound by the links."),
        (0.0, 1.0, "update is bound by arithmetic."),
    ],
)  # fmt: skip
def test_the_loop_that_receives_most_is_said_where_links_bind(
    fitting, once: float, in_the_loop: float, said: str
) -> None:
    link = Route("ici", 2)
    loop = Loop("while", 4, "mine.py:3")
    levels = (
        Level((), Work(1e9, 1e3, {link: once})),
        Level((loop,), Work(received={link: in_the_loop / 4})),
    )
    update = fitting.programs["update"]
    compiled = dataclasses.replace(update.compiled, levels=levels)
    programs = {"update": dataclasses.replace(update, compiled=compiled)}
    out = io.StringIO()
    print_plan(
        dataclasses.replace(fitting, programs=programs, device_kind="TPU v6 lite"),
        Console(file=out, width=200),
    )
    # What to do about it may follow.
    assert said in out.getvalue().replace(": try", ".")
