"""The interface of attention over whole sequences, whatever the implementation."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.models.kv_cache import KeyValues
from grpo_eqx.models.product import inner_products
from grpo_eqx.models.tiles import filled
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rules import batch_spec, dividing_axes


class Visible(NamedTuple):
    """Keys that each query sees, as two runs of its row's positions.

    One run ends with the query itself, so that a row can hold several sequences. The other is
    anywhere before it: a prompt that several sequences of the row continue.
    """

    own_start: Int[Array, "R T"]
    """First position of the run that ends with the query."""
    prompt_start: Int[Array, "R T"]
    prompt_end: Int[Array, "R T"]
    """End of the prompt, exclusive, at most the query's own position; where it is not after the
    start, there is no prompt."""

    @classmethod
    def of_padded(cls, mask: Bool[Array, "R T"]) -> "Visible":
        """Returns what causality shows of one sequence a row, padded at either end.

        Padding sees itself alone.
        """
        positions = jnp.arange(mask.shape[1], dtype=jnp.int32)
        first = jnp.argmax(mask, axis=1).astype(jnp.int32)
        nothing = jnp.zeros(mask.shape, jnp.int32)
        return cls(jnp.where(mask, first[:, None], positions), nothing, nothing)

    def windowed(self, window: Int[Array, ""]) -> "Visible":
        """Returns what is visible of the last `window` positions of each query's own sequence.

        The query itself is one of them: a sliding window as in Mistral (arXiv 2310.06825), counted
        as in Hugging Face. The largest int32 sets no limit.
        """
        queries = jnp.arange(self.own_start.shape[1], dtype=jnp.int32)
        # Positions of the sequence from the end of its prompt on, for those of the row.
        in_prompt = self.prompt_end + (queries - self.own_start) + 1 - window
        return Visible(
            jnp.maximum(self.own_start, queries + 1 - window),
            jnp.maximum(self.prompt_start, in_prompt),
            self.prompt_end,
        )

    def filled(self, multiple: int) -> "Visible":
        """Pads rows at their end with positions that see themselves alone."""
        T = self.own_start.shape[1]
        own, *prompt = (filled(x, 1, multiple) for x in self)
        positions = jnp.arange(own.shape[1], dtype=own.dtype)
        return Visible(jnp.where(positions < T, own, positions), *prompt)

    def shows(
        self, queries: Int[Array, "*#shape"], keys: Int[Array, "*#shape"]
    ) -> Bool[Array, "*shape"]:
        """Returns the mask of keys that queries see, both given by their positions.

        The fields are those of the queries, in a shape that broadcasts with the positions.
        """
        own = (keys >= self.own_start) & (keys <= queries)
        return own | ((keys >= self.prompt_start) & (keys < self.prompt_end))

    def blocks(self, queries: int, keys: int) -> Bool[Array, "R i j"]:
        """Returns the pairs of a block of queries and a block of keys, of which any is visible.

        **Arguments:**

        - `queries`, `keys`: sizes of blocks, of which that of queries divides the length of rows.
        """
        R, T = self.own_start.shape
        start = jnp.arange(0, T, keys, dtype=jnp.int32)
        sees = self.sees(start, start + keys)
        return sees.reshape(R, T // queries, queries, -1).any(axis=2)

    def sees(self, start: Int[Array, " j"], end: Int[Array, " j"]) -> Bool[Array, "R T j"]:
        """Returns whether each query sees any key of each block, from `start` to `end`."""
        own, first, last = (x[..., None] for x in self)
        itself = jnp.arange(own.shape[1], dtype=jnp.int32)[:, None]
        meets = (own < end) & (itself >= start)
        return meets | ((first < last) & (first < end) & (last > start))


class Inputs(NamedTuple):
    """Queries, keys and values: each of `K` key heads with the `r` query heads that read it."""

    queries: Float[Array, "R K r T D"]
    keys: Float[Array, "R K T D"]
    values: Float[Array, "R K T D"]


class BlockSizes(NamedTuple):
    """Sizes of the blocks in which attention skips what no query sees."""

    queries: int
    """Most positions of a block of queries."""
    keys: int
    """Most positions of a block of keys."""
    per_wide: int = 1
    """Blocks in a wide block (`BlockedAttention.per_wide`)."""


_UNKNOWN = BlockSizes(128, 128)


class CausalAttention(eqx.Module):
    """Softmax attention of each query over the keys of its row that it sees.

    Differentiable once, with respect to queries, keys and values. Products run in the dtype of the
    queries; scores, the softmax and sums over keys are float32.
    """

    def __call__(
        self,
        queries: Float[Array, "R T N D"],
        kv: KeyValues,
        visible: Visible,
        softcap: float | None = None,
    ) -> Float[Array, "R T N D"]:
        """Computes attention of `R` rows.

        **Arguments:**

        - `queries`: the queries.
        - `kv`: keys and values of the rows, `[R, K, T, D]`.
        - `visible`: the keys that each query sees, at least its own.
        - `softcap`: soft cap of the scores (`soft_capped`); `None` for none.
        """
        R, T, N, D = queries.shape
        K = kv.keys.shape[1]
        by_key = queries.reshape(R, T, K, N // K, D).transpose(0, 2, 3, 1, 4)
        attended = self.attend(Inputs(by_key, *kv), visible, softcap)
        return attended.transpose(0, 3, 1, 2, 4).reshape(R, T, N, D)

    def over(self, layout: RolloutLayout) -> "CausalAttention":
        """Returns the attention for the prompts of a rollout, which has a layout of its own."""
        return self

    def block_sizes(self, length: int, repeats: int) -> BlockSizes:
        """Returns the sizes of blocks, by which plans count what is skipped; by default, a guess.

        **Arguments:**

        - `length`: positions of a row.
        - `repeats`: query heads that read each key head.
        """
        return _UNKNOWN

    @abc.abstractmethod
    def attend(
        self, inputs: Inputs, visible: Visible, softcap: float | None
    ) -> Float[Array, "R K r T D"]:
        """Computes what a call does, from inputs grouped by key head."""


class Residuals(NamedTuple):
    """Values that the forward pass of FlashAttention saves for its backward pass."""

    inputs: Inputs
    visible: Any
    """`Visible` in the form that the implementation uses."""
    attended: Float[Array, "R K r T D"]
    logsumexp: Float[Array, "R K r T"]
    """Logarithm of each query's sum of exponentials."""

    def inner(self, slope: Float[Array, "R K r T D"]) -> Float[Array, "R K r T"]:
        """Computes inner products of cotangents and results, which a softmax's gradient has."""
        return inner_products(self.attended, slope)


def on_each_device(
    devices: jax.sharding.Mesh | RolloutLayout,
    attend: Callable[[Inputs, Visible], Array],
    inputs: Inputs,
    visible: Visible,
) -> Float[Array, "R K r T D"]:
    """Runs `attend` on each device, for its own rows and heads.

    **Arguments:**

    - `devices`: the mesh of training, or the layout of a rollout whose prompts are the rows.
    - `attend`: computes attention on one device, for its own rows and heads.
    - `inputs`, `visible`: those of all rows.
    """
    R, K, repeats = inputs.queries.shape[:3]
    rows: str | tuple[str, ...] | None
    if isinstance(devices, RolloutLayout):
        mesh, rows, heads = devices.mesh, devices.prompts or None, devices.heads(K) or None
        readers = devices.queries(K, repeats) or None
    else:
        mesh, heads, readers = devices, dividing_axes(devices, K, ("tp",)) or None, None
        rows, _ = batch_spec(mesh, R, 1)
    if mesh.size == 1:
        return attend(inputs, visible)
    of_keys, of_queries = PartitionSpec(rows, heads), PartitionSpec(rows, heads, readers)
    run = jax.shard_map(
        lambda inputs, visible: attend(Inputs(*inputs), Visible(*visible)),
        mesh=mesh,
        in_specs=((of_queries, of_keys, of_keys), PartitionSpec(rows)),
        out_specs=of_queries,
        check_vma=False,
    )
    return run(tuple(inputs), tuple(visible))
