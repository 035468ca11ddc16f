"""The programs of a run, to be compiled before anything calls them."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import jax

from grpo_eqx.generation import Sampling
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.training.lowering import lower_generate, lower_score, lower_update
from grpo_eqx.training.programs import (
    GENERATE,
    SCORE,
    SCORE_REFERENCE,
    SCORE_SHARE,
    UPDATE,
    Programs,
)

EVALUATE, EVALUATE_SAMPLES = "evaluate", "evaluate_samples"
_MOST_COMPLETIONS = 128


class RunProgram(NamedTuple):
    """A program to compile, and the resident arrays that are its arguments."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    arguments: tuple[str, ...]


def run_programs(
    run: RunSpec, programs: Programs, *, prompt_width: int | None = None
) -> Iterator[RunProgram]:
    """Yields the programs of a run, the largest first.

    **Arguments:** the description of the run, and its programs; the width of the prompts that
    `generate` completes, by default that of the longest.
    """
    cfg, lengths, state = run.cfg, run.prompts, run.state_shapes(programs)
    P, G, width = cfg.prompts_per_step, cfg.num_generations, prompt_width or lengths.train
    is_share = cfg.steps_per_generation > 1
    yield RunProgram(
        UPDATE,
        lambda: lower_update(
            programs,
            state.model,
            *run.update_shape,
            run.passes.batch_fields,
            is_share=is_share,
            drops=cfg.reward_failures == "drop",
        ),
        ("parameters", "optimizer_state"),
    )
    yield RunProgram(
        GENERATE, lambda: lower_generate(programs, state.model, P, G, width), ("parameters",)
    )
    if run.passes.num_scores(cfg)[SCORE] > 0:
        yield RunProgram(SCORE, lambda: lower_score(programs, state.model, P, G), ("parameters",))
    reference = state.reference_model if run.passes.reference else None
    if reference is not None:
        owner = "parameters" if state.reference is None else "reference_model"
        yield RunProgram(
            SCORE_REFERENCE,
            lambda: lower_score(programs, reference, P, G, is_reference=True),
            (owner,),
        )

    def evaluate(name: str, num_samples: int, temperature: float) -> RunProgram:
        rows = evaluation_rows(lengths.num_heldout, num_samples, programs.mesh.size)
        batch, sampling = (rows, num_samples, lengths.heldout), Sampling(temperature=temperature)
        return RunProgram(
            name, lambda: lower_generate(programs, state.model, *batch, sampling), ("parameters",)
        )

    yield evaluate(EVALUATE, 1, 0.0)
    if cfg.num_generations_eval is not None:
        assert cfg.eval_temperature is not None  # resolved
        yield evaluate(EVALUATE_SAMPLES, cfg.num_generations_eval, cfg.eval_temperature)


def in_order_of_use(
    run: RunSpec, programs: Programs, prompt_widths: Sequence[int]
) -> Iterator[tuple[Hashable, Callable[[], jax.stages.Lowered]]]:
    """Yields what steps call, for `Programs.ahead`.

    **Arguments:** the description of the run, and its programs; the widths of prompts, of which the
    first is that of the next step.
    """
    first, *others = prompt_widths
    lowerings = {x.name: x.lower for x in run_programs(run, programs, prompt_width=first)}
    if run.passes.entropies and run.cfg.steps_per_generation > 1:
        model = run.state_shapes(programs).model
        lowerings[SCORE_SHARE] = lambda: lower_score(
            programs, model, *run.update_shape, is_share=True
        )
    batch = run.cfg.prompts_per_step, run.cfg.num_generations
    yield programs.key_of_generate(*batch, first), lowerings[GENERATE]
    in_turn = SCORE, SCORE_REFERENCE, SCORE_SHARE, UPDATE
    yield from ((name, lowerings[name]) for name in in_turn if name in lowerings)
    for width in others:
        more = run_programs(run, programs, prompt_width=width)
        lower = next(x.lower for x in more if x.name == GENERATE)
        yield programs.key_of_generate(*batch, width), lower


def evaluation_rows(num_problems: int, num_samples: int, num_shards: int) -> int:
    """Returns how many problems to complete at a time: about 128 completions, split evenly."""
    rows = min(num_problems, max(1, _MOST_COMPLETIONS // num_samples))
    return -(-rows // num_shards) * num_shards
