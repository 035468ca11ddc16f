"""The update of adapters beside that of all parameters, and Qwen3's beside Qwen2's.

    python benchmarks/lora.py --json lora.json

The models have the sizes of step.py's small one, and random weights. Updates of the same random
tokens are timed in turns; ratios are the medians of those of each turn. Run it alone on the
machine.
"""

import dataclasses
import json
import statistics
from pathlib import Path

import jax
import tyro
from rich.console import Console
from rich.table import Table
from small_model import small_model
from timed_update import TimedUpdate, random_batch

from grpo_eqx.common.random_keys import make_key
from grpo_eqx.models import Decoder, Qwen3Config
from grpo_eqx.models.lora import Lora, with_adapters

QWEN2 = small_model(vocab_size=8192)
QWEN3 = Qwen3Config(
    vocab_size=QWEN2.vocab_size,
    hidden_size=QWEN2.hidden_size,
    intermediate_size=QWEN2.intermediate_size,
    num_hidden_layers=QWEN2.num_hidden_layers,
    num_attention_heads=QWEN2.num_attention_heads,
    num_key_value_heads=QWEN2.num_key_value_heads,
    head_dim=QWEN2.head_size,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraBenchmark:
    """What to update on."""

    lora_rank: int = 8
    """Rank of the adapters, on all linear maps."""
    prompt_length: int = 64
    """Tokens of a prompt."""
    completion_length: int = 128
    """Tokens of a completion."""
    group: int = 8
    """Completions of each prompt."""
    prompts: int = 4
    """Prompts of the batch."""
    repeats: int = 15
    """Timed updates of each."""
    json: Path | None = None
    """File for the figures."""


def main(cfg: LoraBenchmark) -> None:
    batch = random_batch(
        QWEN2.vocab_size, cfg.prompts, cfg.group, cfg.prompt_length, cfg.completion_length
    )
    lora = Lora(rank=cfg.lora_rank, alpha=32.0)
    models = {
        "Qwen2": Decoder.init(QWEN2, make_key(0)),
        "Qwen2, LoRA": with_adapters(Decoder.init(QWEN2, make_key(0)), lora, make_key(1)),
        "Qwen3": Decoder.init(QWEN3, make_key(0)),
    }
    updates = {name: TimedUpdate(model, batch) for name, model in models.items()}
    for update in updates.values():
        update()
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(cfg.repeats):
        for name, update in updates.items():
            seconds[name].append(update())
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    table = Table(title="An update of the small model")
    for column in ("", "parameters trained", "median", "of Qwen2's"):
        table.add_column(column, justify="right" if column else "left")
    for name, update in updates.items():
        model = update.state.model
        leaves = zip(jax.tree.leaves(model), jax.tree.leaves(model.trainable), strict=True)
        trained = sum(x.size for x, is_trained in leaves if is_trained)
        turns = zip(seconds[name], seconds["Qwen2"], strict=True)
        ratio = statistics.median(mine / theirs for mine, theirs in turns)
        table.add_row(name, f"{trained:,}", f"{medians[name]:.3f} s", f"{ratio:.2f}")
    Console(highlight=False).print(table)
    if cfg.json is not None:
        settings = {k: v for k, v in dataclasses.asdict(cfg).items() if k != "json"}
        cfg.json.write_text(json.dumps({**settings, "seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(LoraBenchmark, description=__doc__))
