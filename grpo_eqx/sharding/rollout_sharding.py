"""Layouts of a rollout over a mesh: strategies for its batch, its cache and its weights."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.errors import UserError
from grpo_eqx.sharding.mesh import AXES
from grpo_eqx.sharding.rules import PARAMETER_RULES, Rules, num_shards

VOCAB_AXES = ("fsdp", "tp")
"""Mesh axes that split the vocabulary during generation."""


class RolloutLayout(NamedTuple):
    """Mesh axes that split the parts of a rollout."""

    mesh: jax.sharding.Mesh
    prompts: tuple[str, ...]
    """Axes that split the prompts, their keys and values, and the slots that complete them."""
    groups: tuple[str, ...]
    """Axes that split the completions of each prompt."""
    why: str
    """Name of the strategy, and the reason for it here."""

    @property
    def num_prompt_shards(self) -> int:
        return num_shards(self.mesh, self.prompts)

    @property
    def num_shards(self) -> int:
        """Number of devices that completions are split over; the others hold copies."""
        return num_shards(self.mesh, self.prompts + self.groups)

    @property
    def splits_heads(self) -> bool:
        """Whether `tp` is left to attention heads, MLP and vocabulary, as in the update."""
        return "tp" not in self.prompts + self.groups

    def sharding(self, *axes: tuple[str, ...]) -> NamedSharding:
        """Returns the sharding of an array whose dimensions are split over these mesh axes."""
        return NamedSharding(self.mesh, PartitionSpec(*(axis or None for axis in axes)))

    def heads(self, number: int) -> tuple[str, ...]:
        """Returns the axes that split the keys and values of that many heads."""
        divide = self.splits_heads and number % self.mesh.shape["tp"] == 0
        return ("tp",) if divide else ()

    def logits(self, vocab_size: int) -> list[NamedSharding]:
        """Returns shardings of `[P, G, V]` logits: as computed, then as tokens are drawn from them.

        Each device scores its part of the vocabulary for all slots of its part of `dp`, then holds
        the whole vocabulary for its own slots; in between, only logits are sent.
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
        """Rules for the weights that generate: those of the parameters, with two differences.

        Tokens are looked up and scored in parts of the vocabulary, so that no device gathers other
        parts for each token. Where `tp` splits the batch, it splits what `fsdp` splits.
        """
        rules = {**PARAMETER_RULES, "vocab": VOCAB_AXES}
        if not self.splits_heads:
            rules |= {"heads": (), "kv_heads": (), "mlp": (), "hidden": ("fsdp", "tp")}
        return rules


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

        They are decoded `num_slots` at a time; `None`: all at once. Raises `UserError`, with the
        reason, where this layout is impossible.
        """


class LegacySharding(RolloutSharding):
    """Completions split over every device (dp x fsdp x tp): each decodes its own, with their cache.

    Weights are sent to the completions, layer by layer.
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
    """Completions split over `dp` only: `fsdp` splits weights alone, which stay in place.

    Each device holds the cache of all completions of its part of `dp`.
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
                raise UserError(f"{error} The alternative fails too: {other}") from other
            return layout._replace(
                why=f"{layout.why} (auto, because legacy is not possible: {error})"
            )
        return layout._replace(why=f"{layout.why} (auto: this uses the least memory)")


def parse_rollout_sharding(name: str) -> RolloutSharding:
    """Returns the strategy by name: `auto`, `legacy` or `maxtext`."""
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
    """Splits completions over all axes: prompts over as many as divide them, groups over the rest.

    With slots, all axes split prompts: each device refills its slots from prompts of its own.
    """
    num_prompts, num_generations, num_slots = batch
    # Checked even for more slots than completions: an evaluation has more completions.
    if num_slots is not None and num_slots % num_shards(mesh, axes):
        raise UserError(_does_not_divide(name, num_shards(mesh, axes), batch))
    if num_slots is not None and num_slots >= num_prompts * num_generations:
        num_slots = None  # one for each completion
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
            f"rollout_sharding {name} must split {num_slots} slots (max_num_seqs) and "
            f"{num_prompts} prompts evenly over {shards} devices: make both a multiple of {shards}."
        )
    return (
        f"rollout_sharding {name} must split {num_prompts} prompts, with {num_generations} "
        f"completions each, evenly over {shards} devices: make the number of prompts per step a "
        f"multiple of {shards}."
    )
