"""Layout of a rollout over devices: its batch, its cache and its weights."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.sharding.rules import PARAMETER_RULES, Rules, dividing_axes, num_shards

_Result = TypeVar("_Result")

VOCAB_AXES = ("tp", "fsdp")
"""Mesh axes that split the vocabulary during generation, if weights stay split over `fsdp`."""


class RolloutLayout(NamedTuple):
    """Mesh axes that split the parts of a rollout."""

    mesh: jax.sharding.Mesh
    """The mesh of training, or the mesh of `DeviceGroups`."""
    prompts: tuple[str, ...]
    """Axes that split the prompts, their keys and values, and the slots that complete them."""
    groups: tuple[str, ...]
    """Axes that split the completions of each prompt."""
    why: str
    """Name of the strategy, and the reason for its choice."""
    sharing: tuple[str, ...] | None = None
    """Axes of the devices that together hold all weights, gathered once per rollout, and share
    heads, MLP and vocabulary. `None`: weights stay split over `fsdp`."""

    @property
    def num_prompt_shards(self) -> int:
        """Number of parts that prompts are split into."""
        return num_shards(self.mesh, self.prompts)

    @property
    def num_shards(self) -> int:
        """Number of parts that completions are split into; more devices repeat the same work."""
        return num_shards(self.mesh, self.prompts + self.groups)

    @property
    def sends_weights(self) -> bool:
        """Whether weights are sent to the completions' devices for every token."""
        return self.sharing is None and "fsdp" in self.prompts + self.groups

    @property
    def num_copies(self) -> int:
        """Times that all devices together read the weights for a token of each completion."""
        if self.sharing is not None:
            return self.mesh.size // num_shards(self.mesh, self.sharing)
        if self.sends_weights:
            return self.mesh.size // num_shards(self.mesh, self.head_axes)
        return self.mesh.shape["dp"]

    @property
    def head_axes(self) -> tuple[str, ...]:
        """Axes that split attention heads and MLP, as far as their sizes divide them."""
        if self.sharing is not None:
            return self.sharing
        return () if "tp" in self.prompts + self.groups else ("tp",)

    def sharding(self, *axes: tuple[str, ...]) -> NamedSharding:
        """Returns the sharding of an array whose dims are split over these mesh axes."""
        return NamedSharding(self.mesh, PartitionSpec(*(axis or None for axis in axes)))

    def on_each_device(
        self,
        function: Callable[..., _Result],
        in_axes: Sequence[Sequence[tuple[str, ...]]],
        out_axes: Sequence[tuple[str, ...]],
    ) -> Callable[..., _Result]:
        """Wraps a function to run on each device's own parts of its arguments.

        Use it where the compiler would send data between devices although no device needs any.

        **Arguments:**

        - `function`: the function.
        - `in_axes`, `out_axes`: the mesh axes that split the dims of each argument and the result;
          of a tree, the dims of each array.
        """
        if self.mesh.size == 1:
            return function
        *in_specs, out_specs = (self.sharding(*axes).spec for axes in [*in_axes, out_axes])
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            check_vma=False,
        )

    def heads(self, number: int) -> tuple[str, ...]:
        """Returns the axes that split the keys and values of `number` heads."""
        return dividing_axes(self.mesh, number, self.head_axes)

    def queries(self, num_key_heads: int, repeats: int) -> tuple[str, ...]:
        """Returns the axes that split the query heads of each key head, besides `heads`."""
        taken = len(self.heads(num_key_heads))
        return dividing_axes(self.mesh, repeats, self.head_axes[taken:])

    def logits(self, shape: tuple[int, ...]) -> list[NamedSharding]:
        """Returns the shardings of `[P, G, V]` logits: as computed, then as tokens are drawn.

        First, devices compute logits of parts of the vocabulary for the same slots; then each holds
        the whole vocabulary for its own slots. In between, only logits are sent.
        """
        axes = VOCAB_AXES if self.sharing is None else self.sharing
        P, G, V = shape
        if V % num_shards(self.mesh, axes):
            return [self.sharding(self.prompts, self.groups)]
        prompts, groups = (
            tuple(axis for axis in each if axis not in axes) for each in (self.prompts, self.groups)
        )
        scored = self.sharding(prompts, groups, axes)
        if self.sharing is None:
            drawn = self.prompts, self.groups
        elif G % num_shards(self.mesh, groups + axes) == 0:
            drawn = prompts, groups + axes
        elif P % num_shards(self.mesh, prompts + axes) == 0:
            drawn = prompts + axes, groups
        else:
            drawn = prompts, groups
        return [scored] if drawn == (prompts, groups) else [scored, self.sharding(*drawn)]

    @property
    def parameter_rules(self) -> list[Rules]:
        """Rules for the weights that generate: the layouts that they take, one after the other.

        If weights stay split over `fsdp`, tokens are looked up and scored in parts of the
        vocabulary, so that no device gathers other parts for each token. If `tp` splits the batch,
        `tp` also splits the dims that `fsdp` splits.

        If devices share the weights, there are two layouts: each device first sends the others
        their parts of what it holds, and then gathers its own part. In a single step, the compiler
        would gather whole weights.
        """
        if self.sharing is not None:
            cut = tuple(dict.fromkeys((*self.sharing, "tp")))  # tp may be in sharing
            parts = {name: cut for name in ("vocab", "heads", "kv_heads", "mlp")}
            shared = {name: self.sharing for name in parts}
            whole = {"hidden": (), "adapter": ()}
            return [{**PARAMETER_RULES, **parts}, {**PARAMETER_RULES, **shared, **whole}]
        rules = {**PARAMETER_RULES, "vocab": VOCAB_AXES}
        if not self.head_axes:
            rules |= {"heads": (), "kv_heads": (), "mlp": (), "hidden": ("fsdp", "tp")}
        return [rules]
