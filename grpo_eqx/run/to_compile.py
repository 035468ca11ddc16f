"""The programs of a run, to be compiled before anything calls them."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from grpo_eqx.generation import Sampling
from grpo_eqx.generation.local_sampler import GENERATE
from grpo_eqx.generation.routes import Routes, shapes_of_routes
from grpo_eqx.generation.sent_weights import SEND
from grpo_eqx.generation.turn_programs import (
    ADMIT,
    DECODE,
    EXTEND,
    OPEN,
    PREFILL,
    READS,
    REREAD,
    SLOTS,
    WEIGHTS,
    TurnProgram,
    reads_of,
)
from grpo_eqx.run.initial_state import state_shapes
from grpo_eqx.run.programs import Programs
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.training.micro_batches import RowShape
from grpo_eqx.training.rows import Rows, shapes_of_rows
from grpo_eqx.training.scorer import SCORE, SCORE_REFERENCE, SCORE_SHARE
from grpo_eqx.training.updater import UPDATE

SAMPLING = (GENERATE, WEIGHTS, PREFILL, SLOTS, DECODE, EXTEND, REREAD, ADMIT)
"""Programs that complete prompts, of which a run has the first or the others."""
SENT_WEIGHTS = "sent_weights"
EVALUATE, EVALUATE_SAMPLES = "evaluate", "evaluate_samples"
_MOST_COMPLETIONS = 128


class RunProgram(NamedTuple):
    """A program to compile, and the resident arrays that are its arguments."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    arguments: tuple[str, ...]
    beside: Callable[[], Any] = lambda: None
    """Returns the shapes of what lies beside its arguments, and is not resident throughout."""
    key: Hashable = None
    """Key of a program of sampling in `Compiler.start`."""


def run_programs(
    run: RunSpec, programs: Programs, *, prompt_width: int | None = None
) -> Iterator[RunProgram]:
    """Yields the programs of a run, the largest first.

    **Arguments:**

    - `run`, `programs`: the description of the run, and what runs on its devices.
    - `prompt_width`: the width of the prompts that are sampled, by default that of the longest.
    """
    cfg, lengths, state = run.cfg, run.prompts, state_shapes(run, programs.updater)
    scorer, updater = programs.scorer, programs.updater
    routes = _routes(run, programs)
    width = prompt_width or lengths.train

    def kept() -> Any:
        """Returns the shapes of what sampling keeps on the devices between two steps."""
        if programs.sampler.sender is not None:
            # What is being sent, of which each device has as much as it arrives as.
            return programs.sampler.shapes_of_weights(state.model) if cfg.samples_ahead else None
        if cfg.carried_caches != "keep":
            return None
        weights = programs.sampler.shapes_of_weights(state.model)
        return programs.sampler.turns(*run.sampled_shape).shapes_of_slots(weights, width)

    yield RunProgram(
        UPDATE,
        lambda: updater.lower(
            state.model,
            state.opt_state,
            _rows(run, programs, programs.update_rows, run.passes.row_fields),
            routes,
        ),
        ("parameters", "optimizer_state"),
        kept,
    )
    carried = run.cfg.carried_steps > 0
    sender = programs.sampler.sender
    if sender is not None:
        yield RunProgram(SEND, lambda: sender.lower(state.model), ("parameters",), key=SEND)
    yield from _sampling(run, programs, *run.sampled_shape, width, is_carried=carried)
    if run.passes.num_scores(cfg)[SCORE] > 0:
        rows = _rows(run, programs, programs.rollout_rows)
        yield RunProgram(
            SCORE, lambda: scorer.lower(state.model, rows, routes), ("parameters",), kept
        )
    reference = state.reference_model if run.passes.reference else None
    if reference is not None:
        owner = "parameters" if state.reference is None else "reference_model"
        own = _rows(run, programs, programs.rollout_rows, replays=False)
        yield RunProgram(
            SCORE_REFERENCE, lambda: scorer.lower(reference, own, None), (owner,), kept
        )
    yield from _evaluations(run, programs)


def _evaluations(run: RunSpec, programs: Programs) -> Iterator[RunProgram]:
    """Yields the programs of evaluations."""
    cfg, lengths = run.cfg, run.prompts

    def evaluate(name: str, num_samples: int, temperature: float) -> Iterator[RunProgram]:
        rows = evaluation_rows(lengths.num_heldout, num_samples, programs.sampler.mesh.size)
        sampling = Sampling(temperature=temperature)
        for each in _sampling(run, programs, rows, num_samples, lengths.heldout, sampling):
            yield each._replace(name=f"{name} {each.name}" if run.acts else name)

    yield from evaluate(EVALUATE, 1, 0.0)
    if cfg.num_generations_eval is not None:
        assert cfg.eval_temperature is not None  # resolved
        yield from evaluate(EVALUATE_SAMPLES, cfg.num_generations_eval, cfg.eval_temperature)


def _sampling(
    run: RunSpec,
    programs: Programs,
    num_prompts: int,
    num_generations: int,
    prompt_width: int,
    sampling: Sampling | None = None,
    *,
    is_carried: bool = False,
) -> Iterator[RunProgram]:
    """Yields the programs that complete a batch, in the order of their use."""
    sampler = programs.sampler
    owner = "parameters" if sampler.sender is None else SENT_WEIGHTS
    model = sampler.shapes_of_weights(state_shapes(run, programs.updater).model)
    batch = num_prompts, num_generations, prompt_width, sampling or sampler.options.sampling
    if run.has_harness:
        programs_of_turns, _ = sampler.open_programs(*run.open_shape)
        made = programs_of_turns.to_compile(
            model, 1, sampler.options.sampling, [*READS], opens=True
        )
        yield from _of_turns((each for each in made if each.key.program != OPEN), owner)
        return
    if not run.acts and not is_carried:
        yield RunProgram(
            GENERATE,
            lambda: sampler.lower(model, *batch),
            (owner,),
            key=sampler.key(*batch),
        )
        return
    reads = reads_of(responds=run.acts, is_carried=is_carried)
    turns = sampler.turns(num_prompts, num_generations)
    yield from _of_turns(turns.to_compile(model, *batch[2:], reads), owner)


def _of_turns(programs: Iterable[TurnProgram], owner: str) -> Iterator[RunProgram]:
    """Yields the programs of a session.

    **Arguments:**

    - `programs`: the programs.
    - `owner`: the arrays that hold the weights.
    """
    for each in programs:
        arguments = (owner,) if each.key.program == WEIGHTS else ()
        yield RunProgram(each.key.program, each.lower, arguments, each.beside, each.key)


def in_order_of_use(
    run: RunSpec, programs: Programs, prompt_widths: Sequence[int]
) -> Iterator[tuple[Hashable, Callable[[], jax.stages.Lowered]]]:
    """Yields what steps call, for `Compiler.start`.

    **Arguments:**

    - `run`, `programs`: the description of the run, and what runs on its devices.
    - `prompt_widths`: the widths of prompts, of which the first is that of the next step.
    """
    first, *others = prompt_widths
    lowerings = {x.name: x.lower for x in run_programs(run, programs, prompt_width=first)}
    # Those of runs that do not act are compiled when they are called, and those of prompts whose
    # lengths environments decide.
    is_known = run.acts and not run.passed.changes_prompts
    evaluations = _evaluations(run, programs) if is_known and run.cfg.eval_steps else ()
    of_evaluations = [(x.key, x.lower) for x in evaluations]
    if run.cfg.eval_on_start:
        yield from of_evaluations
    yield from sampling_programs(run, programs, first)
    if run.passes.entropies and run.cfg.steps_per_generation > 1:
        lowerings[SCORE_SHARE] = _lower_share(run, programs)
    in_turn = SCORE, SCORE_REFERENCE, SCORE_SHARE, UPDATE
    yield from ((name, lowerings[name]) for name in in_turn if name in lowerings)
    for width in others:
        yield from sampling_programs(run, programs, width)
    yield from of_evaluations  # begun already where the run starts with one


def sampling_programs(
    run: RunSpec, programs: Programs, prompt_width: int
) -> Iterator[tuple[Hashable, Callable[[], jax.stages.Lowered]]]:
    """Yields what a rollout calls, for `Compiler.start`."""
    carried, sender = run.cfg.carried_steps > 0, programs.sampler.sender
    if sender is not None:
        model = state_shapes(run, programs.updater).model
        yield SEND, lambda: sender.lower(model)
    for each in _sampling(run, programs, *run.sampled_shape, prompt_width, is_carried=carried):
        yield each.key, each.lower


def _lower_share(run: RunSpec, programs: Programs) -> Callable[[], jax.stages.Lowered]:
    """Returns the lowering of the policy's score of a rollout's share."""
    model = state_shapes(run, programs.updater).model
    rows = _rows(run, programs, programs.update_rows)
    return lambda: programs.scorer.lower(model, rows, _routes(run, programs))


def evaluation_rows(num_problems: int, num_samples: int, num_shards: int) -> int:
    """Returns how many problems to complete at a time: about 128 completions, split evenly."""
    rows = min(num_problems, max(1, _MOST_COMPLETIONS // num_samples))
    return -(-rows // num_shards) * num_shards


def _rows(
    run: RunSpec,
    programs: Programs,
    shape: RowShape,
    of_loss: Sequence[str] | None = None,
    *,
    replays: bool = True,
) -> Rows:
    return shapes_of_rows(
        shape,
        programs.updater.forward.mesh,
        replays=replays and run.cfg.router_replay,
        of_loss=of_loss,
    )


def _routes(run: RunSpec, programs: Programs) -> Routes | None:
    """Returns the shapes of the routes that a run replays."""
    of_token, cfg = run.model.routes, run.cfg
    if of_token is None or not cfg.router_replay:
        return None
    return shapes_of_routes(
        of_token,
        (cfg.prompts_per_step, run.prompts.train),
        (*run.rollout_shape, run.completion_length),
        programs.sampler.mesh,
    )
