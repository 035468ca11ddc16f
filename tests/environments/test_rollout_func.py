"""Completions that a function of the user's makes."""

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.common.errors import RunError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.environments import RolloutTrainer
from grpo_eqx.environments.rollout_func import FunctionSampler
from grpo_eqx.generation.sampler import PendingSamples, Sampled, Sampler
from grpo_eqx.rewards.logged import TrainerState
from tests.environments.templates import HERMES, tokenizer_with
from tests.environments.test_acting import settings
from tests.environments.test_environments import steps_of

__all__ = ["settings"]


def generated(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
    """Makes completions as the trainer does, and rewards their length."""
    own = trainer.generate(prompts)
    return {
        **{name: [each[name] for each in own] for name in ("prompt_ids", "completion_ids")},
        "logprobs": [each["logprobs"] for each in own],
        "num_chars": [len(each["text"]) for each in own],
    }


def short(completions: list[str], **columns: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def as_told(num_chars: list[int], **columns: Any) -> list[float]:
    return [-float(number) for number in num_chars]


@pytest.mark.slow
def test_a_function_that_generates_makes_the_same_run(
    settings: dict[str, Any], tmp_path: Any
) -> None:
    def trained(name: str, **passed: Any) -> list[dict[str, Any]]:
        own = {**settings, "output_dir": tmp_path / name, "eval_steps": None}
        own |= {"stop_strings": ("e", "a"), "mask_truncated_completions": True}
        GRPOTrainer(GRPOConfig(**own), **passed).fit()
        return steps_of(own)

    plain = trained("plain", reward_funcs={"short": short})
    made = trained("made", reward_funcs={"short": as_told}, rollout_func=generated)
    for step, expected in zip(made, plain, strict=True):
        assert step["reward"] == expected["reward"]
        assert step["completions/mean_length"] == expected["completions/mean_length"]
        assert step["completions/clipped_ratio"] == expected["completions/clipped_ratio"] < 1
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


class Fixed(Sampler):
    """Draws three tokens, and an end token."""

    def __init__(self, eos: int) -> None:
        self.eos, self.submitted = eos, list[list[Trajectory]]()

    def set_weights(self, model: Any, version: int) -> None: ...

    def submit(self, trajectories: Any, *_: Any, **__: Any) -> PendingSamples:  # type: ignore[override]
        self.submitted.append(list(trajectories))
        drawn = np.array([5, 6, 7, self.eos])
        own = [each.extended(drawn, np.full(4, -0.5), version=3) for each in trajectories]
        return _Done(Sampled(own))


class _Done(PendingSamples):
    def __init__(self, made: Sampled) -> None:
        self.made = made

    def result(self) -> Sampled:
        return self.made


@pytest.fixture
def tokenizer() -> ChatTokenizer:
    return tokenizer_with(HERMES)


@pytest.fixture
def cfg() -> GRPOConfig:
    sizes = {"max_prompt_length": 40, "max_completion_length": 30}
    return GRPOConfig(prompts_per_step=2, num_generations=2, **sizes).resolved()


def sampled(func: Any, tokenizer: ChatTokenizer, cfg: GRPOConfig) -> tuple[Sampled, Fixed]:
    """Completes two prompts twice each."""
    engine = Fixed(tokenizer.eos_ids[0])
    sampler = FunctionSampler(func, engine, tokenizer, cfg)
    sampler._version = 3
    problems = [Prompt("1 + 1?", {}), Prompt("2 + 2?", {})]
    ids = tokenizer.encode_prompts(problems)
    begun = [Trajectory(ids[p], Address(3, p, g)) for p in range(2) for g in range(2)]
    return sampler.submit(begun, problems=problems).result(), engine


def test_each_generation_has_draws_of_its_own(tokenizer: ChatTokenizer, cfg: GRPOConfig) -> None:
    def twice(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
        generated(prompts, trainer)
        return generated(prompts, trainer)

    _, engine = sampled(twice, tokenizer, cfg)
    first, second = ([each.address for each in own] for own in engine.submitted)
    assert first == [
        Address(3, p, g) for p in range(2) for g in range(2)
    ]  # as without the function
    assert [address.sample for address in second] == [0, 1, 0, 1]
    assert not {*first} & {*second}


def test_a_dialogue_by_hand(tokenizer: ChatTokenizer, cfg: GRPOConfig) -> None:
    """What the model writes is learned from, and what is put between is not."""

    def asks_again(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
        made: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        }
        for prompt in prompts:
            (first,) = trainer.generate([prompt])
            begun = first["completion_ids"] + [9, 9]
            (second,) = trainer.generate([prompt], [begun])
            made["prompt_ids"].append(first["prompt_ids"])
            made["completion_ids"].append(begun + second["completion_ids"])
            made["logprobs"].append(first["logprobs"] + [0.0, 0.0] + second["logprobs"])
            made["env_mask"].append([1] * 4 + [0] * 2 + [1] * 4)
        return made

    made, engine = sampled(asks_again, tokenizer, cfg)
    for each in made.trajectories:
        eos = tokenizer.eos_ids[0]
        assert each.ids.tolist() == [5, 6, 7, eos, 9, 9, 5, 6, 7, eos]
        assert each.written.tolist() == [True] * 4 + [False] * 2 + [True] * 4
        assert each.sampler_logps.tolist() == [-0.5] * 4 + [0.0] * 2 + [-0.5] * 4
        assert each.versions.tolist() == [3] * 10
        assert each.finish_reason == "stop"
    begun = engine.submitted[1][0]
    assert begun.prompt_ids == tokenizer.encode_prompts([Prompt("1 + 1?", {})])[0]
    assert begun.ids.tolist() == [5, 6, 7, tokenizer.eos_ids[0], 9, 9]
    assert len(engine.submitted[1]) == 4  # the number for which programs are compiled
    assert len({own[0].address for own in engine.submitted}) == 8
    filling = {each.address for own in engine.submitted for each in own[1:]}
    assert len(filling) == 3  # whose draws nobody looks at
    assert not filling & {own[0].address for own in engine.submitted}


def test_what_is_too_long_is_cut_and_truncated(tokenizer: ChatTokenizer, cfg: GRPOConfig) -> None:
    eos, left = tokenizer.eos_ids[0], list[int]()

    def goes_on(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
        begun = [[8] * length for length in (25, 26, 30, 40)]
        drawn = trainer.generate(prompts, begun)
        left.extend(len(each["completion_ids"]) for each in drawn)
        ids = [a + b["completion_ids"] + [eos] for a, b in zip(begun, drawn, strict=True)]
        return {
            "prompt_ids": [each["prompt_ids"] for each in drawn],
            "completion_ids": ids,
            "logprobs": [[-1.0] * len(each) for each in ids],
        }

    made, engine = sampled(goes_on, tokenizer, cfg)
    assert [len(each) for each in engine.submitted[0]] == [25, 26, 29, 29]
    assert left == [4, 4, 3, 0]  # the engine of this test draws four, whatever the limit
    assert [len(each) for each in made.trajectories] == [30] * 4
    reasons = [each.finish_reason for each in made.trajectories]
    assert reasons == ["stop", "length", "length", "length"]


def test_different_prompts_of_a_problem(tokenizer: ChatTokenizer, cfg: GRPOConfig) -> None:
    def varies(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
        ids = [[1, 2, 3], [1, 2, 4], [1, 2], [1, 2]]
        return {"prompt_ids": ids, "completion_ids": [[7]] * 4, "logprobs": [[-1.0]] * 4}

    made, _ = sampled(varies, tokenizer, cfg)
    assert [list(each.prompt_ids) for each in made.trajectories] == [[1, 2]] * 4
    assert [each.ids.tolist() for each in made.trajectories] == [[3, 7], [4, 7], [7], [7]]
    assert made.trajectories[0].written.tolist() == [False, True]
    assert {each.finish_reason for each in made.trajectories} == {"length"}

    def varies_much(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
        ids = [[1], [1, *range(30)]] * 2
        return {"prompt_ids": ids, "completion_ids": [[7, 8]] * 4, "logprobs": [[-1.0, -1.0]] * 4}

    with pytest.raises(UserError, match="the 30 tokens after the first difference count as"):
        sampled(varies_much, tokenizer, cfg)


GOOD = {
    "prompt_ids": [[1, 2]] * 4, "completion_ids": [[5, 6]] * 4, "logprobs": [[-1.0, -1.0]] * 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_ids": None}, "returned prompt_ids None: give a list with an entry per comple"),
        ({"logprobs": [[-1.0, -1.0]] * 2}, "2 logprobs for 4 prompts: give one for each"),
        ({"completion_ids": [[]] * 4}, r"completion_ids\[0\] \[\]: give at least one token's id"),
        ({"completion_ids": [[5, 10**9]] * 4}, r"completion_ids\[0\] \[5, 1000000000\]: give"),
        ({"completion_ids": ["text"] * 4}, r"completion_ids\[0\] 'text': give"),
        ({"completion_ids": [5] * 4}, r"completion_ids\[0\] 5: give at least one token's id"),
        ({"prompt_ids": [[5] * 41] * 4}, "41 tokens in .*, and max_prompt_length is 40: raise it"),
        ({"logprobs": [[-1.0]] * 4}, r"no entry of logprobs\[0\] for each of its 2 tokens"),
        ({"logprobs": [[0.5, -1.0]] * 4}, r"0.5 in logprobs\[0\]: give log-probs, which are at m"),
        ({"logprobs": [[float("nan"), 0.0]] * 4}, r"nan in logprobs\[0\]"),
        ({"env_mask": [[1, 2]] * 4}, r"2 in env_mask\[0\]: give 1 for what the model wrote"),
        ({"env_mask": [[1]] * 4}, r"no entry of env_mask\[0\] for each of its 2 tokens"),
        ({"reward": [1.0]}, "1 reward for 4 prompts"),
        ({"prompts": [1.0] * 4}, "returned 'prompts', and reward functions get their own: give"),
        ({5: [1.0] * 4}, "returned 5, and reward functions get their own: give another name"),
    ],
)
def test_what_breaks_the_contract_is_refused(
    changes: dict[str, Any], said: str, tokenizer: ChatTokenizer, cfg: GRPOConfig
) -> None:
    made, _ = sampled(lambda prompts, trainer: GOOD, tokenizer, cfg)
    assert len(made.trajectories) == 4
    with pytest.raises(UserError, match=said):
        sampled(lambda prompts, trainer: {**GOOD, **changes}, tokenizer, cfg)


def test_other_mistakes_are_refused(tokenizer: ChatTokenizer, cfg: GRPOConfig) -> None:
    with pytest.raises(UserError, match=r"a dict without logprobs \(did you mean logprob\?\): add"):
        sampled(lambda *_: {"logprob" if k == "logprobs" else k: x for k, x in GOOD.items()},
                tokenizer, cfg)  # fmt: skip
    with pytest.raises(UserError, match="returned None: return a dict with prompt_ids, completion"):
        sampled(lambda *_: None, tokenizer, cfg)
    with pytest.raises(RunError, match=r"rollout_func raised ZeroDivisionError: .*line \d+\): fix"):
        sampled(lambda *_: 1 / 0, tokenizer, cfg)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([[5] * 70],), "a prompt of 70 tokens, and max_prompt_length is 40: raise it, or shorten"),
        (([[5]], []), "1 prompts and 0 completions: give it one completion for each prompt"),
        ((["Hi", 5],), "the prompt 5: give texts, conversations or lists of tokens"),
        (
            ([{"role": "user", "content": "Hi"}],),
            "the prompt {'role': 'user', .*: give texts, conv",
        ),
        (([[5]], [[5, -1]]), r"the completion \[5, -1\]: give a list of tokens"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    arguments: Any, said: str, tokenizer: ChatTokenizer, cfg: GRPOConfig
) -> None:
    with pytest.raises(UserError, match=said):
        sampled(lambda prompts, trainer: trainer.generate(*arguments), tokenizer, cfg)


def test_errors_of_generating_are_not_the_functions(
    tokenizer: ChatTokenizer, cfg: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the function goes on after them: other processes have ended."""

    def goes_on(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
        with contextlib.suppress(MemoryError):
            trainer.generate(prompts)
        return GOOD

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("too large")

    monkeypatch.setattr(Fixed, "submit", fails)
    with pytest.raises(MemoryError, match="too large"):
        sampled(goes_on, tokenizer, cfg)


def test_generating_ends_with_the_call(tokenizer: ChatTokenizer, cfg: GRPOConfig) -> None:
    kept = list[RolloutTrainer]()

    def keeps(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
        kept.append(trainer)
        with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="in another thread"):
            pool.submit(trainer.generate, prompts).result()
        prompts[0] += " changed"
        return GOOD

    made, _ = sampled(keeps, tokenizer, cfg)
    assert made.acted is not None
    assert list(made.acted.prompts) == ["1 + 1?"] * 2 + ["2 + 2?"] * 2
    assert kept[0].state == TrainerState(3, cfg.steps)
    with pytest.raises(UserError, match="outside rollout_func"):
        kept[0].generate(["Hi"])


def test_a_conversation_is_the_functions_own(tokenizer: ChatTokenizer, cfg: GRPOConfig) -> None:
    def answers(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
        for prompt in prompts:
            prompt.append({"role": "assistant", "content": "Hi!"})
        return GOOD

    problem = Prompt([{"role": "user", "content": "Hi."}], {})
    begun = [Trajectory([1], Address(3, 0, g)) for g in range(4)]
    FunctionSampler(answers, Fixed(0), tokenizer, cfg).submit(begun, problems=[problem]).result()
    assert len(problem.content) == 1


def test_arrays_and_single_values_are_read(tokenizer: ChatTokenizer, cfg: GRPOConfig) -> None:
    arrays: Mapping[str, Any] = {name: list(np.array(x)) for name, x in GOOD.items()}
    rounded = [[np.float32(1e-7), -1.0]] * 4
    made, _ = sampled(lambda *_: {**arrays, "logprobs": rounded}, tokenizer, cfg)
    assert made.trajectories[0].sampler_logps.tolist() == [0.0, -1.0]
    made, _ = sampled(lambda *_: {**arrays, "level": 3}, tokenizer, cfg)
    assert made.acted is not None
    assert made.acted.columns == {"level": [3] * 4}
    assert made.acted.of([1]).columns == {"level": [3]}
    assert made.acted.joined(made.acted.of([0])).columns == {"level": [3] * 5}
