"""Generation: sampling, the rollout it fills, and the engine."""

from grpo_eqx.common.prng import sample_keys as sample_keys
from grpo_eqx.generation.completions import Completions as Completions
from grpo_eqx.generation.engine import generate as generate
from grpo_eqx.generation.prompts import Prompts as Prompts
from grpo_eqx.generation.rollout import Rollout as Rollout
from grpo_eqx.generation.sampling import Sampling as Sampling
from grpo_eqx.generation.slots import SlotCounts as SlotCounts
from grpo_eqx.generation.stopping import Stopping as Stopping
