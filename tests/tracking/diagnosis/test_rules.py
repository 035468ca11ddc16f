"""Each rule fires on a sick history, and not on its healthy neighbor just under the threshold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from grpo_eqx.tracking.diagnosis import RULES, Doctor, Finding, diagnose
from grpo_eqx.tracking.diagnosis.history import History

from .histories import SETTINGS, Value, evaluated, steps_of

NAN = math.nan
Row = Mapping[str, float]


class Case(NamedTuple):
    """A rule, a history that it fires on, and one that it does not."""

    rule: str
    sick: Mapping[str, Value]
    healthy: Mapping[str, Value]
    said: str
    """Part of the sentence that it says."""
    settings: Mapping[str, Any] = {}


def from_step(first: int, sick: float, before: float) -> Value:
    """A metric that is sick from a step on."""
    return lambda step: sick if step >= first else before


def alternating(often: float, seldom: float, every: int) -> Value:
    return lambda step: seldom if step % every == 0 else often


CASES = [
    Case(
        "reward_none",
        {"rewards/judge/mean": NAN, "rewards/judge/std": NAN},
        {"rewards/judge/mean": alternating(NAN, 0.5, 5), "rewards/judge/std": 0.1},
        "Reward function judge returned None for all completions of steps 1 to 5",
    ),
    Case(  # it scored some of the first problems, which are rare, and then none for a while
        "reward_none",
        {"rewards/judge/mean": from_step(10, NAN, 0.5), "rewards/judge/std": 0.1},
        {
            "rewards/judge/mean": lambda step: NAN if step >= 10 or step % 2 else 0.5,
            "rewards/judge/std": 0.1,
        },
        "Reward function judge returned None for all completions of steps 10 to 14",
    ),
    Case(
        "no_reward",
        {"reward": from_step(5, NAN, 0.5), "reward_std": from_step(5, NAN, 0.5)},
        {"reward": alternating(0.5, NAN, 5), "reward_std": alternating(0.5, NAN, 5)},
        "No completion had a reward, so steps 5 to 6 trained nothing",
    ),
    Case(
        "reward_never_fires",
        {"rewards/format/mean": 0.0, "rewards/format/std": 0.0},
        {
            "rewards/format/mean": alternating(0.0, 1 / 128, 2),
            "rewards/format/std": alternating(0.0, 0.088, 2),
        },
        "Reward function format returned 0 for all completions of steps 1 to 2",
    ),
    Case(
        "reward_always_fires",
        {"rewards/format/mean": 1.0, "rewards/format/std": 0.0},
        # It is learned, and then always 1: nothing is wrong with that.
        {
            "rewards/format/mean": from_step(5, 1.0, 0.9),
            "rewards/format/std": from_step(5, 0.0, 0.3),
        },
        "Reward function format returned 1 for all completions",
    ),
    Case(
        "rewards_cancel",
        {"reward": 0.0, "reward_std": 0.0},
        {"reward": 0.0, "reward_std": 1e-3},
        "add up to 0 for all completions",
    ),
    Case(
        "rewards_too_large",
        {"reward": 1e35, "reward_std": math.inf},
        {"reward": 1e35, "reward_std": alternating(1e33, math.inf, 5)},
        "too large for float32",
    ),
    Case(
        "reward_fell",
        {"reward": from_step(20, 0.3, 0.6)},
        {"reward": from_step(20, 0.4, 0.6)},
        "The reward fell from 0.6 (steps 1 to 10) to 0.3",
    ),
    Case(
        "groups_without_variance",
        {"frac_reward_zero_std": 0.96},
        {"frac_reward_zero_std": 0.94},
        "In 96% of the groups of steps 1 to 5 all rewards were equal",
    ),
    Case(
        "truncated",
        {"completions/clipped_ratio": 0.55, "completions/mean_length": 44.0},
        {"completions/clipped_ratio": 0.45, "completions/mean_length": 44.0},
        "55% of the completions of steps 1 to 3 were cut off at max_completion_length (48)",
    ),
    Case(
        "truncated",
        {
            "completions/clipped_ratio": 0.3,
            "reward": 0.0,
            "reward_std": 0.0,
            "rewards/correct/mean": 0.0,
            "rewards/correct/std": 0.0,
        },
        {"completions/clipped_ratio": 0.3},
        "before they ended, and no completion had a reward",
    ),
    Case(
        "truncated",
        {"completions/clipped_ratio": 1.0, "completions/mean_length": 48.0},
        {"completions/clipped_ratio": 0.0},
        "100% of the completions of steps 1 to 3 were cut off",
    ),
    Case(
        "tools_never_called",
        {"tools/call_frequency": 0.0},
        {"tools/call_frequency": alternating(0.0, 1 / 128, 3)},
        "No completion of steps 1 to 3 called a tool.",
    ),
    Case(
        "tools_never_called",
        {"tools/call_frequency": 0.0, "completions/clipped_ratio": 1.0},
        {"tools/call_frequency": 1 / 128},
        "No completion of steps 1 to 3 called a tool, or ended a turn: all were cut off at "
        "max_completion_length (48).",
    ),
    Case(
        "tools_fail",
        {"tools/call_frequency": 1.5, "tools/failure_frequency": from_step(5, 0.95, 0.1)},
        {"tools/call_frequency": 1.5, "tools/failure_frequency": alternating(0.89, 1.0, 3)},
        "67% of the calls of steps 4 to 6 failed",
    ),
    Case(
        "tools_slow",
        {"time/tools/wait_s": 15.0, "time/tools/call_s": 2.5, "step_time": 25.0},
        {"time/tools/wait_s": 12.0, "time/tools/call_s": 2.5, "step_time": 25.0},
        "For 60% of the time of steps 1 to 3, no completion decoded, because all waited for calls, "
        "which took 2.5 s on average.",
    ),
    Case(
        "ids_without_token",
        {"completions/num_ids_without_token": from_step(5, 129.0, 0.0)},
        {"completions/num_ids_without_token": 0.0},
        "The completions of steps 5 to 6 have 258 ids for which the tokenizer has no token",
    ),
    Case(
        "length_explosion",
        {
            "completions/mean_length": from_step(20, 44.0, 20.0),
            "completions/clipped_ratio": from_step(20, 0.6, 0.0),
        },
        {
            "completions/mean_length": from_step(20, 38.0, 20.0),
            "completions/clipped_ratio": from_step(20, 0.4, 0.0),
        },
        "Completions grew from 20 tokens at the start to 44",
    ),
    Case(  # longer, without a limit in sight: good if the reward gains by it
        "length_explosion",
        {"completions/mean_length": lambda step: 20.0 + 2 * step, "reward": 0.5},
        {"completions/mean_length": lambda step: 20.0 + 2 * step},
        "and the reward did not gain",
    ),
    Case(
        "entropy_collapse",
        {"entropy": lambda step: 0.2 * 0.9**step},
        {"entropy": lambda step: max(0.2 * 0.9**step, 0.02)},
        "The entropy fell from 0.18 nats per token at the start to",
    ),
    Case(
        "entropy_explosion",
        {"entropy": from_step(9, 0.4, 0.2), "reward": from_step(9, 0.3, 0.5)},
        # A bonus on entropy makes it grow, and the reward with it.
        {"entropy": from_step(9, 0.4, 0.2)},
        "The entropy grew from 0.2 nats per token at the start to 0.4",
    ),
    Case(
        "sampler_gap",
        {"sampling/sampling_logp_difference/mean": 0.035},
        {"sampling/sampling_logp_difference/mean": 0.025},
        "differ by 0.035 per token",
    ),
    Case(
        "kl_blow_up",
        {"kl": from_step(20, 0.6, 0.01)},
        {"kl": from_step(20, 0.4, 0.01)},
        "The KL divergence to the reference is 0.6 nats per token",
        {"beta": 0.04},
    ),
    Case(
        "ratios_clipped",
        {"clip_ratio/region_mean": 0.55},
        {"clip_ratio/region_mean": 0.45},
        "The gradients of 55% of the tokens were clipped",
        {"num_iterations": 4},
    ),
    Case(
        "gradient_spikes",
        {"grad_norm": lambda step: 12.0 if step in (20, 24, 29) else 1.0},
        {"grad_norm": lambda step: 12.0 if step in (20, 29) else 9.0 if step == 24 else 1.0},
        "3 of the gradient norms of steps 10 to 29 are over 10 times the usual one (1), up to 12",
    ),
    Case(
        "gradient_is_zero",
        {"grad_norm": lambda step: 0.0 if step in (7, 8, 9) else 1.0},
        {
            "grad_norm": lambda step: 0.0 if step in (7, 8, 9) else 1.0,
            "frac_reward_zero_std": lambda step: float(step == 8),
        },
        "exactly 0 in steps 7 to 9",
    ),
    Case(
        "skipped_updates",
        {"skipped_updates": lambda step: float(step == 7)},
        {"skipped_updates": 0.0},
        "1 update was skipped",
    ),
    Case(
        "padding",
        {"perf/padding_share": 0.36},
        {"perf/padding_share": 0.31},
        "36% of the positions",
    ),
    Case(
        "idle_slots",
        {"perf/slot_utilization": 0.64},
        {"perf/slot_utilization": 0.69},
        "36% of the rollout's slots are idle",
    ),
    Case(
        "imbalance",
        {"perf/balance": 0.64},
        {"perf/balance": 0.69},
        "The average device has 64% of the tokens of the fullest one",
    ),
    Case(
        "compiles_in_every_step",
        {"compile/num_programs": 3.0, "compile/seconds": 0.4},
        {"compile/num_programs": alternating(0.0, 3.0, 2), "compile/seconds": 0.4},
        "100% of steps 4 to 13 compiled programs, 3.0 each. Compiling took 4.0 s, and the steps "
        "10.0 s.",
    ),
]


def sicknesses(
    rows: Sequence[Row],
    evaluations: Sequence[Row] = (),
    *,
    num_devices: int | None = 1,
    **settings: Any,
) -> list[Finding]:
    found = diagnose({**SETTINGS, **settings}, rows, evaluations, num_devices=num_devices)
    return [finding for finding in found if finding.kind == "sickness"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_fires_above_its_threshold(case: Case) -> None:
    found = [x for x in sicknesses(steps_of(**case.sick), **case.settings) if x.rule == case.rule]
    assert len(found) == 1
    assert case.said in found[0].text
    assert found[0].advice.endswith(".")


@pytest.mark.parametrize("run", [{}, {"steps": 4}, {"prompts_per_step": 8, "num_generations": 5}])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_it_waits_for_the_steps_that_it_looks_at(case: Case, run: Mapping[str, int]) -> None:
    settings = {**SETTINGS, **case.settings, **run}
    (rule,) = [rule for rule in RULES if rule.name == case.rule]
    needed = rule.steps(History(settings))
    steps = steps_of(settings["steps"], **case.sick)
    found = [x.step for x in diagnose(settings, steps, (), num_devices=1) if x.rule == case.rule]
    assert all(step >= needed for step in found)
    is_sick_at_once = not any(callable(value) for value in case.sick.values())
    if is_sick_at_once and needed <= settings["steps"]:
        assert found == [needed]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_it_is_silent_just_under_it(case: Case) -> None:
    assert sicknesses(steps_of(**case.healthy), **case.settings) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_one_noisy_step_is_no_sickness(case: Case) -> None:
    if case.rule == "skipped_updates":
        return  # no noise makes a gradient infinite
    steps = steps_of()
    sick = steps_of(**case.sick)[29]
    assert sicknesses([*steps[:29], {**steps[29], **sick}, *steps[30:]]) == []


def test_a_fall_of_evaluations_is_judged_by_their_number_of_problems() -> None:
    (found,) = sicknesses(steps_of(), evaluated((0, 0.6), (20, 0.7), (40, 0.6)))
    assert found.rule == "evaluation_falls"
    assert found.step == 40
    assert "fell from 0.7 (after step 20) to 0.6 (after step 40), while the reward went from" in (
        found.text
    )
    assert "with a high reward" in found.advice
    assert sicknesses(steps_of(), evaluated((0, 0.6), (20, 0.7), (40, 0.6), problems=128)) == []
    assert sicknesses(steps_of(), evaluated((0, 0.6), (20, 0.64), (40, 0.6), problems=10**6)) == []


def test_few_problems_that_were_all_right_once_may_be_wrong_by_chance() -> None:
    for problems in (1, 3):
        assert sicknesses(steps_of(), evaluated((20, 1.0), (40, 0.0), problems=problems)) == []


@pytest.mark.parametrize(("prompts", "generations"), [(2, 8), (4, 8), (8, 2), (16, 8)])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_small_batches_of_problems_that_differ_are_no_sickness(
    prompts: int, generations: int, spread: float
) -> None:
    """Of a policy that slowly learns; some problems are easy, some hard, and batches vary."""
    settings = {
        **SETTINGS, "steps": 200, "prompts_per_step": prompts, "num_generations": generations
    }  # fmt: skip
    for seed in range(3):
        draws = np.random.default_rng([seed, prompts])
        rows = [
            {**row, **rewards_of(draws, prompts, generations, spread, gain=0.2 * place / 200)}
            for place, row in enumerate(steps_of(200, entropy=0.2))
        ]
        assert [
            x for x in diagnose(settings, rows, [], num_devices=1) if x.kind == "sickness"
        ] == []


def rewards_of(
    draws: np.random.Generator, prompts: int, generations: int, spread: float, gain: float
) -> dict[str, float]:
    """The metrics of right and wrong answers to problems that are solved with other chances."""
    chances = np.clip(draws.beta(spread, spread, prompts) + gain, 0, 1)
    rewards = (draws.random((prompts, generations)) < chances[:, None]).astype(float)
    mean, std = float(rewards.mean()), float(rewards.std(ddof=1))
    return {
        "reward": mean, "reward_std": std,
        "rewards/correct/mean": mean, "rewards/correct/std": std,
        "frac_reward_zero_std": float((rewards.max(1) == rewards.min(1)).mean()),
    }  # fmt: skip


def test_rewards_of_environments_that_take_turns_are_not_missing() -> None:
    """Each is `None` for the problems of the other, and small steps have but one of them."""
    for prompts, of_chess in ((1, lambda step: step % 3 == 0), (2, lambda step: step > 2)):
        steps = steps_of(
            **{
                "rewards/Chess/mean": lambda step, has=of_chess: 0.4 if has(step) else NAN,
                "rewards/Maze/mean": lambda step, has=of_chess: NAN if has(step) else 0.4,
            }
        )
        assert sicknesses(steps, prompts_per_step=prompts) == []


def test_environments_that_take_turns_and_never_reward_are_told_of() -> None:
    """Neither scores in every step, so that the rules on single functions see nothing."""
    steps = steps_of(
        **{
            "rewards/Chess/mean": alternating(0.0, NAN, 2),
            "rewards/Chess/std": alternating(0.0, NAN, 2),
            "rewards/correct/mean": alternating(NAN, 0.0, 2),
            "rewards/correct/std": alternating(NAN, 0.0, 2),
            "reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0,
        }
    )  # fmt: skip
    (found,) = sicknesses(steps)
    assert found.rule == "groups_without_variance"


@pytest.mark.parametrize("reward", [0.0, 1.0, NAN])
def test_the_reward_of_an_environment_is_told_as_its_own(reward: float) -> None:
    own: Mapping[str, Value] = {"rewards/Maze/mean": reward, "rewards/Maze/std": 0.0 * reward}
    passed = "Chess, Maze, passed to GRPOTrainer"
    (found,) = sicknesses(steps_of(5, **own), environment_factory=passed)
    gave = f"gave the reward {reward:g} for all" if reward == reward else "rewarded no completion"
    assert found.text.startswith(f"Environment Maze {gave}")
    assert "get_reward" in found.advice
    (of_function,) = sicknesses(steps_of(5, **own), environment_factory="Chess")
    assert of_function.text.startswith("Reward function Maze returned")


@pytest.mark.parametrize("masks", [False, True])
def test_what_shortens_completions_depends_on_who_writes_them(masks: bool) -> None:
    clipped: Mapping[str, Value] = {"completions/clipped_ratio": 0.75}
    (plain,) = sicknesses(steps_of(**clipped), mask_truncated_completions=masks)
    steps = steps_of(**clipped, **{"tools/call_frequency": 1.0})
    (acting,) = sicknesses(steps, mask_truncated_completions=masks)
    assert ("system_prompt" in plain.advice) == (not masks)
    assert "tools" not in plain.advice
    assert "answers of tools and environments count" in acting.advice
    assert "max_tool_response_length" in acting.advice
    assert "system_prompt" not in acting.advice
    for advice in (plain.advice, acting.advice):
        assert ("mask_truncated_completions" in advice) == (not masks)


def test_a_fall_with_the_reward_is_no_hacking() -> None:
    steps = steps_of(reward=from_step(30, 0.45, 0.6))
    (found,) = sicknesses(steps, evaluated((20, 0.7), (40, 0.4)))
    assert found.rule == "evaluation_falls"
    assert "the reward fell as well" in found.advice


def test_every_rule_has_a_case() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    others = {"evaluation_falls", "loss_near_0"}
    assert {case.rule for case in CASES} | others == set(names)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_run_that_goes_on_is_told_the_same_once(case: Case) -> None:
    settings = {**SETTINGS, **case.settings}
    steps = steps_of(**case.sick)
    doctor = Doctor(settings, num_devices=1)
    live = [finding for metrics in steps for finding in doctor.step(metrics)]
    after = diagnose(settings, steps, [], num_devices=1)
    assert [(x.rule, x.step, x.text) for x in live] == [(x.rule, x.step, x.text) for x in after]
    assert {x.last_step for x in live} == {None}


def test_a_run_that_is_resumed_is_told_again_and_remembers_its_start() -> None:
    steps = steps_of(entropy=lambda step: 0.2 * 0.9**step)
    doctor = Doctor(SETTINGS, [*steps[:35], *evaluated((35, 0.5))], num_devices=1)
    (found,) = doctor.step(steps[35])
    assert found.rule == "entropy_collapse"
    assert "0.18 nats per token at the start" in found.text


def test_what_is_over_has_a_last_step() -> None:
    steps = steps_of(kl=lambda step: 0.6 if 10 <= step < 20 else 0.01)
    (found,) = sicknesses(steps, beta=0.04)
    assert (found.step, found.last_step) == (12, 19)


def solved_until(last: int, reward: float) -> dict[str, Value]:
    """Metrics of a run that solves all problems from step 25 on, until another reward."""
    rate = lambda step: min(0.3 + 0.03 * step, 0.999) if step <= last else reward  # noqa: E731
    deviation = lambda step: math.sqrt(rate(step) * (1 - rate(step)))  # noqa: E731
    return {
        "reward": rate, "reward_std": deviation,
        "rewards/correct/mean": rate, "rewards/correct/std": deviation,
        "frac_reward_zero_std": lambda step: rate(step) ** 8 + (1 - rate(step)) ** 8,
        "entropy": lambda step: 0.2 * 0.9**step,
    }  # fmt: skip


def test_a_run_that_solves_its_problems_is_healthy() -> None:
    rows = steps_of(60, **solved_until(60, 0.0))
    found = diagnose({**SETTINGS, "steps": 60}, rows, [])
    notes = {finding.rule: finding for finding in found if finding.kind == "note"}
    assert notes.keys() == {"loss_near_0", "groups_without_variance"}
    assert "is at its best. Nothing is left to learn" in notes["groups_without_variance"].text
    assert [finding for finding in found if finding.kind == "sickness"] == []


def test_a_collapse_after_all_is_solved_is_told_besides() -> None:
    found = sicknesses(steps_of(60, **solved_until(40, 0.001)), steps=60)
    assert {"groups_without_variance", "entropy_collapse"} <= {each.rule for each in found}


def test_a_reward_function_may_have_a_slash_in_its_name() -> None:
    never = {"rewards/org/judge/mean": 0.0, "rewards/org/judge/std": 0.0}
    (found,) = sicknesses(steps_of(5, **never))
    assert found.rule == "reward_never_fires"
    assert "Reward function org/judge returned 0" in found.text


def test_the_loss_near_0_is_said_once_and_no_sickness() -> None:
    (found,) = diagnose(SETTINGS, steps_of(), [])
    assert (found.rule, found.kind, found.step) == ("loss_near_0", "note", 3)
    assert "is right" in found.text
    for others in ({"num_iterations": 2}, {"beta": 0.04}, {"advantage_estimator": "reinforce"}):
        assert diagnose({**SETTINGS, **others}, steps_of(), []) == []
    assert diagnose(SETTINGS, steps_of(loss=0.4), []) == []


@pytest.mark.parametrize(
    ("settings", "has_formula"),
    [
        ({"loss_type": "dapo"}, True),
        ({"loss_type": "bnpo", "advantage_estimator": "rloo"}, True),
        ({"loss_type": "dr_grpo"}, False),
        ({"loss_type": "dapo", "advantage_estimator": "reinforce_plus_plus"}, False),
    ],
)
def test_a_formula_of_the_loss_is_told_where_it_holds(
    settings: Mapping[str, Any], has_formula: bool
) -> None:
    (found,) = diagnose({**SETTINGS, **settings}, steps_of(), [])
    assert ("-sum(A L) / sum(L)" in found.text) == has_formula
    assert "does not vanish with it" in found.text


@pytest.mark.parametrize("number", range(4))
def test_a_short_run_is_judged_by_the_steps_that_it_has(number: int) -> None:
    never: Mapping[str, Value] = {"rewards/correct/mean": 0.0, "rewards/correct/std": 0.0}
    found = sicknesses(steps_of(number, **never), steps=number, prompts_per_step=2)
    is_enough = 16 * number >= 32  # completions
    assert [x.rule for x in found] == (["reward_never_fires"] if is_enough else [])
    assert sicknesses(steps_of(number), steps=number) == []


def test_without_settings_and_with_few_metrics_there_is_nothing_to_say() -> None:
    rows = [{"step": float(step), "reward": 0.5} for step in range(1, 30)]
    assert diagnose({}, rows, [{"step": 3.0}]) == []
    assert diagnose({}, [], evaluated((0, 0.9), (10, 0.1))) == []


def test_values_that_are_not_finite_are_left_out() -> None:
    """Unless all are, which is a sickness of rewards."""
    noisy = {name: x for name, x in steps_of()[0].items() if name not in ("step",)}
    for missing in (NAN, math.inf):
        steps = steps_of()
        for metrics in steps[::3]:
            metrics.update(dict.fromkeys(noisy, missing))
        assert sicknesses(steps, evaluated((0, 0.5), (20, missing), (40, 0.5))) == []


def test_a_small_batch_has_padding_that_is_its_remainder() -> None:
    rates = {"perf/tokens_per_second/update": 2000.0, "time/train/update_s": 0.5}
    padded: Mapping[str, Value] = {"perf/padding_share": 0.5}
    assert sicknesses(steps_of(**padded, **rates)) == []
    many = {**rates, "time/train/update_s": 10.0}
    assert [x.rule for x in sicknesses(steps_of(**padded, **many))] == ["padding"]
    (found,) = sicknesses(steps_of(**padded, **rates), micro_batch_size_per_device=64)
    assert found.advice == "Lower micro_batch_size_per_device (64)."
    assert sicknesses(steps_of(**padded, **rates), micro_batch_size_per_device=1) == []


def test_few_slots_of_a_device_may_be_idle() -> None:
    steps = steps_of(**{"perf/slot_utilization": 0.5})
    assert sicknesses(steps, max_num_seqs=32) == []
    assert sicknesses(steps, prompts_per_step=4, num_generations=8) == []
    assert sicknesses(steps, prompts_per_step=32, num_devices=8) == []
    (found,) = sicknesses(steps, prompts_per_step=32, num_devices=2)
    assert found.rule == "idle_slots"
    assert sicknesses(steps, prompts_per_step=32, num_devices=None) == []


def test_idle_slots_are_to_be_fewer_until_a_device_has_few() -> None:
    steps = steps_of(**{"perf/slot_utilization": 0.5})
    advised = [
        finding.advice
        for slots in (None, 128, 64)
        for finding in sicknesses(steps, prompts_per_step=64, max_num_seqs=slots, num_devices=2)
    ]
    assert [text.partition(",")[0] for text in advised] == [
        "Set max_num_seqs to 128",
        "Set max_num_seqs to 64",
    ]


def test_advised_slots_can_be_dealt_to_the_devices() -> None:
    steps = steps_of(**{"perf/slot_utilization": 0.5})
    (found,) = sicknesses(steps, prompts_per_step=40, num_generations=30, num_devices=8)
    assert "max_num_seqs to 296," in found.advice
    (found,) = sicknesses(steps, prompts_per_step=4, num_generations=128, num_devices=8)
    assert "make prompts_per_step a multiple of the devices" in found.advice


def test_advice_names_the_setting_to_blame() -> None:
    (gap,) = sicknesses(steps_of(**{"sampling/sampling_logp_difference/mean": 0.2}), top_p=0.5)
    assert "top_p 0.5" in gap.text
    assert "Leave top_p out" in gap.advice
    corrected = steps_of(**{"sampling/sampling_logp_difference/mean": 0.09})
    assert sicknesses(corrected, importance_sampling_mode="token_truncate") == []
    stale = steps_of(**{"sampling/sampling_logp_difference/mean": 0.2})
    (gap,) = sicknesses(stale, max_staleness=4, importance_sampling_mode="token_truncate")
    assert "with max_staleness 4, older policies drew some" in gap.text
    assert "Lower max_staleness or learning_rate" in gap.advice
    idle = steps_of(**{"perf/slot_utilization": 0.5})
    (waits,) = sicknesses(
        idle, max_staleness=1, max_num_seqs=128, prompts_per_step=64,
        importance_sampling_mode="none",
    )  # fmt: skip
    assert "steps wait for groups that would become too old" in waits.text
    assert waits.advice == "Raise max_staleness, or lower max_num_seqs."
    (ahead,) = sicknesses(
        idle, max_staleness=1, max_num_seqs=128, prompts_per_step=64, rollout_devices=4,
        importance_sampling_mode="none",
    )  # fmt: skip
    assert "most end long before the longest" in ahead.text
    (cold,) = sicknesses(steps_of(frac_reward_zero_std=1.0), temperature=0.1)
    assert "Raise temperature (0.1)" in cold.advice
    fallen = steps_of(frac_reward_zero_std=1.0, reward=from_step(4, 0.0, 0.4))
    (collapsed, *_) = sicknesses(fallen)
    assert "0.4 at the start" in collapsed.text
    assert "Lower learning_rate" in collapsed.advice
