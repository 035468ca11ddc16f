"""All metrics that a run can log: their units, meanings and healthy ranges.

The page of metrics in the documentation is made from it.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping

_ANY: Mapping[str, str] = {
    **dict.fromkeys(("{func}", "{figure}"), ".+"),
    **dict.fromkeys(("{k}", "{program}", "{sampling}"), "[^/]+"),
    "{metric}": "[^/@]+",
}
"""Regular expressions for the placeholders in names of metrics."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric, or all metrics whose names differ only in a placeholder."""

    name: str
    """Name under which it is logged. A placeholder in braces, as in `rewards/{func}/mean`, stands
    for any text; only `func` and `figure` may stand for text with slashes."""
    unit: str
    """Unit; empty for plain numbers."""
    meaning: str
    """One sentence."""
    healthy: str = ""
    """Values of a healthy run, in words; empty if every value can be healthy."""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression that matches the names."""
        parts = re.split(r"(\{\w+\})", self.name)
        return re.compile("".join(_ANY.get(part) or re.escape(part) for part in parts))


def find_metric(name: str) -> Metric | None:
    """Returns the entry of the metric with a logged name, or `None`."""
    return next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)


_REWARDS = (
    Metric("step", "steps", "Training steps done so far; 0 before the first."),
    Metric(
        "reward", "reward",
        "Mean over completions of the weighted sum of all reward functions.",
        "rises over tens of steps; single steps are noisy",
    ),
    Metric(
        "reward_std", "reward",
        "Standard deviation over the step's completions of the weighted sum of rewards.",
        "above 0: equal rewards teach nothing",
    ),
    Metric(
        "frac_reward_zero_std", "share",
        "Share of groups of two or more rewards whose rewards are all equal, which teach nothing; "
        "NaN where no group has two.",
        "well below 1",
    ),
    Metric(
        "rewards/{func}/mean", "reward",
        "Mean of one reward function, without its weight, over the completions that it scored.",
        "rises, or stays where it was while others rise",
    ),
    Metric(
        "rewards/{func}/std", "reward",
        "Standard deviation of one reward function over the completions that it scored.",
        "above 0: a function that gives all the same teaches nothing",
    ),
    Metric(
        "rewards/{func}/num_failed", "completions",
        "With `reward_failures` `drop`: completions on which the function failed, which are "
        "left out.",
        "0",
    ),
)  # fmt: skip
_COMPLETIONS = (
    Metric(
        "completions/mean_length", "tokens",
        "Mean length of all completions, with the end-of-sequence token.",
        "no steady growth towards `max_completion_length` without more reward",
    ),
    Metric("completions/min_length", "tokens", "Length of the shortest completion."),
    Metric("completions/max_length", "tokens", "Length of the longest completion."),
    Metric(
        "completions/mean_terminated_length", "tokens",
        "Mean length of the completions that ended by themselves; 0 if none did.",
    ),
    Metric(
        "completions/min_terminated_length", "tokens",
        "Length of the shortest completion that ended by itself; 0 if none did.",
    ),
    Metric(
        "completions/max_terminated_length", "tokens",
        "Length of the longest completion that ended by itself; 0 if none did.",
    ),
    Metric(
        "completions/clipped_ratio", "share",
        "Share of completions that were cut off at `max_completion_length`.",
        "near 0; a run warns above 0.5",
    ),
    Metric(
        "completions/num_ids_without_token", "tokens",
        "Ids of the completions for which the tokenizer has no token; absent where the model has "
        "no such ids.",
        "0",
    ),
    Metric(
        "tools/call_frequency", "calls",
        "Calls of tools, or steps of its environment, in a completion, on average.",
        "above 0",
    ),
    Metric(
        "tools/failure_frequency", "share",
        "Share of the calls that raised, ran out of time, named an unknown tool, or had other "
        "arguments than it has.",
        "falls",
    ),
    Metric("tools/turns", "turns", "Turns of a completion whose calls were run, on average."),
    Metric(
        "tools/num_lost", "completions",
        "Completions whose environment or agent failed, which the loss leaves out.",
        "0",
    ),
    Metric(
        "agents/requests", "requests",
        "Requests of an agent that were answered in a completion, on average.",
    ),
    Metric(
        "agents/forks", "trajectories",
        "Trajectories of a completion besides the first, which an agent began by rewriting its "
        "history or with another prompt, on average.",
    ),
    Metric(
        "agents/drifted_tokens", "tokens",
        "Tokens of a completion's answers that the agent has changed, so that the loss leaves them "
        "out, on average.",
        "near 0",
    ),
    Metric(
        "agents/num_refused", "requests",
        "Requests that were too long for `max_prompt_length` or `max_completion_length`.",
        "0",
    ),
    Metric("time/agents/run_s", "s", "Seconds that an agent took for a completion, on average."),
    Metric("time/tools/call_s", "s", "Seconds of a call of a tool, on average."),
    Metric(
        "time/tools/wait_s", "s",
        "Seconds of the rollout in which no completion decoded, because all waited for calls.",
        "a small part of `step_time`",
    ),
    Metric("num_tokens", "tokens", "Tokens of all completions so far, each with its prompt."),
    Metric(
        "dynamic_sampling/num_generation_batches", "rollouts",
        "With `dynamic_sampling`: rollouts that the step took.",
        "below `max_generation_batches`",
    ),
    Metric(
        "dynamic_sampling/frac_groups_dropped", "share",
        "With `dynamic_sampling`: share of the generated groups that were not trained on.",
        "well below 1",
    ),
)  # fmt: skip
_UPDATES = (
    Metric(
        "loss", "",
        "Loss whose gradient the update follows, a mean over the step's updates.",
        "near 0 with one update per rollout, as it should be: it does not tell whether a run "
        "learns",
    ),
    Metric("policy_loss", "", "With `entropy_coef`: the loss without the entropy bonus."),
    Metric(
        "entropy", "nats",
        "Mean entropy of the next token's distribution at the sampling temperature.",
        "falls slowly; near 0, all completions of a group are alike",
    ),
    Metric(
        "kl", "nats",
        "With `beta`: mean estimate of the divergence from the reference model.",
        "grows slowly, without jumps",
    ),
    Metric(
        "grad_norm", "",
        "Norm of the gradient before clipping, a mean over the step's updates.",
        "without spikes far above its usual size; 0 if every group has equal rewards",
    ),
    Metric(
        "update_norm", "",
        "Norm of the change to the parameters, a mean over the step's updates.",
        "above 0",
    ),
    Metric(
        "skipped_updates", "updates",
        "Updates that were not applied, because their loss or gradient was not finite.",
        "0",
    ),
    Metric(
        "learning_rate", "",
        "Learning rate of the step's last update; absent where an optimizer was passed.",
    ),
    Metric(
        "policy_ratio/mean", "",
        "Mean ratio of a token's probability to its probability under the sampling policy; of "
        "sequences, if `importance_sampling_level` says so.",
        "1 with one update per rollout, close to 1 with several",
    ),
    Metric(
        "policy_ratio/min", "",
        "Smallest ratio of a token's probability to its probability under the sampling policy.",
    ),
    Metric(
        "policy_ratio/max", "",
        "Largest ratio of a token's probability to its probability under the sampling policy.",
    ),
    Metric(
        "clip_ratio/low_mean", "share",
        "Share of tokens without gradient, because their ratio is below the clip range.",
        "small; 0 with one update per rollout",
    ),
    Metric(
        "clip_ratio/low_min", "share",
        "Smallest share of tokens below the clip range of any completion.",
    ),
    Metric(
        "clip_ratio/high_mean", "share",
        "Share of tokens without gradient, because their ratio is above the clip range.",
        "small; 0 with one update per rollout",
    ),
    Metric(
        "clip_ratio/high_max", "share",
        "Largest share of tokens above the clip range of any completion.",
    ),
    Metric(
        "clip_ratio/region_mean", "share",
        "Share of tokens without gradient, because their ratio is outside of the clip range.",
        "small; 0 with one update per rollout",
    ),
    Metric(
        "cispo_clip_ratio", "share",
        "With `loss_type` `cispo`: share of tokens, at positive advantages, whose weight was "
        "capped.",
    ),
    Metric(
        "effective_batch/completions", "completions",
        "Completions that the policy term acts on: not masked, and with a nonzero advantage.",
        "most of the step's",
    ),
    Metric(
        "effective_batch/tokens", "tokens",
        "Tokens that the policy term acts on.",
        "most of the step's",
    ),
    Metric(
        "sampling/sampling_logp_difference/mean", "nats",
        "Mean absolute difference of a token's log-prob between the trainer and the sampler.",
        "as small as rounding, unless `top_k`, `top_p` or `min_p` is set",
    ),
    Metric(
        "sampling/sampling_logp_difference/max", "nats",
        "Largest absolute difference of a token's log-prob between the trainer and the sampler.",
    ),
    Metric(
        "sampling/importance_sampling_ratio/mean", "",
        "Mean ratio of the trainer's probability of a token to the sampler's; with "
        "`importance_sampling_mode`, the weight.",
        "close to 1",
    ),
    Metric(
        "sampling/importance_sampling_ratio/min", "",
        "Smallest ratio of the trainer's probability of a token to the sampler's, or weight.",
    ),
    Metric(
        "sampling/importance_sampling_ratio/max", "",
        "Largest ratio of the trainer's probability of a token to the sampler's, or weight.",
    ),
)  # fmt: skip
_STALENESS = (
    Metric(
        "staleness/mean", "steps",
        "With `max_staleness`: steps by which the policy that drew a token is older than the one "
        "that learns from it, on average.",
        "below `max_staleness`; corrections grow with it",
    ),
    Metric(
        "staleness/max", "steps", "The largest of these ages.", "at most `max_staleness`",
    ),
    Metric(
        "staleness/frac_stale_tokens", "share",
        "Share of the step's tokens that an older policy drew.",
    ),
    Metric(
        "staleness/num_groups_waiting", "groups",
        "Groups that are whole and wait for a later step to learn from them.",
        "below `prompts_per_step`",
    ),
    Metric(
        "staleness/frac_idle_slots", "share",
        "Share of the slots of all decoding steps that were idle.",
        "below 0.1, except in a run's last steps, which begin no more completions; more "
        "`max_staleness` or fewer `max_num_seqs` keep slots full",
    ),
)  # fmt: skip
_EXPERTS = (
    Metric(
        "moe/max_vio", "",
        "Uses of the most used expert over the average expert's uses, minus 1; mean over layers.",
        "does not grow during a run",
    ),
    Metric(
        "moe/unused_experts", "share",
        "Share of experts that no token of a completion used; mean over layers.",
        "near 0 in large batches; does not grow",
    ),
    Metric(
        "moe/routing_agreement", "share",
        "With `router_replay`: share of the replayed choices that the trained router would make.",
        "near 1; falls as updates on one rollout, or rounding, move the routers",
    ),
)  # fmt: skip
_EVALUATIONS = (
    Metric(
        "eval/{sampling}/pass@{k}", "share",
        "Share of completions of held-out problems that are correct; for `k` above 1, probability "
        "that at least one of `k` is. `sampling` is `greedy`, or the temperature as in "
        "`temperature_0.8`.",
        "rises with the reward; if it falls while the reward rises, the reward is gamed",
    ),
    Metric(
        "eval/{sampling}/maj@{k}", "share",
        "Share of held-out problems on which the answer that most of `k` completions give is "
        "correct.",
        "at least pass@1",
    ),
    Metric(
        "eval/{sampling}/strict/pass@{k}", "share",
        "Like pass@k, but an answer counts only if it is marked, as after `####` in GSM8K.",
        "close to pass@k; otherwise, answers are right, but not in the requested form",
    ),
    Metric(
        "eval/{sampling}/{metric}", "",
        "Mean over held-out problems of one of `eval_metrics`, by its name.",
    ),
    Metric(
        "eval/{sampling}/{figure}/ci_low", "",
        "Lower end of a figure's 95 % interval.",
    ),
    Metric(
        "eval/{sampling}/{figure}/ci_high", "",
        "Upper end of a figure's 95 % interval.",
    ),
    Metric("time/eval_s", "s", "Seconds of an evaluation during training."),
    Metric("eval/num_problems", "problems", "Held-out problems that the evaluation is made of."),
)  # fmt: skip
_SPEED = (
    Metric("step_time", "s", "Seconds of the step, by TRL's name."),
    Metric("time/train/step_s", "s", "Seconds of the step, by the name of its parts."),
    Metric(
        "time/train/step_avg_last10_s", "s",
        "Mean of `step_time` over the latest steps of this process, ten at most.",
        "steady, once the first steps have compiled",
    ),
    Metric(
        "time/train/rollout_s", "s",
        "Part of the step that waited for completions, and wrote the records of the step "
        "before.",
    ),
    Metric("time/train/reward_s", "s", "Part of the step that called the reward functions."),
    Metric(
        "time/train/update_s", "s",
        "Part of the step that waited for other policies' forward passes, and for the updates.",
    ),
    Metric(
        "time/startup/first_rollout_s", "s",
        "In the first step alone: seconds from the trainer's creation until its first rollout.",
    ),
    Metric(
        "time/startup/first_update_s", "s",
        "In the first step alone: seconds from the trainer's creation until its first update "
        "was done.",
    ),
    Metric(
        "throughput/train/valid_tokens_per_s", "tokens/s",
        "Valid tokens of the step divided by `step_time`.",
    ),
    Metric(
        "throughput/train/valid_tokens_per_s_update", "tokens/s",
        "Valid tokens of the step divided by `time/train/update_s`.",
    ),
    Metric(
        "perf/tokens_per_second/rollout", "tokens/s",
        "Generated tokens, including replaced groups, per second of rollout time.",
    ),
    Metric(
        "perf/tokens_per_second/update", "tokens/s",
        "Tokens trained on per second of update time: each prompt once for its group, plus the "
        "completions, in each of `num_iterations` passes.",
    ),
    Metric(
        "perf/mfu/update", "share",
        "FLOPs that the updates require, divided by the devices' peak in the same time; absent "
        "if the peak is unknown.",
    ),
    Metric(
        "perf/bandwidth_utilization/rollout", "share",
        "Bytes that decoding must read, divided by the devices' peak in the same time; absent if "
        "the peak is unknown.",
    ),
    Metric(
        "perf/slot_utilization", "share",
        "Generated tokens divided by the slots of all decoding steps; the rest was idle.",
        "above 2/3; see `max_num_seqs`",
    ),
    Metric(
        "perf/cache_read_share", "share",
        "Share of the slots' caches of keys and values that decoding's attention reads: up to "
        "the longest live completion, in blocks of 128 positions.",
    ),
    Metric(
        "perf/padding_share", "share",
        "Share of the positions of the updates' rows that hold no token. Small batches cannot fill "
        "their rows.",
        "below 1/3",
    ),
    Metric(
        "perf/balance", "share",
        "Tokens of the average device in the updates, divided by those of the busiest.",
        "near 1",
    ),
)  # fmt: skip
_MEMORY = (
    Metric(
        "memory/train/bytes_in_use_max_gib", "GiB",
        "Memory in use on the fullest device at the end of the step's updates; absent on CPUs.",
        "steady",
    ),
    Metric(
        "memory/train/peak_bytes_in_use_max_gib", "GiB",
        "Peak memory in use on the fullest device since its process began; absent on CPUs.",
        "below the device's memory, and steady after the first steps",
    ),
    Metric(
        "memory/train/host_peak_gib", "GiB",
        "Peak host memory of the largest process so far; on CPUs, this includes the model.",
        "steady after the first steps",
    ),
)  # fmt: skip
_COMPILATION = (
    Metric(
        "compile/num_programs", "programs",
        "Programs compiled, or loaded from the cache, since the step before.",
        "0 after the first steps",
    ),
    Metric(
        "compile/num_cache_hits", "programs",
        "Programs loaded from the cache of compiled ones since the step before.",
    ),
    Metric(
        "compile/seconds", "s",
        "Seconds spent compiling and loading programs since the step before, without tracing. "
        "Threads do so before and beside steps: it may exceed `step_time`.",
        "0 after the first steps",
    ),
    Metric(
        "compile/num_shapes/{program}", "shapes",
        "Sets of shapes for which `generate`, `score` or `update` was compiled since the start.",
        "no growth after the first steps",
    ),
)  # fmt: skip

SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Rewards": _REWARDS,
    "Completions": _COMPLETIONS,
    "Updates": _UPDATES,
    "Staleness": _STALENESS,
    "Experts": _EXPERTS,
    "Evaluations": _EVALUATIONS,
    "Time and throughput": _SPEED,
    "Memory": _MEMORY,
    "Compilation": _COMPILATION,
}
"""The metrics by topic."""

METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)
"""All metrics, in the order of the documentation."""
