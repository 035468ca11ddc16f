"""Generation: where completions come from, and the engine on the run's own devices."""

from grpo_eqx.generation.engine import generate as generate
from grpo_eqx.generation.local_sampler import LocalSampler as LocalSampler
from grpo_eqx.generation.options import SamplerOptions as SamplerOptions
from grpo_eqx.generation.sampler import PendingSamples as PendingSamples
from grpo_eqx.generation.sampler import Sampled as Sampled
from grpo_eqx.generation.sampler import Sampler as Sampler
from grpo_eqx.generation.sampler import SamplingCounts as SamplingCounts
from grpo_eqx.generation.sampling import Sampling as Sampling
from grpo_eqx.generation.slots import SlotCounts as SlotCounts
from grpo_eqx.generation.stopping import Stopping as Stopping
