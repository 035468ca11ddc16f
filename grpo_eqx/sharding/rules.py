"""Sharding of weights and batches: rules for the mesh axes that split each dim."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from grpo_eqx.common.errors import UserError

Rules = Mapping[str, tuple[str, ...]]
"""Map from the logical name of a dim to the mesh axes that split it."""

PARAMETER_RULES: Rules = {
    "vocab": ("tp",),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "mlp": ("tp",),
    "hidden": ("fsdp",),
    "norm": (),  # a split scale would force activations to be split like it, and gathered
    "layers": (),
    "experts": (),
    # The long dim of an adapter's matrix is split: the hidden size as in weights, others by tp and
    # fsdp. If the rank were split, merging would add up whole matrices over devices, instead of
    # gathering the adapter.
    "rank": (),
    "adapter": ("tp", "fsdp"),
}
BATCH_AXES = ("dp", "fsdp")


def dividing_axes(mesh: jax.sharding.Mesh, number: int, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns as many of the first axes as divide a number evenly.

    A divisor of the number thus takes a prefix of the number's axes. So key heads are on the same
    devices as the query heads that read them.
    """
    while number % num_shards(mesh, axes):
        axes = axes[:-1]
    return axes


def parameter_sharding(
    mesh: jax.sharding.Mesh,
    dims: tuple[str, ...],
    shape: tuple[int, ...],
    rules: Rules = PARAMETER_RULES,
    head_size: int = 1,
) -> NamedSharding:
    """Returns the sharding of one parameter, by the logical names of its dims.

    Each dim takes its `dividing_axes`, except axes that an earlier dim has taken. Heads are never
    cut.

    **Arguments:**

    - `mesh`: the mesh.
    - `dims`, `shape`: names of the dims, such as `("vocab", "hidden")` for an LM head, and sizes.
    - `rules`: the mesh axes that each name may take, in order.
    - `head_size`: elements of a head.

    Raises `UserError` for a name without a rule.
    """
    if unknown := [name for name in dims if name not in rules]:
        raise UserError(f"there is no dimension {unknown[0]!r}: use {', '.join(rules)}.")
    spec, taken = [], set[str]()
    for name, size in zip(dims, shape, strict=True):
        count = size // head_size if name in ("heads", "kv_heads") else size
        free = tuple(axis for axis in rules[name] if axis not in taken)
        axes = dividing_axes(mesh, count, free)
        taken |= set(axes)
        spec.append(axes[0] if len(axes) == 1 else axes or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def batch_spec(
    mesh: jax.sharding.Mesh, num_prompts: int, num_generations: int
) -> tuple[str | tuple[str, ...] | None, str | None]:
    """Returns the axes of prompts and of groups: prompts over dp, prompts or else groups over fsdp.

    A dim that its axis does not divide stays whole (`None`).
    """
    dp, fsdp = (mesh.shape[axis] for axis in BATCH_AXES)
    if num_prompts % (dp * fsdp) == 0:
        return BATCH_AXES, None
    return "dp" if num_prompts % dp == 0 else None, "fsdp" if num_generations % fsdp == 0 else None


def batch_sharding(
    mesh: jax.sharding.Mesh, num_prompts: int, num_generations: int
) -> NamedSharding:
    """Returns the sharding of `[P, G, ...]` arrays: `P` over dp, and `P` or else `G` over fsdp.

    Raises `UserError` if the numbers do not divide evenly.
    """
    prompts, groups = batch_spec(mesh, num_prompts, num_generations)
    if prompts == BATCH_AXES:
        return NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    if prompts is not None and groups is not None:
        return NamedSharding(mesh, PartitionSpec(prompts, groups))
    dp, fsdp = (mesh.shape[axis] for axis in BATCH_AXES)
    if dp == 1:
        fix = f"prompts_per_step or num_generations a multiple of {fsdp}"
    elif fsdp == 1:
        fix = f"prompts_per_step a multiple of {dp}"
    else:
        fix = (
            f"prompts_per_step a multiple of {dp * fsdp}, or of {dp} with num_generations a "
            f"multiple of {fsdp}"
        )
    raise UserError(
        f"{num_prompts} prompts with {num_generations} completions each cannot be split evenly "
        f"over dp={dp} x fsdp={fsdp} devices: make {fix}."
    )


def laid_out_embeddings(
    x: Float[Array, "*batch H"], mesh: jax.sharding.Mesh | None
) -> Float[Array, "*batch H"]:
    """Constrains rows that were looked up in a table, `[P, G, ..., H]`, to `batch_sharding`.

    This takes two constraints: first, each device looks up tokens in its own part of the table, to
    which their gradients return. Otherwise, the compiler may gather the table, or all gradients.
    """
    if mesh is None or mesh.size == 1:
        return x
    for sharding in _embedding_shardings(mesh, x.shape):
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x


def _embedding_shardings(mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> list[NamedSharding]:
    """Returns shardings of `[P, G, ..., H]` embeddings: `H` split like the table, then by batch."""
    prompts, groups = batch_spec(mesh, *shape[:2])
    by_batch = NamedSharding(mesh, PartitionSpec(prompts, groups))
    if shape[-1] % mesh.shape["fsdp"]:
        return [by_batch]
    prompts = "dp" if prompts == BATCH_AXES else prompts
    groups = None if groups == "fsdp" else groups
    unsplit = (None,) * (len(shape) - 3)
    return [NamedSharding(mesh, PartitionSpec(prompts, groups, *unsplit, "fsdp")), by_batch]


def num_batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Returns the number of parts of a batch; devices along `tp` have copies."""
    return num_shards(mesh, BATCH_AXES)


def num_shards(mesh: jax.sharding.Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    """Returns the number of parts that an entry of a `PartitionSpec` splits a dim into."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of arrays that are whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def last_dim_sharding(mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Returns a sharding of the last dim over as many axes as divide it.

    Taking or writing rows of such an array sends nothing: each device has a part of every row.
    """
    axes = dividing_axes(mesh, shape[-1], mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec(*(None,) * (len(shape) - 1), axes or None))


def optimizer_shardings(
    optimizer: optax.GradientTransformation, params: Any, param_shardings: Any
) -> Any:
    """Returns shardings of an optimizer's state: moments like their parameters, else replicated."""
    mesh = jax.tree.leaves(param_shardings)[0].mesh
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        state,
        param_shardings,
        transform_non_params=lambda _: replicated(mesh),
    )
