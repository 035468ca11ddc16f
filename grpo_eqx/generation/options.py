"""Options of the sampler on the run's own devices."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.generation.engine import DecodingForm
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.generation.stopping import Stopping
from grpo_eqx.models.causal_attention import CausalAttention
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rollout_sharding import LegacySharding, RolloutSharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """Options of `LocalSampler`, besides its arrays."""

    sampling: Sampling
    """Sampling in training."""
    max_prompt_length: int
    """Tokens of the longest prompt that is trained on."""
    max_completion_length: int
    stopping: Stopping
    pad_id: int
    seed: int
    dtype: jnp.dtype
    rollout_dtype: jnp.dtype | None = None
    """Dtype of the weights. `None`: `dtype`, in which int8 ones compute too."""
    kv_cache_dtype: jnp.dtype | None = None
    """Dtype of keys and values. `None`: `compute_dtype`."""
    kv_head_multiple: int = 1
    """Multiple up to which zeros follow each head of stored keys and values."""
    max_num_seqs: int | None = None
    """Completions that are decoded at a time, across all devices. `None`: all."""
    keeps_caches: bool = False
    """Whether completions that a session leaves unfinished keep their keys and values, which then
    are of older weights; by default, they are computed anew."""
    decoding_form: DecodingForm | None = None
    """Form of model and prompts that the devices decode fastest; `None`: as they are."""
    records_routes: bool = False
    """Whether the experts that routers chose are kept, for the policy to use."""
    weights_are_sent: bool = False
    """Whether the weights come from other devices, in the form that sampling reads."""
    rollout_sharding: RolloutSharding = dataclasses.field(default_factory=LegacySharding)
    attention: CausalAttention
    """Attention of the prefill; decoding attends to its cache by other means."""

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype in which sampling computes."""
        dtype = self.rollout_dtype
        return self.dtype if dtype is None or dtype == jnp.int8 else dtype

    @property
    def weight_itemsize(self) -> int:
        """Bytes of a weight."""
        return (self.rollout_dtype or self.dtype).itemsize

    def kv_itemsize(self, head_size: int) -> float:
        """Returns the bytes in the KV cache for each element of a head.

        They include the zeros after the head, and for int8 its float32 scale.
        """
        dtype = self.compute_dtype if self.kv_cache_dtype is None else self.kv_cache_dtype
        stored = -(-head_size // self.kv_head_multiple) * self.kv_head_multiple
        scale_bytes = 4 if dtype == jnp.int8 else 0
        return (dtype.itemsize * stored + scale_bytes) / head_size


def sampling_weights(model: CausalLM, options: SamplerOptions) -> CausalLM:
    """Returns the model that sampling reads: adapters merged, weights in the sampling dtype."""
    if options.weights_are_sent:
        return model
    dtype, model = options.compute_dtype, model.merged()
    return model.rounded(dtype) if options.rollout_dtype == jnp.int8 else model.astype(dtype)


def weights_moved_by_layer(
    model: CausalLM, options: SamplerOptions, layout: RolloutLayout
) -> CausalLM:
    """Returns `laid_out_weights`, of which devices exchange one layer after the other.

    Where a program returns weights, TPUs exchange stacks of layers into other arrays than those
    that are returned, which takes the largest stacks once more. Those of one layer are small.
    """
    if layout.mesh.size == 1:
        return laid_out_weights(model, options, layout)
    model = sampling_weights(model, options)
    steps = [model.shardings(layout.mesh, rules) for rules in layout.parameter_rules]

    def moved(layer: Any) -> Any:
        for step in steps:
            of_layer = jax.tree.map(_without_first_axis, step.layers)
            layer = jax.lax.with_sharding_constraint(layer, of_layer)
        return layer

    others = _with_layers(model, None)
    for step in steps:
        others = jax.lax.with_sharding_constraint(others, _with_layers(step, None))
    return _with_layers(others, jax.lax.map(moved, model.layers))


def _with_layers(model: CausalLM, layers: Any) -> CausalLM:
    return eqx.tree_at(lambda x: x.layers, model, layers, is_leaf=lambda x: x is None)


def _without_first_axis(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def laid_out_weights(model: CausalLM, options: SamplerOptions, layout: RolloutLayout) -> CausalLM:
    """Returns the weights that sampling reads, as a layout splits them over the devices."""
    model = sampling_weights(model, options)
    for rules in layout.parameter_rules:
        model = jax.lax.with_sharding_constraint(model, model.shardings(layout.mesh, rules))
    return model
