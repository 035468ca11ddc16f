"""Generation with and without refilling slots, on a queue of completions of geometric lengths.

    python benchmarks/slot_refill.py --json slot_refill.json

The model has random weights and ends a completion about once in 128 tokens. Without refilling, all
slots wait for the longest of their completions before they take the next ones. Both must draw the
same tokens. A slot for every completion, which takes the most memory, is timed too. Run it alone on
the machine.
"""

import dataclasses
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from small_model import small_model

from grpo_eqx import UserError
from grpo_eqx.common.random_keys import make_key, sample_keys
from grpo_eqx.generation import Sampling, Stopping, generate
from grpo_eqx.generation.engine import Generated
from grpo_eqx.models.families.qwen2 import Qwen2

MODEL = small_model(vocab_size=128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotRefill:
    """What to generate."""

    prompts: int = 64
    """Prompts in the queue."""
    group: int = 8
    """Completions of each."""
    prompt_length: int = 64
    """Tokens of a prompt."""
    max_completion_length: int = 1024
    """Limit of a completion."""
    num_slots: int = 64
    """Completions decoded at a time."""
    repeats: int = 3
    """Timed runs of each."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        for name in (
            "prompts",
            "group",
            "prompt_length",
            "max_completion_length",
            "num_slots",
            "repeats",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1.")


def main(cfg: SlotRefill) -> None:
    model = Qwen2.init(MODEL, make_key(0))
    rng = np.random.default_rng(0)
    shape = cfg.prompts, cfg.prompt_length
    ids = jnp.asarray(rng.integers(2, MODEL.vocab_size, shape), jnp.int32)
    keys = sample_keys(0, jnp.int32(0), jnp.arange(cfg.prompts), cfg.group)
    run = partial(
        generate,
        sampling=Sampling(),
        max_length=cfg.max_completion_length,
        stopping=Stopping.of_ids([1], MODEL.vocab_size),
        num_slots=cfg.num_slots,
    )
    programs = {
        "refilled": jax.jit(run),
        "waiting": jax.jit(partial(run, refill_at=cfg.num_slots)),
        "at_once": jax.jit(partial(run, num_slots=None)),
    }
    arguments = model, ids, jnp.ones(shape, bool), keys
    rollouts = {name: jax.block_until_ready(p(*arguments)) for name, p in programs.items()}
    check_same(rollouts["refilled"], rollouts["waiting"])
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(cfg.repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    lengths = np.asarray(rollouts["refilled"].lengths)
    figures = {
        "completions": lengths.size,
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "refilled_s": medians["refilled"],
        "waiting_s": medians["waiting"],
        "at_once_s": medians["at_once"],
        "ratio": medians["refilled"] / medians["waiting"],
    }
    print(
        f"{lengths.size} completions of {lengths.mean():.0f} tokens in the mean, {lengths.max()} "
        f"at most, in {cfg.num_slots} slots: the same tokens with and without refilling.\n"
        f"refilled {medians['refilled']:.2f} s, waiting {medians['waiting']:.2f} s: "
        f"{figures['ratio']:.2f} of the time. All at once, in as many slots as completions: "
        f"{medians['at_once']:.2f} s"
    )
    if cfg.json is not None:
        cfg.json.write_text(json.dumps(figures, indent=2) + "\n")


def check_same(first: Generated, second: Generated) -> None:
    """Ends the program where two rollouts differ in a token."""
    exists = jnp.arange(first.ids.shape[-1]) < first.lengths[..., None]
    same = {
        "lengths": first.lengths == second.lengths,
        "ids": (first.ids == second.ids) | ~exists,
        "finished": first.finished == second.finished,
    }
    for name, equal in same.items():
        if not bool(equal.all()):
            sys.exit(f"error: {name} differ with and without refilling.")


if __name__ == "__main__":
    try:
        main(tyro.cli(SlotRefill, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
