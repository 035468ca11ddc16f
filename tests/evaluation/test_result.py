"""pass@1, pass@k and maj@k, and how they are reported."""

from itertools import combinations

import numpy as np
import pytest

from grpo_eqx import Evaluation

SOLVED = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]], bool)
VOTED = np.array([True, False, True, False])


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
    scores = {"words": np.array([[2.0, np.nan, 4.0, 3.0], [1.0] * 4, [np.nan] * 4, [2.0] * 4])}
    evaluation = Evaluation(SOLVED, SOLVED, VOTED, scores, temperature=0.7)
    assert str(evaluation) == (
        "43.8% (14.3-78.4) correct on 4 problems, 4 completions each, at temperature 0.7; "
        "pass@4 75.0% (30.1-95.4); maj@4 50.0% (15.0-85.0); "
        "strict pass@1 43.8% (14.3-78.4); strict pass@4 75.0% (30.1-95.4); "
        "words 2 (0.8684 to 3.132)"
    )
    greedy = Evaluation(SOLVED[:, :1])
    assert str(greedy) == "50.0% (15.0-85.0) correct on 4 problems, greedy"


def test_its_metrics_say_how_it_was_sampled() -> None:
    evaluation = Evaluation(np.array([[True, False], [False, False]]), temperature=0.7)
    metrics = evaluation.metrics()
    assert metrics["eval/temperature_0.7/pass@1"] == 0.25
    assert metrics["eval/temperature_0.7/pass@2"] == 0.5
    assert metrics["eval/num_problems"] == 2
    for name in ("pass@1", "pass@2"):
        low, value, high = (
            metrics[f"eval/temperature_0.7/{name}{end}"] for end in ("/ci_low", "", "/ci_high")
        )
        assert low < value < high
    assert set(Evaluation(np.array([[True]])).metrics()) == {
        "eval/greedy/pass@1", "eval/greedy/pass@1/ci_low", "eval/greedy/pass@1/ci_high",
        "eval/num_problems",
    }  # fmt: skip


def test_evaluations_of_parts_are_joined_to_that_of_the_whole() -> None:
    scores = {"words": np.arange(16.0).reshape(4, 4)}
    whole = Evaluation(SOLVED, ~SOLVED, VOTED, scores, 1.0)
    parts = [
        Evaluation(SOLVED[at], ~SOLVED[at], VOTED[at], {"words": scores["words"][at]}, 1.0)
        for at in (slice(0, 3), slice(3, 4))
    ]
    assert parts[0].joined(parts[1]).metrics() == whole.metrics()
