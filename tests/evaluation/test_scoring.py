"""Scores of completions: flexible and strict, by majority, and by functions of the user's own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from grpo_eqx import Evaluation, GRPOConfig, UserError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.evaluation.scoring import EvalMetrics, Grader
from grpo_eqx.models.pretrained import model_folder
from grpo_eqx.rewards import RewardFunc, gsm8k
from grpo_eqx.rollout.rollout import Rollout

ROWS = [
    {
        "question": "Mia picks 12 plums and eats 5. How many are left?",
        "answer": "Mia has 12 - 5 = <<12-5=7>>7 plums.\n#### 7",
    },
    {
        "question": "A shirt costs $1,200 and a hat half of that. How much are both?",
        "answer": "The hat costs 1200 / 2 = <<1200/2=600>>600.\nBoth cost 1,800.\n#### 1,800",
    },
]
"""Rows in the format of GSM8K."""
PROBLEMS = [Prompt(row["question"], {"answer": row["answer"]}) for row in ROWS]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))


def evaluated(
    tokenizer: ChatTokenizer,
    texts: Sequence[Sequence[str]],
    func: RewardFunc | str = gsm8k.correct,
    metrics: EvalMetrics = (),
    **settings: Any,
) -> Evaluation:
    """The evaluation of completions with these texts."""
    groups = [
        [
            Trajectory([1], Address(0, p, s), np.array(tokenizer.tokenizer(text)["input_ids"], int))
            for s, text in enumerate(group)
        ]
        for p, group in enumerate(texts)
    ]
    rollout = Rollout(PROBLEMS, groups, tokenizer)
    vars(rollout)["texts"] = [list(group) for group in texts]
    with Grader(GRPOConfig(**settings), func, metrics) as scorer:
        scorer.check_answers(PROBLEMS)
        return scorer(rollout, 1.0)


def test_gsm8k_is_scored_flexibly_and_strictly_by_its_reward_functions(
    tokenizer: ChatTokenizer,
) -> None:
    texts = [
        ["12 - 5 = 7 plums are left.\n#### 7", "So 7 are left.", r"\boxed{7}", "It is 5 of 12."],
        ["#### 1800", "Both cost $1,800.", "#### 1,200", "<answer>1800.00</answer> in all, not 3"],
    ]
    evaluation = evaluated(tokenizer, texts)
    assert evaluation.solved.tolist() == [[True, True, True, False], [True, True, False, True]]
    assert evaluation.strict is not None
    assert evaluation.strict.tolist() == [[True, False, True, False], [True, False, False, True]]
    for p, row in enumerate(ROWS):
        answers = [row["answer"]] * 4
        for func, own in (
            (gsm8k.correct, evaluation.solved),
            (gsm8k.correct_strict, evaluation.strict),
        ):
            assert own[p].tolist() == [x == 1 for x in func([], texts[p], answer=answers)]
    metrics = evaluation.metrics()
    assert metrics["eval/temperature_1/pass@1"] == 6 / 8
    assert metrics["eval/temperature_1/strict/pass@1"] == 4 / 8


@pytest.mark.parametrize(
    ("texts", "right"),
    [
        (["#### 7", "#### 7", "#### 5"], True),
        (["#### 5", "#### 7", "#### 5"], False),
        (["#### 7", "#### 7.0", "#### 5"], True),  # the same number
        (["#### 7", "#### 5", "what?"], True),  # as many votes: the first that was drawn
        (["#### 5", "#### 7", "what?"], False),
        (["#### 7", "what?", "who?"], True),  # without an answer there is no vote
        (["what?", "who?", "how?"], False),
    ],
)
def test_the_majority_of_answers_decides(
    tokenizer: ChatTokenizer, texts: list[str], right: bool
) -> None:
    evaluation = evaluated(tokenizer, [texts, ["#### 1800"] * 3])
    assert evaluation.voted is not None
    assert evaluation.voted.tolist() == [right, True]
    assert evaluation.metrics()["eval/temperature_1/maj@3"] == (1 + right) / 2


def words(completions: list[str], **columns: Any) -> list[float | None]:
    """Counts words; applies to no empty text."""
    return [len(text.split()) or None for text in completions]


def failing(completions: list[str], **columns: Any) -> list[float]:
    raise ZeroDivisionError


def test_functions_of_the_users_own_are_averaged(tokenizer: ChatTokenizer) -> None:
    texts = [["a b c", "", "a"], ["", "", ""]]
    for metrics in ([words], {"words": words}):
        evaluation = evaluated(tokenizer, texts, metrics=metrics)
        assert evaluation.metrics()["eval/temperature_1/words"] == 2
    named = evaluated(tokenizer, texts, metrics={"format": "format", "length": words})
    assert list(named.scores) == ["format", "length"]


def test_one_that_fails_leaves_the_others_as_they_are(tokenizer: ChatTokenizer) -> None:
    evaluation = evaluated(
        tokenizer, [["#### 7"], ["no"]], metrics=[words, failing],
        reward_failures="drop", max_failed_rewards=1.0,
    )  # fmt: skip
    assert evaluation.solved.tolist() == [[True], [False]]
    assert evaluation.scores["words"].tolist() == [[2.0], [1.0]]
    assert np.isnan(evaluation.scores["failing"]).all()


def test_another_function_has_no_strict_form_and_no_majority(tokenizer: ChatTokenizer) -> None:
    evaluation = evaluated(tokenizer, [["a", "b"], ["c", "d e"]], func=words)
    assert evaluation.solved.tolist() == [[True, True], [True, False]]
    assert evaluation.strict is None
    assert evaluation.voted is None
    strict = evaluated(tokenizer, [["So 7", "#### 7"], ["#### 3", "#### 1800"]], "correct_strict")
    assert strict.solved.tolist() == [[False, True], [False, True]]
    assert strict.strict is None
    assert strict.voted is not None
    assert strict.voted.tolist() == [True, False]


def test_names_that_would_be_no_metrics_are_refused() -> None:
    with pytest.raises(UserError, match="eval_metrics has the name 'a/b': use letters"):
        Grader(GRPOConfig(), "correct", {"a/b": words})
    with pytest.raises(UserError, match="two reward functions have the same name, words"):
        Grader(GRPOConfig(), "correct", [words, words])
