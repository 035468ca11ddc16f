"""Makes the plan of a run on given devices: compiles every program of the run."""

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import jax

from grpo_eqx.evaluation import evaluation_rows
from grpo_eqx.generation import Sampling
from grpo_eqx.models.base import CausalLM
from grpo_eqx.planner.compiled_program import compile_program
from grpo_eqx.planner.devices import Target
from grpo_eqx.planner.plan import EVALUATE, Plan, PlannedProgram
from grpo_eqx.planner.step_time import step_floors
from grpo_eqx.run_spec import RunSpec
from grpo_eqx.sharding.layout_report import bytes_per_device
from grpo_eqx.tracking.device_peaks import device_peaks
from grpo_eqx.training.lowering import (
    lower_generate,
    lower_score,
    lower_update,
    model_shapes,
    optimizer_shapes,
    reference_shapes,
)
from grpo_eqx.training.programs import Programs

Say = Callable[[str], None]
"""Progress callback: receives what is being worked on, for users who wait."""

SETTINGS = (
    "prompts_per_step", "num_generations", "max_completion_length", "micro_batch_size_per_device",
    "loss_backend", "optimizer", "max_num_seqs", "kv_cache_dtype", "rollout_sharding", "mesh",
    "remat", "beta",
)  # fmt: skip
"""Settings of the run that a plan reports."""
TRAINING = ("generate", "score", "score_reference", "update")
"""Programs of a step, in the order in which they are shown."""
UPDATING = ("score", "score_reference", "update")
"""Programs that run in micro-batches."""


class _Program(NamedTuple):
    """A program to compile, and the resident arrays that are its arguments."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    arguments: tuple[str, ...]


def make_plan(
    run: RunSpec,
    target: Target,
    say: Say,
    *,
    only: Collection[str] = (*TRAINING, EVALUATE),
    stop_early: bool = False,
) -> Plan:
    """Compiles the programs of a run whose micro-batches are not `auto`.

    **Arguments:** the programs to compile, if the run has them; whether to stop at the first that
    does not fit.

    Raises `UserError` where the mesh, the batches or the model do not fit the devices.
    """
    mesh = run.mesh(target.devices)
    programs = run.programs(mesh)
    model = model_shapes(run.model, mesh)
    frozen = not run.cfg.sync_ref_model
    reference = reference_shapes(programs, model, frozen=frozen) if run.passes.reference else None
    resident = {
        "parameters": bytes_per_device(model),
        "optimizer_state": bytes_per_device(optimizer_shapes(programs, model)),
        "reference_model": bytes_per_device(reference),
    }
    layout = programs.rollout_layout(run.cfg.prompts_per_step, run.cfg.num_generations)
    floors = step_floors(run, programs.options, layout, device_peaks(target.device_kind))
    planned: dict[str, PlannedProgram] = {}
    plan = Plan(
        topology=target.name,
        device_kind=target.device_kind,
        num_devices=mesh.size,
        num_hosts=len({device.process_index for device in target.devices}),
        model=run.cfg.model,
        mesh=dict(mesh.shape),
        rollout_sharding=layout.why,
        micro_batch_size=run.micro_batch_size(mesh),
        rows=programs.row_shape(*run.update_shape),
        settings={name: getattr(run.cfg, name) for name in SETTINGS},
        prompt_length=run.prompts.train,
        prompt_length_known=run.prompts.known,
        hbm_bytes=target.usable_bytes,
        resident=resident,
        programs=planned,
    )
    for program in _programs(run, programs, model, reference):
        if program.name not in only:
            continue
        say(f"compiling {program.name} for {target.name}")
        planned[program.name] = PlannedProgram(
            compiled=compile_program(program.lower(), target),
            elsewhere_bytes=sum(resident.values()) - sum(resident[x] for x in program.arguments),
            floor=floors.get(program.name),
        )
        if stop_early and not plan.fits:
            break
    planned.update({name: planned.pop(name) for name in (*TRAINING, EVALUATE) if name in planned})
    return plan


def _programs(
    run: RunSpec, programs: Programs, model: CausalLM, reference: CausalLM | None
) -> Iterator[_Program]:
    """Yields the run's programs, the largest first."""
    cfg, lengths = run.cfg, run.prompts
    P, G, prompt = cfg.prompts_per_step, cfg.num_generations, lengths.train
    is_share = cfg.steps_per_generation > 1
    yield _Program(
        "update",
        lambda: lower_update(
            programs, model, *run.update_shape, run.passes.batch_fields, is_share=is_share
        ),
        ("parameters", "optimizer_state"),
    )
    yield _Program(
        "generate", lambda: lower_generate(programs, model, P, G, prompt), ("parameters",)
    )
    if run.passes.num_scores(run.cfg)["score"] > 0:
        yield _Program("score", lambda: lower_score(programs, model, P, G), ("parameters",))
    if reference is not None:
        yield _Program(
            "score_reference",
            lambda: lower_score(programs, reference, P, G),
            ("reference_model",),
        )
    rows = evaluation_rows(lengths.num_heldout, 1, programs.mesh.size)
    greedy = Sampling(temperature=0.0)
    yield _Program(
        EVALUATE,
        lambda: lower_generate(programs, model, rows, 1, lengths.heldout, greedy),
        ("parameters",),
    )
