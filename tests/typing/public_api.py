"""A user's script that imports public names only: what a type checker must accept.

    mypy --strict tests/typing/public_api.py

It also runs: with `python`, it trains for two steps.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_eqx import (
    Callback,
    Evaluation,
    Event,
    FitResult,
    GRPOConfig,
    GRPOTrainer,
    Response,
    UserError,
    recipes,
)
from grpo_eqx.data import Prompt, PromptSource
from grpo_eqx.loss_backends import LossBackend, TokenStats
from grpo_eqx.planner import Plan
from grpo_eqx.rewards import gsm8k
from grpo_eqx.tracking import RecordedRun, Tracker, diagnose


def brief(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """1 for an empty completion, and less for longer ones."""
    return [1.0 - min(len(text), 200) / 200 for text in completions]


async def judged(
    completions: Sequence[str], *, answer: Sequence[Any], **columns: object
) -> list[float | None]:
    """As a slow judge would be called; it does not apply to problems without an answer."""
    return [
        None if gold is None else float(str(gold) in text)
        for text, gold in zip(completions, answer, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Sums(PromptSource):
    """Sums of two numbers."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        a, b = divmod((self.first + index) * 7919 % 10_000, 100)
        return Prompt(f"What is {a} plus {b}?", {"answer": a + b})


class StopWhenSolved(Callback):
    def on_step_end(self, event: Event) -> Response | None:
        reward = event.metrics["reward"]
        return Response(metrics={"distance": 1 - reward}, stop="solved" if reward == 1 else None)

    def on_save(self, event: Event) -> None:
        print(event.checkpoint)


class Lines(Tracker):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append(f"{step} {metrics.get('reward', 0.0):.2f}")

    def finish(self) -> None:
        print("\n".join(self.lines))


class PlainLoss(LossBackend):
    def token_stats(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: float | Float[Array, ""],
        mesh: jax.sharding.Mesh | None,
        softcap: float | None,
    ) -> TokenStats:
        logits = hidden.astype(jnp.float32) @ head.T
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        logprobs = jax.nn.log_softmax(logits / temperature)
        return TokenStats(
            logps=jnp.take_along_axis(logprobs, ids[..., None], axis=-1)[..., 0],
            entropies=-jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1),
            logsumexps=jax.nn.logsumexp(logits / temperature, axis=-1),
        )


def main(folder: Path) -> None:
    config: GRPOConfig = recipes.dr_grpo(
        steps=2,
        prompts_per_step=4,
        num_generations=4,
        max_completion_length=8,
        eval_problems=8,
        reward_weights=(1.0, 0.1, 0.5),
        output_dir=folder / "run",
    )
    trainer = GRPOTrainer(
        config,
        reward_funcs=[gsm8k.correct, brief, judged],
        train_data=Sums(0, 9000),
        eval_data=Sums(9000, 10_000),
        loss_backend=PlainLoss(),
        trackers=[Lines()],
        callbacks=[StopWhenSolved()],
    )
    plan: Plan = trainer.plan("local")
    print(plan.fits)
    result: FitResult = trainer.fit()
    rewards: list[float] = [metrics["reward"] for metrics in result.history]
    evaluation: Evaluation = trainer.evaluate(temperature=1.0, num_samples=2)
    accuracy: float = evaluation.accuracy
    texts: list[str] = trainer.generate(["What is 2 plus 3?"])
    trainer.save_pretrained(folder / "model")
    print(rewards, accuracy, evaluation.pass_at(2), texts, result.output_dir, result.stopped)
    run = RecordedRun.read(result.output_dir)
    for finding in diagnose(run.settings, run.steps, run.evaluations, num_devices=run.num_devices):
        print(finding)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        try:
            main(Path(name))
        except UserError as error:
            raise SystemExit(str(error)) from error
