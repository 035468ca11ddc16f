"""Bytes and seconds that a step's table of completions takes.

python benchmarks/completions_tables.py

Two shapes: the embedded run's, whose completions the embedded model draws, and 512 completions of
1,024 tokens of English, from Python's own reference. The English is cut into words, of about as
many letters as tokens of a large vocabulary have, and each token has the log-prob of some token
that the embedded model drew.
"""

import pydoc_data.topics
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.tracking.completions_table import prompt_id, write_completions

REPEATS = 5
NUM_PROMPTS, NUM_GENERATIONS, LENGTH = 32, 16, 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cfg = GRPOConfig(steps=1, output_dir=folder, resume="never", log_completions_steps=1)
        GRPOTrainer(cfg).fit()
        table = pq.ParquetFile(next(Path(folder, "completions").iterdir())).read()
        embedded = table.to_pydict()
    report("embedded model: 128 completions", embedded)
    logps = np.concatenate(embedded["token_logps"]).astype(np.float32)
    report(f"{NUM_PROMPTS * NUM_GENERATIONS} x {LENGTH:,} tokens of English", english(logps))


def english(logps: np.ndarray) -> dict[str, list[Any]]:
    """Returns the columns of a table with completions from Python's reference."""
    draw = np.random.default_rng(0)
    words = re.findall(r" ?\w+|\s+|[^\w\s]", " ".join(pydoc_data.topics.topics.values()))
    rows = NUM_PROMPTS * NUM_GENERATIONS
    starts = draw.integers(0, len(words) - LENGTH, rows)
    tokens = [words[start : start + LENGTH] for start in starts]
    prompts = ["".join(words[i * 100 : i * 100 + 100]) for i in range(NUM_PROMPTS)]
    prompts = [prompt for prompt in prompts for _ in range(NUM_GENERATIONS)]
    return {
        "step": [1] * rows,
        "prompt_id": list(map(prompt_id, prompts)),
        "prompt": prompts,
        "completion": ["".join(each) for each in tokens],
        "rewards/correct": draw.integers(0, 2, rows).astype(float).tolist(),
        "reward": draw.integers(0, 2, rows).astype(float).tolist(),
        "advantage": draw.normal(size=rows).tolist(),
        "length": [LENGTH] * rows,
        "truncated": [True] * rows,
        "tokens": tokens,
        "token_logps": list(draw.choice(logps, (rows, LENGTH))),
    }


def report(name: str, columns: Mapping[str, list[Any]]) -> None:
    texts = {k: x for k, x in columns.items() if not k.startswith("token")}
    print(f"{name}: {size_and_time(texts)} without tokens, {size_and_time(columns)} with them")


def size_and_time(columns: Mapping[str, list[Any]]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path, seconds = Path(folder, "table.parquet"), []
        for _ in range(REPEATS):
            began = time.perf_counter()
            write_completions(path, columns)
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds)
        return f"{path.stat().st_size / 1000:,.1f} kB in {1000 * median:,.1f} ms"


if __name__ == "__main__":
    main()
