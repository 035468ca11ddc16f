"""Strategies for the layout of a rollout over a mesh: its batch, its cache and its weights."""

import abc
import math
import re
from typing import NamedTuple

import equinox as eqx
import jax

from grpo_eqx.common.errors import UserError
from grpo_eqx.sharding.mesh import AXES
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rules import num_shards


class RolloutSharding(eqx.Module):
    """Strategy that chooses the layout of a rollout from a mesh and a batch."""

    @abc.abstractmethod
    def layout(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> RolloutLayout:
        """Returns the layout of `num_generations` completions of each prompt.

        **Arguments:**

        - `mesh`: the mesh of training.
        - `num_prompts`, `num_generations`: prompts of a batch, and completions of each prompt.
        - `num_slots`: completions that are decoded at a time; `None` for all at once.

        Called for the steps of a run, and for batches of evaluations and of `generate`. Their
        numbers of prompts are multiples of the number of devices, mostly with one completion each.

        Raises `UserError`, with the reason, if this layout is impossible.
        """


def lay_out(
    strategy: RolloutSharding,
    mesh: jax.sharding.Mesh,
    num_prompts: int,
    num_generations: int,
    num_slots: int | None = None,
) -> RolloutLayout:
    """Returns a strategy's layout of a batch; raises `UserError` if it does not fit the batch."""
    layout = strategy.layout(mesh, num_prompts, num_generations, num_slots)
    where = f"{type(strategy).__name__}.layout"
    if not isinstance(layout, RolloutLayout):
        raise UserError(
            f"{where} returned a {type(layout).__name__}: return a grpo_eqx.sharding.RolloutLayout."
        )
    _check_axes(layout, mesh, where)
    if num_slots is not None and num_slots >= num_prompts * num_generations:
        num_slots = None  # a slot for each completion
    _check_division(layout, (num_prompts, num_generations, num_slots), where)
    return layout


def _check_axes(layout: RolloutLayout, mesh: jax.sharding.Mesh, where: str) -> None:
    """Rejects a layout on other devices, with unknown axes, or with an axis that occurs twice."""
    own = layout.mesh
    if list(own.devices.flat) != list(mesh.devices.flat) or not set(AXES) <= set(own.axis_names):
        raise UserError(
            f"{where} returned another mesh: it must have the devices of the mesh that it gets, in "
            f"that order, and axes {', '.join(AXES)} and any others."
        )
    sharing = () if layout.sharing is None else layout.sharing
    fields = {"prompts": layout.prompts, "groups": layout.groups, "sharing": sharing}
    for field, axes in fields.items():
        if not isinstance(axes, tuple):
            raise UserError(f"{where} returned {field}={axes!r}: return a tuple of mesh axes.")
        if not set(axes) <= set(own.axis_names):
            names = ", ".join(own.axis_names)
            raise UserError(f"{where} returned {field}={axes!r}: its mesh has {names}.")
    used = [axis for axes in fields.values() for axis in axes]
    if twice := [axis for axis in own.axis_names if used.count(axis) > 1]:
        raise UserError(
            f"{where} returned the axis {twice[0]!r} twice: prompts, groups and sharing split "
            f"different things, each over axes of its own."
        )


def _check_division(layout: RolloutLayout, batch: tuple[int, int, int | None], where: str) -> None:
    """Rejects a layout whose axes do not divide a batch of prompts, completions and slots."""
    num_prompts, num_generations, num_slots = batch
    if num_slots is not None and num_shards(layout.mesh, layout.groups) > 1:
        raise UserError(
            f"{where} splits the completions of each prompt over {', '.join(layout.groups)}, while "
            f"max_num_seqs has fewer slots than completions: leave groups empty then."
        )
    if num_generations == 1 and num_shards(layout.mesh, layout.groups) > 1:
        raise UserError(
            f"{where} splits the completions of each prompt over {', '.join(layout.groups)}, while "
            f"each prompt has one, as in greedy evaluations: leave groups empty then, and let "
            f"prompts take their axes, as far as these divide them."
        )
    counts = [
        (num_prompts, "number of prompts", layout.prompts),
        (num_generations, "number of completions of a prompt", layout.groups),
        (num_slots or 0, "number of slots (max_num_seqs)", layout.prompts),
    ]
    for number, what, axes in counts:
        parts = num_shards(layout.mesh, axes)
        if number % parts:
            raise UserError(
                f"{where} splits over {', '.join(axes)}, {parts} parts, and the {what} is "
                f"{number}: use other axes, or a multiple of {parts}."
            )


class LegacySharding(RolloutSharding):
    """Completions split over all devices (dp x fsdp x tp); each decodes its own, with their cache.

    For each token, weights are sent to all devices, layer by layer.
    """

    def layout(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> RolloutLayout:
        why = f"legacy: each of the {mesh.size} devices decodes its own completions"
        return _split("legacy", mesh, AXES, (num_prompts, num_generations, num_slots), why)


class MaxTextSharding(RolloutSharding):
    """Completions split over `dp` only; `fsdp` splits only weights, which stay in place.

    Each device holds the cache of all completions in its part of `dp`.
    """

    def layout(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> RolloutLayout:
        same = f"the {mesh.shape['fsdp']} fsdp devices in it decode the same ones"
        why = f"maxtext: each dp shard decodes its own completions, and {same}"
        return _split("maxtext", mesh, ("dp",), (num_prompts, num_generations, num_slots), why)


class ReplicatedSharding(RolloutSharding):
    """Completions split over all devices, each of which holds all weights.

    Weights are gathered once per rollout, in the rollout's dtype. After that, nothing is sent until
    the rollout ends.
    """

    def layout(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> RolloutLayout:
        why = f"replicated: each of the {mesh.size} devices holds all weights"
        batch = num_prompts, num_generations, num_slots
        return _shared("replicated", mesh, 1, batch, why)


class TensorSharding(RolloutSharding):
    """Completions split over groups of `size` neighboring devices, which share the weights.

    Each device holds a part of heads, MLP and vocabulary, sent to it once per rollout. For each
    token, the devices of a group add up their results twice per layer. The mesh of training can be
    any mesh. Heads whose number is not divisible by `size` are copied.
    """

    size: int

    def __check_init__(self) -> None:
        if self.size < 2:
            raise UserError(
                f"rollout_sharding tensor:{self.size}: groups need at least 2 devices; groups of "
                f"one are replicated."
            )

    def layout(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> RolloutLayout:
        name = f"tensor:{self.size}"
        if mesh.size % self.size:
            raise UserError(
                f"rollout_sharding {name} needs groups of {self.size} devices, but {mesh.size} "
                f"{'is' if mesh.size == 1 else 'are'} available: choose a size that divides "
                f"{mesh.size}, or replicated."
            )
        groups = mesh.size // self.size
        of = "all" if groups == 1 else f"in each of {groups} groups,"
        why = f"{name}: {of} {self.size} devices share the weights"
        return _shared(name, mesh, self.size, (num_prompts, num_generations, num_slots), why)


_TENSOR = re.compile(r"tensor:(\d+)")


def parse_rollout_sharding(name: str) -> RolloutSharding:
    """Returns the strategy with a name: `legacy`, `maxtext`, `replicated`, or `tensor:4`.

    Raises `UserError` for anything else.
    """
    named: dict[str, type[RolloutSharding]] = {
        "legacy": LegacySharding,
        "maxtext": MaxTextSharding,
        "replicated": ReplicatedSharding,
    }
    if name in named:
        return named[name]()
    if match := _TENSOR.fullmatch(name):
        return TensorSharding(int(match[1]))
    raise UserError(
        f"rollout_sharding is {name!r}: use {', '.join(named)}, or tensor:N with the number "
        f"of devices that share the weights, as in tensor:4."
    )


def _shared(
    name: str,
    mesh: jax.sharding.Mesh,
    size: int,
    batch: tuple[int, int, int | None],
    why: str,
) -> RolloutLayout:
    """Splits completions over groups of `size` devices, which share all weights."""
    groups = DeviceGroups.of(mesh, size)
    layout = _split(name, groups.mesh, AXES, batch, why)
    return layout._replace(sharing=groups.within)


def _split(
    name: str,
    mesh: jax.sharding.Mesh,
    axes: tuple[str, ...],
    batch: tuple[int, int, int | None],
    why: str,
) -> RolloutLayout:
    """Splits completions over all axes: prompts over as many axes as divide their number, and the
    completions of a prompt over the rest.

    With slots, all axes split prompts, because each device refills its slots from its own prompts.
    """
    num_prompts, num_generations, num_slots = batch
    # Also checked for more slots than completions, because evaluations have more completions.
    if num_slots is not None and num_slots % num_shards(mesh, axes):
        raise UserError(_does_not_divide(name, num_shards(mesh, axes), batch))
    if num_slots is not None and num_slots >= num_prompts * num_generations:
        num_slots = None  # one for each completion
        batch = num_prompts, num_generations, None
    # Prompts take as many axes as possible, because a prompt's completions share its cache.
    fewest = 0 if num_slots is None else len(axes)
    for cut in range(len(axes), fewest - 1, -1):
        prompts, groups = axes[:cut], axes[cut:]
        whole = num_prompts % num_shards(mesh, prompts) == 0
        if whole and num_generations % num_shards(mesh, groups) == 0:
            break
    else:
        raise UserError(_does_not_divide(name, num_shards(mesh, axes), batch))
    return RolloutLayout(mesh, prompts, groups, why)


def _does_not_divide(name: str, shards: int, batch: tuple[int, int, int | None]) -> str:
    num_prompts, num_generations, num_slots = batch
    over = "groups of devices" if name.startswith("tensor") else "devices"
    if num_slots is not None:
        return (
            f"rollout_sharding {name} must split {num_slots} slots (max_num_seqs) and "
            f"{num_prompts} prompts evenly over {shards} {over}: make both a multiple of {shards}."
        )
    return (
        f"rollout_sharding {name} must split {num_prompts} prompts, with {num_generations} "
        f"completions each, evenly over {shards} {over}: make the number of prompts per step a "
        f"multiple of {shards}."
    )


class DeviceGroups(NamedTuple):
    """A second mesh of the same devices, in the same order: `dp`, `fsdp` and `tp` count groups.

    A program can hold arrays in both meshes, and move them from one mesh to the other.
    """

    mesh: jax.sharding.Mesh
    within: tuple[str, ...]
    """Axes within a group, each of a prime number of devices. A dim that cannot be split evenly
    over all axes can then be split over some of them. The axes along `tp` come first, so that a dim
    that `tp` splits is only cut further."""

    @classmethod
    def of(cls, mesh: jax.sharding.Mesh, size: int) -> "DeviceGroups":
        """Cuts each axis of a mesh, from the last on, until groups have `size` devices.

        `size` must divide the number of devices.
        """
        names, shape, within = list[str](), list[int](), list[str]()
        for axis in reversed(AXES):
            inside = math.gcd(size, mesh.shape[axis])  # the part of the axis within a group
            size //= inside
            factors = _prime_factors(inside)
            inner = [f"{axis}_{i}" for i in range(1, len(factors) + 1)]
            names = [axis, *inner, *names]
            shape = [mesh.shape[axis] // inside, *factors, *shape]
            within += inner
        assert size == 1, "groups of equal size"
        types = (jax.sharding.AxisType.Auto,) * len(names)
        grid = mesh.devices.reshape(shape)
        return cls(jax.sharding.Mesh(grid, tuple(names), axis_types=types), tuple(within))


def _prime_factors(number: int) -> list[int]:
    factors, divisor = list[int](), 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
