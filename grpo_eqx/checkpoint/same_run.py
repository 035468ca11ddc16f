"""Decides whether a config continues the run of a checkpoint."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_eqx.checkpoint.store import CheckpointStore
from grpo_eqx.config import GRPOConfig
from grpo_eqx.distributed.join import code_fingerprint
from grpo_eqx.errors import UserError
from grpo_eqx.rewards import RewardFunc

MAY_CHANGE = frozenset(
    {
        # how long the run is, and what is kept of it
        "steps", "output_dir", "log_completions_steps", "wandb", "wandb_project", "eval_problems",
        "save_steps", "save_minutes", "save_total_limit", "resume",
        "metric_for_best_model", "greater_is_better",
        "preemption_deadline", "stop_after", "hang_timeout",
        # what happens when something fails, which a run that stopped for it may change
        "max_skipped_updates", "reward_timeout", "reward_batch_timeout", "reward_workers",
        "reward_failures", "max_failed_rewards",
        # where the problems are read from: their fingerprints are compared instead
        "data", "eval_data",
        # how the work is laid out: the results are the same up to rounding
        "mesh", "rollout_sharding", "micro_batch_size_per_device", "max_num_seqs", "loss_backend",
        "remat", "require_processes", "start_timeout",
    }
)  # fmt: skip
"""Settings that may differ between a checkpoint and the run that continues it."""

_COMPUTING = ("jax", "jaxlib", "equinox", "optax")


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Settings and inputs that identify a run."""

    config: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    """Hashes of the tokenizer and the problems, by name."""
    commits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Commits of what was loaded from the Hugging Face hub, by setting."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Versions of the packages that compute the run; hashes of this one's and the rewards' code."""

    @classmethod
    def of(
        cls,
        cfg: GRPOConfig,
        fingerprints: Mapping[str, str],
        commits: Mapping[str, str],
        rewards: Mapping[str, RewardFunc],
    ) -> "RunFacts":
        """Describes a run as a checkpoint records it.

        **Arguments:** the settings; hashes of the inputs; commits on the hub; the reward functions
        by name, which need not be those of the settings.
        """
        settings = dataclasses.asdict(cfg) | {"reward_funcs": list(rewards)}
        config = json.loads(json.dumps(settings, default=str))
        versions = {name: version(name) for name in _COMPUTING}
        versions["the code of grpo_eqx"] = code_fingerprint()
        for name, func in rewards.items():
            versions[f"the code of reward {name}"] = _code_hash(func)
        return cls(config, fingerprints, commits, versions)

    @classmethod
    def saved(cls, store: CheckpointStore, step: int) -> "RunFacts":
        """Reads the facts that were saved with a step."""
        facts = store.facts(step)
        return cls(*(facts[field.name] for field in dataclasses.fields(cls)))

    def changes_since(self, saved: "RunFacts", checkpoint: Path) -> list[str]:
        """Lists the settings that have changed since a checkpoint, as `name: old -> new`.

        A branch that moved on is listed with its commits: the run continues with the checkpoint's
        parameters, and fingerprints tell whether tokenizer and problems are the same. So are other
        versions of packages, which may round otherwise. Raises `UserError`, with the names, where
        the changes make it another run.
        """
        values = {
            name: (saved.config.get(name), self.config.get(name))
            for name in {**saved.config, **self.config}
        }
        changed = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
        described = {name: f"{name}: {old} -> {new}" for name, (old, new) in changed.items()}
        refused = [described[name] for name in changed if name not in MAY_CHANGE]
        refused += [
            f"{name} are others" if name.endswith("s") else f"{name} is another"
            for name, value in self.fingerprints.items()
            if saved.fingerprints.get(name) != value
        ]
        if refused:
            raise UserError(
                f"the checkpoint {str(checkpoint)!r} is of another run ({'; '.join(refused)}): set "
                f"these back to continue it, or use another output_dir or --resume never to start "
                f"a new run."
            )
        moved = [
            f"the commit of {name}: {saved.commits[name]} -> {value}"
            for name, value in self.commits.items()
            if name not in changed and saved.commits.get(name, value) != value
        ]
        updated = [
            f"{name}: {saved.versions[name]} -> {value}"
            for name, value in self.versions.items()
            if saved.versions.get(name, value) != value
        ]
        return [*described.values(), *moved, *updated]


def _code_hash(func: RewardFunc) -> str:
    """Hashes the file that defines a function, with its helpers, or else the function's lines."""
    while isinstance(func, functools.partial):
        func = func.func
    code = func if inspect.isroutine(func) else type(func)
    for part in (inspect.getmodule(code), code):
        with contextlib.suppress(OSError, TypeError):  # what is typed has no file
            source = inspect.getsource(part)  # type: ignore[arg-type]
            return hashlib.sha256(source.encode()).hexdigest()[:12]
    return "unknown"
