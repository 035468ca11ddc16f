"""Evaluations that a run makes while it trains."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

from grpo_eqx.common.errors import UserError
from grpo_eqx.evaluation.evaluator import Draws, Evaluator
from grpo_eqx.evaluation.result import Evaluation
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.tracking.stages import track_on_terminal

SECONDS = "time/eval_s"
"""Metric of an evaluation in training: its seconds."""


class Evaluated(NamedTuple):
    """Evaluations of the model after one step."""

    evaluations: tuple[Evaluation, ...]
    """Evaluation of greedy completions, then of sampled completions if the settings ask for it."""
    metrics: dict[str, float]


class TrainingEvaluations:
    """Evaluations that the settings plan: before, during and at the end of training."""

    def __init__(self, cfg: GRPOConfig, evaluator: Evaluator):
        """**Arguments:**

        - `cfg`: the resolved settings.
        - `evaluator`: makes the evaluations.

        Raises `UserError` if the held-out problems cannot be scored, or completed.
        """
        self.cfg = cfg
        self.evaluator = evaluator
        self.draws = [Draws()]
        if cfg.num_generations_eval is not None:
            assert cfg.eval_temperature is not None  # resolved
            self.draws.append(Draws(cfg.eval_temperature, cfg.num_generations_eval))
        if cfg.eval_steps is not None:
            try:
                evaluator.scorer.check_answers(evaluator.problems.prompts)
            except UserError as error:
                raise UserError(f"eval_steps is {cfg.eval_steps}: {error}") from error
            for draws in self.draws:
                evaluator.check_layout(draws)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that the evaluations record, except for their time."""
        if self.cfg.eval_steps is None:
            return []
        names = [name for draws in self.draws for name in self.evaluator.metric_names(draws)]
        return list(dict.fromkeys(names))

    def are_due(self, step: int, *, ends: bool = False) -> bool:
        """Returns whether to evaluate the model after a step.

        **Arguments:**

        - `step`: the step, 0 before the first.
        - `ends`: whether the run ends after it.
        """
        every = self.cfg.eval_steps
        if every is None:
            return False
        if step == 0:
            return self.cfg.eval_on_start or ends
        return step % every == 0 or step >= self.cfg.steps or ends

    def describe(self, step: int) -> str:
        """Describes the evaluation of the model after a step."""
        when = f"after step {step:,}" if step else "before training"
        return f"evaluating on {len(self.evaluator.problems):,} problems {when}"

    def make(
        self,
        model: CausalLM,
        step: int,
        on_progress: Callable[[str], None],
        interrupted: Callable[[], bool],
    ) -> Evaluated | None:
        """Evaluates a model; returns `None` if the evaluation was interrupted.

        **Arguments:**

        - `model`, `step`: the model, and the step after which it is evaluated.
        - `on_progress`: called with the progress, in words.
        - `interrupted`: returns whether to give up, with the same result in all processes.
        """
        began, evaluations = time.perf_counter(), list[Evaluation]()
        for number, draws in enumerate(self.draws):
            if number > 0 and interrupted():
                return None
            how = f"{draws.num_samples} samples each" if number > 0 else "greedy"
            doing = f"evaluating {'after' if step else 'before'} step {step or 1:,} ({how})"
            evaluation = self.evaluator.evaluate(
                model, step, draws, on_progress=on_progress, interrupted=interrupted,
                track=functools.partial(track_on_terminal, description=doing),
            )  # fmt: skip
            if evaluation is None:
                return None
            evaluations.append(evaluation)
        metrics = {name: x for each in evaluations for name, x in each.metrics().items()}
        metrics[SECONDS] = time.perf_counter() - began
        return Evaluated(tuple(evaluations), metrics)
