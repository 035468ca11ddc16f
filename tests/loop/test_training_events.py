"""The order of what follows a step."""

from unittest.mock import Mock

from grpo_eqx import GRPOConfig
from grpo_eqx.checkpoint.checkpoints import Checkpoints
from grpo_eqx.evaluation.in_training import TrainingEvaluations
from grpo_eqx.loop.callbacks import RunView
from grpo_eqx.loop.training_events import TrainingEvents
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.tracking.run_record import RunRecord
from grpo_eqx.tracking.stages import Stages
from grpo_eqx.training.state import TrainState


def events(calls: Mock, *, saves: bool) -> TrainingEvents:
    run, evaluations = Mock(spec=RunView), Mock(spec=TrainingEvaluations)
    evaluations.are_due.return_value = False
    record, checkpoints = Mock(spec=RunRecord), Mock(spec=Checkpoints, saves=saves)
    checkpoints.after_step.return_value = None
    calls.attach_mock(record.sync, "sync")
    calls.attach_mock(checkpoints.after_step, "after_step")
    run.cfg = GRPOConfig(steps=2)
    state = TrainState(Mock(spec=CausalLM), None, step=1)
    return TrainingEvents(
        run, lambda: state, (), evaluations, record, checkpoints, Mock(spec=Stages), Mock()
    )


def test_a_step_is_saved_once_its_records_are_on_the_disk() -> None:
    calls = Mock()
    events(calls, saves=True).evaluate_and_save({})
    assert [name for name, *_ in calls.mock_calls] == ["sync", "after_step"]


def test_a_step_that_is_not_saved_does_not_wait_for_them() -> None:
    calls = Mock()
    events(calls, saves=False).evaluate_and_save({})
    assert [name for name, *_ in calls.mock_calls] == ["after_step"]
