"""The work of step.py, the same for us and for every peer: model, tokenizer, prompts, reward.

Each side imports this in an environment of its own, so nothing here needs grpo_eqx.
"""

import dataclasses
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

MODELS: dict[str, dict[str, Any]] = {
    # 4.2 million parameters and the embedding's, whose size the work says
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
    },
    # those of Qwen2.5
    "0.5B": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "3B": {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
    },
}
ALPHABET = "abcdefgh 0123456789"
PAD_ID, EOS_ID = 0, 1
"""A side sets the embedding of the second to zero, and with it its logit, which is the head's too:
so with other random weights completions are as long."""
LEARNING_RATE = 1e-5


@dataclasses.dataclass(frozen=True)
class Work:
    """A GRPO step: `prompts` prompts with `group` completions each."""

    prompt_length: int
    completion_length: int
    prompts: int
    group: int
    micro_batch: int
    """Completions that are taken through the model's update at a time; where that is all of them, a
    side may choose for itself."""
    model: str
    """One of `MODELS`."""
    vocabulary: int
    """A model with random weights ends a completion about once in so many tokens."""
    warmup_steps: int
    """Before those that are timed: they compile."""
    steps: int
    """Timed ones."""

    def model_config(self) -> dict[str, Any]:
        """Settings of Qwen2."""
        return {
            **MODELS[self.model],
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
        }

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a character."""
        vocab = {"<pad>": PAD_ID, "<eos>": EOS_ID}
        for char in (*map(chr, range(32, 127)), "\n"):
            vocab[char] = len(vocab)
        while len(vocab) < self.vocabulary:
            vocab[f"<u{len(vocab)}>"] = len(vocab)
        bpe = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
        return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")

    def texts(self) -> list[str]:
        rng = random.Random(0)
        return ["".join(rng.choices(ALPHABET, k=self.prompt_length)) for _ in range(256)]


def reward(completions: list[str], **columns: Any) -> list[float]:
    """The share of a letter: it varies within groups, and favors no length, which would drift."""
    return [text.count("a") / max(len(text), 1) for text in completions]


class Stopwatch:
    """The time at the end of every step, and the lengths that were generated."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.start = time.perf_counter()
        self.ends: list[float] = []
        self.lengths: list[float] = []

    def step_ends(self) -> None:
        self.ends.append(time.perf_counter())

    def report(self, **more: Any) -> None:
        """Prints the figures as the last line of the output."""
        last = self.ends[-self.work.steps - 1 :]
        figures = {
            "seconds": [end - start for start, end in itertools.pairwise(last)],
            "untimed_steps": len(self.ends) - self.work.steps,
            "untimed_seconds": last[0] - self.start,
            "mean_length": self._mean_length(),
        }
        print(json.dumps({**figures, **more}))

    def _mean_length(self) -> float | None:
        return statistics.fmean(self.lengths[-self.work.steps :]) if self.lengths else None


def work_of_command() -> Work:
    """The work that step.py passes on the command line, as JSON."""
    fields: Mapping[str, Any] = json.loads(sys.argv[1])
    return Work(**fields)
