"""The model that the command `eval` evaluates, with its settings."""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx

from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.checkpoint.saved import OtherArraysError, SavedStep, complete_steps
from grpo_eqx.common.errors import FileError, UserError, first_line
from grpo_eqx.common.plain_data import field
from grpo_eqx.common.read_files import expanded
from grpo_eqx.data.run_inputs import PLAIN
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.pretrained import model_folder, saved_adapter
from grpo_eqx.run.initial_state import initial_model, state_shapes
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.settings.embedded import EMBEDDED_MODEL
from grpo_eqx.tracking.metrics_file import Metrics
from grpo_eqx.tracking.recorded_run import read_settings
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.training.updater import Updater

_OF_A_RUN = (
    "model", "data", "eval_data", "eval_problems", "system_prompt", "chat_template",
    "chat_template_kwargs", "max_prompt_length", "overlong_prompts", "max_completion_length",
    "stop_strings", "dtype", "rollout_dtype", "kv_cache_dtype", "max_num_seqs", "seed",
    "lora_rank", "lora_alpha", "lora_target", "use_rslora", "load_in_8bit",
)  # fmt: skip
"""Settings of a run that decide the answers of its model."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to evaluate: by name or folder, or the model of a run or a checkpoint."""

    name: str
    settings: Mapping[str, Any]
    """Settings of the model's run, or of its adapters."""
    checkpoint: SavedStep | None = None
    """Checkpoint with the trained parameters; `None` if the model in the settings has them."""
    facts: RunFacts | None = None
    """Facts of the model's run, from a checkpoint."""
    of_run: bool = False

    @classmethod
    def find(cls, name: str) -> "Subject":
        """Finds a model by name or path; downloads models of the hub.

        For a run's folder, this is the final model, or before the run's end, the model of the
        newest checkpoint. Raises `UserError` if there is no model.
        """
        path = expanded(name)
        run = RunFolder(path)
        if os.path.exists(run.metrics):
            return cls._of_run(name, run)
        if re.fullmatch(r"step_\d+", path.name):
            if os.path.isdir(path):
                return cls._of_checkpoint(name, path.parent, int(path.name.removeprefix("step_")))
            if saved := [f"step_{step}" for step in complete_steps(path.parent)]:
                raise UserError(
                    f"{str(path.parent)!r} has no {path.name}, but {', '.join(saved)}: use one of "
                    f"these."
                )
        model = name if name == EMBEDDED_MODEL else str(path) if os.path.exists(path) else name
        try:
            model_folder(model)
        except UserError as error:
            if os.path.exists(path) or not os.path.isdir(path.parent):
                raise
            hint = f"No run is in {name!r} either: of a run, give the output_dir."
            raise UserError(f"{error} {hint}") from error
        adapter = saved_adapter(model)
        if adapter is None:
            return cls(name, {"model": model})
        lora = adapter.lora
        of_adapter = {
            "lora_rank": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_target": None if lora.target is None else ",".join(lora.target),
            "use_rslora": lora.rank_stabilized,
        }
        return cls(name, {"model": model, **of_adapter})

    @classmethod
    def _of_run(cls, name: str, run: RunFolder) -> "Subject":
        steps = complete_steps(run.checkpoints)
        if not run.is_complete or (steps and _goes_on(run)):
            if not steps:
                raise UserError(
                    f"the run in {name!r} has neither a model nor a checkpoint yet: evaluate it "
                    f"when it has saved one."
                )
            return cls._of_checkpoint(name, run.checkpoints, steps[0])
        settings = _of_a_run(_config_of(run))
        template = settings.get("chat_template")
        # The tokenizer in the model's folder already has the template.
        own = {
            "model": str(run.model),
            "chat_template": template if template == PLAIN else None,
            "chat_template_kwargs": (),
        }
        facts = _facts(SavedStep(run.checkpoints, steps[0])) if steps else None
        return cls(name, {**settings, **own}, None, facts, of_run=True)

    @classmethod
    def _of_checkpoint(cls, name: str, folder: Path, step: int) -> "Subject":
        checkpoint = SavedStep(folder, step)
        facts = _facts(checkpoint)
        settings, commit = _of_a_run(facts.config), facts.commits.get("model")
        if commit is not None:
            settings["model"] = f"{settings['model'].partition('@')[0]}@{commit}"
        return cls(name, settings, checkpoint, facts, of_run=True)

    def check_single_turn(self) -> None:
        """Raises `UserError` for a run whose completions act, in what cannot be called here."""
        if self.facts is None:
            return
        config = self.facts.config
        acts = [*config.get("tools", ()), *filter(None, [config.get("harness")])]
        if acts:
            raise UserError(
                f"the run in {self.name!r} had tools, environments or a harness "
                f"({', '.join(acts)}), which this command cannot call: evaluate in Python, as in "
                f"GRPOTrainer(cfg, tools=...).evaluate(), with the run's model as cfg.model."
            )

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raises `UserError` for a tokenizer that differs from the run's."""
        self._check("the tokenizer", fingerprint, "export the model with --model of the right one")

    def check_problems(self, fingerprint: str) -> None:
        """Raises `UserError` for problems that differ from the run's held-out problems."""
        fix = (
            "give them as --data, or evaluate in Python, with a function of your own too: "
            "GRPOTrainer(cfg, model=..., eval_data=..., eval_func=...).evaluate()"
        )
        self._check("the held-out problems", fingerprint, fix)

    def _check(self, what: str, fingerprint: str, fix: str) -> None:
        if self.facts is not None and self.facts.fingerprints.get(what) != fingerprint:
            verb = "are" if what.endswith("s") else "is"
            raise UserError(
                f"{what} of the run in {self.name!r} {verb} not found by its settings, as "
                f"something else was passed to GRPOTrainer, or a file has changed; {fix}."
            )

    def load(self, run: RunSpec, updater: Updater) -> CausalLM:
        """Places the model on the devices, as the trainer holds it.

        Raises `UserError` if it cannot be read, or has another architecture than the run's model.
        """
        if self.checkpoint is None:
            return initial_model(run, updater.forward)
        shapes = state_shapes(run, updater).model
        try:
            trained = self.checkpoint.model(eqx.filter(shapes, shapes.trainable))
        except OtherArraysError as error:
            raise UserError(
                f"the checkpoint {str(self.checkpoint.path)!r} is of another model than "
                f"{run.cfg.model!r} ({error}): export it with grpo-eqx export --model FOLDER, and "
                f"evaluate that."
            ) from error
        except UserError:
            raise
        except Exception as error:  # from Orbax or TensorStore, of any class
            raise _unreadable(self.checkpoint, error) from error
        if run.lora is None:
            return trained
        return eqx.combine(trained, initial_model(run, updater.forward))


def _facts(checkpoint: SavedStep) -> RunFacts:
    try:
        return RunFacts.saved(checkpoint)
    except Exception as error:  # such as a file that is missing or damaged
        raise _unreadable(checkpoint, error) from error


def _unreadable(checkpoint: SavedStep, error: Exception) -> UserError:
    return UserError(
        f"cannot read the checkpoint {checkpoint.path}: {first_line(error)}; give another, as in "
        f"RUN/checkpoints/step_100."
    )


def _goes_on(run: RunFolder) -> bool:
    """Returns whether an ended run was continued, so that its final model is outdated."""
    if run.stopped.exists():
        return False
    made = max((int(row["step"]) for row in Metrics.read(run.metrics).steps), default=0)
    return made < field(_config_of(run), "steps", int, str(run.config))


def _config_of(run: RunFolder) -> dict[str, Any]:
    """Reads the settings of a run; raises `UserError` if they cannot be read."""
    try:
        return read_settings(run)
    except FileError as error:
        raise UserError(
            f"the run in {str(run.path)!r} cannot be read: {first_line(error)}; give its folder "
            f"model, or one of its checkpoints."
        ) from error


def _of_a_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a run's model needs; runs of older versions may lack some."""
    found = {name: config[name] for name in _OF_A_RUN if name in config}
    return {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}
