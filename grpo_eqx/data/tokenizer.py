"""Text to tokens and back, through a Hugging Face tokenizer and its chat template."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_eqx.errors import UserError

_GENERATION_CONFIG = "generation_config.json"


class ChatTokenizer:
    """A tokenizer with the chat template, end-of-sequence and padding ids of its model."""

    def __init__(
        self, tokenizer: Any, eos_ids: Sequence[int] = (), system_prompt: str | None = None
    ):
        """**Arguments:** a transformers tokenizer; the ids that end a completion, by default the
        tokenizer's own; the text of a system message before every prompt.
        """
        own = tokenizer.eos_token_id
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids) or (() if own is None else (own,))
        if not self.eos_ids:
            raise UserError("the tokenizer names no eos_token: set one, so that completions end.")
        pad = tokenizer.pad_token_id
        self.pad_id: int = self.eos_ids[0] if pad is None else pad
        self.system_prompt = system_prompt

    @classmethod
    def from_pretrained(cls, folder: Path, system_prompt: str | None = None) -> "ChatTokenizer":
        """The tokenizer in a model's folder."""
        # It would advise every user to install torch, which nothing here needs.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            eos_ids = _generation_eos_ids(folder)
        except Exception as error:  # the tokenizers library raises nothing more precise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{folder} holds no usable tokenizer: {reason}") from error
        return cls(tokenizer, eos_ids, system_prompt)

    def check_belongs_to(self, vocab_size: int) -> None:
        """Raises `UserError` where a model with this vocabulary cannot have the tokenizer."""
        if len(self.tokenizer) > vocab_size:
            raise UserError(
                f"the tokenizer has {len(self.tokenizer)} tokens, and the model's vocabulary "
                f"{vocab_size}: they do not belong together."
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the tokenizer, and the end-of-sequence ids as `generation_config.json`."""
        self.tokenizer.save_pretrained(folder)
        generation = {"eos_token_id": list(self.eos_ids), "pad_token_id": self.pad_id}
        path = Path(folder) / _GENERATION_CONFIG
        path.write_text(json.dumps(generation, indent=2) + "\n")

    def render(self, text: str) -> str:
        """The chat up to where the assistant starts, as the model will read it."""
        if self.tokenizer.chat_template is None:
            return text if self.system_prompt is None else f"{self.system_prompt}\n\n{text}"
        messages = [{"role": "user", "content": text}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts."""
        if not texts:
            return []
        rendered = [self.render(text) for text in texts]
        special = self.tokenizer.chat_template is None  # a template brings its own special tokens
        return self.tokenizer(rendered, add_special_tokens=special)["input_ids"]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Completions as text, without special tokens."""
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)


def _generation_eos_ids(folder: Path) -> tuple[int, ...]:
    """The end-of-sequence ids of a model's `generation_config.json`, which may name several."""
    path = folder / _GENERATION_CONFIG
    if not path.exists():
        return ()
    ids = json.loads(path.read_text()).get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
