"""The order of what follows a step."""

from unittest.mock import Mock

from grpo_eqx.checkpoint.checkpoints import Checkpoints
from grpo_eqx.evaluation.in_training import TrainingEvaluations
from grpo_eqx.loop.training_events import TrainingEvents
from grpo_eqx.tracking.run_record import RunRecord
from grpo_eqx.tracking.stages import Stages


def events(calls: Mock, *, saves: bool) -> TrainingEvents:
    trainer, evaluations = Mock(callbacks=()), Mock(spec=TrainingEvaluations)
    evaluations.are_due.return_value = False
    record, checkpoints = Mock(spec=RunRecord), Mock(spec=Checkpoints, saves=saves)
    checkpoints.after_step.return_value = None
    calls.attach_mock(record.sync, "sync")
    calls.attach_mock(checkpoints.after_step, "after_step")
    trainer.state.step, trainer.cfg.steps = 1, 2
    return TrainingEvents(trainer, evaluations, record, checkpoints, Mock(spec=Stages), Mock())


def test_a_step_is_saved_once_its_records_are_on_the_disk() -> None:
    calls = Mock()
    events(calls, saves=True).evaluate_and_save({})
    assert [name for name, *_ in calls.mock_calls] == ["sync", "after_step"]


def test_a_step_that_is_not_saved_does_not_wait_for_them() -> None:
    calls = Mock()
    events(calls, saves=False).evaluate_and_save({})
    assert [name for name, *_ in calls.mock_calls] == ["after_step"]
