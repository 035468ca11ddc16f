"""Choice of the layout of a rollout: the fastest that fits, by an estimate of its decoding."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from grpo_eqx.common.errors import UserError
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.cost import (
    activation_bytes,
    cache_bytes,
    logits_bytes,
    projected_bytes,
    token_flops,
)
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.layout_report import bytes_per_device
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rollout_sharding import (
    LegacySharding,
    MaxTextSharding,
    ReplicatedSharding,
    RolloutSharding,
    TensorSharding,
)
from grpo_eqx.sharding.rules import num_shards
from grpo_eqx.tracking.device_links import HOP_SECONDS, LinkRates, link_rates, num_hops
from grpo_eqx.tracking.device_peaks import DevicePeaks, device_peaks

_FULL = 0.9
"""Share of a device's memory that an estimate may fill: it counts the largest arrays only."""
_TYPICAL = DevicePeaks(1e14, 1e12), LinkRates(5e10)
"""Rates by which layouts are compared on devices whose own are unknown."""
_LOGITS = 4
"""Arrays of the logits' size that drawing tokens holds at once."""


class Batch(NamedTuple):
    """Completions of a rollout: `generations` of each prompt, decoded `slots` at a time."""

    prompts: int
    generations: int
    slots: int | None

    @property
    def at_a_time(self) -> int:
        completions = self.prompts * self.generations
        return completions if self.slots is None else min(self.slots, completions)


class Estimate(NamedTuple):
    """Estimate of what a rollout takes of each device in a layout."""

    layout: RolloutLayout
    seconds: float
    """Seconds of a decoding step at the device's peak rates, if nothing overlaps."""
    num_bytes: int
    """Bytes resident at most."""

    @property
    def name(self) -> str:
        return self.layout.why.partition(": ")[0]


@dataclasses.dataclass(frozen=True)
class DecodingWork:
    """Sizes of a run from which time and memory of its rollouts follow, for every layout."""

    config: ModelConfig
    weights: CausalLM
    """Shapes of the weights in a rollout's dtypes."""
    itemsize: int
    """Bytes of an activation."""
    kv_itemsize: float
    prompt_length: int
    completion_length: int
    resident_bytes: int
    """Bytes that training keeps on each device."""
    usable_bytes: int
    """Bytes of each device that programs can use."""
    device_kind: str

    def estimate(self, layout: RolloutLayout, batch: Batch) -> Estimate:
        """Estimates a decoding step in the middle of completions of full length."""
        config, mesh = self.config, layout.mesh
        peaks, links = self.rates or _TYPICAL
        slots = batch.at_a_time // layout.num_shards
        refilled = batch.at_a_time < batch.prompts * batch.generations
        prompts = slots if refilled else -(-batch.prompts // layout.num_prompt_shards)
        held = self._held(layout)
        computed = _num_bytes(_read(self.weights))
        read = computed if layout.sends_weights else bytes_per_device(_read(held))
        scale = read / computed
        heads = num_shards(mesh, layout.heads(config.num_key_value_heads))
        position = cache_bytes(config, self.kv_itemsize) / heads
        prompt_bytes = prompts * self.prompt_length * position
        own_bytes = slots * self.completion_length * position
        seconds = (
            token_flops(config) * slots * scale / peaks.flops_per_second
            + (read + prompt_bytes + own_bytes / 2) / peaks.bytes_per_second
            + self._exchanging(layout, links, slots)
        )
        logits = slots * logits_bytes(config) * _LOGITS * scale
        resident = self.resident_bytes + bytes_per_device(held)
        return Estimate(layout, seconds, math.ceil(resident + prompt_bytes + own_bytes + logits))

    @property
    def rates(self) -> tuple[DevicePeaks, LinkRates] | None:
        """Peak rates of the devices and of their links; `None` where any is unknown."""
        peaks, links = device_peaks(self.device_kind), link_rates(self.device_kind)
        return None if peaks is None or links is None else (peaks, links)

    def _held(self, layout: RolloutLayout) -> CausalLM:
        """Returns the shapes of the weights as a layout splits them."""
        shardings = self.weights.shardings(layout.mesh, layout.parameter_rules[-1])
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self.weights,
            shardings,
        )

    def _exchanging(self, layout: RolloutLayout, links: LinkRates, slots: int) -> float:
        """Returns the seconds in which a device receives what a decoding step of slots needs."""
        config = self.config
        layers = config.num_hidden_layers
        row = float(slots * activation_bytes(config, self.itemsize))
        logits = float(slots * logits_bytes(config))
        if layout.sharing is not None:
            group = _Group.along(layout.sharing, layout.mesh, links)
            # Two sums a layer, one of embeddings, and the logits of a device's own slots.
            return group.sums(2 * layers + 1, row) + group.others(logits / group.size)
        axes = layout.parameter_rules[-1]["hidden"]
        split = _Group.along(axes, layout.mesh, links)
        if layout.sends_weights:
            weights = float(_num_bytes(self.weights.layers))
            return split.others(weights, layers) + split.others(logits)
        # Products sum over the hidden size, which is split: queries, keys, values, gate and up.
        tp = _Group.along(("tp",), layout.mesh, links)
        projected = slots * projected_bytes(config, self.itemsize) / tp.size
        sums = split.sums(5 * layers, projected / 5)
        return sums + tp.sums(2 * layers + 1, row) + split.others(logits)


class _Group(NamedTuple):
    """Devices that exchange data, and what these wait for."""

    size: int
    rate: float
    """Bytes a second over a link."""
    latency: float
    """Seconds until data have reached all devices, however little data."""

    @classmethod
    def along(cls, axes: tuple[str, ...], mesh: jax.sharding.Mesh, links: LinkRates) -> "_Group":
        """Returns the first group along some axes of a mesh."""
        first = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
        devices = np.ravel(mesh.devices[first]).tolist()
        if links.network is None:  # the links of TPUs join all of a slice
            return cls(len(devices), links.link, num_hops(devices) * HOP_SECONDS)
        nodes = {device.slice_index for device in devices}
        return cls(len(devices), links.link if len(nodes) == 1 else links.network, 0.0)

    def others(self, num_bytes: float, times: int = 1) -> float:
        """Returns the seconds to receive what others hold of arrays, in so many parts."""
        return num_bytes * (self.size - 1) / self.size / self.rate + times * self.latency

    def sums(self, times: int, num_bytes: float) -> float:
        """Returns the seconds of so many all-reduces."""
        return 2 * times * self.others(num_bytes)


def _read(weights: CausalLM) -> CausalLM:
    """Returns the weights that a token reads: of an embedding of its own, only a row."""
    if weights.config.tie_word_embeddings:
        return weights
    return eqx.tree_at(lambda model: model.embed_tokens, weights, None)


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


class AutoSharding(RolloutSharding):
    """The fastest strategy that fits the devices, by an estimate of time and memory.

    Where no strategy fits, it is the strategy that takes the least memory.
    """

    work: DecodingWork | None = None
    """Sizes of the run. `None`: the first strategy that divides the batch is chosen."""

    def layout(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> RolloutLayout:
        batch = Batch(num_prompts, num_generations, num_slots)
        if self.work is None:
            return _layouts(mesh, batch)[0]
        chosen, *others = self.ranked(mesh, *batch)
        if not others:
            said = "auto: the only one that divides the batch"
        elif not self.fits(chosen):
            said = "auto: none fits by an estimate, and this takes the least memory"
        elif self.work.rates is None:
            said = "auto: the fastest by an estimate at typical rates, as this device's are unknown"
        else:
            said = f"auto: about {_milliseconds(chosen)} a token; {others[0].name} "
            fits = self.fits(others[0])
            said += f"takes {_milliseconds(others[0])}" if fits else "does not fit"
        return chosen.layout._replace(why=f"{chosen.layout.why} ({said})")

    def ranked(
        self,
        mesh: jax.sharding.Mesh,
        num_prompts: int,
        num_generations: int,
        num_slots: int | None = None,
    ) -> list[Estimate]:
        """Ranks the strategies that divide a batch: first those that fit, by time, then others."""
        assert self.work is not None
        batch = Batch(num_prompts, num_generations, num_slots)
        estimates = [self.work.estimate(layout, batch) for layout in _layouts(mesh, batch)]
        fit = sorted(filter(self.fits, estimates), key=lambda x: x.seconds)
        others = [x for x in estimates if not self.fits(x)]
        return fit + sorted(others, key=lambda x: x.num_bytes)

    def fits(self, estimate: Estimate) -> bool:
        """Returns whether a device has the memory of an estimate, and some more."""
        assert self.work is not None
        return estimate.num_bytes <= _FULL * self.work.usable_bytes


def _layouts(mesh: jax.sharding.Mesh, batch: Batch) -> list[RolloutLayout]:
    """Returns the layouts of all strategies that divide a batch; refuses one that none does."""
    layouts, refusals = list[RolloutLayout](), list[UserError]()
    for strategy in _strategies(mesh.size):
        try:
            layouts.append(strategy.layout(mesh, *batch))
        except UserError as error:
            refusals.append(error)
    if not layouts:
        # Most strategies refuse it for the same reason, which is said once.
        reasons = {str(error).partition(" must ")[2]: str(error) for error in reversed(refusals)}
        tried = " ".join(reversed(reasons.values()))
        raise UserError(f"rollout_sharding auto finds no layout for this batch. {tried}")
    return layouts


def _strategies(num_devices: int) -> Iterator[RolloutSharding]:
    """Yields the strategies to choose from, simplest first."""
    yield ReplicatedSharding()
    for size in (2, 4, 8, 16):
        if num_devices > 1 and num_devices % size == 0:
            yield TensorSharding(size)
    yield LegacySharding()
    yield MaxTextSharding()


def _milliseconds(estimate: Estimate) -> str:
    return f"{estimate.seconds * 1e3:.3g} ms"
