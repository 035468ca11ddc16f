"""The decoder of all families, as one Equinox module: the same definition trains and generates."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

from grpo_eqx.common.choices import Remat
from grpo_eqx.models.architecture import MLP, Activation
from grpo_eqx.models.attention import OwnKeys, attend
from grpo_eqx.models.causal_attention import BlockedAttention, CausalAttention, Visible
from grpo_eqx.models.decoder_config import DecoderConfig
from grpo_eqx.models.experts import Experts
from grpo_eqx.models.interface import CausalLM, Extended, Hidden, TensorForm, parameter_name
from grpo_eqx.models.kv_cache import GrowingCache, KeyValues, KVCache
from grpo_eqx.models.layers import Linear, geglu, rms_norm, swiglu
from grpo_eqx.models.prompt_cache import PromptCache
from grpo_eqx.models.rotary import Rotary
from grpo_eqx.models.rounding import RoundedTable
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rules import PARAMETER_RULES, Rules, laid_out_embeddings, parameter_sharding

_Inputs = ParamSpec("_Inputs")
_Output = TypeVar("_Output")


_GATED: Mapping[Activation, Callable[[Array, Array], Array]] = {"silu": swiglu, "gelu_tanh": geglu}
_NO_WINDOW = 2**30
"""Window of a layer that has none, beside layers that have one."""


_Chosen = Integer[Array, "P G T k"] | None
"""Experts of each token in one layer; `None` in layers without."""


class DecoderLayer(eqx.Module):
    """One transformer layer; in `Decoder.layers` every array has a leading axis of layers.

    Fields have the names of Hugging Face's modules. Parts that the architecture lacks are `None`.
    """

    input_layernorm: Float[Array, "*stack H"]
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    post_attention_layernorm: Float[Array, "*stack H"]
    gate_proj: Linear | None
    up_proj: Linear | None
    down_proj: Linear | None
    experts: Experts | None
    """In place of the three maps of an MLP."""
    q_norm: Float[Array, "*stack D"] | None
    k_norm: Float[Array, "*stack D"] | None
    pre_feedforward_layernorm: Float[Array, "*stack H"] | None
    post_feedforward_layernorm: Float[Array, "*stack H"] | None

    def project(
        self, x: Float[Array, "P G T H"], rotary: Rotary, config: DecoderConfig
    ) -> tuple[Float[Array, "P G T N D"], KeyValues]:
        """Projects the normalized input to rotated queries, rotated keys, and values."""
        x = _normed(x, self.input_layernorm, config)
        split = (*x.shape[:-1], -1, config.head_size)
        queries, keys, values = (
            projection(x).reshape(split) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = (
                _normed(queries, self.q_norm, config), _normed(keys, self.k_norm, config)
            )  # fmt: skip
        queries, keys = rotary.rotate(queries), rotary.rotate(keys)
        scale = config.architecture.score_scale
        if scale is not None and scale != config.head_size**-0.5:
            queries = queries * (scale * config.head_size**0.5)  # attention has its own factor
        return queries, KeyValues(keys.swapaxes(2, 3), values.swapaxes(2, 3))

    def finish(
        self,
        x: Float[Array, "P G T H"],
        attended: Float[Array, "P G T N D"],
        config: DecoderConfig,
        devices: jax.sharding.Mesh | RolloutLayout | None = None,
        replayed: _Chosen = None,
    ) -> tuple[Float[Array, "P G T H"], _Chosen]:
        """Computes the rest of the layer from the attention of its heads.

        **Arguments:**

        - `x`: input of the layer.
        - `attended`: result of its attention.
        - `config`: the config.
        - `devices`: the mesh of training, or the layout of a rollout.
        - `replayed`: experts to use in place of those that the router chooses.

        **Returns:** the output of the layer, and the experts that its router chooses.
        """
        added = self.o_proj(attended.reshape(*x.shape[:-1], -1))
        output_norm = self.post_feedforward_layernorm
        if self.pre_feedforward_layernorm is None or output_norm is None:
            x = x + added
            normed = _normed(x, self.post_attention_layernorm, config)
            added, chosen = self._mlp(normed, config, devices, replayed)
            return x + added, chosen
        x = x + _normed(added, self.post_attention_layernorm, config)
        normed = _normed(x, self.pre_feedforward_layernorm, config)
        added, chosen = self._mlp(normed, config, devices, replayed)
        return x + _normed(added, output_norm, config), chosen

    def _mlp(
        self,
        x: Float[Array, "P G T H"],
        config: DecoderConfig,
        devices: jax.sharding.Mesh | RolloutLayout | None,
        replayed: _Chosen,
    ) -> tuple[Float[Array, "P G T H"], _Chosen]:
        gated, shape = _GATED[config.architecture.activation], config.architecture.experts
        if self.experts is not None:
            assert shape is not None
            return self.experts(x, shape, gated, devices, replayed)
        assert self.gate_proj is not None
        assert self.up_proj is not None
        assert self.down_proj is not None
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x))), None


def _normed(
    x: Float[Array, "*batch H"], scale: Float[Array, " H"], config: DecoderConfig
) -> Float[Array, "*batch H"]:
    return rms_norm(x, scale, config.rms_norm_eps, config.architecture.norm_offset)


class _ByKind(NamedTuple):
    """Rotary positions and windows by kind of layer, with a leading axis if there are several."""

    rotary: Rotary
    windows: Int[Array, " kinds"] | int | None

    @classmethod
    def at(cls, positions: Int[Array, "*shape"], config: DecoderConfig) -> "_ByKind":
        kinds = config.architecture.kinds
        rotaries = [Rotary.at(positions, config.head_size, kind.rope) for kind in kinds]
        if len(kinds) == 1:
            return cls(rotaries[0], kinds[0].window)
        windows = [kind.window or _NO_WINDOW for kind in kinds]
        stacked = Rotary(*(jnp.stack(x) for x in zip(*rotaries, strict=True)))
        return cls(stacked, jnp.array(windows, jnp.int32))

    def of(self, kind: Int[Array, ""] | None) -> tuple[Rotary, Int[Array, ""] | None]:
        """Returns the rotary positions of a layer, and its window if it has one."""
        if kind is None:
            window = self.windows
            return self.rotary, None if window is None else jnp.asarray(window, jnp.int32)
        assert isinstance(self.windows, jax.Array)
        return Rotary(self.rotary.cos[kind], self.rotary.sin[kind]), self.windows[kind]


class Decoder(CausalLM):
    """A decoder of any family, with layers stacked along a leading axis and run by `lax.scan`.

    Its config's `architecture` says what the family computes.
    """

    embed_tokens: Float[Array, "V H"] | RoundedTable
    layers: DecoderLayer | list[DecoderLayer]
    norm: Float[Array, " H"]
    lm_head: Float[Array, "V H"] | RoundedTable | None
    config: DecoderConfig = eqx.field(static=True)

    @classmethod
    def init(cls, config: DecoderConfig, key: PRNGKeyArray, std: float = 0.02) -> "Decoder":
        """Draws random float32 weights: normal with `std`, biases zero, norms the identity."""
        keys = iter(jax.random.split(key, 9))
        stack, hidden = config.num_hidden_layers, config.hidden_size
        wide = config.num_attention_heads * config.head_size
        narrow = config.num_key_value_heads * config.head_size
        architecture = config.architecture

        def normal(*shape: int) -> Array:
            return std * jax.random.normal(next(keys), shape, jnp.float32)

        def linear(name: str, out_size: int, in_size: int) -> Linear:
            biased = name in architecture.biased
            weight = normal(stack, out_size, in_size)
            return Linear(weight, jnp.zeros((stack, out_size), jnp.float32) if biased else None)

        def mlp_linear(name: str, out_size: int, in_size: int) -> Linear | None:
            return linear(name, out_size, in_size) if architecture.experts is None else None

        def experts() -> Experts | None:
            if architecture.experts is None:
                return None
            return Experts.init(architecture.experts, stack, hidden, next(keys), std)

        def norm(*shape: int) -> Array:
            return jnp.full(shape, 1 - architecture.norm_offset, jnp.float32)

        def optional_norm(exists: bool, size: int) -> Array | None:
            return norm(stack, size) if exists else None

        return cls(
            embed_tokens=normal(config.vocab_size, hidden),
            layers=DecoderLayer(
                input_layernorm=norm(stack, hidden),
                q_proj=linear("q_proj", wide, hidden),
                k_proj=linear("k_proj", narrow, hidden),
                v_proj=linear("v_proj", narrow, hidden),
                o_proj=linear("o_proj", hidden, wide),
                post_attention_layernorm=norm(stack, hidden),
                gate_proj=mlp_linear("gate_proj", config.intermediate_size, hidden),
                up_proj=mlp_linear("up_proj", config.intermediate_size, hidden),
                down_proj=mlp_linear("down_proj", hidden, config.intermediate_size),
                experts=experts(),
                q_norm=optional_norm(architecture.head_norms, config.head_size),
                k_norm=optional_norm(architecture.head_norms, config.head_size),
                pre_feedforward_layernorm=optional_norm(architecture.output_norms, hidden),
                post_feedforward_layernorm=optional_norm(architecture.output_norms, hidden),
            ),
            norm=norm(hidden),
            lm_head=None if config.tie_word_embeddings else normal(config.vocab_size, hidden),
            config=config,
        )

    @staticmethod
    def tensor_name(name: str, layer: int | None = None, expert: int | None = None) -> str:
        if name == "lm_head":
            return "lm_head.weight"
        if layer is None:
            return f"model.{name}.weight"
        module, _, kind = name.removeprefix("layers.").partition(".")
        if module.endswith("layernorm"):
            return f"model.layers.{layer}.{module}.weight"
        if module == "experts":
            where = "gate" if kind == "router" else f"experts.{expert}.{kind}"
            return f"model.layers.{layer}.mlp.{where}.weight"
        kind = kind or "weight"  # that of a norm
        block = "mlp" if module in MLP else "self_attn"
        return f"model.layers.{layer}.{block}.{module}.{kind}"

    @staticmethod
    def tensor_form(name: str) -> TensorForm:
        if name.startswith("layers.experts.") and not name.endswith(".router"):
            return TensorForm(stacked=2, is_transposed=True)
        return TensorForm(stacked=int(name.startswith("layers.")))

    def shardings(self, mesh: jax.sharding.Mesh, rules: Rules = PARAMETER_RULES) -> "Decoder":
        head_size = self.config.head_size

        def of(path: tuple[object, ...], leaf: Array | jax.ShapeDtypeStruct) -> NamedSharding:
            dims = _dims(parameter_name(path))
            return parameter_sharding(mesh, dims, leaf.shape, rules, head_size)

        return jax.tree.map_with_path(of, self)

    @property
    def output_table(self) -> Float[Array, "V H"] | RoundedTable:
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def with_output_table(self, table: Float[Array, "V H"] | RoundedTable) -> "Decoder":
        if self.lm_head is None:
            return dataclasses.replace(self, embed_tokens=table)
        return dataclasses.replace(self, lm_head=table)

    def __call__(
        self, ids: Int[Array, "B T"], mask: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T H"]:
        """Computes final hidden states of sequences, padded at either end where `mask` is false."""
        mask = jnp.ones(ids.shape, bool) if mask is None else mask
        return self.hidden(ids, _positions(mask), Visible.of_padded(mask)).states

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
        scale = self.config.architecture.embedding_scale
        if scale != 1:
            x = x * jnp.asarray(scale, x.dtype)
        return laid_out_embeddings(x, mesh)

    def prefill(
        self,
        ids: Int[Array, "P Tp"],
        mask: Bool[Array, "P Tp"],
        remat: Remat = "none",
        attention: CausalAttention = BlockedAttention(),
        layout: RolloutLayout | None = None,
    ) -> PromptCache:
        step = self._causal_step(_positions(mask), Visible.of_padded(mask), attention, layout)
        x = self.embed(ids[:, None])
        layers = self._stack, self._kind_of_layer(), None
        _, (kv, chosen) = jax.lax.scan(_remat(step, remat), x, layers)
        order = jnp.arange(ids.shape[1])
        last = jnp.max(jnp.where(mask, order, 0), axis=1)
        return PromptCache(
            kv=kv,
            visible=mask & (order != last[:, None]),
            last_ids=jnp.take_along_axis(ids, last[:, None], axis=1)[:, 0],
            last_positions=mask.sum(axis=1, dtype=jnp.int32) - 1,
            routes=None if chosen is None else _by_token(chosen[:, :, 0]),
        )

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
        step = self._causal_step(positions, visible, attention, mesh)

        def without_kv(
            x: Float[Array, "R 1 T H"], layer: _LayerToRun
        ) -> tuple[Float[Array, "R 1 T H"], _Chosen]:
            x, (_, chosen) = step(x, layer)
            return x, chosen

        x = self.embed(ids[:, None], mesh)
        replayed = None if routes is None else self._by_layer(routes)[:, :, None]
        layers = self._stack, self._kind_of_layer(), replayed
        x, chosen = jax.lax.scan(_remat(without_kv, remat), x, layers)
        return Hidden(
            _normed(x[:, 0], self.norm, self.config),
            None if chosen is None else _by_token(chosen[:, :, 0]),
        )

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
        assert isinstance(prompt.kv, list), "decoding reads stored keys and values"
        order = jnp.arange(ids.shape[2])
        places = position[..., None] + order
        if lengths is not None:  # past the end, nothing is written
            places = jnp.where(order < lengths[..., None], places, own[0].length)
        positions = prompt.last_positions[:, None, None] + places
        by_kind = _ByKind.at(positions, self.config)

        def step(
            carry: tuple[Float[Array, "P G T H"], GrowingCache],
            xs: tuple[DecoderLayer, Int[Array, ""] | None, KVCache, Int[Array, ""]],
        ) -> tuple[tuple[Float[Array, "P G T H"], GrowingCache], _Chosen]:
            (x, own), (layer, kind, prompt_kv, depth) = carry, xs
            rotary, window = by_kind.of(kind)
            queries, new = layer.project(x, rotary, self.config)
            own = own.written(new, depth, places, layout)
            attended = attend(
                queries,
                prompt.segment(prompt_kv.loaded(queries.dtype), positions, window),
                OwnKeys(own, depth, places, num_written, new, window),
                self.config.architecture.score_softcap,
                layout,
            )
            x, chosen = layer.finish(x, attended, self.config, layout)
            return (x, own), chosen

        x, written, routes, first = self.embed(ids), [], [], 0
        stacks = self.layers if isinstance(self.layers, list) else [self.layers]
        for stack, prompt_kv, kv in zip(stacks, prompt.kv, own, strict=True):
            depths = jnp.arange(len(prompt_kv.values))  # XLA unrolls the loop over a single one
            kinds = self._kind_of_layer(first, len(depths))
            (x, kv), chosen = jax.lax.scan(step, (x, kv), (stack, kinds, prompt_kv, depths))
            written.append(kv)
            if chosen is not None:
                routes.append(_by_token(chosen))
            first += len(depths)
        joined = jnp.concatenate(routes, axis=-1) if routes else None
        return Extended(_normed(x, self.norm, self.config), written, joined)

    def _by_layer(self, routes: Integer[Array, "R T Lk"]) -> Integer[Array, "L R T k"]:
        """Splits the experts of tokens into those of each layer."""
        split = routes.reshape(*routes.shape[:-1], self.config.num_hidden_layers, -1)
        return jnp.moveaxis(split, -2, 0)

    def _kind_of_layer(self, first: int = 0, number: int | None = None) -> Int[Array, " L"] | None:
        """Returns the kinds of successive layers by their numbers; `None` if there is only one."""
        architecture = self.config.architecture
        kinds = architecture.kinds
        if len(kinds) == 1:
            return None
        end = None if number is None else first + number
        numbers = [kinds.index(kind) for kind in architecture.layers[first:end]]
        return jnp.array(numbers, jnp.int32)

    @property
    def _stack(self) -> DecoderLayer:
        assert not isinstance(self.layers, list), "whole sequences need layers in one stack"
        return self.layers

    def _causal_step(
        self,
        positions: Int[Array, "R T"],
        visible: Visible,
        attention: CausalAttention,
        devices: jax.sharding.Mesh | RolloutLayout | None,
    ) -> Callable[
        [Float[Array, "R 1 T H"], "_LayerToRun"],
        tuple[Float[Array, "R 1 T H"], tuple[KeyValues, _Chosen]],
    ]:
        """Returns the step of a scan over the layers of whole rows.

        It yields keys and values, and the experts that the layer's router chooses.
        """
        by_kind = _ByKind.at(positions[:, None], self.config)
        softcap = self.config.architecture.score_softcap

        def step(
            x: Float[Array, "R 1 T H"], to_run: _LayerToRun
        ) -> tuple[Float[Array, "R 1 T H"], tuple[KeyValues, _Chosen]]:
            layer, kind, replayed = to_run
            rotary, window = by_kind.of(kind)
            queries, kv = layer.project(x, rotary, self.config)
            of_row = KeyValues(kv.keys[:, 0], kv.values[:, 0])
            seen = visible if window is None else visible.windowed(window)
            attended = attention(queries[:, 0], of_row, seen, softcap)
            x, chosen = layer.finish(x, attended[:, None], self.config, devices, replayed)
            return x, (kv, chosen)

        return step


_LayerToRun = tuple[DecoderLayer, Int[Array, ""] | None, _Chosen]
"""A layer, the number of its kind where there are several, and the experts that are replayed."""


def _by_token(chosen: Integer[Array, "L *tokens k"]) -> Integer[Array, "*tokens Lk"]:
    """Joins the experts of each layer, one layer after the other."""
    by_token = jnp.moveaxis(chosen, 0, -2)
    return by_token.reshape(*by_token.shape[:-2], -1)


def _positions(mask: Bool[Array, "R T"]) -> Int[Array, "R T"]:
    """Returns positions of sequences that are padded at either end."""
    return jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)


_DIMS = {
    "embed_tokens": ("vocab", "hidden"),
    "norm": ("norm",),
    "lm_head": ("vocab", "hidden"),
    **{
        f"layers.{name}": ("layers", "norm")
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "q_norm",
            "k_norm",
            "o_proj.bias",
        )
    },
    "layers.o_proj.weight": ("layers", "hidden", "heads"),
    "layers.gate_proj.weight": ("layers", "mlp", "hidden"),
    "layers.up_proj.weight": ("layers", "mlp", "hidden"),
    "layers.down_proj.weight": ("layers", "hidden", "mlp"),
    "layers.experts.router": ("layers", "experts", "hidden"),
    "layers.experts.gate_proj": ("layers", "experts", "hidden", "mlp"),
    "layers.experts.up_proj": ("layers", "experts", "hidden", "mlp"),
    "layers.experts.down_proj": ("layers", "experts", "mlp", "hidden"),
    "layers.q_proj.weight": ("layers", "heads", "hidden"),
    "layers.q_proj.bias": ("layers", "heads"),
    **{f"layers.{name}_proj.weight": ("layers", "kv_heads", "hidden") for name in "kv"},
    **{f"layers.{name}_proj.bias": ("layers", "kv_heads") for name in "kv"},
}


def _dims(name: str) -> tuple[str, ...]:
    """Returns the logical names of a parameter's dimensions, of rounded ones and adapters too."""
    owner, _, kind = name.rpartition(".")
    if kind == "scales":  # one for each row
        return _DIMS[f"{owner}.weight" if owner.startswith("layers") else owner][:-1]
    if owner.endswith(".adapter"):
        layers, rows, columns = _DIMS[owner.replace(".adapter", ".weight")]
        other = columns if kind == "a" else rows
        return layers, "rank", other if other == "hidden" else "adapter"
    return _DIMS[owner if kind == "values" else name]


def _remat(step: Callable[_Inputs, _Output], remat: Remat) -> Callable[_Inputs, _Output]:
    """Wraps a scan body so that its backward pass recomputes what `remat` does not keep."""
    if remat == "none":
        return step
    policy = jax.checkpoint_policies.nothing_saveable
    if remat == "dots":
        policy = jax.checkpoint_policies.save_only_these_names("product")
    return jax.checkpoint(step, policy=policy, prevent_cse=False)
