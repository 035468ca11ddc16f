"""A run whose reward function does what the variable FAULT says, at its third call.

The run has then saved two steps.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import jax

from grpo_eqx import GRPOConfig, GRPOTrainer, cli


def hang() -> None:
    threading.Event().wait()


def hang_in_c() -> None:
    """Keeps Python's other threads from running."""
    ctypes.PyDLL(None).sleep(1000)


def fail() -> None:
    raise ValueError("the judge is broken")


FAULTS: dict[str, Callable[[], None]] = {"hang": hang, "hang_in_c": hang_in_c, "fail": fail}


class Reward:
    """The length of a completion, until it is to be faulty."""

    __name__ = "length"

    def __init__(self, fault: str):
        self.name, _, self.only = fault.partition("_on_")
        self.calls = 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        faulty = self.calls >= 3 and self.only in ("", str(jax.process_index()))
        if self.name.startswith("extreme"):
            return self._extreme(completions, faulty)
        if faulty:
            FAULTS[self.name]()
        return [float(len(text)) for text in completions]

    def _extreme(self, completions: list[str], faulty: bool) -> list[float]:
        """Rewards beyond the range of float32: once, or from now on."""
        faulty = faulty and (self.name == "extreme" or self.calls == 3)
        return [1e39 * (i % 2) if faulty else float(len(x)) for i, x in enumerate(completions)]


def train(cfg: GRPOConfig) -> None:
    GRPOTrainer(cfg, reward_funcs=[Reward(os.environ["FAULT"])]).fit()


cli.run(train)
