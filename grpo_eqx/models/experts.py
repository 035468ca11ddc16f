"""Mixtures of experts: MLPs of which each token uses a few, chosen by a router."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from grpo_eqx.models.architecture import ExpertsShape
from grpo_eqx.models.grouped_product import grouped_product
from grpo_eqx.models.product import product
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rules import PARAMETER_RULES, batch_spec, dividing_axes, parameter_sharding

_Gated = Callable[[Array, Array], Array]
_Axes = tuple[str, ...]


class Experts(eqx.Module):
    """Experts of a layer, and the router that chooses among them.

    Exact: every token passes through all of the experts that it chose, however many chose the same.
    Weights are laid out `[in, out]`, as the grouped product of TPUs reads them; files have the
    transpose.
    """

    router: Float[Array, "*stack E H"]
    gate_proj: Float[Array, "*stack E H I"]
    up_proj: Float[Array, "*stack E H I"]
    down_proj: Float[Array, "*stack E I H"]

    @classmethod
    def init(
        cls, shape: ExpertsShape, stack: int, hidden: int, key: PRNGKeyArray, std: float
    ) -> "Experts":
        """Draws random float32 weights: normal with `std`."""
        router, gate, up, down = jax.random.split(key, 4)
        E, size = shape.number, shape.intermediate_size
        return cls(
            std * jax.random.normal(router, (stack, E, hidden), jnp.float32),
            std * jax.random.normal(gate, (stack, E, hidden, size), jnp.float32),
            std * jax.random.normal(up, (stack, E, hidden, size), jnp.float32),
            std * jax.random.normal(down, (stack, E, size, hidden), jnp.float32),
        )

    def __call__(
        self,
        x: Float[Array, "P G T H"],
        shape: ExpertsShape,
        gated: _Gated,
        devices: jax.sharding.Mesh | RolloutLayout | None = None,
        replayed: Integer[Array, "P G T k"] | None = None,
    ) -> tuple[Float[Array, "P G T H"], Integer[Array, "P G T k"]]:
        """Computes the weighted sum of each token's experts, on each device for its own tokens.

        **Arguments:**

        - `x`: the tokens.
        - `shape`: numbers of experts.
        - `gated`: activation of the gates, applied to what they gate.
        - `devices`: the mesh of training, or the layout of a rollout; `None` for one device.
        - `replayed`: experts to use in place of those that the router chooses.

        **Returns:** the sums, and the experts that the router chooses, in the dtype of `shape`.
        """
        if devices is None:
            return self._of_tokens(x, replayed, shape, gated)
        split = _Split.of(devices, x.shape, self.gate_proj.shape)
        if split.mesh.size == 1:
            return self._of_tokens(x, replayed, shape, gated)
        hidden, size, summed = (axes or None for axes in (split.hidden, split.size, split.summed))

        def run(
            x: Array, replayed: Array | None, router: Array, gate: Array, up: Array, down: Array
        ) -> tuple[Array, Array]:
            sent = () if split.summed else split.hidden
            gate, up, down = _whole(gate, 1, sent), _whole(up, 1, sent), _whole(down, 2, sent)
            experts = Experts(router, gate, up, down)
            return experts._of_tokens(x, replayed, shape, gated, split.summed, split.size)

        choices = PartitionSpec(split.prompts or None, split.groups or None)
        tokens = PartitionSpec(*choices, None, summed)
        router, wide, narrow = (
            PartitionSpec(None, *axes) for axes in ((summed,), (hidden, size), (size, hidden))
        )
        each_device = jax.shard_map(
            run,
            mesh=split.mesh,
            in_specs=(tokens, choices, router, wide, wide, narrow),
            out_specs=(tokens, choices),
            check_vma=False,
        )
        return each_device(x, replayed, self.router, self.gate_proj, self.up_proj, self.down_proj)

    def _of_tokens(
        self,
        x: Float[Array, "P G T H"],
        replayed: Integer[Array, "P G T k"] | None,
        shape: ExpertsShape,
        gated: _Gated,
        hidden: _Axes = (),
        size: _Axes = (),
    ) -> tuple[Float[Array, "P G T H"], Integer[Array, "P G T k"]]:
        """Computes the same of a device's tokens.

        **Arguments:**

        - `x`, `replayed`, `shape`, `gated`: as in a call.
        - `hidden`: mesh axes that split the hidden size of the same tokens.
        - `size`: mesh axes that split each expert.
        """
        tokens = x.reshape(-1, x.shape[-1])
        logits = _added(product("th,eh->te", tokens, self.router), hidden)
        own = routes = Routes.of(logits, shape)
        if replayed is not None:
            routes = Routes.replayed(logits, replayed.reshape(own.chosen.shape), shape)
        groups = _Groups.of(routes.chosen, len(self.router))
        rows = groups.sorted(tokens)
        # Named so that rematerialization keeps them, as it does the products of an MLP.
        gate, up = (
            checkpoint_name(_added(grouped_product(rows, weights, groups.sizes), hidden), "product")
            for weights in (self.gate_proj, self.up_proj)
        )
        # Weighted before the last product, whose result the backward pass then does not need.
        weights = groups.sorted_choices(routes.weights).astype(rows.dtype)
        rows = grouped_product(weights * gated(gate, up), self.down_proj, groups.sizes)
        chosen = own.chosen.astype(shape.dtype).reshape(*x.shape[:-1], -1)
        return _added(groups.summed(rows), size).reshape(x.shape), chosen


class _Split(NamedTuple):
    """Mesh axes that split tokens `[P, G, T, H]` and weights `[E, H, I]` of a layer's experts."""

    mesh: jax.sharding.Mesh
    prompts: _Axes
    groups: _Axes
    hidden: _Axes
    """Axes that split the hidden size of weights."""
    size: _Axes
    """Axes that split the size of each expert."""

    @classmethod
    def of(
        cls,
        devices: jax.sharding.Mesh | RolloutLayout,
        tokens: tuple[int, ...],
        weights: tuple[int, ...],
    ) -> "_Split":
        if isinstance(devices, RolloutLayout):
            mesh, rules = devices.mesh, devices.parameter_rules[-1]
            prompts, groups = devices.prompts, dividing_axes(mesh, tokens[1], devices.groups)
        else:
            mesh, rules = devices, PARAMETER_RULES
            prompts, groups = map(_axes, batch_spec(mesh, *tokens[:2]))
        dims = "experts", "hidden", "mlp"
        _, hidden, size = parameter_sharding(mesh, dims, weights, rules).spec
        return cls(mesh, prompts, groups, _axes(hidden), _axes(size))

    @property
    def summed(self) -> _Axes:
        """The axes of `hidden`, if devices along them have the same tokens.

        Then these send each other sums, and otherwise weights.
        """
        return () if set(self.hidden) & {*self.prompts, *self.groups} else self.hidden


def _axes(entry: str | tuple[str, ...] | None) -> _Axes:
    """Returns the axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _whole(x: Array, dim: int, axes: _Axes) -> Array:
    """Gathers the parts of a dimension that devices along some axes hold."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _added(x: Array, axes: _Axes) -> Array:
    return jax.lax.psum(x, axes) if axes else x


class Routes(NamedTuple):
    """Experts that each token uses, and the weights of their sum."""

    chosen: Int[Array, "T k"]
    weights: Float[Array, "T k"]

    @classmethod
    def of(cls, logits: Float[Array, "T E"], shape: ExpertsShape) -> "Routes":
        """Chooses the experts of largest probability, by the router's float32 logits."""
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), shape.per_token)
        return cls(chosen, _normalized(weights, shape))

    @classmethod
    def replayed(
        cls, logits: Float[Array, "T E"], chosen: Integer[Array, "T k"], shape: ExpertsShape
    ) -> "Routes":
        """Weights experts that were chosen before, by the router's logits as they are now.

        This is the replay of R3 (arXiv 2510.11370): the choice is fixed, and gradients pass
        through the weights.
        """
        chosen = chosen.astype(jnp.int32)
        # A sum, and no gather, whose gradient would be a scatter, which is slow on TPUs.
        is_chosen = chosen[..., None] == jnp.arange(shape.number)
        weights = jnp.where(is_chosen, jax.nn.softmax(logits)[:, None], 0.0).sum(axis=-1)
        # Above 0, however unlikely the router finds them now: their sum is a divisor.
        weights = jnp.maximum(weights, jnp.finfo(jnp.float32).tiny)
        return cls(chosen, _normalized(weights, shape))


def _normalized(weights: Float[Array, "T k"], shape: ExpertsShape) -> Float[Array, "T k"]:
    return weights / weights.sum(axis=-1, keepdims=True) if shape.normalized else weights


class _Groups(NamedTuple):
    """Rows for each token and expert that it chose, sorted by expert."""

    order: Int[Array, " rows"]
    """Choice of each row, counted along `[T, k]`."""
    places: Int[Array, "T k"]
    """Row of each choice."""
    sizes: Int[Array, " E"]
    """Number of rows of each expert."""

    @classmethod
    def of(cls, chosen: Int[Array, "T k"], number: int) -> "_Groups":
        is_chosen = chosen[..., None] == jnp.arange(number)
        uses = is_chosen.sum(axis=1, dtype=jnp.int32)
        sizes = uses.sum(axis=0)
        # The first row of each expert, and those of tokens before.
        rows = jnp.cumsum(sizes) - sizes + jnp.cumsum(uses, axis=0) - uses
        places = jnp.where(is_chosen, rows[:, None], 0).sum(axis=-1)
        # Sorted as one number: a sort of two arrays takes TPUs' compiler four times as long.
        count = chosen.size
        assert number * count < 2**31
        keys = chosen.reshape(-1) * count + jnp.arange(count, dtype=jnp.int32)
        return cls(jax.lax.sort(keys, is_stable=False) % count, places, sizes)

    def sorted(self, tokens: Float[Array, "T H"]) -> Float[Array, "rows H"]:
        return _taken(tokens, self.order // self.places.shape[1], self.places)

    def sorted_choices(self, x: Float[Array, "T k"]) -> Float[Array, "rows 1"]:
        return _taken(x.reshape(-1, 1), self.order, self.places.reshape(-1, 1))

    def summed(self, rows: Float[Array, "rows H"]) -> Float[Array, "T H"]:
        """Sums the rows of each token, in float32."""
        of_choices = _taken(rows, self.places.reshape(-1), self.order[:, None])
        of_choices = of_choices.reshape(*self.places.shape, -1)
        return of_choices.astype(jnp.float32).sum(axis=1).astype(rows.dtype)


@jax.custom_vjp
def _taken(
    x: Float[Array, "n H"], rows: Int[Array, " m"], back: Int[Array, "n copies"]
) -> Float[Array, "m H"]:
    """Takes rows of `x`, each of them as often as `back` has columns, which says where they go.

    The gradient takes rows too: by itself it would be a scatter, which is slow on TPUs.
    """
    return x[rows]


def _taken_forward(
    x: Float[Array, "n H"], rows: Int[Array, " m"], back: Int[Array, "n copies"]
) -> tuple[Float[Array, "m H"], Int[Array, "n copies"]]:
    return _taken(x, rows, back), back


def _taken_backward(
    back: Int[Array, "n copies"], dy: Float[Array, "m H"]
) -> tuple[Float[Array, "n H"], None, None]:
    return dy[back].astype(jnp.float32).sum(axis=1).astype(dy.dtype), None, None


_taken.defvjp(_taken_forward, _taken_backward)
