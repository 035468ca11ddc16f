"""Makes the plan of a run on given devices: compiles every program of the run."""

from collections.abc import Callable, Collection

from grpo_eqx.planner.compiled_program import compile_program
from grpo_eqx.planner.devices import Target
from grpo_eqx.planner.plan import Plan, PlannedProgram
from grpo_eqx.planner.step_time import step_floors
from grpo_eqx.run_programs import EVALUATE, run_programs
from grpo_eqx.run_spec import RunSpec
from grpo_eqx.sharding.layout_report import bytes_per_device
from grpo_eqx.tracking.device_peaks import device_peaks
from grpo_eqx.training.programs import GENERATE, SCORE, SCORE_REFERENCE, UPDATE

Say = Callable[[str], None]
"""Progress callback: receives what is being worked on, for users who wait."""

SETTINGS = (
    "prompts_per_step", "num_generations", "max_completion_length", "micro_batch_size_per_device",
    "loss_backend", "optimizer", "max_num_seqs", "kv_cache_dtype", "rollout_sharding", "mesh",
    "remat", "beta",
)  # fmt: skip
"""Settings of the run that a plan reports."""
TRAINING = (GENERATE, SCORE, SCORE_REFERENCE, UPDATE)
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

    **Arguments:** the programs to compile, if the run has them; whether to stop at the first that
    does not fit.

    Raises `UserError` where the mesh, the batches or the model do not fit the devices.
    """
    mesh = run.mesh(target.devices)
    programs = run.programs(mesh)
    state = run.state_shapes(programs)
    resident = {
        "parameters": bytes_per_device(state.model),
        "optimizer_state": bytes_per_device(state.opt_state),
        "reference_model": bytes_per_device(state.reference),
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
    for program in run_programs(run, programs):
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
