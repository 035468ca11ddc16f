"""Makes the plan of a run on given devices: compiles every program of the run."""

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax

from grpo_eqx.common.errors import UserError
from grpo_eqx.generation.local_sampler import GENERATE
from grpo_eqx.generation.sent_weights import SEND
from grpo_eqx.generation.turn_programs import REREAD
from grpo_eqx.planner.compiled_program import CompiledProgram, compile_program
from grpo_eqx.planner.devices import Target
from grpo_eqx.planner.plan import Plan, PlannedProgram, is_evaluation
from grpo_eqx.planner.routes import route_finder
from grpo_eqx.planner.trips import Decoding, MicroBatches, Once, Trips, Turns
from grpo_eqx.planner.work import Level, Work
from grpo_eqx.run.initial_state import state_shapes
from grpo_eqx.run.programs import Programs, make_programs
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.run.to_compile import EVALUATE, SAMPLING, SENT_WEIGHTS, run_programs
from grpo_eqx.sharding.layout_report import bytes_per_device
from grpo_eqx.tracking.device_peaks import device_peaks
from grpo_eqx.training.scorer import SCORE, SCORE_REFERENCE
from grpo_eqx.training.updater import UPDATE

Say = Callable[[str], None]
"""Progress callback: receives what is being worked on, for users who wait."""

SETTINGS = (
    "prompts_per_step", "num_generations", "max_completion_length", "micro_batch_size_per_device",
    "loss_backend", "optimizer", "max_num_seqs", "rollout_dtype", "kv_cache_dtype",
    "rollout_sharding", "mesh", "remat", "beta", "num_iterations", "steps_per_generation",
    "lora_rank", "load_in_8bit", "router_replay", "max_staleness",
)  # fmt: skip
"""Settings of the run that a plan reports."""
TRAINING = (SEND, *SAMPLING, SCORE, SCORE_REFERENCE, UPDATE)
"""Programs of a step, in the order in which they are shown."""
UPDATING = (SCORE, SCORE_REFERENCE, UPDATE)
"""Programs that run in micro-batches."""


def make_plan(
    run: RunSpec,
    target: Target,
    say: Say,
    *,
    only: Collection[str] = (*TRAINING, EVALUATE),
    stop_early: bool = False,
) -> Plan:
    """Compiles the programs of a run whose micro-batches are not `auto`.

    **Arguments:**

    - `only`: the programs to compile, of those that the run has.
    - `stop_early`: whether to stop at the first program that does not fit.

    Raises `UserError` where the mesh, the batches or the model do not fit the devices.
    """
    mesh, rollout_mesh = run.mesh(target.devices), run.rollout_mesh(target.devices)
    programs = make_programs(run, mesh, rollout_mesh=rollout_mesh)
    state = state_shapes(run, programs.updater)
    resident = {
        "parameters": bytes_per_device(state.model),
        "optimizer_state": bytes_per_device(state.opt_state),
        "reference_model": bytes_per_device(state.reference),
    }
    on_rollout_devices = {}
    if rollout_mesh is not None:
        sent = bytes_per_device(programs.sampler.shapes_of_weights(state.model))
        on_rollout_devices = {SENT_WEIGHTS: sent}
    layout = programs.sampler.layout(*run.sampled_shape)
    scores = run.passes.num_scores(run.cfg)
    runs = {SEND: 1, **dict.fromkeys(SAMPLING, 1), **scores, UPDATE: run.cfg.updates_per_step}
    if run.cfg.carried_caches == "keep":
        runs[REREAD] = 0  # resumed runs alone read what is carried over
    planned: dict[str, PlannedProgram] = {}
    plan = Plan(
        topology=target.name,
        device_kind=target.device_kind,
        num_devices=mesh.size + (0 if rollout_mesh is None else rollout_mesh.size),
        num_hosts=len({device.process_index for device in target.devices}),
        model=run.cfg.model,
        mesh=dict(mesh.shape),
        rollout_sharding=layout.why,
        rollout_devices=0 if rollout_mesh is None else rollout_mesh.size,
        micro_batch_size=run.micro_batch_size(mesh),
        rows=programs.update_rows,
        settings=_settings(run),
        prompt_length=run.prompts.train,
        prompt_length_known=run.prompts.known,
        hbm_bytes=target.usable_bytes,
        resident=resident | on_rollout_devices,
        programs=planned,
        peaks=device_peaks(target.device_kind),
    )
    for program in run_programs(run, programs):
        evaluates = is_evaluation(program.name)
        if (EVALUATE if evaluates else program.name) not in only:
            continue
        compiling = f"compiling {program.name} for {target.name}"
        try:
            lowered = program.lower()
        except UserError as error:
            if not evaluates or run.cfg.eval_steps is not None:
                raise
            say(f"no evaluation is planned: {error}")  # training can do without one
            break
        of_mesh, held = mesh, resident
        if rollout_mesh is not None and (evaluates or program.name in SAMPLING):
            of_mesh, held = rollout_mesh, on_rollout_devices
        compiled = compile_program(
            lowered, target, list(of_mesh.devices.flat), begin=partial(say, compiling)
        )
        if rollout_mesh is not None and program.name == SEND:
            compiled = _with_sent(compiled, on_rollout_devices[SENT_WEIGHTS], mesh, rollout_mesh)
        planned[program.name] = PlannedProgram(
            compiled=compiled,
            elsewhere_bytes=sum(held.values())
            - sum(held[x] for x in program.arguments)
            + bytes_per_device(program.beside()),
            runs=runs.get(program.name, 0),
            trips=_trips(program.name, run, programs),
        )
        if stop_early and not plan.fits:
            break
    in_order = [name for name in TRAINING if name in planned]
    in_order += [name for name in planned if is_evaluation(name)]
    planned.update({name: planned.pop(name) for name in in_order})
    return plan


def _with_sent(
    compiled: CompiledProgram,
    num_bytes: int,
    training: jax.sharding.Mesh,
    rollout: jax.sharding.Mesh,
) -> CompiledProgram:
    """Adds what each device that samples receives of one that trains, once the program has run."""
    route, hops = route_finder([training.devices.flat[0], rollout.devices.flat[0]])([0, 1])
    sent = Level((), Work(received={route: float(num_bytes)}, hops=hops))
    return dataclasses.replace(compiled, levels=(*compiled.levels, sent))


def _settings(run: RunSpec) -> dict[str, Any]:
    """Returns settings of the run, with the kinds of the objects that replace some of them."""
    passed = run.passed.described()
    return {
        name: f"{passed[name]} (passed)" if name in passed else getattr(run.cfg, name)
        for name in SETTINGS
    }


def _trips(name: str, run: RunSpec, programs: Programs) -> Trips | None:
    """Returns what is known of a program's loops; `None` for a program that steps do not run."""
    cfg, options = run.cfg, programs.sampler.options
    form = options.decoding_form
    repeats = run.model.num_attention_heads // run.model.num_key_value_heads
    if is_evaluation(name):
        return None
    if name == SEND:
        return Once()
    if name not in SAMPLING:
        batch, rows = run.rollout_shape, programs.rollout_rows
        if name == UPDATE:
            batch, rows = run.update_shape, programs.update_rows
        attention = programs.updater.forward.attention
        return MicroBatches(
            rows=rows,
            num_prompts=batch[0],
            num_generations=batch[1],
            prompt_length=run.prompts.train,
            attention_blocks=attention.block_sizes(rows.width, repeats),
        )
    layout = programs.sampler.layout(*run.sampled_shape)
    number = cfg.prompts_per_step * cfg.num_generations
    decoding = Decoding(
        num_completions=number,
        num_slots=min(cfg.max_num_seqs or number, number),
        num_shards=layout.num_prompt_shards,
        max_length=options.max_completion_length,
        prompt_length=run.prompts.train,
        attention_blocks=options.attention.block_sizes(run.prompts.train, repeats),
        cache_parts=form.num_parts(options.max_completion_length) if form else 1,
    )
    if name == GENERATE:
        return decoding
    devices, of_each = programs.sampler.turns(*run.sampled_shape).readers
    return Turns(
        program=name, decoding=decoding, num_readers=devices * of_each,
        is_carried=cfg.carried_steps > 0,
    )  # fmt: skip
