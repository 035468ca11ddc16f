"""One process of a short run in an environment; writes what came of it.

python acting_worker.py MODEL OUT
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from noted_run import fit_and_note

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.environments import Environment, Step


class Echo(Environment):
    """Answers each turn, some later than others, as often as the seed says."""

    def reset(self, seed: int) -> str:
        if seed % 11 == 3:
            raise OSError("no container")
        self.left = seed % 4
        return f"Say {seed} words."

    async def step(self, text: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(0.01 * (len(text) % 3))
        self.left -= 1
        reward = len(set(text)) / 10
        if self.left < 0:
            return Step(reward=reward, done=True)
        return Step(f"{len(text)} letters. More!", reward=reward)


def seen(environments: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Rewards that depend on what the environments of this process hold."""
    pairs = zip(environments, completions, strict=True)
    return [environment.left + len(messages) / 8 for environment, messages in pairs]


def main(model: str, out: Path) -> None:
    cfg = GRPOConfig(
        model=model, output_dir=out / "run", chat_template=str(out / "template"), steps=2,
        prompts_per_step=8, num_generations=4, max_completion_length=120, learning_rate=1e-3,
        eval_problems=13, eval_steps=1, stop_strings=("e", "a"), max_prompt_length=128, seed=6,
        log_completions_steps=0, start_timeout=120.0, resume="never", data="word_problems",
    )  # fmt: skip
    trainer = GRPOTrainer(
        cfg, environment_factory=Echo, reward_funcs=seen, eval_metrics={"seen": seen}
    )
    fit_and_note(trainer, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
