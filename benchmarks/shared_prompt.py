"""The update with each prompt computed once for its group, beside the plain layout.

    python benchmarks/shared_prompt.py --json shared_prompt.json

In the plain layout every completion brings its own copy of the prompt: the same rollout in groups
of one, through the same code, so that nothing else differs. That is no more arithmetic than prompt
and completion as one sequence are. Both must give the same gradients; then they are timed in turns.
Run it alone on the machine.
"""

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table
from small_model import small_model
from timed_update import Batch, TimedUpdate, random_batch

from grpo_eqx import UserError
from grpo_eqx.common.random_keys import make_key
from grpo_eqx.models.families.qwen2 import Qwen2
from grpo_eqx.models.interface import parameter_name
from grpo_eqx.training.state import TrainState

MODEL = small_model(vocab_size=8192)
TOLERANCE = 1e-5
"""Of a tensor's gradient, by its norm: two orders of the same float32 sums differ by less."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPrompt:
    """What to update on."""

    prompt_length: int = 512
    """Tokens of a prompt."""
    completion_length: int = 128
    """Tokens of a completion."""
    group: int = 16
    """Completions of each prompt."""
    prompts: int = 2
    """Prompts of the batch."""
    repeats: int = 5
    """Timed updates of each layout."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        for name in ("prompt_length", "completion_length", "group", "prompts", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1.")


def main(cfg: SharedPrompt) -> None:
    model = Qwen2.init(MODEL, make_key(0))
    batch = random_batch(
        MODEL.vocab_size, cfg.prompts, cfg.group, cfg.prompt_length, cfg.completion_length
    )
    # In micro-batches of a group's size, because the plain layout is slower in one piece: it then
    # needs so much memory that the system's handing it out shows in the time.
    layouts = {
        "shared": TimedUpdate(model, batch, cfg.group),
        "plain": TimedUpdate(_copied(model), in_groups_of_one(batch), cfg.group),
    }
    for update in layouts.values():
        update()
    tensor, difference = gradient_difference(layouts["plain"].state, layouts["shared"].state)
    if not difference <= TOLERANCE:
        sys.exit(
            f"error: the gradients of {tensor} differ by {difference:.1e} of their norm, more than "
            f"{TOLERANCE:.0e}: the layouts do not compute the same."
        )
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    for _ in range(cfg.repeats):
        for name, update in layouts.items():
            seconds[name].append(update())
    medians = {name: statistics.median(of_layout) for name, of_layout in seconds.items()}
    figures: dict[str, Any] = {
        **{name: value for name, value in dataclasses.asdict(cfg).items() if name != "json"},
        **{f"{name}_s": median for name, median in medians.items()},
        "ratio": medians["plain"] / medians["shared"],
        "gradient_difference": difference,
        "gradient_difference_tensor": tensor,
        **{f"{name}_tokens": update.tokens for name, update in layouts.items()},
        **{f"{name}_temporary_bytes": update.temporary_bytes for name, update in layouts.items()},
        "seconds": seconds,
    }
    show(figures)
    if cfg.json is not None:
        cfg.json.write_text(json.dumps(figures, indent=2) + "\n")


def _copied(model: Qwen2) -> Qwen2:
    return jax.tree.map(jnp.copy, model)  # updates are written over it


def in_groups_of_one(batch: Batch) -> Batch:
    """The plain layout: as many prompts as completions."""
    return Batch(
        [[each] for group in batch.groups for each in group], batch.advantages.reshape(-1, 1)
    )


def gradient_difference(state: TrainState, reference: TrainState) -> tuple[str, float]:
    """The tensor whose gradient of the first update differs most, and by how much of its norm."""

    def gradients(state: TrainState) -> Qwen2:
        # After one step Adam's first moment is the gradient but for a factor, and has not been
        # rounded as the parameters' change has.
        return optax.tree.get(state.opt_state, "mu")

    def relative(found: jax.Array, wanted: jax.Array) -> float:
        a, b = (np.asarray(x, np.float64) for x in (found, wanted))
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    differences = jax.tree.map(relative, gradients(state), gradients(reference))
    paths, values = zip(*jax.tree.leaves_with_path(differences), strict=True)
    worst = int(np.argmax(values))  # a NaN, if there is any
    return parameter_name(paths[worst]), values[worst]


def show(figures: dict[str, Any]) -> None:
    title = (
        f"An update on {figures['prompts']} x {figures['group']} completions of "
        f"{figures['completion_length']} tokens after prompts of {figures['prompt_length']}"
    )
    table = Table(title=title)
    for column in ("", "median", "fastest", "slowest", "tokens", "temporary MiB"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in (("shared", "prompt once per group"), ("plain", "prompt per completion")):
        seconds = figures["seconds"][name]
        table.add_row(
            label,
            *(f"{x:.2f} s" for x in (figures[f"{name}_s"], min(seconds), max(seconds))),
            f"{figures[f'{name}_tokens']:,}",
            f"{figures[f'{name}_temporary_bytes'] / 2**20:,.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(table)
    console.print(
        f"The same gradients, to {figures['gradient_difference']:.1e} of each tensor's norm, "
        f"{figures['ratio']:.2f} times as fast"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(SharedPrompt, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
