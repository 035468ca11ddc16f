"""Metrics of a training step, from what it sampled, its updates and its times."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import SupportsFloat

from grpo_eqx.generation import LocalSampler
from grpo_eqx.loop.learner import Learner
from grpo_eqx.rollout.rollout import Rollout
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.tracking.device_peaks import device_peaks
from grpo_eqx.tracking.metrics import StepClock, merge_updates
from grpo_eqx.tracking.performance import Work, performance_metrics, throughput_metrics
from grpo_eqx.training.state import TrainState
from grpo_eqx.training.updater import SKIPPED


class StepMetrics:
    """Computation of the metrics of each step of a run."""

    def __init__(
        self,
        cfg: GRPOConfig,
        sampler: LocalSampler,
        learner: Learner,
        num_shapes: Counter[str],
        learning_rate: Callable[[int], float] | None,
    ):
        """**Arguments:**

        - `cfg`: the resolved settings.
        - `sampler`, `learner`: the sampler and the learner of the run.
        - `num_shapes`: the sets of shapes that each program has been compiled for.
        - `learning_rate`: the rate of an update, counted from 0, if it is known.
        """
        self._cfg, self._sampler, self._learner = cfg, sampler, learner
        self._num_shapes, self._learning_rate = num_shapes, learning_rate

    def after(
        self,
        state: TrainState,
        kept: Rollout,
        made: Rollout,
        updates: Sequence[Mapping[str, SupportsFloat]],
        skipped: int,
        clock: StepClock,
    ) -> dict[str, float]:
        """Returns the metrics of a step, but for those of its rollout.

        **Arguments:**

        - `state`: the state after the step.
        - `kept`, `made`: what it learned from, and everything that was sampled for it.
        - `updates`: the metrics of each of its updates, on the host.
        - `skipped`: how many updates were skipped.
        - `clock`: its times, up to the end of the updates.
        """
        metrics = {**merge_updates(updates), SKIPPED: float(skipped)}
        if self._learning_rate is not None:
            last_update = state.step * self._cfg.updates_per_step - 1
            metrics["learning_rate"] = self._learning_rate(last_update)
        metrics["num_tokens"] = float(state.num_tokens)
        times = clock.metrics()
        throughput = throughput_metrics(
            self._learner.num_counted,
            step_seconds=times["step_time"],
            update_seconds=times["time/train/update_s"],
        )
        return {
            **metrics,
            **times,
            **throughput,
            **self._use_of_devices(state, kept, made, times),
            **self._use_of_arrays(made),
        }

    def _use_of_devices(
        self, state: TrainState, kept: Rollout, made: Rollout, times: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns the shares of the devices' peak rates that rollout and updates reached."""
        cfg, options, config = self._cfg, self._sampler.options, state.model.config
        mesh = self._sampler.mesh
        layout = self._sampler.layout(cfg.prompts_per_step, cfg.num_generations)
        return performance_metrics(
            config,
            rollout=Work(made.prompt_lengths, made.lengths, times["time/train/rollout_s"]),
            num_decode_steps=made.counts.steps,
            update=Work(kept.prompt_lengths, kept.lengths, times["time/train/update_s"]),
            num_iterations=cfg.num_iterations,
            frozen=state.model.has_adapters,
            peaks=device_peaks(mesh.devices.flat[0].device_kind),
            num_devices=mesh.size,
            num_copies=layout.num_copies,
            itemsize=options.weight_itemsize,
            kv_itemsize=options.kv_itemsize(config.head_size),
        )

    def _use_of_arrays(self, made: Rollout) -> dict[str, float]:
        """Returns the shares of slots, caches and rows that were used, and the shapes compiled."""
        of_slots, slots = {}, made.counts.slots
        if slots:  # else the sampler does not count them
            of_slots["perf/slot_utilization"] = made.counts.tokens / slots
            of_slots["perf/cache_read_share"] = made.counts.cache_share / slots
        return {
            **of_slots,
            **self._learner.packing_metrics(),
            **{
                f"compile/num_shapes/{name}": float(count)
                for name, count in dict(self._num_shapes).items()
            },
        }
