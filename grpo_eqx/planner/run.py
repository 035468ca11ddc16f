"""What a plan needs to know of a run: its settings, its model's shapes, the lengths of prompts."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from grpo_eqx.config import EMBEDDED_MODEL, GRPOConfig
from grpo_eqx.construction import check_positions, load_inputs
from grpo_eqx.data.batches import TokenizedPrompts, padded_length
from grpo_eqx.data.load import is_hub_name
from grpo_eqx.errors import UserError
from grpo_eqx.generation import Stopping
from grpo_eqx.models.base import ModelConfig
from grpo_eqx.models.pretrained import model_folder
from grpo_eqx.models.registry import published_config, read_config
from grpo_eqx.strategies import Strategies, check_batches
from grpo_eqx.training.programs import Programs


class PromptLengths(NamedTuple):
    """What prompts are padded to, in tokens."""

    train: int
    heldout: int
    num_heldout: int
    """Problems of an evaluation."""
    num_train: int | None
    """Problems to train on, where they are known."""

    @property
    def known(self) -> bool:
        """Whether they are those of the run's problems; else the most that its settings allow."""
        return self.num_train is not None

    @classmethod
    def of(
        cls, train: TokenizedPrompts, heldout: TokenizedPrompts, max_length: int
    ) -> "PromptLengths":
        """Those of problems at hand."""
        longest = [max(map(len, problems.tokens)) for problems in (train, heldout)]
        widths = [padded_length(each, max_length) for each in longest]
        return cls(widths[0], widths[1], len(heldout), len(train))

    @classmethod
    def longest(cls, cfg: GRPOConfig) -> "PromptLengths":
        """The longest that the settings allow."""
        return cls(cfg.max_prompt_length, cfg.max_prompt_length, cfg.eval_problems, None)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run, without weights and devices."""

    cfg: GRPOConfig
    """Resolved."""
    model: ModelConfig
    prompts: PromptLengths
    strategies: Strategies = dataclasses.field(default_factory=Strategies)

    @classmethod
    def of(cls, cfg: GRPOConfig) -> "PlannedRun":
        """The run of a config; of a model only its `config.json` is needed, if that.

        Problems that are at hand with the model's tokenizer are read for the lengths of prompts.
        """
        cfg = cfg.resolved()
        model = model_config(cfg.model)
        return cls(cfg, model, _prompt_lengths(cfg, model))

    @property
    def num_scores(self) -> dict[str, int]:
        """Passes of each scoring program over a step's rollout."""
        cfg = self.cfg
        old = int(cfg.updates_per_step > 1)
        entropies = cfg.num_iterations if cfg.top_entropy_quantile < 1 else 0
        return {"score": old + entropies, "score_reference": int(cfg.beta > 0)}

    @property
    def scored(self) -> list[str]:
        """What an update knows of its tokens from earlier passes, by the fields of `Batch`."""
        cfg = self.cfg
        has = {
            "old_logps": cfg.updates_per_step > 1,
            "ref_logps": cfg.beta > 0,
            "entropies": cfg.top_entropy_quantile < 1,
        }
        return [name for name, there in has.items() if there]

    def changed(self, **settings: Any) -> "PlannedRun":
        """The run with other settings; raises `UserError` where they cannot be."""
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, **settings))

    def mesh(self, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
        """The run's mesh; raises `UserError` where it, or its batches, do not fit the devices."""
        mesh = self.strategies.build_mesh(self.cfg, devices)
        self.check_batches(mesh)
        return mesh

    def check_batches(self, mesh: jax.sharding.Mesh) -> None:
        """Refuses batches that cannot be split over a mesh, or that are more than all problems."""
        wanted, there = self.cfg.prompts_per_step, self.prompts.num_train
        if there is not None and there < wanted:
            raise UserError(
                f"{self.cfg.data} has {there} problems, and prompts_per_step is {wanted}: lower it "
                f"or bring more problems."
            )
        check_batches(self.cfg, mesh, self.strategies.rollout(self.cfg))

    def programs(self, mesh: jax.sharding.Mesh) -> Programs:
        """The run's programs. Their shapes depend on no tokenizer, but for its vocabulary."""
        stopping = Stopping.of_strings((), self.cfg.stop_strings, [b""] * self.model.vocab_size)
        return self.strategies.programs(self.cfg, mesh, stopping, pad_id=0)


def model_config(name: str) -> ModelConfig:
    """Finds the config of a folder, of a published model by its name, or of any on the hub."""
    if is_at_hand(name):
        return read_config(model_folder(name) / "config.json")
    return published_config(name) or read_config(_downloaded_config(name))


def _downloaded_config(name: str) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        return hf_hub_download(name, "config.json")
    except (OSError, HFValidationError, ValueError) as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise UserError(
            f"model {name!r} is not a folder, and its config.json could not be downloaded from the "
            f"Hugging Face hub ({type(error).__name__}: {reason})."
        ) from error


def is_at_hand(model: str) -> bool:
    """Whether a model is on this machine, as a folder or with the package."""
    return model == EMBEDDED_MODEL or Path(model).is_dir()


def _prompt_lengths(cfg: GRPOConfig, model: ModelConfig) -> PromptLengths:
    data = [name for name in (cfg.data, cfg.eval_data) if name is not None]
    has_tokenizer = (
        is_at_hand(cfg.model) and (model_folder(cfg.model) / "tokenizer_config.json").exists()
    )
    if not has_tokenizer or any(map(is_hub_name, data)):
        check_positions(cfg, model, "a prompt without text", 0)
        return PromptLengths.longest(cfg)
    inputs = load_inputs(cfg, None, None, None)
    inputs.check_belong_to(model, cfg)
    return PromptLengths.of(inputs.train, inputs.heldout, cfg.max_prompt_length)
