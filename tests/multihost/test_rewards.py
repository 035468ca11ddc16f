"""Reward functions that fail on one host, or log on each."""

from typing import Any

import pytest


@pytest.mark.slow
def test_all_hosts_drop_the_same_completions_and_have_what_each_has_logged(pod: Any) -> None:
    for outcome in pod.run("reward_worker.py", [2, 2]).values():
        assert outcome.code == 0, outcome.output
