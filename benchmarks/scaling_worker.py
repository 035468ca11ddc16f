"""Times one point of scaling.py, on all devices there are: python scaling_worker.py POINT."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from small_model import small_model
from timed_update import Batch, cpu_updater, packed, rows_of

from grpo_eqx.common.random_keys import make_key
from grpo_eqx.data.trajectory import Address, Group, Trajectory
from grpo_eqx.generation import LocalSampler, SamplerOptions, Sampling, Stopping
from grpo_eqx.generation.cpu import CpuDecoding
from grpo_eqx.models.causal_attention import best_attention
from grpo_eqx.models.cost import decode_bytes, update_flops
from grpo_eqx.models.families.qwen2 import Qwen2
from grpo_eqx.sharding import parse_mesh

MODEL = small_model(vocab_size=8192)


@dataclasses.dataclass(frozen=True)
class Work:
    """Prompts with a group of completions each, all of one length."""

    prompts: int
    group: int
    prompt_length: int
    completion_length: int
    repeats: int


def main(work: Work) -> None:
    mesh = parse_mesh("auto").build()
    model = Qwen2.init(MODEL, make_key(0))
    model = jax.device_put(model, model.shardings(mesh))
    groups, generate_s = timed_generate(model, work, mesh)
    update_s = timed_update(model, groups, work, mesh)
    seconds, least = {"generate": generate_s, "update": update_s}, least_work(work)
    print(json.dumps({name: {"seconds": seconds[name], "work": least[name]} for name in least}))


def timed_generate(
    model: Qwen2, work: Work, mesh: jax.sharding.Mesh
) -> tuple[list[Group], list[float]]:
    options = SamplerOptions(
        sampling=Sampling(),
        max_prompt_length=work.prompt_length,
        max_completion_length=work.completion_length,
        stopping=Stopping.of_ids((), MODEL.vocab_size),  # nothing ends before the limit
        pad_id=0,
        seed=0,
        dtype=jnp.dtype("float32"),
        decoding_form=CpuDecoding(),
        attention=best_attention(mesh),
    )
    sampler = LocalSampler(options, mesh)
    sampler.set_weights(model, 0)
    rng = np.random.default_rng(0)
    ids = rng.integers(MODEL.vocab_size, size=(work.prompts, work.prompt_length)).tolist()
    prompts = [
        Trajectory(ids[p], Address(0, p, g)) for p in range(work.prompts) for g in range(work.group)
    ]

    def generate() -> list[Trajectory]:
        return sampler.submit(prompts).result().trajectories

    made = generate()
    groups = [made[i : i + work.group] for i in range(0, len(made), work.group)]
    return groups, timed(generate, work.repeats)


def timed_update(
    model: Qwen2, groups: list[Group], work: Work, mesh: jax.sharding.Mesh
) -> list[float]:
    rng = np.random.default_rng(1)
    advantages = rng.standard_normal((work.prompts, work.group), np.float32)
    rows = rows_of(Batch(groups, advantages), packed(groups, mesh), mesh)
    updater = cpu_updater(mesh)
    state = updater.init(model)

    def update() -> Any:
        nonlocal state
        state, metrics = updater(state, rows)
        return state, metrics

    return timed(update, work.repeats)


def timed(run: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each run, after one that compiles."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return seconds


def least_work(work: Work) -> dict[str, float]:
    """What bounds each program: the bytes that decoding reads, and an update's FLOPs."""
    prompts = np.full(work.prompts, work.prompt_length)
    completions = np.full((work.prompts, work.group), work.completion_length)
    read = decode_bytes(
        MODEL,
        prompts,
        completions,
        num_decode_steps=work.completion_length,
        num_copies=1,
        itemsize=4,
        kv_itemsize=4.0,
    )
    return {"generate": read, "update": update_flops(MODEL, prompts, completions)}


if __name__ == "__main__":
    main(Work(**json.loads(sys.argv[1])))
