"""Least time of a step's programs, by their arithmetic and what they read.

Prompts and completions have the planned lengths; communication is not counted.
"""

from typing import NamedTuple

import numpy as np

from grpo_eqx.run_spec import RunSpec
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.tracking.device_peaks import DevicePeaks
from grpo_eqx.training.options import ProgramOptions


class Floor(NamedTuple):
    """Work of one program in one step, on all devices together."""

    flops: float
    """Model FLOPs: recomputation is not counted."""
    bytes_read: float
    """Bytes that decoding has to read; 0 where arithmetic is the bound."""
    seconds: float | None
    """Least time in seconds; `None` where the devices' peaks are unknown."""


def step_floors(
    run: RunSpec, options: ProgramOptions, layout: RolloutLayout, peaks: DevicePeaks | None
) -> dict[str, Floor]:
    """Returns the floor of each program in a step, over all the times that the step runs it."""
    cfg, length, num_devices = run.cfg, options.max_completion_length, layout.mesh.size
    prompts = np.full(cfg.prompts_per_step, run.prompts.train)
    completions = np.full((cfg.prompts_per_step, cfg.num_generations), length)
    slots = min(cfg.max_num_seqs or completions.size, completions.size)
    read = run.model.decode_bytes(
        prompts,
        completions,
        num_decode_steps=length * -(-completions.size // slots),
        num_copies=layout.num_copies,
        itemsize=options.dtype.itemsize,
        kv_itemsize=options.kv_itemsize(run.model.head_size),
    )
    forward = run.model.update_flops(prompts, completions) / 3  # the backward pass is twice that

    def floor(flops: float, num_bytes: float = 0.0) -> Floor:
        if peaks is None:
            return Floor(flops, num_bytes, None)
        seconds = max(flops / peaks.flops_per_second, num_bytes / peaks.bytes_per_second)
        return Floor(flops, num_bytes, seconds / num_devices)

    return {
        "generate": floor(forward, read),
        **{name: floor(times * forward) for name, times in run.passes.num_scores(run.cfg).items()},
        "update": floor(3 * cfg.num_iterations * forward),
    }
