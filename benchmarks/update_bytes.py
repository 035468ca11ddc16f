r"""Bytes that an update receives over links on described TPU slices, against the least of FSDP.

    JAX_PLATFORMS=cpu python benchmarks/update_bytes.py --topologies v6e-8 v6e-16 --meshes auto

The least: per micro-batch two gathers of the weights in the compute dtype, one for the forward pass
and one for the backward pass, which recomputes it; per update one reduce-scatter of the float32
gradients. Compiles each update, which takes minutes for large models.
"""

import dataclasses
import sys

import jax
import tyro
from qwen2_sizes import MODELS
from rich.console import Console
from rich.table import Table

from grpo_eqx import GRPOConfig, UserError
from grpo_eqx.planner.devices import find_target
from grpo_eqx.planner.make_plan import make_plan
from grpo_eqx.run.prompt_lengths import PromptLengths
from grpo_eqx.run.spec import RunSpec

GB = 1e9
COLUMNS = ("devices", "mesh", "micro-batches", "received, GB", "FSDP's least, GB", "ratio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Updates:
    """What to update, and where."""

    model: str = "3B"
    """Size of Qwen2.5."""
    topologies: tuple[str, ...] = ("v6e-8", "v6e-16")
    """TPU types."""
    meshes: tuple[str, ...] = ("auto",)
    """Layouts of the devices."""
    prompts: int = 64
    """Prompts of a step."""
    group: int = 8
    """Completions of each."""
    prompt_length: int = 256
    """Tokens of a prompt."""
    completion_length: int = 512
    """Tokens of a completion."""
    markdown: bool = False
    """Print the table as Markdown."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UserError(f"model is {self.model!r}: use one of {', '.join(MODELS)}.")


def main(cfg: Updates) -> None:
    rows = [row(cfg, topology, mesh) for topology in cfg.topologies for mesh in cfg.meshes]
    if cfg.markdown:
        lines = [COLUMNS, ["---", "---", *["---:"] * 4], *rows]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    table = Table(title=f"Received by each device in an update, {cfg.model}")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in COLUMNS[:2] else "right")
    for each in rows:
        table.add_row(*each)
    Console(width=None if sys.stdout.isatty() else 100, highlight=False).print(table)


def row(cfg: Updates, topology: str, mesh: str) -> list[str]:
    settings = GRPOConfig(
        model=cfg.model,
        mesh=mesh,
        prompts_per_step=cfg.prompts,
        num_generations=cfg.group,
        max_prompt_length=cfg.prompt_length,
        max_completion_length=cfg.completion_length,
    ).resolved()
    lengths = PromptLengths(cfg.prompt_length, cfg.prompt_length, cfg.prompts, None)
    run = RunSpec(settings, MODELS[cfg.model], lengths)
    plan = make_plan(run, find_target(topology), lambda text: None, only=["update"])
    time = plan.step_time
    assert time is not None
    parts = time.programs["update"].parts
    received = sum(part.repeats.least * sum(part.work.received.values()) for part in parts)
    micro_batches = max(part.repeats.least for part in parts if part.where == "each micro-batch")
    shards = plan.mesh["fsdp"]
    weights = run.model.num_layer_parameters + run.model.num_head_parameters
    held = weights / plan.mesh["tp"] * (shards - 1) / shards
    least = held * (2 * 2 * micro_batches + 4)
    return [
        topology, mesh, f"{micro_batches:.0f}", f"{received / GB:.1f}", f"{least / GB:.1f}",
        f"{received / least:.2f}",
    ]  # fmt: skip


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        main(tyro.cli(Updates, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
