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
