"""The places of a run where evaluations are made, checkpoints saved and callbacks called."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_eqx.checkpoint.checkpoints import Checkpoints
from grpo_eqx.distributed.exchange import from_main
from grpo_eqx.evaluation.in_training import SECONDS, TrainingEvaluations
from grpo_eqx.loop.callback_calls import CallbackCalls, EventName, Heard
from grpo_eqx.loop.callbacks import Callback, Event, RunView
from grpo_eqx.tracking.run_record import RunRecord
from grpo_eqx.tracking.stages import Stages
from grpo_eqx.training.state import TrainState


class TrainingEvents:
    """Sequence of what `fit` does besides steps, the same in all processes.

    After each step: callbacks, the record, an evaluation if one is due, a checkpoint if that is. A
    resumed run makes the evaluation of its last step first, if it ended before that.
    """

    def __init__(
        self,
        run: RunView,
        state: Callable[[], TrainState],
        callbacks: Sequence[Callback],
        evaluations: TrainingEvaluations,
        record: RunRecord,
        checkpoints: Checkpoints,
        stages: Stages,
        on_progress: Callable[[str], None],
    ):
        """**Arguments:**

        - `run`: what callbacks may see of the run.
        - `state`: returns the state as it is now.
        - `callbacks`: the callbacks, in their order.
        - `evaluations`, `record`, `checkpoints`: those of the run.
        - `stages`: shows which long work is being done.
        - `on_progress`: called with what has been done.
        """
        self._run, self._state = run, state
        self._evaluations = evaluations
        self._record = record
        self._checkpoints = checkpoints
        self._stages, self._on_progress = stages, on_progress
        self._callbacks = CallbackCalls(callbacks)
        self._stopped: str | None = None

    @property
    def _step(self) -> int:
        return self._state().step

    @property
    def ends(self) -> bool:
        """Whether no more steps are made: all are done, or a callback has ended the run."""
        return self._step >= self._run.cfg.steps or self._stopped is not None

    def begin(self) -> None:
        """Tells callbacks that training begins, and runs an evaluation that is missing."""
        self._tell("on_train_begin")
        planned, names = self._evaluations.are_due(self._step), self._evaluations.metric_names
        ends = self.ends and self._evaluations.are_due(self._step, ends=True)
        if (planned or ends) and not from_main(self._record.has_evaluation(self._step, names)):
            self._evaluate()
            if self._checkpoints.stops:  # whatever there is to save is saved
                self._checkpoints.stop(self._step)

    def step_ended(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Tells callbacks the metrics of a step, and returns what they log."""
        return self._tell("on_step_end", metrics).metrics

    def evaluate_and_save(self, metrics: Mapping[str, float]) -> float:
        """Makes what is due after a step.

        **Arguments:**

        - `metrics`: metrics of the step.

        **Returns:** the seconds that evaluations took. Raises `Preempted` where the run was asked
        to end.
        """
        evaluated: Mapping[str, float] = {}
        is_due = self._evaluations.are_due(self._step, ends=self.ends)
        if is_due and not self._checkpoints.stops:  # else the resumed run makes it
            evaluated = self._evaluate()
        if self._stopped is not None:
            self._checkpoints.save_next()
        if self._checkpoints.saves:  # whose step has all of its records
            self._record.sync()
        saved = self._checkpoints.after_step(self._state(), {**metrics, **evaluated})
        if saved is not None and self._callbacks.wants("on_save"):
            self._checkpoints.wait()
            self._tell("on_save", checkpoint=saved)
        return evaluated.get(SECONDS, 0.0)

    def ended(self) -> str | None:
        """Tells callbacks that training has ended; returns which of them ended it, and why."""
        if self._stopped is not None:
            self._record.stopped(self._step, self._stopped)
        self._tell("on_train_end")
        return self._stopped

    def _evaluate(self) -> Mapping[str, float]:
        """Evaluates the model, and records that; returns nothing where it was interrupted."""
        step = self._step
        model, interrupted = self._state().model, self._checkpoints.are_interrupted
        with self._stages.lasting(self._evaluations.describe(step)):
            made = self._evaluations.make(model, step, self._on_progress, interrupted)
        if made is None:
            return {}
        for evaluation in made.evaluations:
            self._record.note(f"after step {step}: {evaluation}")
        metrics = {**made.metrics, **self._tell("on_evaluate", made.metrics).metrics}
        self._record.evaluation(step, metrics)
        return metrics

    def _tell(
        self,
        name: EventName,
        metrics: Mapping[str, float] | None = None,
        checkpoint: Path | None = None,
    ) -> Heard:
        event = Event(
            step=self._step,
            metrics={} if metrics is None else metrics,
            history=tuple(self._record.history),
            evaluations=tuple(self._record.evaluations),
            run=self._run,
            model=self._state().model,
            checkpoint=checkpoint,
        )
        heard = self._callbacks(name, event)
        if self._step < self._run.cfg.steps:  # else it has ended by itself
            self._stopped = self._stopped or heard.stop
        return heard
