"""The embedded problems: right, repeatable, and held out for real."""

import re

import numpy as np
import pytest

from grpo_eqx.data.word_problems import WordProblems
from grpo_eqx.rewards import gsm8k

TRAIN = WordProblems("train", size=3000)
HELDOUT = WordProblems("heldout", size=600)


def test_every_solution_is_right_line_by_line() -> None:
    for index in range(len(HELDOUT)):
        prompt = HELDOUT[index]
        *lines, last = prompt.columns["answer"].splitlines()
        for line in lines:
            calculation, result = line.split("=")
            left, op, right = re.fullmatch(r"(\d+)([-+*/])(\d+)", calculation).groups()
            value = {"+": int(left) + int(right), "-": int(left) - int(right),
                     "*": int(left) * int(right), "/": int(left) / int(right)}[op]  # fmt: skip
            assert value == int(result)
        assert last == f"#### {result}"
        assert int(result) >= 0


def test_one_to_three_steps_of_several_templates() -> None:
    problems = [TRAIN.problem(i) for i in range(500)]
    assert {len(problem.steps) for problem in problems} == {1, 2, 3}
    assert len({problem.template for problem in problems}) >= 8


def test_a_problem_is_a_pure_function_of_its_index() -> None:
    again = WordProblems("train", size=10)
    assert [again[i] for i in range(10)] == [TRAIN[i] for i in range(10)]
    other = WordProblems("train", size=10, seed=1)
    assert [other[i] for i in range(10)] != [TRAIN[i] for i in range(10)]


def test_no_held_out_combination_of_numbers_is_trained_on() -> None:
    def combinations(source: WordProblems) -> set[object]:
        problems = (source.problem(i) for i in range(len(source)))
        return {(problem.template, problem.steps) for problem in problems}

    assert not combinations(TRAIN) & combinations(HELDOUT)


def test_gold_solutions_earn_the_reward_and_wrong_ones_do_not() -> None:
    prompts = [HELDOUT[i] for i in range(len(HELDOUT))]
    gold = [prompt.columns["answer"] for prompt in prompts]
    texts = [prompt.text for prompt in prompts]
    assert set(gsm8k.correct(texts, gold, answer=gold)) == {1.0}
    slipped = []
    for i in range(len(HELDOUT)):
        problem = HELDOUT.problem(i)
        lines = problem.solve([0] * (len(problem.steps) - 1) + [1])
        slipped.append("\n".join([*lines, "#### " + lines[-1].split("=")[1]]))
    assert set(gsm8k.correct(texts, slipped, answer=gold)) == {0.0}


def test_indices_outside_are_refused() -> None:
    for index in (-1, 3000):
        with pytest.raises(IndexError):
            TRAIN[index]


def test_answers_are_spread_out() -> None:
    answers = [TRAIN.problem(i).answer for i in range(1000)]
    most_common = np.bincount(answers).max() / len(answers)
    assert most_common < 0.05
