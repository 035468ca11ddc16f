"""Trackers: one object per destination of metrics."""

from grpo_eqx.tracking.trackers.base import CompletionsTable as CompletionsTable
from grpo_eqx.tracking.trackers.base import Tracker as Tracker
from grpo_eqx.tracking.trackers.jsonl import JsonlTracker as JsonlTracker
from grpo_eqx.tracking.trackers.tensorboard import TensorBoardTracker as TensorBoardTracker
from grpo_eqx.tracking.trackers.wandb import WandbTracker as WandbTracker
