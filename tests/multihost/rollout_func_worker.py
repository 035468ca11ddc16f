"""One process of a short run whose completions a function makes; writes what came of it.

python rollout_func_worker.py MODEL OUT FUNCTION
"""

import sys
from pathlib import Path
from typing import Any

import jax
from noted_run import fit_and_note

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.environments import RolloutFunc, RolloutTrainer


def goes_on(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
    """Completions of two turns each, with two tokens between them."""
    assert jax.process_index() == 0
    first = trainer.generate(prompts)
    between = first[0]["prompt_ids"][:2]
    begun = [own["completion_ids"][:20] + between for own in first]
    # Out of order, and not a whole batch at a time.
    odd, even = (trainer.generate(prompts[n::2], begun[n::2]) for n in (1, 0))
    second = [(odd if n % 2 else even)[n // 2] for n in range(len(prompts))]
    pairs = list(zip(first, second, strict=True))
    return {
        "prompt_ids": [a["prompt_ids"] for a, _ in pairs],
        "completion_ids": [
            own + b["completion_ids"] for own, (_, b) in zip(begun, pairs, strict=True)
        ],
        "logprobs": [a["logprobs"][:20] + [0.0, 0.0] + b["logprobs"] for a, b in pairs],
        "env_mask": [
            [1] * len(a["logprobs"][:20]) + [0, 0] + [1] * len(b["logprobs"]) for a, b in pairs
        ],
        "letters": [len(set(a["text"] + b["text"])) for a, b in pairs],
    }


def fails(prompts: list[Any], trainer: RolloutTrainer) -> dict[str, Any]:
    """Fails after it has generated."""
    trainer.generate(prompts[:8])
    raise ValueError("no such page")


def told(letters: list[int], **columns: Any) -> list[float]:
    return [number / 10 for number in letters]


def main(model: str, out: Path, func: RolloutFunc) -> None:
    cfg = GRPOConfig(
        model=model, output_dir=out / "run", steps=2, prompts_per_step=8, num_generations=4,
        max_completion_length=60, learning_rate=1e-3, eval_problems=13, eval_steps=1,
        stop_strings=("e", "a"), max_prompt_length=128, seed=6, log_completions_steps=0,
        start_timeout=120.0, resume="never", data="word_problems",
    )  # fmt: skip
    trainer = GRPOTrainer(
        cfg, rollout_func=func, reward_funcs=told, eval_func=told, eval_metrics={"told": told}
    )
    fit_and_note(trainer, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), {"goes_on": goes_on, "fails": fails}[sys.argv[3]])
