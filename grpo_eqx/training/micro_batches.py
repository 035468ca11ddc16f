"""Division of a batch into micro-batches."""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from grpo_eqx.errors import UserError
from grpo_eqx.generation.prompts import map_prompts_and_completions
from grpo_eqx.sharding.rules import num_shards

Part = TypeVar("Part")


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Division of a batch into micro-batches of which every device holds an equal share."""

    prompt_shards: int
    prompt_parts: int
    group_shards: int
    group_parts: int

    @classmethod
    def plan(
        cls, num_prompts: int, num_generations: int, sharding: NamedSharding, size: int | None
    ) -> "MicroBatches":
        """Plans micro-batches of `size` completions per device: whole groups, or parts of one.

        Raises `UserError`, with the sizes that work, if `size` does not divide evenly.
        """
        prompt_shards, group_shards = _shards(sharding)
        if size is None:
            return cls(prompt_shards, 1, group_shards, 1)
        prompts, group = num_prompts // prompt_shards, num_generations // group_shards
        parts = _parts(prompts, group)
        if size not in parts:
            raise UserError(
                f"micro_batch_size_per_device is {size}, but each device has {prompts} x {group} "
                f"completions to split: use one of {', '.join(map(str, sorted(parts)))}."
            )
        prompt_parts, group_parts = parts[size]
        return cls(prompt_shards, prompt_parts, group_shards, group_parts)

    @staticmethod
    def sizes(num_prompts: int, num_generations: int, sharding: NamedSharding) -> list[int]:
        """Returns the sizes that divide evenly, ascending; the last is all that a device has."""
        prompt_shards, group_shards = _shards(sharding)
        return sorted(_parts(num_prompts // prompt_shards, num_generations // group_shards))

    @property
    def num_group_blocks(self) -> int:
        """Number of parts that a group is cut into, over devices and micro-batches."""
        return self.group_shards * self.group_parts

    @property
    def num_prompt_blocks(self) -> int:
        """Number of parts that the prompts are cut into, over devices and micro-batches."""
        return self.prompt_shards * self.prompt_parts

    def split(self, batch: Part) -> Part:
        """Cuts a batch, or parts of one: every array gets a leading dim of micro-batches."""
        return map_prompts_and_completions(self._cut_prompts, self._cut, batch)

    def join(self, x: Array) -> Array:
        """Restores the `[P, G, ...]` array from which one with a dim of micro-batches was cut."""
        _, P, G, *rest = x.shape
        pieces = x.reshape(
            self.prompt_parts, self.group_parts, self.prompt_shards, P // self.prompt_shards,
            self.group_shards, G // self.group_shards, *rest,
        )  # fmt: skip
        whole = pieces.transpose(2, 0, 3, 4, 1, 5, *range(6, 6 + len(rest)))
        return whole.reshape(P * self.prompt_parts, G * self.group_parts, *rest)

    def _cut(self, x: Array) -> Array:
        (P, G), rest = x.shape[:2], x.shape[2:]
        shape = (
            self.prompt_shards, self.prompt_parts, P // self.prompt_shards // self.prompt_parts,
            self.group_shards, self.group_parts, G // self.group_shards // self.group_parts,
        )  # fmt: skip
        order = (1, 4, 0, 2, 3, 5)
        pieces = x.reshape(*shape, *rest).transpose(*order, *range(6, 6 + len(rest)))
        return pieces.reshape(
            self.prompt_parts * self.group_parts,
            P // self.prompt_parts,
            G // self.group_parts,
            *rest,
        )

    def _cut_prompts(self, x: Array) -> Array:
        """Cuts `[P, ...]` to match `_cut`: prompts are repeated for every part of their group."""
        shape = (self.prompt_shards, self.prompt_parts, -1, *x.shape[1:])
        pieces = jnp.moveaxis(x.reshape(shape), 1, 0)
        pieces = pieces.reshape(self.prompt_parts, -1, *x.shape[1:])
        return jnp.repeat(pieces, self.group_parts, axis=0)


def _parts(prompts: int, group: int) -> dict[int, tuple[int, int]]:
    """Maps each size that divides a device's completions to its parts of prompts and groups."""
    whole = {n * group: (prompts // n, 1) for n in range(1, prompts + 1) if prompts % n == 0}
    partial = {n: (prompts, group // n) for n in range(1, group) if group % n == 0}
    return partial | whole


def _shards(sharding: NamedSharding) -> tuple[int, int]:
    """Returns the numbers of parts that prompts and groups are split into over devices."""
    prompts, groups = (*sharding.spec, None, None)[:2]
    return num_shards(sharding.mesh, prompts), num_shards(sharding.mesh, groups)
