"""How a rollout is laid out over a mesh: strategies for its batch, its cache and its weights."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.errors import UserError
from grpo_eqx.sharding.mesh import AXES
from grpo_eqx.sharding.rules import PARAMETER_RULES, Rules, num_shards

VOCAB_AXES = ("fsdp", "tp")
"""What the vocabulary is split over while generating."""


class RolloutLayout(NamedTuple):
    """The mesh axes that the parts of a rollout are split over."""

    mesh: jax.sharding.Mesh
    prompts: tuple[str, ...]
    """Of the prompts, their keys and values, and the slots that complete them."""
    groups: tuple[str, ...]
    """Of the completions of each prompt."""
    why: str
    """The strategy, and what speaks for it here."""

    @property
    def num_prompt_shards(self) -> int:
        return num_shards(self.mesh, self.prompts)

    @property
    def num_shards(self) -> int:
        """Over how many devices completions are split; the others hold copies."""
        return num_shards(self.mesh, self.prompts + self.groups)

    @property
    def splits_heads(self) -> bool:
        """Whether `tp` is left to attention heads, MLP and vocabulary, as in the update."""
        return "tp" not in self.prompts + self.groups

    def sharding(self, *axes: tuple[str, ...]) -> NamedSharding:
        """Of an array whose dimensions are split over these axes of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*(axis or None for axis in axes)))

    def heads(self, number: int) -> tuple[str, ...]:
        """The axes that so many heads' keys and values are split over."""
        divide = self.splits_heads and number % self.mesh.shape["tp"] == 0
        return ("tp",) if divide else ()

    def logits(self, vocab_size: int) -> list[NamedSharding]:
        """Of `[P, G, V]` logits: as they are computed, then as tokens are drawn from them.

        Each device scores its part of the vocabulary for all slots of its part of `dp`, then has
        the whole vocabulary for its own slots; in between only logits travel.
        """
        drawn = self.sharding(self.prompts, self.groups)
        if vocab_size % num_shards(self.mesh, VOCAB_AXES):
            return [drawn]
        prompts, groups = (
            tuple(axis for axis in axes if axis not in VOCAB_AXES)
            for axes in (self.prompts, self.groups)
        )
        scored = self.sharding(prompts, groups, VOCAB_AXES)
        return [scored] if (prompts, groups) == (self.prompts, self.groups) else [scored, drawn]

    @property
    def parameter_rules(self) -> Rules:
        """Of the weights that generate: those of the parameters, but for two things.

        Tokens are looked up and scored in parts of the vocabulary, of which no device gathers the
        others' for each token. Where `tp` splits the batch, it splits what `fsdp` does.
        """
        rules = {**PARAMETER_RULES, "vocab": VOCAB_AXES}
        if not self.splits_heads:
            rules |= {"heads": (), "kv_heads": (), "mlp": (), "hidden": ("fsdp", "tp")}
        return rules


class RolloutSharding(eqx.Module):
    """A rule from a mesh and a batch to the layout of a rollout."""

    @abc.abstractmethod
    def layout(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> RolloutLayout:
        """The layout of that many completions of each prompt, decoded `num_slots` at a time.

        Raises `UserError`, with the reason, where they cannot be laid out so. `None`: all at a
        time.
        """


class LegacySharding(RolloutSharding):
    """Completions over every device (dp x fsdp x tp): each decodes its own, with their cache.

    Layers of the weights travel to where the completions are.
    """

    def layout(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> RolloutLayout:
        why = f"legacy: each of {mesh.size} devices decodes completions of its own"
        return _split("legacy", mesh, AXES, (num_prompts, num_generations, num_slots), why)


class MaxTextSharding(RolloutSharding):
    """Completions over `dp` only: what `fsdp` splits is weights alone, which stay where they are.

    Each device has the cache of all completions of its part of `dp`.
    """

    def layout(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> RolloutLayout:
        same = f"the {mesh.shape['fsdp']} devices of fsdp decode the same completions"
        why = f"maxtext: each part of dp decodes completions of its own, and {same}"
        return _split("maxtext", mesh, ("dp",), (num_prompts, num_generations, num_slots), why)


class AutoSharding(RolloutSharding):
    """`LegacySharding` where the completions divide over all devices, else `MaxTextSharding`."""

    def layout(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> RolloutLayout:
        batch = num_prompts, num_generations, num_slots
        try:
            layout = LegacySharding().layout(mesh, *batch)
        except UserError as error:
            try:
                layout = MaxTextSharding().layout(mesh, *batch)
            except UserError as other:
                raise UserError(f"{error} Nor does the other: {other}") from other
            return layout._replace(why=f"{layout.why} (auto; {error})")
        return layout._replace(why=f"{layout.why} (auto: this takes the least memory)")


def parse_rollout_sharding(name: str) -> RolloutSharding:
    """The strategy of that name: `auto`, `legacy` or `maxtext`."""
    named: dict[str, type[RolloutSharding]] = {
        "auto": AutoSharding,
        "legacy": LegacySharding,
        "maxtext": MaxTextSharding,
    }
    return named[name]()


def _split(
    name: str,
    mesh: jax.sharding.Mesh,
    axes: tuple[str, ...],
    batch: tuple[int, int, int | None],
    why: str,
) -> RolloutLayout:
    """Completions over all the axes: prompts over as many of them as divide, groups over the rest.

    With slots all of it is prompts: each device refills its slots from prompts of its own.
    """
    num_prompts, num_generations, num_slots = batch
    # Also of more slots than completions: an evaluation has more of these.
    if num_slots is not None and num_slots % num_shards(mesh, axes):
        raise UserError(_does_not_divide(name, num_shards(mesh, axes), batch))
    if num_slots is not None and num_slots >= num_prompts * num_generations:
        num_slots = None  # one for each
        batch = num_prompts, num_generations, None
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
    if num_slots is not None:
        return (
            f"rollout_sharding {name} splits {num_slots} slots (max_num_seqs) and {num_prompts} "
            f"prompts over {shards} devices: make both a multiple of {shards}."
        )
    return (
        f"rollout_sharding {name} splits {num_prompts} prompts with {num_generations} completions "
        f"each over {shards} devices: make the prompts of a step a multiple of {shards}."
    )
