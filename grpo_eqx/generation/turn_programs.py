"""Programs of a session, in which completions have several turns."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt

from grpo_eqx.common.compiler import Compiler
from grpo_eqx.common.random_keys import sample_keys
from grpo_eqx.generation.engine import begin
from grpo_eqx.generation.options import SamplerOptions, weights_moved_by_layer
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.generation.slots import SlotQueue, Slots, laid_out_prompts, prompt_shardings
from grpo_eqx.generation.stopping import Stopping
from grpo_eqx.generation.turns import (
    TOKENS_AT_ONCE,
    Readers,
    Report,
    decode_turns,
    num_readers,
    read_tokens,
)
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.prompt_cache import PromptCache
from grpo_eqx.sharding.arrays import shapes_of
from grpo_eqx.sharding.rollout_layout import RolloutLayout

PREFILL, SLOTS, DECODE, EXTEND, ADMIT = "prefill", "slots", "decode", "extend", "admit"


class Draws(NamedTuple):
    """Addresses of the draws of a batch."""

    seed: UInt[Array, ""]
    step: Int[Array, ""]
    rows: Int[Array, " P"]
    """Row of each prompt among those that are sampled for the step."""


class TurnKey(NamedTuple):
    """Key of a program of a session in `Compiler.start`."""

    program: str
    num_prompts: int
    num_generations: int
    prompt_width: int
    sampling: Sampling

    def __str__(self) -> str:
        return f"{self.program} (prompts of {self.prompt_width} tokens)"


class TurnProgram(NamedTuple):
    """One of the programs of a session, to be compiled before it is called."""

    key: TurnKey
    lower: Callable[[], jax.stages.Lowered]
    beside: Callable[[], Any]
    """Returns the shapes of what a session holds while it runs, besides its arguments."""


class TurnPrograms:
    """The compiled programs of one layout."""

    def __init__(
        self,
        options: SamplerOptions,
        lay_out: Callable[[], RolloutLayout],
        batch: tuple[int, int],
        compiler: Compiler,
    ):
        """**Arguments:**

        - `options`: options of the sampler.
        - `lay_out`: returns the layout over devices.
        - `batch`: number of prompts, and of completions of each.
        - `compiler`: compiles the programs.
        """
        self._options, self._lay_out, self._batch = options, lay_out, batch
        self._group, number = batch[1], batch[0] * batch[1]
        self.num_slots = min(options.max_num_seqs or number, number)
        self.is_refilled = self.num_slots < number
        self._prefill = compiler.jit(PREFILL, self._read_prompts)
        # Not with the prefill, whose peak would have the empty caches too.
        keeps = () if self.is_refilled else (0,)
        self._slots = compiler.jit(SLOTS, self._first_slots, donate_argnums=keeps)
        self.decode = compiler.jit(DECODE, self._decode, static_argnums=5, donate_argnums=1)
        self.read = compiler.jit(EXTEND, self._read, donate_argnums=1)
        self.admit = compiler.jit(ADMIT, self._admit, donate_argnums=1)

    @functools.cached_property
    def layout(self) -> RolloutLayout:
        """Layout over devices; raises `UserError` where they cannot split the batch evenly."""
        return self._lay_out()

    @property
    def readers(self) -> tuple[int, int]:
        """Devices, and slots of each that read at once."""
        devices = self.layout.num_shards
        return devices, num_readers(self.num_slots // devices)

    def to_compile(
        self, model: CausalLM, prompt_width: int, sampling: Sampling
    ) -> Iterator[TurnProgram]:
        """Yields the programs in the order of their use.

        **Arguments:**

        - `model`: the shapes of the model, as training holds it.
        - `prompt_width`: tokens of a padded prompt.
        - `sampling`: how tokens are drawn.
        """
        P = self._batch[0]

        def prompts() -> list[Any]:
            by_prompt = self.layout.sharding(self.layout.prompts)
            return [_shape((P, prompt_width), dtype, by_prompt) for dtype in (jnp.int32, bool)]

        @functools.cache
        def begun() -> tuple[CausalLM, PromptCache, Slots]:
            return self._shapes_of_begun(model, *prompts())

        def kept() -> PromptCache | None:
            return begun()[1] if self.is_refilled else None

        def decode() -> jax.stages.Lowered:
            weights, _, slots = begun()
            whole = self.layout.sharding()
            seed, step = (_shape((), dtype, whole) for dtype in (jnp.uint32, jnp.int32))
            draws = Draws(seed, step, _shape((P,), jnp.int32, whole))
            stopping = self._options.stopping
            stopping = shapes_of(stopping, jax.tree.map(lambda x: whole, stopping))
            return self.decode.lower(
                weights, slots, draws, stopping, _shape((), jnp.int32), sampling
            )

        def read() -> jax.stages.Lowered:
            weights, _, slots = begun()
            return self.read.lower(weights, slots, self._shapes_of_readers())

        def admit() -> jax.stages.Lowered:
            _, prompts, slots = begun()
            by_row = self.layout.sharding(self.layout.prompts)
            return self.admit.lower(prompts, slots, _shape((self.num_slots,), jnp.int32, by_row))

        def program(
            name: str, lower: Callable[[], jax.stages.Lowered], beside: Callable[[], Any]
        ) -> TurnProgram:
            return TurnProgram(TurnKey(name, *self._batch, prompt_width, sampling), lower, beside)

        yield program(PREFILL, lambda: self._prefill.lower(model, *prompts()), lambda: None)
        yield program(SLOTS, lambda: self._slots.lower(begun()[1]), lambda: begun()[0])
        yield program(DECODE, decode, kept)
        yield program(EXTEND, read, kept)
        if self.is_refilled:
            yield program(ADMIT, admit, lambda: begun()[0])

    def _shapes_of_begun(self, *arguments: Any) -> tuple[CausalLM, PromptCache, Slots]:
        """Returns the shapes of weights, prompts and slots, with their shardings."""
        layout = self.layout
        model, prompts = self._prefill.eval_shape(*arguments)
        if self._options.decoding_form is None:
            of_model = model.shardings(layout.mesh, layout.parameter_rules[-1])
        else:  # which the compiler chooses
            of_model, _ = self._prefill.lower(*arguments).compile().output_shardings
        prompts = shapes_of(prompts, prompt_shardings(prompts, layout))
        slots = self._slots.eval_shape(prompts)
        return shapes_of(model, of_model), prompts, shapes_of(slots, slots.shardings(layout))

    def _shapes_of_readers(self) -> Readers:
        layout, n = self.layout, self.readers[0] * self.readers[1]
        by_row = layout.sharding(layout.prompts + layout.groups)
        return Readers(
            slots=_shape((n,), jnp.int32, by_row),
            ids=_shape((n, 1, TOKENS_AT_ONCE), jnp.int32, by_row),
            lengths=_shape((n, 1), jnp.int32, by_row),
            resumes=_shape((n, 1), bool, by_row),
        )

    def begin(
        self, model: CausalLM, prompt_ids: Int[Array, "P Tp"], prompt_mask: Bool[Array, "P Tp"]
    ) -> tuple[CausalLM, PromptCache | None, Slots]:
        """Returns the weights that decode, the prompts that slots are refilled from, and the slots.

        Where every completion has a slot, slots hold all prompts.
        """
        model, prompts = self._prefill(model, prompt_ids, prompt_mask)
        slots = self._slots(prompts)
        return model, prompts if self.is_refilled else None, slots

    def _read_prompts(
        self, model: CausalLM, prompt_ids: Int[Array, "P Tp"], prompt_mask: Bool[Array, "P Tp"]
    ) -> tuple[CausalLM, PromptCache]:
        options, layout = self._options, self.layout
        model = weights_moved_by_layer(model, options, layout)
        begun = begin(
            model, prompt_ids, prompt_mask, self._group,
            max_length=options.max_completion_length, num_slots=self.num_slots, layout=layout,
            kv_cache_dtype=options.kv_cache_dtype, kv_head_multiple=options.kv_head_multiple,
            attention=options.attention.over(layout), decoding_form=options.decoding_form,
        )  # fmt: skip
        return begun.model, laid_out_prompts(begun.queue.prompts, layout)

    def _first_slots(self, prompts: PromptCache) -> Slots:
        queue = SlotQueue(prompts, self._group, self.layout.num_prompt_shards)
        slots = queue.first_slots(self.num_slots, self._options.max_completion_length)
        return slots.laid_out(self.layout)

    def _decode(
        self,
        model: CausalLM,
        slots: Slots,
        draws: Draws,
        stopping: Stopping,
        pause_after: Int[Array, ""],
        sampling: Sampling,
    ) -> tuple[Slots, Report]:
        keys = sample_keys(draws.seed, draws.step, draws.rows, self._group).reshape(-1)
        slots, report = decode_turns(
            model, slots, keys, stopping, sampling, self.layout, pause_after
        )
        report = jax.lax.with_sharding_constraint(report, self.layout.sharding())
        return slots.laid_out(self.layout), report

    def _read(self, model: CausalLM, slots: Slots, readers: Readers) -> Slots:
        return read_tokens(model, slots, readers, self.layout)

    def _admit(self, prompts: PromptCache, slots: Slots, completions: Int[Array, " R"]) -> Slots:
        queue = SlotQueue(prompts, self._group, self.layout.num_prompt_shards)
        admitted = queue.admitted(slots, jnp.maximum(completions, 0), completions >= 0)
        return admitted.laid_out(self.layout)


def _shape(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None = None
) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
