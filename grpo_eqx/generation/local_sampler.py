"""The sampler on the run's own devices, with the weights that are trained."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt

from grpo_eqx.common.compiler import Compiler
from grpo_eqx.common.random_keys import sample_keys
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.trajectory import Group, Trajectory
from grpo_eqx.generation.engine import Generated, generate
from grpo_eqx.generation.open_session import OpenSession
from grpo_eqx.generation.options import SamplerOptions, laid_out_weights
from grpo_eqx.generation.pending import Shared
from grpo_eqx.generation.sampler import (
    PendingSamples,
    Responder,
    Sampled,
    Sampler,
    SamplingCounts,
    Until,
)
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.generation.sent_weights import WeightSender
from grpo_eqx.generation.session import Kept, Session
from grpo_eqx.generation.stopping import Stopping
from grpo_eqx.generation.turn_programs import READS, Draws, TurnPrograms, reads_of
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.arrays import fetch, shapes_of, shard
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rollout_sharding import lay_out
from grpo_eqx.sharding.rules import batch_sharding

GENERATE = "generate"


class GenerateKey(NamedTuple):
    """Key of a sampling program in `Compiler.start`."""

    num_prompts: int
    num_generations: int
    prompt_width: int
    sampling: Sampling

    def __str__(self) -> str:
        return f"{GENERATE} (prompts of {self.prompt_width} tokens)"


@dataclasses.dataclass(frozen=True)
class _Pending(PendingSamples):
    groups: list[Group]
    version: int
    generated: Generated

    def result(self) -> Sampled:
        made = self.generated
        arrays = fetch((made.ids, made.logps, made.lengths, made.finished))
        steps, slots, cache_share = fetch(made.counts)
        counts = SamplingCounts(int(steps), int(slots), float(cache_share), int(arrays[2].sum()))
        trajectories = [
            each.completed(
                ids[:length],
                logps[:length],
                version=self.version,
                finish_reason="stop" if finished else "length",
            )
            for group, *of_group in zip(self.groups, *arrays, strict=True)
            for each, ids, logps, length, finished in zip(group, *of_group, strict=True)
        ]
        return Sampled(trajectories, counts, made.routes)


class LocalSampler(Sampler):
    """Sampler on a mesh: one program completes all trajectories that are submitted together."""

    def __init__(
        self,
        options: SamplerOptions,
        mesh: jax.sharding.Mesh,
        compiler: Compiler | None = None,
        sender: WeightSender | None = None,
    ):
        """**Arguments:**

        - `options`: settings and strategies.
        - `mesh`: the devices.
        - `compiler`: compiles its program; by default one of its own.
        - `sender`: sends it weights, where training has other devices.
        """
        self.options = options
        self.mesh = mesh
        self.sender = sender
        self._compiler = compiler or Compiler()
        self._layouts: dict[tuple[int, int], RolloutLayout] = {}
        self._turns: dict[tuple[int, int], TurnPrograms] = {}
        self._open: dict[tuple[int, int], TurnPrograms] = {}
        """Programs of open sessions, by their slots and their limit."""
        self._carried: Session | None = None
        """The last session that was to stop early, where the next one keeps its caches."""
        self._weights: tuple[CausalLM, int] | None = None
        self._trained: CausalLM | None = None
        """The model, as training holds it, whose weights were sent."""
        self._jitted = self._compiler.jit(GENERATE, self._program, static_argnames="group")

    def set_weights(self, model: CausalLM, version: int) -> None:
        if self.sender is not None:
            sent, self._weights = self._weights, None
            if model is self._trained and sent is not None:
                model = sent[0]
            else:
                del sent  # no device holds both
                self._trained, model = model, self.sender(model)
        self._weights = model, version

    def shapes_of_weights(self, model: CausalLM) -> CausalLM:
        """Returns the shapes of the weights that its programs take.

        **Arguments:**

        - `model`: the shapes of the model, as training holds it.
        """
        return model if self.sender is None else self.sender.shapes(model)

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        sampling: Sampling | None = None,
        *,
        problems: Sequence[Prompt | None] | None = None,
        prompt_width: int | None = None,
        responder: Responder | None = None,
        until: Until | None = None,
    ) -> PendingSamples:
        assert self._weights is not None, "set_weights comes first"
        model, version = self._weights
        groups = [
            list(each) for _, each in itertools.groupby(trajectories, lambda x: x.address[:2])
        ]
        prompts = [group[0].prompt_ids for group in groups]
        num_generations = len(groups[0])
        has_turns = responder is not None or until is not None
        assert has_turns or not any(map(len, trajectories)), "completions are continued in turns"
        assert all([x.address.sample for x in g] == [*range(num_generations)] for g in groups)
        width = prompt_width or max(map(len, prompts))
        sampling = sampling or self.options.sampling
        layout = self.layout(len(groups), num_generations)
        ids, mask = shard(
            _padded(prompts, self.options.pad_id, width), layout.sharding(layout.prompts)
        )
        if has_turns:
            processes = {device.process_index for device in self.mesh.devices.flat}
            if jax.process_index() not in processes:
                return Shared(None, trajectories, min(processes))
            assert not self.options.records_routes, "routes of several turns are not recorded"
            turns = self.turns(len(groups), num_generations)
            shapes = shapes_of(model, model.shardings(self.mesh))
            reads = reads_of(responds=responder is not None, is_carried=until is not None)
            for program in turns.to_compile(shapes, width, sampling, reads):
                self._compiler.ensure(program.key, program.lower)
            addresses = [each.address for each in trajectories]
            draws = shard(Draws.of(self.options.seed, addresses), layout.sharding())
            session = Session(
                turns, model, ids, mask, draws, sampling, self.options,
                trajectories, version, responder, until, self._kept(trajectories, width, until),
            )  # fmt: skip
            if until is not None and self.options.keeps_caches:
                self._carried = session
            if len(processes) < jax.process_count():
                return Shared(session, trajectories, min(processes))
            return session
        steps, rows = np.array([group[0].address[:2] for group in groups], np.int32).T
        assert len({*steps}) == 1, "trajectories of one step are submitted together"
        key = self.key(len(groups), num_generations, width, sampling)
        self._compiler.ensure(
            key, lambda: self.lower(shapes_of(model, model.shardings(self.mesh)), *key)
        )
        generated = self._jitted(
            model, ids, mask, np.uint32(self.options.seed), steps[0], rows,
            self.options.stopping,  # no constant of the program: it has an entry for every token
            num_generations, sampling,
        )  # fmt: skip
        return _Pending(groups, version, generated)

    def open_session(self, num_slots: int, max_length: int) -> OpenSession:
        """Returns a session that takes requests as they come, with the weights as they are now.

        **Arguments:**

        - `num_slots`: number of slots.
        - `max_length`: limit on the tokens of a request, those that are drawn included.

        Raises `UserError` where the devices cannot split the slots evenly.
        """
        assert self._weights is not None, "set_weights comes first"
        model, _ = self._weights
        programs, options = self.open_programs(num_slots, max_length)
        shapes = shapes_of(model, model.shardings(self.mesh))
        for each in programs.to_compile(shapes, 1, options.sampling, [*READS], opens=True):
            self._compiler.ensure(each.key, each.lower)
        return OpenSession(programs, model, options)

    def open_programs(self, num_slots: int, max_length: int) -> tuple[TurnPrograms, SamplerOptions]:
        """Returns the programs of an open session, and its options."""
        options = dataclasses.replace(
            self.options, max_completion_length=max_length - 1, max_num_seqs=None
        )
        lay_out = functools.partial(self.layout, num_slots, 1)
        if (num_slots, max_length) not in self._open:
            self._open[num_slots, max_length] = TurnPrograms(
                options, lay_out, (num_slots, 1), self._compiler
            )
        return self._open[num_slots, max_length], options

    def _kept(
        self, trajectories: Sequence[Trajectory], width: int, until: Until | None
    ) -> Kept | None:
        """Returns what the last session has left of these completions, and lets go of it."""
        if until is None or self._carried is None:
            return None
        kept, self._carried = self._carried.kept, None
        is_usable = kept is not None and kept.are_of(trajectories, width)
        return kept if is_usable else None

    def key(
        self,
        num_prompts: int,
        num_generations: int,
        prompt_width: int,
        sampling: Sampling | None = None,
    ) -> GenerateKey:
        """Returns the key of the program that completes such a batch.

        **Arguments:**

        - `num_prompts`, `num_generations`: prompts, and completions of each.
        - `prompt_width`: tokens of a padded prompt.
        - `sampling`: how tokens are drawn; by default as in training.
        """
        sampling = sampling or self.options.sampling
        return GenerateKey(num_prompts, num_generations, prompt_width, sampling)

    def lower(
        self,
        model: CausalLM,
        num_prompts: int,
        num_generations: int,
        prompt_width: int,
        sampling: Sampling | None = None,
    ) -> jax.stages.Lowered:
        """Lowers the program that completes such a batch.

        **Arguments:**

        - `model`: the shapes of the model, as training holds it.
        - `num_prompts`, `num_generations`: prompts, and completions of each.
        - `prompt_width`: tokens of a padded prompt.
        - `sampling`: how tokens are drawn; by default as in training.
        """
        layout = self.layout(num_prompts, num_generations)
        sharding = layout.sharding(layout.prompts)
        shape = num_prompts, prompt_width
        return self._jitted.lower(
            model,
            jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding),
            jax.ShapeDtypeStruct(shape, bool, sharding=sharding),
            jax.ShapeDtypeStruct((), jnp.uint32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((num_prompts,), jnp.int32),
            self.options.stopping,
            num_generations,
            sampling or self.options.sampling,
        )

    def turns(self, num_prompts: int, num_generations: int) -> TurnPrograms:
        """Returns the programs that complete such a batch in several turns."""
        batch = num_prompts, num_generations
        if batch not in self._turns:
            lay_out = functools.partial(self.layout, *batch)
            self._turns[batch] = TurnPrograms(self.options, lay_out, batch, self._compiler)
        return self._turns[batch]

    def layout(self, num_prompts: int, num_generations: int) -> RolloutLayout:
        """Returns the layout in which that many completions of each prompt are made.

        Raises `UserError` where the devices cannot split them evenly.
        """
        batch = num_prompts, num_generations
        if batch not in self._layouts:  # a strategy may compare many
            options = self.options
            self._layouts[batch] = lay_out(
                options.rollout_sharding, self.mesh, *batch, options.max_num_seqs
            )
        return self._layouts[batch]

    def _program(
        self,
        model: CausalLM,
        prompt_ids: Int[Array, "P Tp"],
        prompt_mask: Bool[Array, "P Tp"],
        seed: UInt[Array, ""],
        step: Int[Array, ""],
        rows: Int[Array, " P"],
        stopping: Stopping,
        group: int,
        sampling: Sampling,
    ) -> Generated:
        options, P = self.options, len(prompt_ids)
        layout = self.layout(P, group)
        # Cast and resharded once for the whole rollout.
        model = laid_out_weights(model, options, layout)
        made = generate(
            model,
            prompt_ids,
            prompt_mask,
            sample_keys(seed, step, rows, group),
            sampling=sampling,
            max_length=options.max_completion_length,
            stopping=stopping,
            num_slots=options.max_num_seqs,
            layout=layout,
            kv_cache_dtype=options.kv_cache_dtype,
            kv_head_multiple=options.kv_head_multiple,
            attention=options.attention.over(layout),
            decoding_form=options.decoding_form,
            records_routes=options.records_routes,
        )
        by_group = batch_sharding(self.mesh, P, group)
        routes = made.routes
        if routes is not None:
            # Every update reads prompts of one width.
            width = max(prompt_ids.shape[1], options.max_prompt_length) - prompt_ids.shape[1]
            routes = routes._replace(prompts=jnp.pad(routes.prompts, ((0, 0), (0, width), (0, 0))))
            routes = routes.split_by_layer(self.mesh)
        arrays = made.ids, made.logps, made.lengths, made.finished
        ids, logps, lengths, finished = jax.lax.with_sharding_constraint(arrays, by_group)
        return Generated(ids, logps, lengths, finished, routes, made.counts)


def _padded(
    prompts: Sequence[Sequence[int]], pad_id: int, width: int
) -> tuple[Int[np.ndarray, "P Tp"], Bool[np.ndarray, "P Tp"]]:
    """Returns ids and mask of prompts, padded on the right."""
    ids = np.full((len(prompts), width), pad_id, np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for p, prompt in enumerate(prompts):
        ids[p, : len(prompt)] = prompt
        mask[p, : len(prompt)] = True
    return ids, mask
