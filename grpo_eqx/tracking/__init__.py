"""Records of a run: trackers, the run folder, the console and the learning curve."""

from grpo_eqx.tracking.plots.learning_curve import plot_learning_curve as plot_learning_curve
from grpo_eqx.tracking.run_folder import RunFolder as RunFolder
from grpo_eqx.tracking.trackers import JsonlTracker as JsonlTracker
from grpo_eqx.tracking.trackers import TensorBoardTracker as TensorBoardTracker
from grpo_eqx.tracking.trackers import Tracker as Tracker
from grpo_eqx.tracking.trackers import WandbTracker as WandbTracker
