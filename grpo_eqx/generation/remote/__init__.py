"""Generation on servers of other engines, which are sent the weights."""

from grpo_eqx.generation.remote.sampler import RemoteOptions as RemoteOptions
from grpo_eqx.generation.remote.sampler import RemoteSampler as RemoteSampler
from grpo_eqx.generation.remote.seeds import request_seed as request_seed
