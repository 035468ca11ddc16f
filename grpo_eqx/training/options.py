"""Options of the device programs."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from grpo_eqx.common.choices import Remat
from grpo_eqx.common.shapes import Number
from grpo_eqx.generation import Sampling, Stopping
from grpo_eqx.models.causal_attention import CausalAttention
from grpo_eqx.objective import Objective
from grpo_eqx.sharding.rollout_sharding import LegacySharding, RolloutSharding
from grpo_eqx.training.optimizer import OptimizerNumbers


class UpdateNumbers(NamedTuple):
    """Numbers that are data of `update`: others compile nothing again."""

    temperature: Number
    objective: Objective
    left_out: Number | None
    """Share of the tokens, those with the lowest entropy, that the policy term leaves out."""
    optimizer: OptimizerNumbers | None
    """`None` for an optimizer that was passed, whose numbers are constants of its own."""


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
    optimizer: OptimizerNumbers | None = None
    """Numbers of the optimizer. `None`: it has constants of its own."""
    mask_truncated_completions: bool = False
    top_entropy_quantile: float = 1.0
    micro_batch_size_per_device: int | None = None
    tokens_per_micro_batch: int
    """Tokens that a device processes at a time where the size of micro-batches is not given."""
    row_multiple: int = 1
    """Divisor of the number of tokens in a row of `score` and `update`."""

    @property
    def temperature(self) -> float:
        """Divisor of the logits in training, which is that of sampling."""
        assert self.sampling.temperature is not None  # completions to train on are not greedy
        return self.sampling.temperature

    @property
    def update_numbers(self) -> UpdateNumbers:
        """Numbers that `update` takes as data."""
        keeps_all = self.top_entropy_quantile == 1
        left_out = None if keeps_all else 1 - self.top_entropy_quantile
        return UpdateNumbers(self.temperature, self.objective, left_out, self.optimizer)

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
