"""The model interface that training, generation and planning require of every family."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

from grpo_eqx.common.choices import Remat
from grpo_eqx.models.causal_attention import BlockedAttention, CausalAttention, Visible
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.kv_cache import GrowingCache
from grpo_eqx.models.layers import Linear, LowRank
from grpo_eqx.models.prompt_cache import PromptCache
from grpo_eqx.models.rounding import RoundedTable
from grpo_eqx.models.softcap import soft_capped
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rules import PARAMETER_RULES, Rules

_Model = TypeVar("_Model", bound="CausalLM")


class Hidden(NamedTuple):
    """Final hidden states of rows of tokens."""

    states: Float[Array, "R T H"]
    routes: Integer[Array, "R T Lk"] | None = None
    """Experts that routers chose for each token, of models with experts."""


class Extended(NamedTuple):
    """The next positions of completions."""

    hidden: Float[Array, "P G T H"]
    """Final hidden states, each of which predicts what follows."""
    own: list[GrowingCache]
    """The completions' keys and values, with those of these positions."""
    routes: Integer[Array, "P G T Lk"] | None = None
    """Experts that routers chose for these positions, of models with experts."""


class TensorForm(NamedTuple):
    """Form in which Hugging Face's files hold a parameter."""

    stacked: int
    """Number of leading axes of which each index is a tensor of its own: layers, then experts."""
    is_transposed: bool = False
    """Whether such a tensor is the transpose of the parameter's matrix."""


class CausalLM(eqx.Module):
    """A decoder-only language model: the same module trains and generates."""

    config: eqx.AbstractVar[ModelConfig]
    embed_tokens: eqx.AbstractVar[Float[Array, "V H"] | RoundedTable]
    layers: eqx.AbstractVar[Any]
    """Layers in one stack, whose arrays have a leading axis of layers; for `extend`, also a list of
    such stacks."""

    @classmethod
    @abc.abstractmethod
    def init(cls, config: Any, key: PRNGKeyArray, std: float = 0.02) -> "CausalLM":
        """Draws random float32 weights for a config of the family: normal with `std`."""

    @staticmethod
    @abc.abstractmethod
    def tensor_name(name: str, layer: int | None = None, expert: int | None = None) -> str:
        """Returns the Hugging Face name of a parameter's tensor.

        **Arguments:**

        - `name`: a `parameter_name`.
        - `layer`: the layer, for parameters within `layers`.
        - `expert`: the expert, for parameters of the experts of a layer.
        """

    @staticmethod
    def tensor_form(name: str) -> TensorForm:
        """Returns how files hold a parameter, by its `parameter_name`."""
        return TensorForm(stacked=int(name.startswith("layers.")))

    @abc.abstractmethod
    def shardings(self: _Model, mesh: jax.sharding.Mesh, rules: Rules = PARAMETER_RULES) -> _Model:
        """Returns the model's tree with a `NamedSharding` for each of its arrays (or shapes)."""

    @property
    @abc.abstractmethod
    def output_table(self) -> Float[Array, "V H"] | RoundedTable:
        """The language-model head: its own matrix, or the embedding where they are tied."""

    @abc.abstractmethod
    def with_output_table(self: _Model, table: Float[Array, "V H"] | RoundedTable) -> _Model:
        """Returns the model with another `output_table`."""

    @property
    def head(self) -> Float[Array, "V H"]:
        """The language-model head of a model that is not `rounded`."""
        assert not isinstance(self.output_table, RoundedTable)
        return self.output_table

    @abc.abstractmethod
    def prefill(
        self,
        ids: Int[Array, "P Tp"],
        mask: Bool[Array, "P Tp"],
        remat: Remat = "none",
        attention: CausalAttention = BlockedAttention(),
        layout: RolloutLayout | None = None,
    ) -> PromptCache:
        """Reads each prompt once, for all completions of its group.

        **Arguments:**

        - `ids`, `mask`: tokens, and which of them are not padding.
        - `remat`: what the backward pass recomputes.
        - `attention`: the attention.
        - `layout`: the layout over devices.
        """

    @abc.abstractmethod
    def hidden(
        self,
        ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        visible: Visible,
        remat: Remat = "none",
        attention: CausalAttention = BlockedAttention(),
        mesh: jax.sharding.Mesh | None = None,
        routes: Integer[Array, "R T Lk"] | None = None,
    ) -> Hidden:
        """Computes the final hidden states of rows of tokens, each of which predicts what follows.

        **Arguments:**

        - `ids`: the tokens.
        - `positions`: positions in their sequences.
        - `visible`: other tokens of the row that each token sees; a row can hold several sequences.
        - `remat`: what the backward pass recomputes.
        - `attention`: the attention.
        - `mesh`: the devices.
        - `routes`: experts to use in place of those that routers choose.
        """

    @abc.abstractmethod
    def extend(
        self,
        prompt: PromptCache,
        own: list[GrowingCache],
        ids: Int[Array, "P G T"],
        position: Int[Array, "P G"],
        num_written: Int[Array, ""] | Int[Array, "P 1"],
        layout: RolloutLayout | None = None,
        lengths: Int[Array, "P G"] | None = None,
    ) -> Extended:
        """Reads the next inputs of completions; decoding reads a single one.

        Each input sees its prompt, its completion so far, and the inputs before it.

        **Arguments:**

        - `prompt`: the prompts, stored for decoding.
        - `own`: the completions' keys and values so far, for each stack of layers (`GrowingCache`).
        - `ids`: the next inputs of each completion.
        - `position`: position of the first in its completion.
        - `num_written`: positions of `own` to read, including those of `ids`; of all completions,
          or of each where each has a row of its own.
        - `layout`: the layout over devices.
        - `lengths`: number of inputs of each completion, the first of `ids`; by default all. The
          others leave no keys and values, and their hidden states mean nothing.
        """

    @property
    def has_adapters(self) -> bool:
        """Whether any linear map has a low-rank adapter, which alone is then trained."""
        return any(x.adapter is not None for x in self._linears())

    @property
    def trainable(self: _Model) -> _Model:
        """Tree of the model with a bool for every array: whether training changes it."""
        if not self.has_adapters:
            return jax.tree.map(lambda _: True, self)
        return jax.tree.map_with_path(lambda path, _: ".adapter." in parameter_name(path), self)

    def merged(self: _Model) -> _Model:
        """Returns the model with each adapter added to its weight, in float32."""
        return self._map_linears(lambda x: x.merged())

    def without_adapters(self: _Model) -> _Model:
        """Returns the model that the adapters were added to, with the same arrays."""

        def without(linear: Linear) -> Linear:
            # Not by its `__init__`: this may be a model of shapes.
            return linear if linear.adapter is None else eqx.tree_at(_adapter, linear, None)

        return self._map_linears(without)

    def _linears(self) -> list[Linear]:
        return [x for x in jax.tree.leaves(self, is_leaf=_is_linear) if isinstance(x, Linear)]

    def _map_linears(self: _Model, func: Callable[[Linear], Linear]) -> _Model:
        return jax.tree.map(
            lambda x: func(x) if isinstance(x, Linear) else x, self, is_leaf=_is_linear
        )

    def astype(self: _Model, dtype: jax.typing.DTypeLike) -> _Model:
        """Returns the model with every array in `dtype`, but for int8 weights and their scales."""
        return jax.tree.map(lambda x: x.astype(dtype), self, is_leaf=_is_linear)

    def rounded(self: _Model, dtype: jax.typing.DTypeLike) -> _Model:
        """Returns the model to generate with int8 weights, and everything else in `dtype`.

        Linear maps and the head have a scale per output. An embedding of its own stays in `dtype`:
        few of its rows are read.
        """
        return self.rounded_linears(dtype).with_output_table(RoundedTable.of(self.head))

    def rounded_linears(self: _Model, dtype: jax.typing.DTypeLike) -> _Model:
        """Returns the model with int8 weights in its linear maps, and the rest in `dtype`."""
        return jax.tree.map(
            lambda x: x.rounded(dtype) if isinstance(x, Linear) else x.astype(dtype),
            self,
            is_leaf=_is_linear,
        )

    def project_logits(self, hidden: Float[Array, "*batch H"]) -> Float[Array, "*batch V"]:
        """Projects final hidden states to float32 logits."""
        if isinstance(self.output_table, RoundedTable):
            logits = self.output_table.project(hidden)
        else:
            head = self.head.astype(hidden.dtype)
            logits = jnp.einsum("...h,vh->...v", hidden, head, preferred_element_type=jnp.float32)
        return soft_capped(logits, self.config.logit_softcap)


def parameter_name(path: tuple[object, ...]) -> str:
    """Returns a parameter's dotted name within its model, such as `layers.q_proj.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _adapter(linear: Linear) -> LowRank | None:
    return linear.adapter


def _is_linear(x: object) -> bool:
    return isinstance(x, Linear)
