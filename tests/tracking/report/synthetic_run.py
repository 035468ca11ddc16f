"""Folders of runs with plausible metrics, which nothing trained."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_eqx import GRPOConfig

HOSTILE = '</script></pre><script>alert(1)</script><img src="http://example.com/x.png">{{ 7 * 7 }}'
"""Completion that must stay text."""


def write_run(
    folder: Path, *, steps: int, every: int = 10, plain: bool = False, **settings: Any
) -> Path:
    """Writes the folder of a run that has finished.

    **Arguments:** steps between tables; whether its metrics are but reward and step time, of which
    a report has one plot.
    """
    cfg = GRPOConfig(steps=steps, output_dir=folder, beta=0.01, **settings).resolved()
    random = np.random.default_rng(cfg.seed)
    (folder / "completions").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / ".lock").touch()
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(cfg), default=str))
    layout = {
        "hosts": 1, "devices": 8, "device_kind": "TPU v6e", "parameter_bytes": 2**30,
        "optimizer_bytes": 2**31, "reference_bytes": 2**29,
    }  # fmt: skip
    (folder / "layout.json").write_text(json.dumps(layout))
    rows = [evaluation(0, random)]
    for step in range(1, steps + 1):
        row = metrics(step, steps, random)
        rows.append({name: row[name] for name in ("step", "reward", "step_time")} if plain else row)
        if step == 1 or step % every == 0:
            write_table(folder, step, random)
    rows.append(evaluation(steps, random))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluation(step: int, random: np.random.Generator) -> dict[str, float]:
    solved = 0.5 + 0.2 * random.random()
    name = "eval/greedy/pass@1"
    return {
        "step": step, name: solved, f"{name}/ci_low": solved - 0.05,
        f"{name}/ci_high": solved + 0.05, "eval/num_problems": 200.0,
    }  # fmt: skip


def metrics(step: int, steps: int, random: np.random.Generator) -> dict[str, float]:
    done, noise = step / steps, random.standard_normal(12)
    rollout, update = 1.0 + 0.1 * abs(noise[0]), 2.0 + 0.1 * abs(noise[1])
    compiling = 30.0 if step == 1 else 0.0
    return {
        "step": step,
        "reward": 0.3 + 0.5 * done + 0.05 * noise[2],
        "reward_std": 0.4,
        "rewards/correct/mean": 0.3 + 0.4 * done + 0.05 * noise[2],
        "rewards/format/mean": 0.1 * done,
        "frac_reward_zero_std": float(np.clip(0.2 + 0.1 * noise[3], 0, 1)),
        "completions/mean_length": 100 + 20 * done + 5 * noise[4],
        "completions/clipped_ratio": float(np.clip(0.1 + 0.05 * noise[5], 0, 1)),
        "tools/turns": 1 + done,
        "tools/call_frequency": 2 * done,
        "tools/failure_frequency": 0.2 * (1 - done),
        "time/tools/call_s": 0.1,
        "time/tools/wait_s": 0.05,
        "entropy": 0.5 - 0.3 * done + 0.02 * noise[6],
        "kl": 0.02 * done + 0.002 * abs(noise[7]),
        "clip_ratio/region_mean": 0.01 + 0.001 * abs(noise[8]),
        "sampling/sampling_logp_difference/mean": 1e-5 * (1 + 0.1 * abs(noise[9])),
        "grad_norm": 0.5 + 0.1 * abs(noise[10]),
        "loss": 0.01 * noise[11],
        "memory/train/peak_bytes_in_use_max_gib": 4.0 + (step > 2),
        "memory/train/host_peak_gib": 2.0,
        "step_time": rollout + 0.1 + update + compiling,
        "time/train/rollout_s": rollout + compiling,
        "time/train/reward_s": 0.1,
        "time/train/update_s": update,
        "compile/seconds": compiling,
        "compile/num_programs": float(step == 1),
    }


def write_table(folder: Path, step: int, random: np.random.Generator) -> None:
    """Writes a table of 16 prompts, of which the first is the same in all, with 8 completions."""
    rewards = random.integers(0, 2, (16, 8)).astype(float)
    rewards[0] = step > 1  # it is learned
    prompts = ["Problem 0?", *(f"Problem {100 * step + p}?" for p in range(1, 16))]
    table = {
        "step": [step] * 128,
        "prompt": [prompt for prompt in prompts for _ in range(8)],
        "completion": [f"{HOSTILE} {i} {'x' * int(random.integers(3000))}" for i in range(128)],
        "rewards/correct": rewards.reshape(-1),
        "reward": rewards.reshape(-1),
        "advantage": (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1),
        "length": [100] * 128,
        "truncated": [False] * 128,
        "tools/calls": [2] * 128,
        "tools/failures": [1] * 128,
        "verdict": [f"good {HOSTILE}"] * 128,
    }  # fmt: skip
    pq.write_table(pa.table(table), folder / "completions" / f"step_{step:06d}.parquet")
