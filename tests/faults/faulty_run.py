"""A run that does what the variable FAULT says in its third step, when two are saved."""

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable
from typing import Any

import jax

from grpo_eqx import GRPOConfig, GRPOTrainer, cli
from grpo_eqx.training.state import TrainState


def hang() -> None:
    threading.Event().wait()


def hang_in_c() -> None:
    """Keeps Python's other threads from running."""
    ctypes.PyDLL(None).sleep(1000)


def compute_in_c() -> None:
    """Stays in C for minutes, as compiling does: meanwhile no handler of a signal is called."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


FAULTS: dict[str, Callable[[], None]] = {
    "hang": hang, "hang_in_c": hang_in_c, "compute_in_c": compute_in_c,
}  # fmt: skip


class Reward:
    """The length of a completion, until it is to be faulty."""

    __name__ = "length"

    def __init__(self, name: str, here: bool):
        self.name, self.here = name, here
        self.calls = -1  # the first is a trial, before any step

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        faulty = self.here and self.calls >= 3
        if self.name.startswith("extreme"):
            return self._extreme(completions, faulty)
        if faulty and self.name in FAULTS:
            FAULTS[self.name]()
        return [float(len(text)) for text in completions]

    def _extreme(self, completions: list[str], faulty: bool) -> list[float]:
        """Rewards beyond the range of float32: once, or from now on."""
        faulty = faulty and (self.name == "extreme" or self.calls == 3)
        return [1e39 * (i % 2) if faulty else float(len(x)) for i, x in enumerate(completions)]


def crash(trainer: GRPOTrainer) -> None:
    """Has the trainer meet a bug in its third step."""
    collect = trainer.rollouts.next

    def crashing(state: TrainState, *others: Any) -> Any:
        if state.step == 2:
            raise ValueError("a bug")
        return collect(state, *others)

    trainer.rollouts.next = crashing  # type: ignore[method-assign]


def train(cfg: GRPOConfig) -> None:
    name, _, only = os.environ["FAULT"].partition("_on_")
    here = only in ("", str(jax.process_index()))
    trainer = GRPOTrainer(cfg, reward_funcs=[Reward(name, here)])
    if name == "crash" and here:
        crash(trainer)
    trainer.fit()
    while name == "evaluate_for_ever":
        print("evaluating", flush=True)
        trainer.evaluate()


cli.run(train)
