"""One process of a short run whose completions agents make; writes what came of it.

python harness_worker.py MODEL OUT AGENT
"""

import sys
from pathlib import Path
from typing import Any

import jax
import openai
from noted_run import fit_and_note

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.environments import Harness, HarnessEndpoint


def asks_twice(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
    """Asks again after the first answer, and begins anew where that is long."""
    assert jax.process_index() == 0
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=300)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    letters = set[str]()
    for n in range(2):
        made = client.chat.completions.create(
            model=endpoint.model, messages=messages, max_tokens=20
        )
        text = made.choices[0].message.content or ""
        letters |= set(text)
        answer = {"role": "assistant", "content": text}
        messages = [*messages, answer, {"role": "user", "content": f"{n}"}]
        if len(text) > 30:
            messages = [{"role": "user", "content": "Again."}]
    return len(letters) / 10


def fails(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
    """Fails after it was answered."""
    asks_twice(endpoint, row)
    raise ValueError("no such page")


def main(model: str, out: Path, harness: Harness) -> None:
    cfg = GRPOConfig(
        model=model, output_dir=out / "run", steps=2, prompts_per_step=8, num_generations=4,
        max_completion_length=60, learning_rate=1e-3, eval_problems=13, eval_steps=1,
        max_prompt_length=128, seed=6, log_completions_steps=0,
        start_timeout=120.0, resume="never", data="word_problems",
    )  # fmt: skip
    fit_and_note(GRPOTrainer(cfg, harness=harness), out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), {"asks_twice": asks_twice, "fails": fails}[sys.argv[3]])
