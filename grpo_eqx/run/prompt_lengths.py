"""Lengths of a run's prompts, as far as they are known before it starts."""

from datetime import datetime
from typing import NamedTuple

from grpo_eqx.data.batches import TokenizedPrompts, padded_length
from grpo_eqx.data.load import is_hub_name
from grpo_eqx.data.run_inputs import check_positions, load_inputs
from grpo_eqx.data.token_files import vocabulary_files
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.pretrained import is_local, model_folder
from grpo_eqx.settings.config import GRPOConfig


class PromptLengths(NamedTuple):
    """Lengths of prompts, in tokens, and how many problems there are."""

    train: int
    """Tokens of the longest problem to train on."""
    heldout: int
    """Width that held-out problems are padded to."""
    num_heldout: int
    """Problems of an evaluation."""
    num_train: int | None
    """Problems to train on. `None`: the lengths are not the problems', but the longest allowed."""

    @property
    def known(self) -> bool:
        """Whether the lengths are those of the run's problems."""
        return self.num_train is not None

    @classmethod
    def of(
        cls, train: TokenizedPrompts, heldout: TokenizedPrompts, max_length: int
    ) -> "PromptLengths":
        """Measures problems."""
        longest = [max(map(len, problems.tokens)) for problems in (train, heldout)]
        return cls(longest[0], padded_length(longest[1], max_length), len(heldout), len(train))

    @classmethod
    def longest(cls, cfg: GRPOConfig) -> "PromptLengths":
        """Returns the longest lengths that the settings allow."""
        return cls(cfg.max_prompt_length, cfg.max_prompt_length, cfg.eval_problems, None)


def lengths_for_plan(cfg: GRPOConfig, model: ModelConfig) -> PromptLengths:
    """Measures the problems where they, and the model's tokenizer, are on this machine.

    Elsewhere, returns the longest lengths that the settings allow.
    """
    data = [name for name in (cfg.data, cfg.eval_data) if name is not None]
    has_tokenizer = is_local(cfg.model) and vocabulary_files(model_folder(cfg.model))
    if not has_tokenizer or any(map(is_hub_name, data)):
        check_positions(cfg, model, "an empty prompt", 0)
        return PromptLengths.longest(cfg)
    inputs = load_inputs(cfg, moment=datetime.now())
    inputs.check_belong_to(model, cfg)
    return PromptLengths.of(inputs.train, inputs.heldout, cfg.max_prompt_length)
