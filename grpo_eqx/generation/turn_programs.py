"""Programs of a session, in which completions have several turns."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt

from grpo_eqx.common.compiler import Compiler
from grpo_eqx.common.random_keys import completion_keys
from grpo_eqx.data.trajectory import Address
from grpo_eqx.generation.engine import begin
from grpo_eqx.generation.options import SamplerOptions, weights_moved_by_layer
from grpo_eqx.generation.sampling import Sampling, shapes_of_each
from grpo_eqx.generation.slots import SlotQueue, Slots, laid_out_prompts, prompt_shardings
from grpo_eqx.generation.stopping import Stopping
from grpo_eqx.generation.turns import (
    CARRIED_AT_ONCE,
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

WEIGHTS, PREFILL, SLOTS, DECODE, ADMIT, OPEN = (
    "weights", "prefill", "slots", "decode", "admit", "open",
)  # fmt: skip
EXTEND, REREAD = "extend", "reread"
READS = {TOKENS_AT_ONCE: EXTEND, CARRIED_AT_ONCE: REREAD}
"""Programs that read tokens, by how many a slot reads at once."""


def reads_of(*, responds: bool, is_carried: bool) -> tuple[int, ...]:
    """Returns how many tokens, of `READS`, slots read at once in a session.

    **Arguments:**

    - `responds`: whether others write in its completions.
    - `is_carried`: whether other sessions began some of them.
    """
    return (TOKENS_AT_ONCE,) * responds + (CARRIED_AT_ONCE,) * is_carried


class Draws(NamedTuple):
    """Addresses of the draws of completions."""

    seed: UInt[Array | np.ndarray, ""]
    steps: Int[Array | np.ndarray, " N"]
    """Step of each."""
    prompts: Int[Array | np.ndarray, " N"]
    """Row of its prompt among those of its step."""
    samples: Int[Array | np.ndarray, " N"]
    """Its number among those of its prompt."""
    starts: Int[Array | np.ndarray, " N"]
    """Its tokens before the one that is first in its address."""

    @classmethod
    def of(
        cls, seed: int, addresses: Sequence[Address], starts: Sequence[int] | None = None
    ) -> "Draws":
        """Returns the draws at some addresses, on the host; `starts` are 0 by default."""
        steps, prompts, samples = np.array(addresses, np.int32).T
        first = np.zeros(len(addresses)) if starts is None else starts
        return cls(np.array(seed, np.uint32), steps, prompts, samples, np.asarray(first, np.int32))


class Opened(NamedTuple):
    """Slots that go on with other tokens, or not at all."""

    taken: Bool[Array | np.ndarray, " R"]
    """True for these slots; the others stay as they are."""
    live: Bool[Array | np.ndarray, " R"]
    """Whether each decodes."""
    lengths: Int[Array | np.ndarray, " R"]
    """Tokens before its last one, whose keys and values it holds."""
    inputs: Int[Array | np.ndarray, " R"]
    """Its last token."""


class TurnKey(NamedTuple):
    """Key of a program of a session in `Compiler.start`."""

    program: str
    num_prompts: int
    num_generations: int
    prompt_width: int | None
    """Tokens of a padded prompt; `None` for a program that is the same for all."""
    sampling: Sampling

    def __str__(self) -> str:
        if self.prompt_width is None:
            return self.program
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
        self._options, self._lay_out, self.batch = options, lay_out, batch
        self._group, number = batch[1], batch[0] * batch[1]
        self.num_slots = min(options.max_num_seqs or number, number)
        self.is_refilled = self.num_slots < number
        # Not with the prefill: XLA for CPUs, which orders collectives by their data alone, could
        # have one device wait for an exchange of weights, and another for one of the prefill.
        self._weights = compiler.jit(WEIGHTS, self._move_weights)
        self._prefill = compiler.jit(PREFILL, self._read_prompts)
        # Not with the prefill, whose peak would have the empty caches too.
        keeps = () if self.is_refilled else (0,)
        self._slots = compiler.jit(SLOTS, self._first_slots, donate_argnums=keeps)
        self.decode = compiler.jit(DECODE, self._decode, donate_argnums=1)
        self._reads = {
            tokens: compiler.jit(name, self._read, donate_argnums=1)
            for tokens, name in READS.items()
        }
        self.admit = compiler.jit(ADMIT, self._admit, donate_argnums=1)
        self.open = compiler.jit(OPEN, self._open, donate_argnums=0)

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
        self,
        model: CausalLM,
        prompt_width: int,
        sampling: Sampling,
        reads: Sequence[int] = (TOKENS_AT_ONCE,),
        *,
        opens: bool = False,
    ) -> Iterator[TurnProgram]:
        """Yields the programs in the order of their use.

        **Arguments:**

        - `model`: the shapes of the model, as training holds it.
        - `prompt_width`: tokens of a padded prompt.
        - `sampling`: how tokens are drawn.
        - `reads`: numbers of tokens, of `READS`, that slots read at once.
        - `opens`: whether requests come at any time, each with its own sampling.
        """
        P, G = self.batch
        by_row = self.layout.sharding(self.layout.prompts)
        drawn = shapes_of_each(sampling, P * G, by_row) if opens else sampling

        @functools.cache
        def moved() -> CausalLM:
            return self._shapes_of_weights(model)

        @functools.cache
        def begun() -> tuple[CausalLM, PromptCache, Slots]:
            return self._shapes_of_begun(moved(), *self._shapes_of_prompts(prompt_width))

        def kept() -> PromptCache | None:
            return begun()[1] if self.is_refilled else None

        def decode() -> jax.stages.Lowered:
            weights, _, slots = begun()
            whole = self.layout.sharding()
            seed, each = _shape((), jnp.uint32, whole), _shape((P * G,), jnp.int32, whole)
            draws = Draws(seed, each, each, each, each)
            stopping = self._options.stopping
            stopping = shapes_of(stopping, jax.tree.map(lambda x: whole, stopping))
            return self.decode.lower(
                weights, slots, draws, stopping, *[_shape((), jnp.int32)] * 2, drawn
            )

        def read(tokens: int) -> jax.stages.Lowered:
            weights, _, slots = begun()
            return self._reads[tokens].lower(weights, slots, self._shapes_of_readers(tokens))

        def admit() -> jax.stages.Lowered:
            _, prompts, slots = begun()
            return self.admit.lower(prompts, slots, self._shape_of_completions())

        def open_() -> jax.stages.Lowered:
            dtypes = bool, bool, jnp.int32, jnp.int32
            return self.open.lower(
                begun()[2], Opened(*(_shape((P * G,), dtype, by_row) for dtype in dtypes))
            )

        def program(
            name: str, lower: Callable[[], jax.stages.Lowered], beside: Callable[[], Any]
        ) -> TurnProgram:
            width = None if name == WEIGHTS else prompt_width
            return TurnProgram(TurnKey(name, *self.batch, width, sampling), lower, beside)

        yield program(WEIGHTS, lambda: self._weights.lower(model), lambda: None)
        yield program(
            PREFILL,
            lambda: self._prefill.lower(moved(), *self._shapes_of_prompts(prompt_width)),
            lambda: None,
        )
        yield program(
            SLOTS,
            lambda: self._slots.lower(begun()[1], *self._shapes_of_first()),
            lambda: begun()[0],
        )
        if opens:
            yield program(OPEN, open_, kept)
        yield program(DECODE, decode, kept)
        for tokens in reads:
            yield program(READS[tokens], functools.partial(read, tokens), kept)
        if self.is_refilled:
            yield program(ADMIT, admit, lambda: begun()[0])

    def shapes_of_slots(self, model: CausalLM, prompt_width: int) -> Slots:
        """Returns the shapes of the slots.

        **Arguments:**

        - `model`: the shapes of the model, as training holds it.
        - `prompt_width`: tokens of a padded prompt.
        """
        weights = self._shapes_of_weights(model)
        return self._shapes_of_begun(weights, *self._shapes_of_prompts(prompt_width))[2]

    def _shapes_of_prompts(self, prompt_width: int) -> list[Any]:
        by_prompt, shape = self.layout.sharding(self.layout.prompts), (self.batch[0], prompt_width)
        return [_shape(shape, dtype, by_prompt) for dtype in (jnp.int32, bool)]

    def _shapes_of_weights(self, model: CausalLM) -> CausalLM:
        """Returns the shapes of what the program of weights returns."""
        layout, moved = self.layout, self._weights.eval_shape(model)
        return shapes_of(moved, moved.shardings(layout.mesh, layout.parameter_rules[-1]))

    def _shapes_of_begun(self, *arguments: Any) -> tuple[CausalLM, PromptCache, Slots]:
        """Returns the shapes of weights, prompts and slots, with their shardings."""
        layout, weights = self.layout, arguments[0]
        model, prompts = self._prefill.eval_shape(*arguments)
        if model is not None:  # with shardings that the compiler chooses
            of_model, _ = self._prefill.lower(*arguments).compile().output_shardings
            weights = shapes_of(model, of_model)
        prompts = shapes_of(prompts, prompt_shardings(prompts, layout))
        slots = self._slots.eval_shape(prompts, *self._shapes_of_first())
        return weights, prompts, shapes_of(slots, slots.shardings(layout))

    def _shapes_of_first(self) -> list[Any]:
        """Returns the shape of the completions of new slots, where there are fewer slots."""
        return [self._shape_of_completions()] if self.is_refilled else []

    def _shape_of_completions(self) -> Any:
        return _shape((self.num_slots,), jnp.int32, self.layout.sharding(self.layout.prompts))

    def _shapes_of_readers(self, tokens: int) -> Readers:
        layout, n = self.layout, self.readers[0] * self.readers[1]
        by_row = layout.sharding(layout.prompts + layout.groups)
        return Readers(
            slots=_shape((n,), jnp.int32, by_row),
            ids=_shape((n, 1, tokens), jnp.int32, by_row),
            lengths=_shape((n, 1), jnp.int32, by_row),
            resumes=_shape((n, 1), bool, by_row),
        )

    def begin(
        self,
        model: CausalLM,
        prompt_ids: Int[Array, "P Tp"],
        prompt_mask: Bool[Array, "P Tp"],
        completions: Int[Array, " R"] | None,
        kept: Slots | None = None,
    ) -> tuple[CausalLM, PromptCache | None, Slots]:
        """Returns the weights that decode, the prompts that slots are refilled from, and the slots.

        Where every completion has a slot, slots hold all prompts.

        **Arguments:**

        - `model`: the model, as training holds it.
        - `prompt_ids`, `prompt_mask`: the prompts.
        - `completions`: where there are fewer slots than completions, that of each new slot.
        - `kept`: slots that another session has left, with what they hold; by default, new ones.
        """
        model = self._weights(model)
        in_form, prompts = self._prefill(model, prompt_ids, prompt_mask)
        model = model if in_form is None else in_form
        if not self.is_refilled:
            return model, None, self._slots(prompts)
        return model, prompts, self._slots(prompts, completions) if kept is None else kept

    def read(self, model: CausalLM, slots: Slots, readers: Readers) -> Slots:
        """Returns the slots with tokens that their completions continue with."""
        return self._reads[readers.ids.shape[-1]](model, slots, readers)

    def _move_weights(self, model: CausalLM) -> CausalLM:
        return weights_moved_by_layer(model, self._options, self.layout)

    def _read_prompts(
        self, model: CausalLM, prompt_ids: Int[Array, "P Tp"], prompt_mask: Bool[Array, "P Tp"]
    ) -> tuple[CausalLM | None, PromptCache]:
        """Returns the model, if decoding takes it in another form, and the prompts."""
        options, layout = self._options, self.layout
        begun = begin(
            model, prompt_ids, prompt_mask, self._group,
            max_length=options.max_completion_length, num_slots=self.num_slots, layout=layout,
            kv_cache_dtype=options.kv_cache_dtype, kv_head_multiple=options.kv_head_multiple,
            attention=options.attention.over(layout), decoding_form=options.decoding_form,
        )  # fmt: skip
        in_form = None if options.decoding_form is None else begun.model
        return in_form, laid_out_prompts(begun.queue.prompts, layout)

    def _first_slots(
        self, prompts: PromptCache, completions: Int[Array, " R"] | None = None
    ) -> Slots:
        queue = SlotQueue(prompts, self._group, self.layout.num_prompt_shards)
        length = self._options.max_completion_length
        if completions is None:
            slots = queue.first_slots(self.num_slots, length)
        else:
            slots = queue.slots_of(completions, length)
        return slots.laid_out(self.layout)

    def _decode(
        self,
        model: CausalLM,
        slots: Slots,
        draws: Draws,
        stopping: Stopping,
        pause_after: Int[Array, ""],
        most_steps: Int[Array, ""],
        sampling: Sampling,
    ) -> tuple[Slots, Report]:
        seed, *addresses, starts = jax.tree.map(jnp.asarray, draws)
        slots, report = decode_turns(
            model, slots, completion_keys(seed, *addresses), starts, stopping, sampling,
            self.layout, pause_after, most_steps,
        )  # fmt: skip
        report = jax.lax.with_sharding_constraint(report, self.layout.sharding())
        return slots.laid_out(self.layout), report

    def _read(self, model: CausalLM, slots: Slots, readers: Readers) -> Slots:
        return read_tokens(model, slots, readers, self.layout)

    def _admit(self, prompts: PromptCache, slots: Slots, completions: Int[Array, " R"]) -> Slots:
        queue = SlotQueue(prompts, self._group, self.layout.num_prompt_shards)
        admitted = queue.admitted(slots, jnp.maximum(completions, 0), completions >= 0)
        return admitted.laid_out(self.layout)

    def _open(self, slots: Slots, opened: Opened) -> Slots:
        taken, *new = (jnp.asarray(x)[:, None] for x in opened)
        live, lengths, inputs = new
        changed = slots._replace(
            live=jnp.where(taken, live, slots.live),
            length=jnp.where(taken, lengths, slots.length),
            inputs=jnp.where(taken, inputs, slots.inputs),
            stop_state=jnp.where(taken, 0, slots.stop_state),
            finished=slots.finished & ~taken,
        )
        return changed.laid_out(self.layout)


def _shape(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None = None
) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
