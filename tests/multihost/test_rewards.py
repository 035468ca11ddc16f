"""A reward function that fails on one host."""

from typing import Any

import pytest


@pytest.mark.slow
def test_all_hosts_drop_the_same_completions_and_count_the_same_share(pod: Any) -> None:
    for outcome in pod.run("reward_worker.py", [2, 2]).values():
        assert outcome.code == 0, outcome.output
