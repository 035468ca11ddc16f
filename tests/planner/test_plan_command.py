"""The command `grpo-eqx plan`: what it asks, shows, writes and ends with."""

import json
import re
import sys

import jax
import pytest

from grpo_eqx import GRPOConfig, recipes
from grpo_eqx.cli.main import main
from grpo_eqx.common.errors import UserError
from grpo_eqx.planner import planning_process


@pytest.fixture
def asked(plan_of, with_memory, monkeypatch) -> list:
    """The questions of the command; the answer is a plan of a program that needs 100 bytes of
    1000 on local, and 2000 elsewhere."""
    questions = []

    def ask(cfg, topology, say, setting, *, acts, help_if_not, evaluates):
        questions.append((cfg, topology, setting))
        say("compiling update")
        return plan_of({"update": 100 if topology == "local" else 2000}, with_memory(1000))

    monkeypatch.setattr("grpo_eqx.planner.planning_process.ask", ask)
    return questions


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", ["grpo-eqx", "plan", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_it_ends_with_0_where_a_run_fits_and_with_3_where_not(asked, monkeypatch, capsys) -> None:
    assert plan(monkeypatch) == 0
    assert "The run fits the local devices" in capsys.readouterr().out
    assert plan(monkeypatch, "--topology", "v6e-8") == 3
    out = capsys.readouterr()
    assert "does not fit" in out.out
    assert out.err == "compiling update\n"


def test_it_leaves_this_machines_accelerators_to_others(asked, monkeypatch) -> None:
    jax.config.update("jax_platforms", None)  # as on a machine with some
    plan(monkeypatch, "--topology", "v6e-8")
    assert jax.config.jax_platforms == "cpu"


def test_side_by_side_it_says_what_automatic_sizes_are(asked, monkeypatch, capsys) -> None:
    flags = ["--micro-batch-size-per-device", "auto"]
    plan(monkeypatch, "--compare", "v6e-8", "local", *flags)
    said = capsys.readouterr().out
    # On v6e-8 none fits.
    assert re.search(r"^micro_batch_size_per_device auto: \d+ \(local\)$", said, re.MULTILINE)
    for others in (["--compare", "2", "4", *flags], ["--compare", "v6e-8", "local"]):
        plan(monkeypatch, *others)
        assert "auto:" not in capsys.readouterr().out


def test_it_takes_all_that_training_takes(asked, monkeypatch) -> None:
    plan(
        monkeypatch, "--topology", "v6e-16", "--search", "num_generations",
        "--model", "Qwen/Qwen2.5-3B-Instruct", "--micro-batch-size-per-device", "auto",
        "--recipe", "dapo", "--steps", "7",
    )  # fmt: skip
    ((cfg, topology, setting),) = asked
    assert (topology, setting) == ("v6e-16", "num_generations")
    assert cfg == recipes.dapo(
        model="Qwen/Qwen2.5-3B-Instruct", micro_batch_size_per_device="auto", steps=7
    )
    plan(monkeypatch, "--micro-batch-size-per-device", "4")
    assert asked[-1] == (GRPOConfig(micro_batch_size_per_device=4), "local", None)


def test_topologies_side_by_side(asked, monkeypatch, capsys, tmp_path) -> None:
    file = tmp_path / "plans.json"
    flags = ["--compare", "v6e-8", "local", "--json", str(file)]
    assert plan(monkeypatch, *flags, "--price-per-device-hour", "36") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "local" in line or "v6e-8" in line]
    assert ["local" in row for row in rows] == [True, False]  # what fits is first
    assert ["yes" in row for row in rows] == [True, False]
    assert {topology for _, topology, _ in asked} == {"v6e-8", "local"}
    assert {name: x["fits"] for name, x in json.loads(file.read_text()).items()} == {
        "v6e-8": False,
        "local": True,
    }


def test_tables_in_a_pipe_are_as_wide_as_they_are(asked, monkeypatch, capsys) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    plan(monkeypatch, "--compare", "v6e-8", "local")
    lines = capsys.readouterr().out.splitlines()
    assert 80 < max(map(len, lines)) <= 120
    assert "…" not in "".join(lines)


def test_values_of_settings_side_by_side(asked, monkeypatch) -> None:
    plan(monkeypatch, "--topology", "v6e-8", "--compare", "replicated", "tensor:4", "2")
    changes = {"rollout_sharding": "replicated"}, {"rollout_sharding": "tensor:4"}
    for change in (*changes, {"micro_batch_size_per_device": 2}):
        assert (GRPOConfig(**change), "v6e-8", None) in asked
    assert len(asked) == 3


def test_the_json_file(asked, monkeypatch, tmp_path) -> None:
    file = tmp_path / "plan.json"
    assert plan(monkeypatch, "--topology", "v6e-8", "--json", str(file)) == 3
    fields = json.loads(file.read_text())
    assert fields["fits"] is False
    assert {"peak_bytes", "hbm_bytes", "programs", "largest", "peaks", "links"} <= fields.keys()


def test_json_on_standard_output_leaves_refusals_to_standard_error(
    asked, monkeypatch, capsys
) -> None:
    answered = planning_process.ask

    def ask(cfg, topology, *others, **how):
        if topology == "v6e-16":
            raise UserError("it is taken.")
        return answered(cfg, topology, *others, **how)

    monkeypatch.setattr(planning_process, "ask", ask)
    assert plan(monkeypatch, "--compare", "local", "v6e-16", "--json", "-") == 0
    said = capsys.readouterr()
    assert list(json.loads(said.out)) == ["local"]
    assert said.err.splitlines()[-1] == "v6e-16: it is taken."


def test_times_and_costs_are_for_the_lengths_and_prices_asked_for(
    asked, monkeypatch, capsys, tmp_path
) -> None:
    file = tmp_path / "plan.json"
    flags = ["--expected-completion-length", "24", "--price-per-device-hour", "3.6"]
    assert plan(monkeypatch, *flags, "--json", str(file)) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "With completions of 24 tokens, a step takes 0.50–0.60 s" in words
    assert "at a cost of 0.50–0.60 (3.6 per device and hour)" in words
    fields = json.loads(file.read_text())
    assert fields["step_time"]["seconds"] == pytest.approx([0.5, 0.6])
    assert fields["step_time"]["cost_per_1000_steps"] == pytest.approx([0.5, 0.6])
    assert fields["step_time"]["programs"]["update"]["bound_by"] == "arithmetic"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--json", "/nowhere/at/all/plan.json"],
            "error: json is /nowhere/at/all/plan.json: it",
        ),
        (["--json", "/"], "error: json is /: it must be a file"),
        (
            ["--expected-completion-length", "49"],
            "error: expected_completion_length is 49: it must be from 1 to max_completion_length, "
            "which is 48.",
        ),
        (
            ["--compare", "v6e-8", "--search", "num_generations"],
            "error: compare and search exclude each other",
        ),
        (["--compare"], "error: compare has no names: give topologies, rollout shardings"),
        (["--topology", "v6e-8", "--compare", "8+8"], "error: compare has 8+8, of 16 devices"),
        (["--compare", "v6e-8", "tensr:3"], "error: unknown TPU type 'tensr:3'"),  # no guess
        (["--compare", "tensr:2"], "error: compare has 'tensr:2': did you mean tensor:2?"),
        (["--compare", "8", "auto"], "error: compare has auto, a rollout sharding there, beside"),
        (["--compare", "v6e-8", "8x"], "error: unknown TPU type '8x': use one of"),
        (
            ["--compare", "v6e-8", "tensor:2"],
            "error: compare has tensor:2, which is planned for the devices of this machine, beside "
            "v6e-8: name the devices for it with --topology",
        ),
        (
            ["--expected-observation-length", "8"],
            "error: expected_observation_length is 8, and expected_turns is 1: set expected_turns",
        ),
        (
            ["--expected-turns", "3"],
            "error: expected_turns is 3: set expected_observation_length, the tokens that the",
        ),
        (
            ["--expected-turns", "4", "--expected-observation-length", "15"],
            "error: expected_turns is 4 and expected_observation_length is 15, which leaves no "
            "token for each turn in completions of 48: lower one of them.",
        ),
        (["--expected-completion-length", "0"], "error: expected_completion_length is 0: it must"),
        (["--price-per-device-hour", "0"], "error: price_per_device_hour is 0.0: it must be above"),
        (["--num-generations", "1"], "error: num_generations is 1: it must be at least 2"),
    ],
)
def test_mistakes_are_one_line(asked, monkeypatch, capsys, arguments, message) -> None:
    assert plan(monkeypatch, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
    assert asked == []


def test_turns_are_planned_where_they_are_expected(asked, monkeypatch, capsys) -> None:
    answered, acts = planning_process.ask, []

    def ask(*question, **how):
        acts.append(how["acts"])
        return answered(*question, **how)

    monkeypatch.setattr(planning_process, "ask", ask)
    plan(monkeypatch)
    assert plan(monkeypatch, "--expected-turns", "3", "--expected-observation-length", "8") == 0
    assert acts == [False, True]
    words = " ".join(capsys.readouterr().out.split())
    assert "With completions of 48 tokens in 3 turns, between which the model reads 8" in words


def test_help_begins_with_what_a_plan_is_for(monkeypatch, capsys) -> None:
    assert plan(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert text.index("--topology") < text.index("--search") < text.index("--model")
