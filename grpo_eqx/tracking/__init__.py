"""Records of a run: trackers, the run folder, the console, the learning curve, the diagnosis."""

from grpo_eqx.tracking.diagnosis import Finding as Finding
from grpo_eqx.tracking.diagnosis import Rule as Rule
from grpo_eqx.tracking.diagnosis import diagnose as diagnose
from grpo_eqx.tracking.plots.learning_curve import plot_learning_curve as plot_learning_curve
from grpo_eqx.tracking.recorded_run import RecordedRun as RecordedRun
from grpo_eqx.tracking.run_folder import RunFolder as RunFolder
from grpo_eqx.tracking.trackers import JsonlTracker as JsonlTracker
from grpo_eqx.tracking.trackers import TensorBoardTracker as TensorBoardTracker
from grpo_eqx.tracking.trackers import Tracker as Tracker
from grpo_eqx.tracking.trackers import WandbTracker as WandbTracker
