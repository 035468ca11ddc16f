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
import optax
from small_model import small_model

from grpo_eqx.common.prng import make_key
from grpo_eqx.generation import Prompts, Rollout, Sampling, Stopping
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models.causal_attention import best_attention
from grpo_eqx.models.cost import decode_bytes, update_flops
from grpo_eqx.models.families.qwen2 import Qwen2
from grpo_eqx.objective import Objective
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.training.batch import Batch
from grpo_eqx.training.options import ProgramOptions
from grpo_eqx.training.programs import Programs

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
    programs = make_programs(work)
    model = Qwen2.init(MODEL, make_key(0))
    model = jax.device_put(model, model.shardings(programs.mesh))
    rollout, generate_s = timed_generate(programs, model, work)
    update_s = timed_update(programs, model, rollout, work)
    seconds, least = {"generate": generate_s, "update": update_s}, least_work(work)
    print(json.dumps({name: {"seconds": seconds[name], "work": least[name]} for name in least}))


def make_programs(work: Work) -> Programs:
    mesh = parse_mesh("auto").build()
    options = ProgramOptions(
        sampling=Sampling(),
        max_prompt_length=work.prompt_length,
        max_completion_length=work.completion_length,
        stopping=Stopping.of_ids((), MODEL.vocab_size),  # nothing ends before the limit
        pad_id=0,
        seed=0,
        dtype=jnp.dtype("float32"),
        remat="none",
        attention=best_attention(mesh),
        decodes_on_cpu=True,
        objective=Objective(),
        tokens_per_micro_batch=1024,
    )
    return Programs(options, mesh, ChunkedLoss(), optax.adamw(1e-5))


def timed_generate(programs: Programs, model: Qwen2, work: Work) -> tuple[Rollout, list[float]]:
    rng = np.random.default_rng(0)
    shape = work.prompts, work.prompt_length
    ids = rng.integers(MODEL.vocab_size, size=shape, dtype=np.int32)
    mask = np.ones(shape, bool)

    def generate() -> Rollout:
        return programs.generate(model, Prompts(ids, mask), 0, num_generations=work.group)[0]

    return generate(), timed(generate, work.repeats)


def timed_update(programs: Programs, model: Qwen2, rollout: Rollout, work: Work) -> list[float]:
    rng = np.random.default_rng(1)
    advantages = rng.standard_normal((work.prompts, work.group), np.float32)
    batch = Batch(rollout, advantages)
    prompt_lengths = np.full(work.prompts, work.prompt_length)
    packing = programs.packing(prompt_lengths, np.asarray(rollout.lengths))
    state = programs.init(model)

    def update() -> Any:
        nonlocal state
        state, metrics = programs.update(state, batch, packing)
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
