"""pass@1 and pass@k."""

from itertools import combinations

import numpy as np
import pytest

from grpo_eqx import Evaluation

SOLVED = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]], bool)


def test_accuracy_is_the_share_of_right_completions() -> None:
    assert Evaluation(SOLVED).accuracy == 7 / 16 == Evaluation(SOLVED).pass_at(1)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(k: int) -> None:
    chosen = [SOLVED[:, list(c)].any(axis=1).mean() for c in combinations(range(4), k)]
    assert Evaluation(SOLVED).pass_at(k) == pytest.approx(np.mean(chosen))


def test_k_beyond_the_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="1 <= k <= 4"):
        Evaluation(SOLVED).pass_at(5)


def test_it_prints_as_a_sentence() -> None:
    assert str(Evaluation(SOLVED)) == (
        "43.8% correct on 4 problems, 4 completions each; pass@4 75.0%"
    )
    assert str(Evaluation(SOLVED[:, :1])) == "50.0% correct on 4 problems"


def test_its_metrics_say_how_it_was_sampled() -> None:
    evaluation = Evaluation(np.array([[True, False], [False, False]]))
    assert evaluation.metrics(0.7) == {
        "eval/temperature_0.7/pass@1": 0.25,
        "eval/temperature_0.7/pass@2": 0.5,
        "eval/num_problems": 2.0,
    }
    assert set(Evaluation(np.array([[True]])).metrics(0.0)) == {
        "eval/greedy/pass@1", "eval/num_problems"
    }  # fmt: skip
