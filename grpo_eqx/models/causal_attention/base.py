"""The interface of attention over whole sequences, whatever the implementation."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.models.attention import Segment
from grpo_eqx.models.kv_cache import KeyValues
from grpo_eqx.sharding.rules import batch_spec


class Inputs(NamedTuple):
    """Queries, keys and values: each of `K` key heads with the `r` query heads that read it."""

    queries: Float[Array, "P K R r T D"]
    own: KeyValues
    """Keys and values of the rows, `[P, K, R, T, D]`."""
    shared: KeyValues | None
    """Keys and values of the prompts, `[P, K, S, D]`."""


class Masks(NamedTuple):
    """Masks that apply in addition to causality within each row."""

    spans: Int[Array, "#P #R T"]
    """Sequence that each position of a row belongs to: queries see no other of that row."""
    visible: Bool[Array, "P S"] | None
    """True on the positions of the prompts that all queries see."""


class CausalAttention(eqx.Module):
    """Softmax attention of each query over its row up to itself, and over its prompt.

    Differentiable once, with respect to queries, keys and values. Products run in the dtype of the
    queries; scores, the softmax and sums over keys are float32, on each device.
    """

    def __call__(
        self,
        queries: Float[Array, "P R T N D"],
        own: KeyValues,
        shared: Segment | None = None,
        spans: Int[Array, "#P #R T"] | None = None,
    ) -> Float[Array, "P R T N D"]:
        """Computes attention of `R` rows for each of `P` prompts.

        **Arguments:** queries; keys and values of the rows, `[P, R, K, T, D]`; those of the
        prompts, `[P, 1, K, S, D]`, with a mask `[P, 1, S]`; the sequence that each position of a
        row belongs to, of which queries see no other (`None`: a row is one sequence).
        """
        P, R, T, N, D = queries.shape
        K = own.keys.shape[2]
        inputs = Inputs(
            queries=queries.reshape(P, R, T, K, N // K, D).transpose(0, 3, 1, 4, 2, 5),
            own=KeyValues(*(x.swapaxes(1, 2) for x in own)),
            shared=None if shared is None else KeyValues(*(x[:, 0] for x in shared.kv)),
        )
        masks = Masks(
            spans=jnp.zeros((1, 1, T), jnp.int32) if spans is None else spans,
            visible=None if shared is None else shared.visible[:, 0],
        )
        return self.attend(inputs, masks).transpose(0, 2, 4, 1, 3, 5).reshape(P, R, T, N, D)

    @abc.abstractmethod
    def attend(self, inputs: Inputs, masks: Masks) -> Float[Array, "P K R r T D"]:
        """Computes what a call does, from inputs grouped by key head."""


class Residuals(NamedTuple):
    """Values that the forward pass of FlashAttention saves for its backward pass."""

    inputs: Inputs
    masks: Any
    """Masks in the form that the implementation uses."""
    attended: Float[Array, "P K R r T D"]
    logsumexp: Float[Array, "P K R r T"]
    """Logarithm of each query's sum of exponentials."""

    def inner(self, slope: Float[Array, "P K R r T D"]) -> Float[Array, "P K R r T"]:
        """Computes inner products of slopes and results, which a softmax's gradient subtracts."""
        return jnp.sum(self.attended.astype(jnp.float32) * slope.astype(jnp.float32), axis=-1)


def filled(x: Array, axis: int, multiple: int, value: int = 0) -> Array:
    """Pads the end of an axis with `value`, so that its length is a multiple of `multiple`."""
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, pads, constant_values=value)


def on_each_device(
    mesh: jax.sharding.Mesh,
    attend: Callable[[Inputs, Masks], Array],
    inputs: Inputs,
    masks: Masks,
) -> Float[Array, "P K R r T D"]:
    """Runs `attend` on each device of a mesh, for its own prompts or rows, and its own heads."""
    P, K, R, _, T, _ = inputs.queries.shape
    masks = masks._replace(spans=jnp.broadcast_to(masks.spans, (P, R, T)))
    if mesh.size == 1:
        return attend(inputs, masks)
    prompts, rows = batch_spec(mesh, P, R)
    heads = "tp" if K % mesh.shape["tp"] == 0 else None
    own, shared = PartitionSpec(prompts, heads, rows), PartitionSpec(prompts, heads)
    of_masks = PartitionSpec(prompts, rows), PartitionSpec(prompts)
    run = jax.shard_map(
        lambda inputs, masks: attend(Inputs(*inputs), Masks(*masks)),
        mesh=mesh,
        in_specs=((own, own, shared), of_masks),
        out_specs=own,
        check_vma=False,
    )
    return run(tuple(inputs), tuple(masks))
