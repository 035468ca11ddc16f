"""What waiting for tools costs: the time of a step with instantaneous and with slow ones.

    python benchmarks/tool_waits.py

64 completions of four turns by the embedded model, each of which waits three times. Settings take
turns, round by round; the table has medians, and the bound that the time of a step without waits
gives: 1.3 of it and one wait, or 1.5 of it and the longest. Run it alone on the machine.
"""

import asyncio
import dataclasses
import itertools
import random
import statistics
import tempfile
from pathlib import Path

import tyro

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.data.word_problems import WordProblems
from grpo_eqx.environments import Environment, Step

NUM_TURNS = 4
PROBLEMS = WordProblems("train", size=10_000, seed=0)
NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waits:
    """How to measure."""

    rounds: int = 2
    """Runs of each kind."""
    steps: int = 6
    """Steps of a run, of which the first two are left out."""
    max_completion_length: int = 256
    """Tokens of a completion."""
    max_num_seqs: int | None = None
    """Completions at a time."""


class Quizmaster(Environment):
    """Asks again until the last turn, after a wait."""

    shortest, longest = 0.0, 0.0

    def reset(self, seed: int) -> str:
        self.num_turns, self.random = 0, random.Random(next(NUMBERS))
        return PROBLEMS.problem(seed).question

    async def step(self, text: str) -> Step:  # type: ignore[override]
        self.num_turns += 1
        if self.num_turns == NUM_TURNS:
            return Step(done=True, reward=float(len(text) % 2))
        await asyncio.sleep(self.random.uniform(self.shortest, self.longest))
        return Step("Are you sure? Show each line again.")


def main(cfg: Waits) -> None:
    waits = {"none": (0.0, 0.0), "0.5 s": (0.5, 0.5), "0 to 2 s": (0.0, 2.0)}
    times: dict[str, list[float]] = {name: [] for name in waits}
    idle: dict[str, list[float]] = {name: [] for name in waits}
    for _ in range(cfg.rounds):
        for name, bounds in waits.items():
            steps = run(cfg, *bounds)
            times[name] += [each["step_time"] for each in steps]
            idle[name] += [each["time/tools/wait_s"] for each in steps]
    without = statistics.median(times["none"])
    print("\n| waits | step | nothing decoded | over no waits | bound |")
    print("|---|---|---|---|---|")
    for name, (_, longest) in waits.items():
        step, wait = (statistics.median(x[name]) for x in (times, idle))
        bound = {"0.5 s": 1.3, "0 to 2 s": 1.5}.get(name, 1.0) * without + longest
        print(f"| {name} | {step:.2f} s | {wait:.2f} s | {step / without:.2f} | {bound:.2f} s |")


def run(cfg: Waits, shortest: float, longest: float) -> list[dict[str, float]]:
    """Trains with environments that wait; returns the metrics of the steps that count."""
    Quizmaster.shortest, Quizmaster.longest = shortest, longest
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            steps=cfg.steps, prompts_per_step=8, num_generations=8, eval_problems=8,
            max_completion_length=cfg.max_completion_length, max_num_seqs=cfg.max_num_seqs,
            output_dir=Path(folder) / "run", log_completions_steps=0,
        )  # fmt: skip
        history = GRPOTrainer(settings, environment_factory=Quizmaster).fit().history
    return [dict(each) for each in history[2:]]


if __name__ == "__main__":
    main(tyro.cli(Waits))
