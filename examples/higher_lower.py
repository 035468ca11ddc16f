"""Teaches a small model to guess a number in few turns, and shows what it learned.

python examples/higher_lower.py
"""

import dataclasses
import random
from pathlib import Path

from grpo_eqx import GRPOConfig, GRPOTrainer, cli
from grpo_eqx.distributed import is_main
from grpo_eqx.environments import Environment, Step

LARGEST = 15
GUESSES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class HigherLowerConfig(GRPOConfig):
    """Settings of the example."""

    model: str = str(Path(__file__).parent / "tiny_agent")
    output_dir: Path | None = Path("runs/higher_lower")
    steps: int = 60
    prompts_per_step: int = 16
    num_generations: int = 8
    learning_rate: float = 3e-4
    max_prompt_length: int = 64
    max_completion_length: int | None = 96


class HigherLower(Environment):
    """The model guesses a number, and is told whether it is higher or lower."""

    def reset(self, seed: int) -> str:
        self.number, self.num_guesses = random.Random(seed).randint(1, LARGEST), 0
        return f"Guess my number, from 1 to {LARGEST}. You have {GUESSES} guesses."

    def step(self, text: str) -> Step:
        self.num_guesses += 1
        if text == str(self.number):
            return Step(reward=1.0, done=True)
        if not text.isdecimal() or self.num_guesses == GUESSES:
            return Step(done=True)
        return Step("Higher." if int(text) < self.number else "Lower.")


def main(cfg: HigherLowerConfig) -> None:
    """Teach a small model to guess a number in few turns, with GRPO."""
    trainer = GRPOTrainer(cfg, environment_factory=HigherLower)
    before = trainer.evaluate(temperature=1.0).accuracy
    result = trainer.fit()
    after = trainer.evaluate(temperature=1.0).accuracy
    if is_main():
        print(f"games won before: {before:.3f}, after: {after:.3f}, in {result.seconds:.0f} s")


if __name__ == "__main__":
    cli.run(main)
