"""Callbacks: code of the user's own at fixed places of a run."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import SupportsFloat

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.evaluation.result import Evaluation
from grpo_eqx.loop.unknown_metric import unknown_metric
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.settings.config import GRPOConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunView:
    """View of a run for its callbacks: settings, and functions of the trainer."""

    cfg: GRPOConfig
    tokenizer: ChatTokenizer
    generate: Callable[..., list[str]]
    """Completes prompts with the model as it is now (`GRPOTrainer.generate`)."""
    evaluate: Callable[..., Evaluation]
    """Evaluates the model as it is now (`GRPOTrainer.evaluate`)."""
    save_pretrained: Callable[[str | Path], None]
    """Writes model and tokenizer as a folder (`GRPOTrainer.save_pretrained`)."""
    evaluation_names: Sequence[str]
    """Names of the metrics of the evaluations that `eval_steps` plans."""
    num_callbacks: int
    """Callbacks of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Moment of a run, with what is known of the run then."""

    step: int
    """Steps that are done."""
    metrics: Mapping[str, float]
    """Metrics of the step or evaluation that the event is about, with what callbacks before this
    one have logged; empty for other events."""
    history: Sequence[Mapping[str, float]]
    """Metrics of the steps that are recorded, also of those before the run was resumed."""
    evaluations: Sequence[Mapping[str, float]]
    """Metrics of the evaluations that are recorded, each with its `step`."""
    run: RunView
    """The run: its settings, and functions that complete prompts, evaluate and save."""
    model: CausalLM
    """The model after the step. The next step's update frees its arrays: copy what is kept."""
    checkpoint: Path | None = None
    """Folder of the checkpoint in `on_save`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Response:
    """Requests of a callback to its run."""

    metrics: Mapping[str, SupportsFloat] = dataclasses.field(default_factory=dict)
    """Numbers to record with those of the step or evaluation, in all trackers."""
    stop: str | None = None
    """Reason to end the run here, with a checkpoint and the model; `None`: the run goes on."""


class Callback:
    """Receiver of the events of a run. Subclass it, and override the methods that are needed.

    On several hosts each process calls its own; what process 0 responds is what all do. A run that
    is resumed has new objects: what they must remember is in the event's `history` and
    `evaluations`. An exception ends the run, which continues from its last checkpoint.
    """

    def on_train_begin(self, event: Event) -> Response | None:
        """Called before the first step of this process, which `stop` prevents; logs nothing."""

    def on_step_end(self, event: Event) -> Response | None:
        """Called after each step, before it is recorded."""

    def on_evaluate(self, event: Event) -> Response | None:
        """Called after each evaluation that `eval_steps` plans, before it is recorded."""

    def on_save(self, event: Event) -> None:
        """Called when a checkpoint is completely written, for which the run waits.

        Not called for the last checkpoint of a preempted run, which has only seconds left.
        """

    def on_train_end(self, event: Event) -> None:
        """Called after the last step, its evaluation and its checkpoint, before `model/` is there.

        Not called when the run fails or is asked to end.
        """


class EarlyStop(Callback):
    """Callback that ends a run whose metric has stopped improving.

    It decides by the recorded values alone, so a run that is resumed ends at the same step.
    """

    def __init__(
        self,
        metric: str,
        patience: int,
        *,
        greater_is_better: bool = True,
        min_improvement: float = 0.0,
    ):
        """**Arguments:**

        - `metric`: a metric of steps or of evaluations, such as `eval/greedy/pass@1`.
        - `patience`: number of values in a row without an improvement that ends the run.
        - `greater_is_better`: whether more is better.
        - `min_improvement`: how much better than the best so far a value must be.

        Raises `UserError` for a patience below 1, and for an improvement below 0. A metric that
        the run does not log ends it with one, at its first step or evaluation.
        """
        if patience != int(patience) or patience < 1:
            raise UserError(f"patience is {patience!r}: use a whole number that is at least 1.")
        if not 0 <= min_improvement < math.inf:
            raise UserError(f"min_improvement is {min_improvement!r}: it must be at least 0.")
        self.metric = metric
        self.patience = patience
        self.greater_is_better = greater_is_better
        self.min_improvement = min_improvement

    def on_train_begin(self, event: Event) -> Response | None:
        if self.metric.startswith("eval/") and not self._may_be_of_evaluations(event):
            why, names = "which no evaluation of this run logs", event.run.evaluation_names
            raise unknown_metric("metric", self.metric, why, names)
        return self._response(event)

    def on_step_end(self, event: Event) -> Response | None:
        if self.metric in event.metrics:
            return self._response(event)
        if not self._may_be_of_evaluations(event):
            known = [*event.metrics, *event.run.evaluation_names]
            raise unknown_metric("metric", self.metric, "which steps do not log", known)
        return None

    def on_evaluate(self, event: Event) -> Response | None:
        if self.metric in event.metrics:
            return self._response(event)
        if event.history and not any(
            self.metric in row for row in (*event.history, *event.evaluations)
        ):
            known = {**event.history[-1], **event.metrics}
            why = "which neither steps nor evaluations log"
            raise unknown_metric("metric", self.metric, why, known)
        return None

    def _may_be_of_evaluations(self, event: Event) -> bool:
        names = event.run.evaluation_names
        has_others = event.run.num_callbacks > 1  # which may log it
        return self.metric in names or (bool(names) and has_others)

    def _response(self, event: Event) -> Response | None:
        rows = (*event.history, *event.evaluations, event.metrics)
        values = [row[self.metric] for row in rows if self.metric in row]
        best, since = self._best(values)
        if since < self.patience:
            return None
        return Response(stop=f"{self.metric} was {best:.4g}, and no better {since} times since")

    def _best(self, values: Sequence[float]) -> tuple[float, int]:
        """Returns the best value, and how many came after it. NaN is never better."""
        best, since = math.nan, 0
        for value in values:
            gain = value - best if self.greater_is_better else best - value
            if not math.isnan(value) and (math.isnan(best) or gain > self.min_improvement):
                best, since = value, 0
            else:
                since += 1
        return best, since
