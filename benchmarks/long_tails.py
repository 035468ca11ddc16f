"""What a step's longest completions cost: tokens per second with and without `max_staleness`.

    python benchmarks/long_tails.py

A model of the embedded one's shape, whose layers compute as always, but whose head decides by the
first token how long a completion is: nine in ten end after 70 tokens on average, the others after
650, and all after 2,048.
Settings take turns, round by round, each in a process of its own; the table has medians. Run it
alone on the machine.
"""

import dataclasses
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.nn
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.common.random_keys import make_key
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.tracking import Tracker

PAD, EOS, FIRST, SHORT, LONG, VOCABULARY = 0, 1, 2, 34, 130, 256
"""Ids: of prompts from `FIRST`, of short completions from `SHORT`, of long ones from `LONG`."""
PROMPT_LENGTH, LONGEST = 32, 2048
MEANS = {SHORT: 70, LONG: 650}
LONG_SHARE = 0.1
NEVER = -20.0
KEYS = (
    "staleness/mean", "staleness/max", "staleness/frac_idle_slots", "perf/slot_utilization",
    "completions/mean_length", "completions/max_length", "time/train/rollout_s",
    "time/train/update_s", "step_time",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongTails:
    """How to measure."""

    staleness: tuple[int, ...] = (0, 2, 4, 6)
    """Values of max_staleness, each with both carried_caches."""
    prompts_per_step: int = 4
    num_generations: int = 4
    max_num_seqs: int = 8
    """Slots, which are refilled."""
    steps: int = 30
    """Timed steps of a run."""
    warmup_steps: int = 10
    """Steps before, while groups of the first ones fill what is carried over."""
    rounds: int = 3
    """Runs of each setting."""
    json: Path | None = None
    """File for the figures."""
    only: str | None = None
    """Settings of a single run, as JSON, whose figures are printed."""


class Watch(Tracker):
    """The metrics of the timed steps."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.rows: list[Mapping[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self.warmup_steps:
            self.rows.append(dict(metrics))

    def finish(self) -> None: ...

    def figures(self, completions: int) -> dict[str, float]:
        tokens = sum(row["completions/mean_length"] * completions for row in self.rows)
        seconds = sum(row["step_time"] for row in self.rows)
        # Not every step has all of them: one that finds enough whole groups decodes nothing.
        values = {key: [row[key] for row in self.rows if key in row] for key in KEYS}
        means = {key: statistics.fmean(each) for key, each in values.items() if each}
        return {**means, "tokens_per_second": tokens / seconds}


def model_of_long_tails() -> Qwen2:
    """Returns the model. The output of each layer is multiplied by 0, so that the head sees the
    last token alone.
    """
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2.init(config, make_key(0))
    kinds = jnp.zeros(VOCABULARY, int).at[SHORT:].set(1).at[LONG:].set(2)
    embeddings = jax.nn.one_hot(kinds, config.hidden_size)
    number = {SHORT: LONG - SHORT, LONG: VOCABULARY - LONG}
    logits = jnp.full((VOCABULARY, config.hidden_size), 0.0).at[:, :3].set(NEVER)
    for kind, first in enumerate(MEANS, start=1):
        ids = slice(first, first + number[first])
        share = LONG_SHARE if first == LONG else 1 - LONG_SHARE
        logits = logits.at[ids, 0].set(jnp.log(share / number[first]))
        logits = logits.at[ids, kind].set(jnp.log((1 - 1 / MEANS[first]) / number[first]))
        logits = logits.at[EOS, kind].set(jnp.log(1 / MEANS[first]))
    head = logits / jnp.sqrt(config.hidden_size)
    layers = model.layers
    silent = eqx.tree_at(
        lambda x: (x.o_proj.weight, x.down_proj.weight),
        layers,
        (0 * layers.o_proj.weight, 0 * layers.down_proj.weight),
    )
    parts = (embeddings, head, silent)
    return eqx.tree_at(lambda x: (x.embed_tokens, x.lm_head, x.layers), model, parts)


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<pad>": PAD, "<eos>": EOS} | {chr(96 + i): i for i in range(FIRST, SHORT)}
    vocab |= {f"<{i}>": i for i in range(SHORT, VOCABULARY)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


def reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    return [sum(x % 2 for x in ids) / len(ids) for ids in completion_ids]


def run(cfg: LongTails, settings: Mapping[str, Any], folder: Path) -> dict[str, float]:
    rng = random.Random(0)
    letters = [chr(96 + i) for i in range(FIRST, SHORT)]
    rows = [{"prompt": "".join(rng.choices(letters, k=PROMPT_LENGTH))} for _ in range(2048)]
    watch = Watch(cfg.warmup_steps)
    GRPOTrainer(
        GRPOConfig(
            steps=cfg.warmup_steps + cfg.steps, prompts_per_step=cfg.prompts_per_step,
            num_generations=cfg.num_generations, max_num_seqs=cfg.max_num_seqs,
            max_prompt_length=PROMPT_LENGTH, max_completion_length=LONGEST, learning_rate=1e-6,
            log_completions_steps=0, save_minutes=None, output_dir=folder / "run", **settings,
        ),
        model=model_of_long_tails(), tokenizer=tokenizer(), reward_funcs=[reward],
        train_data=rows, eval_data=rows[:8], trackers=[watch],
    ).fit()  # fmt: skip
    return watch.figures(cfg.prompts_per_step * cfg.num_generations)


def all_settings(cfg: LongTails) -> list[dict[str, Any]]:
    found = []
    for staleness in cfg.staleness:
        if staleness == 0:
            found.append({"max_staleness": 0})
        else:
            found += [
                {
                    "max_staleness": staleness, "carried_caches": caches,
                    "importance_sampling_mode": "token_truncate",
                }
                for caches in ("recompute", "keep")
            ]  # fmt: skip
    return found


def main(cfg: LongTails) -> None:
    if cfg.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run(cfg, json.loads(cfg.only), Path(folder))))
        return
    made: dict[str, list[dict[str, float]]] = {}
    for _ in range(cfg.rounds):
        for settings in all_settings(cfg):
            command = [
                sys.executable, __file__, "--only", json.dumps(settings),
                *(f"--{name.replace('_', '-')}={getattr(cfg, name)}" for name in (
                    "prompts_per_step", "num_generations", "max_num_seqs", "steps", "warmup_steps",
                )),
            ]  # fmt: skip
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            name = " ".join(str(x) for x in settings.values() if x != "token_truncate")
            made.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
    table = Table("max_staleness", "tokens/s", "ratio", "idle slots", "step", "rollout", "update")
    medians = {
        name: {key: statistics.median(x[key] for x in each) for key in each[0]}
        for name, each in made.items()
    }
    base = next(iter(medians.values()))["tokens_per_second"]
    for name, x in medians.items():
        table.add_row(
            name, f"{x['tokens_per_second']:,.0f}", f"{x['tokens_per_second'] / base:.2f}",
            f"{1 - x['perf/slot_utilization']:.1%}", f"{x['step_time']:.2f} s",
            f"{x['time/train/rollout_s']:.2f} s", f"{x['time/train/update_s']:.2f} s",
        )  # fmt: skip
    Console().print(table)
    if cfg.json is not None:
        cfg.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main(tyro.cli(LongTails))
