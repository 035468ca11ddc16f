"""What a run has on its devices, made of a few options, for batches in arrays `[P, G, Tc]`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.common.compiler import Compiler
from grpo_eqx.data.trajectory import Address, Group, Trajectory
from grpo_eqx.generation import LocalSampler, SamplerOptions, Sampling, Stopping
from grpo_eqx.generation.routes import Routes, shapes_of_routes
from grpo_eqx.loss_backends import ChunkedLoss, LossBackend
from grpo_eqx.models.causal_attention import BlockedAttention
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.objective import Objective
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.rules import num_batch_shards
from grpo_eqx.training import (
    Forward,
    Packing,
    Rows,
    RowShape,
    Scorer,
    TokenScores,
    TrainState,
    UpdateOptions,
    Updater,
)
from grpo_eqx.training.lowering import optimizer_shapes
from grpo_eqx.training.rows import pack, place_tokens, shapes_of_rows, take_tokens, with_loss


@dataclasses.dataclass(frozen=True)
class Sample:
    """Completions of `P` prompts, padded on the right."""

    groups: list[Group]
    ids: Int[np.ndarray, "P G Tc"]
    mask: Bool[np.ndarray, "P G Tc"]
    logps: Float[np.ndarray, "P G Tc"]
    finished: Bool[np.ndarray, "P G"]
    routes: Routes | None = None

    @property
    def lengths(self) -> Int[np.ndarray, "P G"]:
        return self.mask.sum(axis=-1)

    def picked(self, prompts: Any = slice(None), samples: Any = slice(None)) -> "Sample":
        """The completions of some prompts, and of each some, without routes."""
        groups = [list(np.array(group, object)[samples]) for group in self.groups[prompts]]
        ids, mask, logps, finished = (
            x[prompts][:, samples] for x in (self.ids, self.mask, self.logps, self.finished)
        )
        return Sample(groups, ids, mask, logps, finished)

    def with_lengths(self, lengths: Int[np.ndarray, "P G"]) -> "Sample":
        """The completions cut, or filled up with what followed them, to other lengths."""
        return sample_of(
            [group[0].prompt_ids for group in self.groups], self.ids, lengths, self.logps,
            self.finished,
        )  # fmt: skip


def sample_of(
    prompts: Sequence[Sequence[int]],
    ids: Int[np.ndarray, "P G Tc"],
    lengths: Int[np.ndarray, "P G"],
    logps: Float[np.ndarray, "P G Tc"],
    finished: Bool[np.ndarray, "P G"],
) -> Sample:
    """Completions from arrays, of which what follows the lengths means nothing."""
    groups = [
        [
            Trajectory(prompt, Address(0, p, g)).completed(
                ids[p, g, :n].astype(np.int32), logps[p, g, :n].astype(np.float32),
                finish_reason="stop" if finished[p, g] else "length",
            )
            for g, n in enumerate(lengths[p])
        ]
        for p, prompt in enumerate(prompts)
    ]  # fmt: skip
    mask = np.arange(ids.shape[-1]) < lengths[..., None]
    return Sample(groups, ids, mask, logps, finished)


@dataclasses.dataclass(frozen=True)
class Batch:
    """What an update learns from."""

    sample: Sample
    advantages: Float[np.ndarray, "P G"]
    old_logps: Float[np.ndarray, "P G Tc"] | None = None
    ref_logps: Float[np.ndarray, "P G Tc"] | None = None
    entropies: Float[np.ndarray, "P G Tc"] | None = None
    counted: Bool[np.ndarray, "P G Tc"] | None = None
    """`None`: all tokens."""

    @property
    def scores(self) -> Mapping[str, Float[np.ndarray, "P G Tc"]]:
        names = "old_logps", "ref_logps", "entropies"
        found = {name: getattr(self, name) for name in names}
        return {name: x for name, x in found.items() if x is not None}


class Runner:
    """Sampler, scorer and updater on a mesh."""

    def __init__(
        self,
        sampler: SamplerOptions,
        updates: UpdateOptions,
        mesh: jax.sharding.Mesh,
        backend: LossBackend,
        optimizer: optax.GradientTransformation,
        *,
        remat: Any = "none",
        micro: int | None = None,
        tokens_per_micro_batch: int = 100,
    ):
        self.mesh = mesh
        self.compiler = Compiler()
        self.sampler = LocalSampler(sampler, mesh, self.compiler)
        self.forward = Forward(
            backend=backend, mesh=mesh, dtype=sampler.dtype, remat=remat,
            attention=sampler.attention,
        )  # fmt: skip
        self.scorer = Scorer(self.forward, updates.temperature, self.compiler)
        self.updater = Updater(updates, self.forward, optimizer, self.compiler)
        self._micro, self._tokens = micro, tokens_per_micro_batch

    def shape(self, num_prompts: int, num_generations: int) -> RowShape:
        options = self.sampler.options
        return RowShape.of(
            num_prompts, num_generations,
            prompt_length=options.max_prompt_length,
            completion_length=options.max_completion_length,
            num_shards=num_batch_shards(self.mesh), size=self._micro, most_tokens=self._tokens,
        )  # fmt: skip

    def packing(self, sample: Sample) -> Packing:
        prompt_lengths = np.array([len(group[0].prompt_ids) for group in sample.groups])
        return Packing.plan(prompt_lengths, sample.lengths, self.shape(*sample.lengths.shape))

    def sample(
        self, model: CausalLM, prompts: Sequence[Sequence[int]], num_generations: int
    ) -> Sample:
        """Completes prompts as in step 0, padded to one width."""
        self.sampler.set_weights(model, 0)
        width = max(map(len, prompts))
        made = self.sampler.submit(
            [
                Trajectory(prompt, Address(0, p, g))
                for p, prompt in enumerate(prompts)
                for g in range(num_generations)
            ],
            prompt_width=width,
        ).result()
        groups = [
            made.trajectories[i : i + num_generations]
            for i in range(0, len(made.trajectories), num_generations)
        ]
        longest = self.sampler.options.max_completion_length
        ids, logps = (
            np.stack([[_filled(getattr(x, name), longest) for x in group] for group in groups])
            for name in ("ids", "sampler_logps")
        )
        lengths = np.array([[len(x) for x in group] for group in groups])
        finished = np.array([[x.is_finished for x in group] for group in groups])
        mask = np.arange(longest) < lengths[..., None]
        return Sample(groups, ids, mask, logps, finished, made.routes)

    def rows(self, sample: Sample, packing: Packing | None = None) -> Rows:
        packing = packing or self.packing(sample)
        prompts = None if sample.routes is None else range(len(sample.groups))
        return pack(sample.groups, packing, self.mesh, prompts)

    def rows_of(self, batch: Batch, packing: Packing | None = None) -> Rows:
        """The rows of a batch, with all that the loss reads."""
        sample = batch.sample
        packing = packing or self.packing(sample)
        counted = sample.mask if batch.counted is None else sample.mask & batch.counted
        return with_loss(
            self.rows(sample, packing), packing, self.mesh, _each(counted, sample),
            batch.advantages.reshape(-1),
            **{
                name: place_tokens(_each(x, sample), packing, self.mesh)
                for name, x in batch.scores.items()
            },
        )  # fmt: skip

    def score(self, model: CausalLM, sample: Sample, *, is_reference: bool = False) -> TokenScores:
        """Scores by completion, `[P, G, Tc]`; 0 past their ends."""
        packing = self.packing(sample)
        scores = self.scorer(
            model, self.rows(sample, packing), sample.routes, is_reference=is_reference
        )
        shape = sample.mask.shape
        return TokenScores(
            *(
                np.stack(
                    [_filled(each, shape[-1]) for each in take_tokens(np.asarray(x), packing)]
                ).reshape(shape)
                for x in scores
            )
        )

    def lower_update(
        self, model: CausalLM, num_prompts: int, num_generations: int, scored: Sequence[str] = ()
    ) -> jax.stages.Lowered:
        """Lowers the update of a batch for the shapes of a model."""
        routes = self._shapes_of_routes(model, num_prompts, num_generations)
        rows = self._shapes_of_rows(
            num_prompts, num_generations, scored, replays=routes is not None
        )
        opt_state = optimizer_shapes(self.updater, model)
        return self.updater.lower(model, opt_state, rows, routes)

    def lower_score(
        self,
        model: CausalLM,
        num_prompts: int,
        num_generations: int,
        *,
        is_reference: bool = False,
    ) -> jax.stages.Lowered:
        """Lowers the score of a batch for the shapes of a model."""
        routes = self._shapes_of_routes(model, num_prompts, num_generations)
        routes = None if is_reference else routes
        rows = self._shapes_of_rows(num_prompts, num_generations, None, replays=routes is not None)
        return self.scorer.lower(model, rows, routes)

    def _shapes_of_rows(
        self, P: int, G: int, of_loss: Sequence[str] | None, *, replays: bool
    ) -> Rows:
        return shapes_of_rows(self.shape(P, G), self.mesh, replays=replays, of_loss=of_loss)

    def _shapes_of_routes(self, model: CausalLM, P: int, G: int) -> Routes | None:
        options, of_token = self.sampler.options, model.config.routes
        if of_token is None or not options.records_routes:
            return None
        prompts, completions = options.max_prompt_length, options.max_completion_length
        return shapes_of_routes(of_token, (P, prompts), (P, G, completions), self.mesh)

    def update(
        self, state: TrainState, batch: Batch, packing: Packing | None = None
    ) -> tuple[TrainState, dict[str, Array]]:
        return self.updater(state, self.rows_of(batch, packing), batch.sample.routes)


def make_runner(
    vocab_size: int,
    prompt_length: int,
    completion_length: int,
    mesh: str = "auto",
    num_devices: int = 1,
    backend: LossBackend | None = None,
    optimizer: optax.GradientTransformation | None = None,
    **options: Any,
) -> Runner:
    """Makes a runner for small models.

    Options are fields of `SamplerOptions` and `UpdateOptions`, or arguments of `Runner`. Descent is
    plain by default: the change of the parameters is the gradient, up to the rate, which is high
    enough for the rounding of the parameters not to hide it.
    """

    def own(kind: type) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)} & set(options)
        return {name: options.pop(name) for name in names}

    sampler = SamplerOptions(
        **{
            "sampling": Sampling(temperature=0.7),
            "max_prompt_length": prompt_length,
            "max_completion_length": completion_length,
            "stopping": Stopping.of_ids([3], vocab_size),
            "pad_id": 0,
            "seed": 0,
            "dtype": jnp.dtype("float32"),
            "attention": BlockedAttention(64),
            **own(SamplerOptions),
        }
    )
    objective = Objective(epsilon=0.2, epsilon_high=0.28, max_completion_length=completion_length)
    assert sampler.sampling.temperature is not None
    updates = UpdateOptions(
        **{
            "temperature": sampler.sampling.temperature,
            "objective": objective,
            **own(UpdateOptions),
        }
    )
    return Runner(
        sampler, updates, parse_mesh(mesh).build(jax.devices()[:num_devices]),
        backend or ChunkedLoss(token_tile=64), optimizer or optax.sgd(32.0), **options,
    )  # fmt: skip


def _filled(x: np.ndarray, length: int) -> np.ndarray:
    return np.pad(x, (0, length - len(x)))


def _each(x: np.ndarray, sample: Sample) -> list[np.ndarray]:
    """The values of each completion's tokens."""
    flat = x.reshape(-1, x.shape[-1])
    return [row[:n] for row, n in zip(flat, sample.lengths.reshape(-1), strict=True)]
