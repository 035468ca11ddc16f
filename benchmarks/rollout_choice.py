r"""Rollout shardings of models on described TPU slices: time of a token, memory, and auto's choice.

    JAX_PLATFORMS=cpu python benchmarks/rollout_choice.py --markdown
    JAX_PLATFORMS=cpu python benchmarks/rollout_choice.py --models 3B --topologies v6e-8 \
        --compile close

Times and memory are the estimates by which `--rollout-sharding auto` chooses. With `--compile
chosen`, the chosen rollout is compiled too (half a minute each), and the memory is the compiler's.
With `--compile close`, so are all that may be as fast, and times are those that a plan has for the
whole compiled program, divided by its tokens; the last column compares upper ends, as auto does.
"""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Literal

import jax
import tyro
from qwen2_sizes import MODELS
from rich.console import Console
from rich.table import Table

from grpo_eqx import GRPOConfig, UserError
from grpo_eqx.planner.devices import Target, find_target
from grpo_eqx.planner.make_plan import make_plan
from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.trips import Range
from grpo_eqx.rollout.layout_choice import AutoSharding, Estimate
from grpo_eqx.run.programs import make_programs
from grpo_eqx.run.prompt_lengths import PromptLengths
from grpo_eqx.run.spec import RunSpec

GiB = 2**30
NAMES = ("replicated", "tensor:2", "tensor:4", "tensor:8", "tensor:16", "legacy", "maxtext")
TEXTS = ("model", "devices", "auto")
"""Columns without numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What to generate, and where."""

    models: tuple[str, ...] = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
    """Sizes of Qwen2.5."""
    topologies: tuple[str, ...] = ("v5e-16", "v6e-8", "v6e-16", "v6e-256", "v5p-64", "v4-16")
    """TPU types."""
    prompts_per_device: int = 8
    """Prompts of a rollout, per device."""
    group: int = 8
    """Completions of each."""
    prompt_length: int = 256
    """Tokens of a prompt."""
    completion_length: int = 512
    """Tokens of a completion."""
    rollout_dtype: str = "auto"
    """Dtype of the weights: auto (bfloat16) or int8."""
    compile: Literal["nothing", "chosen", "close"] = "nothing"
    """What to compile: what auto chooses, or all whose estimate is at most twice as long."""
    markdown: bool = False
    """Print the table as Markdown."""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.models) - set(MODELS)):
            raise UserError(f"models has {', '.join(unknown)}: use {', '.join(MODELS)}.")


def main(cfg: Choices) -> None:
    columns = ["model", "devices", *NAMES, "auto", "GiB"]
    if cfg.compile == "close":
        columns.append("auto / best")
    rows = [
        row
        for model in cfg.models
        for topology in cfg.topologies
        for row in _rows(cfg, model, find_target(topology))
    ]
    if cfg.markdown:
        lines = [columns, ["---" if name in TEXTS else "---:" for name in columns], *rows]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    title = "Milliseconds of a decoding step, by auto's estimate"
    if cfg.compile == "close":
        title = "Milliseconds of a whole compiled rollout, for each of its tokens"
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in TEXTS else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)


def _rows(cfg: Choices, model: str, target: Target) -> Iterator[list[str]]:
    """Yields the row of a model on a slice, unless training does not fit there at all."""
    prompts = cfg.prompts_per_device * len(target.devices)
    settings = GRPOConfig(
        model=model,
        prompts_per_step=prompts,
        num_generations=cfg.group,
        max_prompt_length=cfg.prompt_length,
        max_completion_length=cfg.completion_length,
        rollout_dtype=cfg.rollout_dtype,  # type: ignore[arg-type]
        eval_problems=prompts,
    ).resolved()
    lengths = PromptLengths(cfg.prompt_length, cfg.prompt_length, prompts, None)
    run = RunSpec(settings, MODELS[model], lengths)
    auto = make_programs(run, run.mesh(target.devices)).sampler.options.rollout_sharding
    assert isinstance(auto, AutoSharding)
    mesh = run.build_mesh(target.devices)
    ranked = auto.ranked(mesh, prompts, cfg.group)
    chosen = ranked[0]
    if not auto.fits(chosen):
        return
    by_name = {each.name: each for each in ranked}
    memory = f"{chosen.num_bytes / GiB:.1f}"
    if cfg.compile == "close":
        close = [x.name for x in ranked if auto.fits(x) and x.seconds <= 2 * chosen.seconds]
        plans = {name: _compiled(settings, name, model, lengths, target) for name in close}
        times = {name: _range(plan) for name, plan in plans.items() if plan.fits}
        cells = [_range_cell(times.get(name)) for name in NAMES]
        ratio = "-"
        if chosen.name in times:
            best = min(each.most for each in times.values())
            ratio = f"{times[chosen.name].most / best:.2f}"
        yield [model, target.name, *cells, chosen.name, _memory(plans[chosen.name]), ratio]
        return
    if cfg.compile == "chosen":
        memory = _memory(_compiled(settings, chosen.name, model, lengths, target))
    cells = [_cell(by_name.get(name), auto) for name in NAMES]
    yield [model, target.name, *cells, chosen.name, memory]


def _memory(plan: Plan) -> str:
    return f"{plan.peak_bytes / GiB:.1f}" + ("" if plan.fits else " (does not fit)")


def _compiled(
    settings: GRPOConfig, strategy: str, model: str, lengths: PromptLengths, target: Target
) -> Plan:
    """Plans a rollout with a strategy."""
    run = RunSpec(dataclasses.replace(settings, rollout_sharding=strategy), MODELS[model], lengths)
    return make_plan(run, target, lambda text: None, only=["generate"])


def _range(plan: Plan) -> Range:
    """Returns the milliseconds of a token, with all that a rollout does: a plan's range."""
    assert plan.step_time is not None
    tokens = plan.expected.length
    return plan.step_time.programs["generate"].total.times(1e3 / tokens)


def _range_cell(milliseconds: Range | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds.least:.2f} to {milliseconds.most:.2f}"


def _cell(estimate: Estimate | None, auto: AutoSharding) -> str:
    if estimate is None or not auto.fits(estimate):
        return "-"
    return f"{estimate.seconds * 1e3:.2f}"


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        main(tyro.cli(Choices, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
