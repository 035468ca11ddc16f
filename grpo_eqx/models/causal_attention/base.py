"""What attention of whole sequences is, however it is computed."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.models.attention import KeyValues, Segment
from grpo_eqx.sharding.rules import BATCH_AXES


class Inputs(NamedTuple):
    """Each of the `K` heads of keys with the `r` heads of queries that read it."""

    queries: Float[Array, "P K R r T D"]
    own: KeyValues
    """Of the rows, `[P, K, R, T, D]`."""
    shared: KeyValues | None
    """Of the prompts, `[P, K, S, D]`."""


class Masks(NamedTuple):
    """What queries see, besides that a row's see nothing after themselves."""

    spans: Int[Array, "#P #R T"]
    """Which sequence each place of a row belongs to: queries see no other's."""
    visible: Bool[Array, "P S"] | None
    """Which places of the prompts all queries see."""


class CausalAttention(eqx.Module):
    """Softmax attention of each query over its row up to itself, and over its prompt.

    Differentiable once, in queries, keys and values. Products run in the dtype of the queries;
    scores, the softmax and sums over keys are float32, on each device.
    """

    def __call__(
        self,
        queries: Float[Array, "P R T N D"],
        own: KeyValues,
        shared: Segment | None = None,
        spans: Int[Array, "#P #R T"] | None = None,
    ) -> Float[Array, "P R T N D"]:
        """Attention of `R` rows for each of `P` prompts.

        **Arguments:** queries; keys and values of the rows, `[P, R, K, T, D]`; those of the
        prompts, `[P, 1, K, S, D]`, with a mask `[P, 1, S]`; which sequence each place of a row
        belongs to, where a query is to see no other's (`None`: a row is one sequence).
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
        """As a call, head by head."""


def on_each_device(
    mesh: jax.sharding.Mesh,
    attend: Callable[[Inputs, Masks], Array],
    inputs: Inputs,
    masks: Masks,
) -> Float[Array, "P K R r T D"]:
    """`attend` on each device of a mesh, for its own prompts, or rows, and its own heads."""
    P, K, R, _, T, _ = inputs.queries.shape
    masks = masks._replace(spans=jnp.broadcast_to(masks.spans, (P, R, T)))
    if mesh.size == 1:
        return attend(inputs, masks)
    prompts, heads, rows = _axes(mesh, P, K, R)
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


def _axes(mesh: jax.sharding.Mesh, P: int, K: int, R: int) -> tuple[Any, str | None, str | None]:
    """The axes that prompts, heads of keys and rows are split over."""
    dp, fsdp, tp = (mesh.shape[axis] for axis in (*BATCH_AXES, "tp"))
    heads = "tp" if K % tp == 0 else None
    if P % (dp * fsdp) == 0:
        return BATCH_AXES, heads, None
    return "dp" if P % dp == 0 else None, heads, "fsdp" if R % fsdp == 0 else None
