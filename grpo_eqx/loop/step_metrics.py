"""Metrics of a training step, from what it generated, its updates and its times."""

from collections.abc import Callable, Mapping, Sequence
from typing import SupportsFloat

from grpo_eqx.rollout.experience import Experience
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.tracking.device_peaks import device_peaks
from grpo_eqx.tracking.metrics import StepClock, merge_updates
from grpo_eqx.tracking.performance import Work, performance_metrics, throughput_metrics
from grpo_eqx.training.programs import SKIPPED, Programs
from grpo_eqx.training.state import TrainState


class StepMetrics:
    """Computation of the metrics of each step of a run."""

    def __init__(
        self,
        cfg: GRPOConfig,
        programs: Programs,
        learning_rate: Callable[[int], float] | None,
    ):
        """**Arguments:** the resolved settings; the run's programs; the rate of an update, counted
        from 0, if it is known.
        """
        self._cfg, self._programs, self._learning_rate = cfg, programs, learning_rate

    def after(
        self,
        state: TrainState,
        experience: Experience,
        updates: Sequence[Mapping[str, SupportsFloat]],
        skipped: int,
        clock: StepClock,
    ) -> dict[str, float]:
        """Returns the metrics of a step.

        **Arguments:** the state after it; what it learned from; the metrics of each of its updates,
        on the host; how many of these were skipped; its times, up to the end of the updates.
        """
        metrics = {**experience.metrics, **merge_updates(updates), SKIPPED: float(skipped)}
        if self._learning_rate is not None:
            last_update = state.step * self._cfg.updates_per_step - 1
            metrics["learning_rate"] = self._learning_rate(last_update)
        metrics["num_tokens"] = float(state.num_tokens)
        times = clock.metrics()
        return {
            **metrics,
            **times,
            **self._throughput(experience, times),
            **self._use_of_devices(state, experience, times),
            **self._use_of_arrays(experience),
        }

    def _throughput(self, experience: Experience, times: Mapping[str, float]) -> dict[str, float]:
        completions = experience.groups.completions
        return throughput_metrics(
            self._programs.num_counted(completions.num_written, completions.finished),
            step_seconds=times["step_time"],
            update_seconds=times["time/train/update_s"],
        )

    def _use_of_devices(
        self, state: TrainState, experience: Experience, times: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns the shares of the devices' peak rates that rollout and updates reached."""
        cfg, programs, config = self._cfg, self._programs, state.model.config
        generated, groups = experience.generated, experience.groups
        layout = programs.rollout_layout(cfg.prompts_per_step, cfg.num_generations)
        return performance_metrics(
            config,
            rollout=Work(
                generated.prompt_lengths,
                generated.completion_lengths,
                times["time/train/rollout_s"],
            ),
            num_decode_steps=generated.num_decode_steps,
            update=Work(
                groups.prompt_lengths, groups.completions.lengths, times["time/train/update_s"]
            ),
            num_iterations=cfg.num_iterations,
            frozen=state.model.has_adapters,
            peaks=device_peaks(programs.mesh.devices.flat[0].device_kind),
            num_devices=programs.mesh.size,
            num_copies=layout.num_copies,
            itemsize=programs.options.weight_itemsize,
            kv_itemsize=programs.options.kv_itemsize(config.head_size),
        )

    def _use_of_arrays(self, experience: Experience) -> dict[str, float]:
        """Returns the shares of slots, caches and rows that were used, and the shapes compiled."""
        generated, shapes = experience.generated, self._programs.num_shapes
        tokens = generated.completion_lengths.sum()
        return {
            "perf/slot_utilization": float(tokens / generated.num_slots),
            "perf/cache_read_share": generated.cache_share / generated.num_slots,
            **experience.packing_metrics(),
            **{f"compile/num_shapes/{name}": float(count) for name, count in dict(shapes).items()},
        }
