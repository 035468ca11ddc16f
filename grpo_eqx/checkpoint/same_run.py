"""Decides whether a config continues the run of a checkpoint."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_eqx.checkpoint.saved import DamagedError, SavedStep
from grpo_eqx.common.errors import FileError, UserError, listed
from grpo_eqx.common.plain_data import field
from grpo_eqx.common.read_files import reading
from grpo_eqx.distributed.program_facts import code_fingerprint
from grpo_eqx.rewards import RewardFunc
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.run_names import MAY_CHANGE
from grpo_eqx.tracking.run_folder import RunFolder

_TRAINING = "the training problems"
_HELDOUT = "the held-out problems"
"""These decide nothing about training."""
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
    """Versions of the packages that compute the run, and a hash of this one's code."""
    reward_code: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Hashes of the code of the reward functions, by name."""
    time: str | None = None
    """Time in the prompts, if their chat template may ask for it."""

    @classmethod
    def of(
        cls,
        cfg: GRPOConfig,
        fingerprints: Mapping[str, str],
        commits: Mapping[str, str],
        rewards: Mapping[str, RewardFunc],
        time: str | None = None,
        tools: Mapping[str, Callable[..., Any]] | None = None,
    ) -> "RunFacts":
        """Describes a run as a checkpoint records it.

        **Arguments:**

        - `cfg`: the settings.
        - `fingerprints`: hashes of the inputs.
        - `commits`: commits on the hub.
        - `rewards`: the reward functions by name, which may have been passed in place of settings.
        - `time`: the time in the prompts, if their template may ask for it.
        - `tools`: tools and classes of environments by name.
        """
        tools = {} if tools is None else tools
        config = _as_json(cfg) | {"reward_funcs": list(rewards), "tools": list(tools)}
        versions = {name: version(name) for name in _COMPUTING}
        versions["the code of grpo_eqx"] = code_fingerprint()
        code = {name: code_hash(func) for name, func in {**rewards, **tools}.items()}
        return cls(config, fingerprints, commits, versions, code, time)

    @classmethod
    def saved(cls, checkpoint: SavedStep) -> "RunFacts":
        """Reads the facts that were saved with a checkpoint; raises `DamagedError`."""
        called, facts = str(checkpoint.path), checkpoint.facts
        try:
            config, fingerprints = (
                field(facts, name, dict, called) for name in ("config", "fingerprints")
            )
            commits, versions, code = (
                field(facts, name, dict, called, {})
                for name in ("commits", "versions", "reward_code")
            )
            time = field(facts, "time", str, called, "") or None
            if time is not None:
                with reading(called):
                    datetime.fromisoformat(time)
        except FileError as error:
            raise DamagedError(str(error)) from error
        return cls(config, fingerprints, commits, versions, code, time)

    def changed_rewards(self, saved: "RunFacts") -> list[str]:
        """Names the functions and classes whose files have changed since a checkpoint, if any."""
        changed = [x for x, code in self.reward_code.items() if saved.reward_code.get(x) != code]
        if not changed:
            return []
        if len(changed) == 1:
            return [f"the file of {changed[0]} has changed"]
        return [f"the files of {listed(changed)} have changed"]

    def changes_since(self, saved: "RunFacts", checkpoint: Path) -> list[str]:
        """Lists what has changed since a checkpoint, as `name: old -> new`.

        A branch that moved on is listed with its commits: the run continues with the checkpoint's
        parameters, and fingerprints tell whether tokenizer and problems are the same. So are other
        versions of packages, which may round otherwise. Raises `UserError`, with the names, where
        the changes make it another run.
        """
        if refused := self.refused(saved):
            run = RunFolder(checkpoint.parent.parent)
            instead = (
                f"Set these back to continue it. {after_its_end(run)}"
                if run.is_complete
                else f"Set these back to continue it, or start a new run: from its weights, which "
                f"grpo-eqx export {checkpoint} --output FOLDER writes for --model, with another "
                f"output_dir; or at step 0, with resume set to never."
            )
            if None not in (saved.time, self.time) and saved.time != self.time:
                refused.append(f"the time in the prompts: {saved.time} -> {self.time}")
                instead = (
                    "Name it in the setting resume, from which prompts take their time. " + instead
                )
            raise UserError(
                f"the checkpoint {str(checkpoint)!r} is of another run ({'; '.join(refused)}). "
                f"{instead}"
            )
        settings = self._changed(saved.config, self.config)
        inputs = self._changed(saved.fingerprints, self.fingerprints)  # held-out problems at most
        commits = {
            f"the commit of {name}": change
            for name, change in self._changed(saved.commits, self.commits).items()
            if name not in settings
        }
        versions = self._changed(saved.versions, self.versions)
        changed = settings | inputs | commits | versions
        for bookkeeping in ("output_dir", "resume"):  # the line before says where from
            changed.pop(bookkeeping, None)
        values = [f"{name}: {old} -> {new}" for name, (old, new) in changed.items()]
        return values + (self.changed_rewards(saved) if saved.reward_code else [])

    def refused(self, saved: "RunFacts") -> list[str]:
        """Lists the changes since a checkpoint that make it another run."""
        newer = _as_json(GRPOConfig())  # defaults of settings that are newer than it
        settings = self._changed({**newer, **saved.config}, self.config)
        others = {name: each for name, each in settings.items() if name not in MAY_CHANGE}
        # What is `None` on one side has mostly followed from another setting.
        given = {name: each for name, each in others.items() if None not in each}
        refused = [f"{name}: {old} -> {new}" for name, (old, new) in (given or others).items()]
        inputs = self._changed(saved.fingerprints, self.fingerprints)
        return refused + [
            f"{name} are others" if name.endswith("s") else f"{name} is another"
            for name in inputs
            # Problems, as they are tokenized, describe the tools.
            if name != _HELDOUT and not (name == _TRAINING and "tools" in others)
        ]

    @staticmethod
    def _changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns what has another value than before, where it had one."""
        return {
            name: (saved[name], value)
            for name, value in now.items()
            if name in saved and saved[name] != value
        }


def _as_json(cfg: GRPOConfig) -> dict[str, Any]:
    """Returns settings as they are read back from JSON."""
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(cfg), default=str))
    return settings


def after_its_end(run: RunFolder) -> str:
    """Says how a new run follows one that is finished."""
    return (
        f"To train on from its model, start a new run with --model {run.model} and another "
        f"--output-dir; to start anew in its place, set resume to never."
    )


def code_hash(func: Callable[..., Any]) -> str:
    """Hashes the file that defines a function or a class, with its helpers, or else its lines."""
    while isinstance(func, functools.partial):
        func = func.func
    code = func if inspect.isroutine(func) or inspect.isclass(func) else type(func)
    for part in (inspect.getmodule(code), code):
        with contextlib.suppress(OSError, TypeError):  # what is typed has no file
            source = inspect.getsource(part)  # type: ignore[arg-type]
            return hashlib.sha256(source.encode()).hexdigest()[:12]
    return "unknown"
