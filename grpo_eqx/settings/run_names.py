"""Settings that distinguish one run from another, and the name that follows from them."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_NAMING = "model", "data"
"""Settings that a run is named after."""
_LONGEST_PART = 80
"""Bytes of each in the name of a folder, which has at most 255."""

MAY_CHANGE = frozenset(
    {
        # how long the run is, and what is kept of it
        "steps", "num_train_epochs", "output_dir", "run_name", "report_to", "wandb",
        "wandb_project", "log_completions_steps", "log_completions", "num_completions_to_print",
        "eval_problems", "resume",
        "eval_steps", "eval_on_start", "num_generations_eval", "eval_temperature",
        "save_steps", "save_minutes", "save_total_limit",
        "metric_for_best_model", "greater_is_better",
        "preemption_deadline", "stop_after", "hang_timeout", "profile_steps", "profile_memory",
        # what happens when something fails, which a run that stopped for it may change
        "max_skipped_updates", "reward_timeout", "reward_batch_timeout", "reward_workers",
        "reward_failures", "max_failed_rewards", "tool_timeout", "tool_workers", "tool_failures",
        "harness_timeout", "harness_concurrency", "harness_host", "harness_port",
        # where the problems are read from: their fingerprints are compared instead
        "data", "eval_data", "chat_template",
        # how the work is laid out: the results are the same up to rounding
        "mesh", "rollout_sharding", "micro_batch_size_per_device", "max_num_seqs", "loss_backend",
        "remat", "require_processes", "start_timeout",
    }
)  # fmt: skip
"""Settings that may differ between a checkpoint and the run that continues it."""


def run_name(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Names a run after its model, data and seed, with a hash of what else makes it another run.

    **Arguments:**

    - `settings`: all settings of the run.
    - `defaults`: all settings of a run of the same model that sets nothing else.
    """
    others = {
        name: settings[name]
        for name in sorted(defaults.keys() - MAY_CHANGE | {"chat_template"})
        if name not in ("model", "seed") and settings[name] != defaults[name]
    }
    # Of these, the last part does not tell one from another.
    ends = {name: _last_part(settings[name]).removesuffix(".jsonl") for name in _NAMING}
    parts = {
        name: end.encode(errors="replace")[:_LONGEST_PART].decode(errors="ignore")
        for name, end in ends.items()
    }
    others |= {
        name: settings[name]
        for name in _NAMING
        if _is_path(settings[name]) or parts[name] != ends[name]
    }
    text = json.dumps(others, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    return "-".join([*parts.values(), f"seed{settings['seed']}", *([digest] if others else [])])


def _is_path(name: str) -> bool:
    """Returns whether a name has folders, or a split of a data set on the hub."""
    repository = name.partition("@")[0]
    return ":" in name or (
        "/" in name
        and (repository.count("/") > 1 or name.startswith((".", "~")) or ".json" in repository)
    )


def _last_part(name: str) -> str:
    """Returns the last part of a path or hub name, of the latter with revision, without split."""
    repository, at, revision = name.partition(":")[0].rstrip("/").partition("@")
    if repository.count("/") == 1:  # a branch may have slashes
        name = f"{repository}{at}{revision.replace('/', '-')}"
    return name.rstrip("/").rsplit("/", 1)[-1]
