"""Qwen2 as one Equinox module: the same definition trains and generates."""

import dataclasses
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from grpo_eqx.choices import Remat
from grpo_eqx.models.attention import OwnKeys, attend
from grpo_eqx.models.base import CausalLM, PromptCache, parameter_name
from grpo_eqx.models.causal_attention import BlockedAttention, CausalAttention, Visible
from grpo_eqx.models.kv_cache import KeyValues, KVCache
from grpo_eqx.models.layers import Linear, Rotary, rms_norm, swiglu
from grpo_eqx.models.qwen2_config import Qwen2Config
from grpo_eqx.models.rounding import RoundedTable
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rules import PARAMETER_RULES, Rules, embedding_shardings, parameter_sharding

_Inputs = ParamSpec("_Inputs")
_Output = TypeVar("_Output")


class Qwen2Layer(eqx.Module):
    """One transformer layer; in `Qwen2.layers` every array has a leading axis of layers."""

    input_layernorm: Float[Array, "*stack H"]
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    post_attention_layernorm: Float[Array, "*stack H"]
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def project(
        self, x: Float[Array, "P G T H"], rotary: Rotary, config: Qwen2Config
    ) -> tuple[Float[Array, "P G T N D"], KeyValues]:
        """Projects the normalized input to rotated queries, rotated keys, and values."""
        x = rms_norm(x, self.input_layernorm, config.rms_norm_eps)
        split = (*x.shape[:-1], -1, config.head_size)
        queries = rotary.rotate(self.q_proj(x).reshape(split))
        keys = rotary.rotate(self.k_proj(x).reshape(split)).swapaxes(2, 3)
        values = self.v_proj(x).reshape(split).swapaxes(2, 3)
        return queries, KeyValues(keys, values)

    def finish(
        self,
        x: Float[Array, "P G T H"],
        attended: Float[Array, "P G T N D"],
        config: Qwen2Config,
    ) -> Float[Array, "P G T H"]:
        """Computes the rest of the layer from the attention of its heads."""
        x = x + self.o_proj(attended.reshape(*x.shape[:-1], -1))
        normed = rms_norm(x, self.post_attention_layernorm, config.rms_norm_eps)
        return x + self.down_proj(swiglu(self.gate_proj(normed), self.up_proj(normed)))


class Qwen2(CausalLM):
    """Qwen2 (arXiv 2407.10671), with layers stacked along a leading axis and run by `lax.scan`."""

    embed_tokens: Float[Array, "V H"] | RoundedTable
    layers: Qwen2Layer | list[Qwen2Layer]
    norm: Float[Array, " H"]
    lm_head: Float[Array, "V H"] | RoundedTable | None
    config: Qwen2Config = eqx.field(static=True)

    @classmethod
    def init(cls, config: Qwen2Config, key: PRNGKeyArray, std: float = 0.02) -> "Qwen2":
        """Draws random float32 weights: normal with `std`, norms one, biases zero."""
        keys = iter(jax.random.split(key, 9))
        stack, hidden = config.num_hidden_layers, config.hidden_size
        wide = config.num_attention_heads * config.head_size
        narrow = config.num_key_value_heads * config.head_size

        def normal(*shape: int) -> Array:
            return std * jax.random.normal(next(keys), shape)

        def linear(out_size: int, in_size: int, bias: bool = False) -> Linear:
            weight = normal(stack, out_size, in_size)
            return Linear(weight, jnp.zeros((stack, out_size)) if bias else None)

        return cls(
            embed_tokens=normal(config.vocab_size, hidden),
            layers=Qwen2Layer(
                input_layernorm=jnp.ones((stack, hidden)),
                q_proj=linear(wide, hidden, bias=True),
                k_proj=linear(narrow, hidden, bias=True),
                v_proj=linear(narrow, hidden, bias=True),
                o_proj=linear(hidden, wide),
                post_attention_layernorm=jnp.ones((stack, hidden)),
                gate_proj=linear(config.intermediate_size, hidden),
                up_proj=linear(config.intermediate_size, hidden),
                down_proj=linear(hidden, config.intermediate_size),
            ),
            norm=jnp.ones(hidden),
            lm_head=None if config.tie_word_embeddings else normal(config.vocab_size, hidden),
            config=config,
        )

    @staticmethod
    def tensor_name(name: str, layer: int | None = None) -> str:
        if name == "lm_head":
            return "lm_head.weight"
        if layer is None:
            return f"model.{name}.weight"
        module, _, kind = name.removeprefix("layers.").partition(".")
        if module.endswith("layernorm"):
            return f"model.layers.{layer}.{module}.weight"
        block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        return f"model.layers.{layer}.{block}.{module}.{kind}"

    def shardings(self, mesh: jax.sharding.Mesh, rules: Rules = PARAMETER_RULES) -> "Qwen2":
        head_size = self.config.head_size

        def of(path: tuple[object, ...], leaf: Array | jax.ShapeDtypeStruct) -> NamedSharding:
            dims = _dims(parameter_name(path))
            return parameter_sharding(mesh, dims, leaf.shape, rules, head_size)

        return jax.tree.map_with_path(of, self)

    @property
    def output_table(self) -> Float[Array, "V H"] | RoundedTable:
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def with_output_table(self, table: Float[Array, "V H"] | RoundedTable) -> "Qwen2":
        if self.lm_head is None:
            return dataclasses.replace(self, embed_tokens=table)
        return dataclasses.replace(self, lm_head=table)

    def __call__(
        self, ids: Int[Array, "B T"], mask: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T H"]:
        """Computes final hidden states of sequences, padded at either end where `mask` is false."""
        mask = jnp.ones(ids.shape, bool) if mask is None else mask
        return self.hidden(ids, _positions(mask), Visible.of_padded(mask))

    def logits(
        self, ids: Int[Array, "B T"], mask: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Computes float32 logits of sequences. Holds `B x T x V` numbers: for small uses only."""
        return self.project_logits(self(ids, mask))

    def embed(
        self, ids: Int[Array, "P G *T"], mesh: jax.sharding.Mesh | None = None
    ) -> Float[Array, "P G *T H"]:
        """Looks up embeddings, in the dtype that the layers compute in, whatever the table's own.

        With a mesh, they are sharded as `batch_sharding` says.
        """
        x = self.embed_tokens[ids].astype(self.norm.dtype)
        if mesh is None or mesh.size == 1:
            return x
        # In two steps: each device looks tokens up in its own part of the table, to which their
        # gradients return. Left to itself, the compiler may gather the table, or all gradients.
        for sharding in embedding_shardings(mesh, x.shape):
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x

    def prefill(
        self,
        ids: Int[Array, "P Tp"],
        mask: Bool[Array, "P Tp"],
        remat: Remat = "none",
        attention: CausalAttention = BlockedAttention(),
        mesh: jax.sharding.Mesh | None = None,
    ) -> PromptCache:
        step = self._causal_step(_positions(mask), Visible.of_padded(mask), attention)
        _, kv = jax.lax.scan(_remat(step, remat), self.embed(ids[:, None], mesh), self._stack)
        order = jnp.arange(ids.shape[1])
        last = jnp.max(jnp.where(mask, order, 0), axis=1)
        return PromptCache(
            kv=kv,
            visible=mask & (order != last[:, None]),
            last_ids=jnp.take_along_axis(ids, last[:, None], axis=1)[:, 0],
            last_positions=mask.sum(axis=1, dtype=jnp.int32) - 1,
        )

    def hidden(
        self,
        ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        visible: Visible,
        remat: Remat = "none",
        attention: CausalAttention = BlockedAttention(),
        mesh: jax.sharding.Mesh | None = None,
    ) -> Float[Array, "R T H"]:
        step = self._causal_step(positions, visible, attention)

        def without_kv(
            x: Float[Array, "R 1 T H"], layer: Qwen2Layer
        ) -> tuple[Float[Array, "R 1 T H"], None]:
            return step(x, layer)[0], None

        x = self.embed(ids[:, None], mesh)
        x, _ = jax.lax.scan(_remat(without_kv, remat), x, self._stack)
        return rms_norm(x[:, 0], self.norm, self.config.rms_norm_eps)

    def decode(
        self,
        prompt: PromptCache,
        own: list[KVCache],
        ids: Int[Array, "P G"],
        position: Int[Array, "P G"],
        num_written: Int[Array, ""],
        layout: RolloutLayout | None = None,
    ) -> tuple[Float[Array, "P G V"], list[KVCache]]:
        assert isinstance(prompt.kv, list), "decoding reads stored keys and values"
        positions = prompt.last_positions[:, None] + position
        rotary = Rotary.at(positions[..., None], self.config.head_size, self.config.rope_theta)

        def step(
            carry: tuple[Float[Array, "P G 1 H"], KVCache],
            xs: tuple[Qwen2Layer, KVCache, Int[Array, ""]],
        ) -> tuple[tuple[Float[Array, "P G 1 H"], KVCache], None]:
            (x, own), (layer, prompt_kv, depth) = carry, xs
            queries, new = layer.project(x, rotary, self.config)
            own = own.written(new, depth, position, layout)
            attended = attend(
                queries[:, :, 0],
                prompt.segment(prompt_kv.loaded(queries.dtype)),
                OwnKeys(own, depth, position, num_written, new),
            )
            return (layer.finish(x, attended[:, :, None], self.config), own), None

        x, written = self.embed(ids)[:, :, None], []
        stacks = self.layers if isinstance(self.layers, list) else [self.layers]
        for stack, prompt_kv, kv in zip(stacks, prompt.kv, own, strict=True):
            depths = jnp.arange(len(kv.keys))  # XLA unrolls the loop over a single one
            (x, kv), _ = jax.lax.scan(step, (x, kv), (stack, prompt_kv, depths))
            written.append(kv)
        hidden = rms_norm(x[:, :, 0], self.norm, self.config.rms_norm_eps)
        return self.project_logits(hidden), written

    @property
    def _stack(self) -> Qwen2Layer:
        assert not isinstance(self.layers, list), "whole sequences need layers in one stack"
        return self.layers

    def _causal_step(
        self, positions: Int[Array, "R T"], visible: Visible, attention: CausalAttention
    ) -> Callable[[Float[Array, "R 1 T H"], Qwen2Layer], tuple[Float[Array, "R 1 T H"], KeyValues]]:
        """Returns the step of a scan over the layers of whole rows, which yields their keys."""
        rotary = Rotary.at(positions[:, None], self.config.head_size, self.config.rope_theta)

        def step(
            x: Float[Array, "R 1 T H"], layer: Qwen2Layer
        ) -> tuple[Float[Array, "R 1 T H"], KeyValues]:
            queries, kv = layer.project(x, rotary, self.config)
            of_row = KeyValues(kv.keys[:, 0], kv.values[:, 0])
            attended = attention(queries[:, 0], of_row, visible)
            return layer.finish(x, attended[:, None], self.config), kv

        return step


def _positions(mask: Bool[Array, "R T"]) -> Int[Array, "R T"]:
    """Returns positions of sequences that are padded at either end."""
    return jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)


_DIMS = {
    "embed_tokens": ("vocab", "hidden"),
    "norm": ("norm",),
    "lm_head": ("vocab", "hidden"),
    "layers.input_layernorm": ("layers", "norm"),
    "layers.post_attention_layernorm": ("layers", "norm"),
    "layers.o_proj.weight": ("layers", "hidden", "heads"),
    "layers.gate_proj.weight": ("layers", "mlp", "hidden"),
    "layers.up_proj.weight": ("layers", "mlp", "hidden"),
    "layers.down_proj.weight": ("layers", "hidden", "mlp"),
    "layers.q_proj.weight": ("layers", "heads", "hidden"),
    "layers.q_proj.bias": ("layers", "heads"),
    **{f"layers.{name}_proj.weight": ("layers", "kv_heads", "hidden") for name in "kv"},
    **{f"layers.{name}_proj.bias": ("layers", "kv_heads") for name in "kv"},
}


def _dims(name: str) -> tuple[str, ...]:
    """Returns the logical names of a parameter's dimensions, of rounded ones too."""
    rounded, _, kind = name.rpartition(".")
    if kind == "scales":  # one for each row
        return _DIMS[f"{rounded}.weight" if rounded.startswith("layers") else rounded][:-1]
    return _DIMS[rounded if kind == "values" else name]


def _remat(step: Callable[_Inputs, _Output], remat: Remat) -> Callable[_Inputs, _Output]:
    """Wraps a scan body so that its backward pass recomputes what `remat` does not keep."""
    if remat == "none":
        return step
    policy = jax.checkpoint_policies.nothing_saveable
    if remat == "dots":
        policy = jax.checkpoint_policies.save_only_these_names("product")
    return jax.checkpoint(step, policy=policy, prevent_cse=False)
