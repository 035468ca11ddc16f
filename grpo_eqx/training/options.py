"""Options of the device programs."""

import dataclasses

import jax.numpy as jnp

from grpo_eqx.choices import Remat
from grpo_eqx.generation import Sampling, Stopping
from grpo_eqx.models.causal_attention import CausalAttention
from grpo_eqx.objective import Objective
from grpo_eqx.sharding.rollout_sharding import LegacySharding, RolloutSharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """Options of the programs, besides their arrays."""

    sampling: Sampling
    max_prompt_length: int
    """Tokens of the longest prompt that is trained on."""
    max_completion_length: int
    stopping: Stopping
    pad_id: int
    seed: int
    dtype: jnp.dtype
    rollout_dtype: jnp.dtype | None = None
    """Dtype of the weights in `generate`. `None`: `dtype`, in which int8 ones compute too."""
    kv_cache_dtype: jnp.dtype | None = None
    """Dtype of keys and values in `generate`. `None`: the one in which it computes."""
    kv_head_multiple: int = 1
    """Multiple up to which zeros follow each head of stored keys and values."""
    max_num_seqs: int | None = None
    """Completions that `generate` decodes at a time, across all devices. `None`: all."""
    decodes_on_cpu: bool = False
    """Whether `generate` transposes the weights and is `unrolled`, as CPUs decode fastest."""
    router_replay: bool = False
    """Whether rollouts hold the experts that the sampler's routers chose, for the policy to use."""
    remat: Remat
    rollout_sharding: RolloutSharding = dataclasses.field(default_factory=LegacySharding)
    attention: CausalAttention
    """Attention over whole sequences; decoding attends to its cache by other means."""
    objective: Objective
    mask_truncated_completions: bool = False
    top_entropy_quantile: float = 1.0
    micro_batch_size_per_device: int | None = None
    tokens_per_micro_batch: int
    """Tokens that a device processes at a time where the size of micro-batches is not given."""
    row_multiple: int = 1
    """Divisor of the number of tokens in a row of `score` and `update`."""

    @property
    def sampling_dtype(self) -> jnp.dtype:
        """Dtype in which `generate` computes."""
        dtype = self.rollout_dtype
        return self.dtype if dtype is None or dtype == jnp.int8 else dtype

    @property
    def weight_itemsize(self) -> int:
        """Bytes of a weight in `generate`."""
        return (self.rollout_dtype or self.dtype).itemsize

    def kv_itemsize(self, head_size: int) -> float:
        """Returns the bytes in the KV cache for each element of a head.

        They include the zeros after the head, and for int8 its float32 scale.
        """
        dtype = self.sampling_dtype if self.kv_cache_dtype is None else self.kv_cache_dtype
        stored = -(-head_size // self.kv_head_multiple) * self.kv_head_multiple
        scale_bytes = 4 if dtype == jnp.int8 else 0
        return (dtype.itemsize * stored + scale_bytes) / head_size
