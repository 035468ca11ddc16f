"""Which mesh axes each dimension of parameters and batches is split over."""

import math
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.errors import UserError

# A dimension's logical name -> the mesh axis it is split over.
PARAMETER_RULES = {"vocab": "tp", "heads": "tp", "mlp": "tp", "hidden": "fsdp", "layers": None}
BATCH_AXES = ("dp", "fsdp")


def parameter_sharding(
    mesh: jax.sharding.Mesh, dims: tuple[str, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """The sharding of one parameter, by the logical names of its dimensions.

    A dimension that its axis does not divide is kept whole.
    """
    spec = []
    for name, size in zip(dims, shape, strict=True):
        axis = PARAMETER_RULES[name]
        spec.append(axis if axis is not None and size % mesh.shape[axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def batch_spec(
    mesh: jax.sharding.Mesh, num_prompts: int, num_generations: int
) -> tuple[str | tuple[str, ...] | None, str | None]:
    """The axes of prompts and of groups: prompts over dp and fsdp, else groups over fsdp too.

    What an axis does not divide is whole (`None`).
    """
    dp, fsdp = (mesh.shape[axis] for axis in BATCH_AXES)
    if num_prompts % (dp * fsdp) == 0:
        return BATCH_AXES, None
    return "dp" if num_prompts % dp == 0 else None, "fsdp" if num_generations % fsdp == 0 else None


def batch_sharding(
    mesh: jax.sharding.Mesh, num_prompts: int, num_generations: int
) -> NamedSharding:
    """The sharding of `[P, G, ...]` arrays: prompts over dp and fsdp, else groups over fsdp too.

    Raises `UserError` where neither divides evenly.
    """
    prompts, groups = batch_spec(mesh, num_prompts, num_generations)
    if prompts == BATCH_AXES:
        return NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    if prompts is not None and groups is not None:
        return NamedSharding(mesh, PartitionSpec(prompts, groups))
    dp, fsdp = (mesh.shape[axis] for axis in BATCH_AXES)
    raise UserError(
        f"{num_prompts} prompts with {num_generations} completions each cannot be split evenly "
        f"over dp={dp} x fsdp={fsdp} devices: make the prompts of an update (prompts_per_step / "
        f"steps_per_generation) a multiple of {dp * fsdp}, or of {dp} with num_generations a "
        f"multiple of {fsdp}."
    )


def num_batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Over how many devices a batch is split; the `tp` axis holds copies."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def prompt_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding of `[P, ...]` arrays that belong to a batch's `[P, G, ...]` arrays."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def optimizer_shardings(
    optimizer: optax.GradientTransformation, params: Any, param_shardings: Any
) -> Any:
    """Shardings of an optimiser's state: moments as their parameters, the rest replicated."""
    mesh = jax.tree.leaves(param_shardings)[0].mesh
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        state,
        param_shardings,
        transform_non_params=lambda _: replicated(mesh),
    )
