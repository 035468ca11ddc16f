"""Records of a run: trackers, the run folder, the console and the learning curve."""

from grpo_eqx.tracking.tracker import JsonlTracker as JsonlTracker
from grpo_eqx.tracking.tracker import Tracker as Tracker
from grpo_eqx.tracking.tracker import WandbTracker as WandbTracker
