"""Text to tokens and back, through a Hugging Face tokenizer and its chat template."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_eqx.errors import UserError

_GENERATION_CONFIG = "generation_config.json"
_FALLBACK_BYTE = re.compile("<0x([0-9a-fA-F]{2})>")


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

    def fingerprint(self) -> str:
        """The same for tokenizers that read and write the same tokens, in short."""
        backend = self.tokenizer.backend_tokenizer.to_str() if self.tokenizer.is_fast else ""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        ends = self.eos_ids, self.pad_id, self.system_prompt
        parts = (backend, vocabulary, self.tokenizer.chat_template, ends)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

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

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        """What each id adds to a decoded text, in bytes, since it may be a part of a character.

        Nothing for special tokens, and for ids without a token.
        """
        special = {*self.tokenizer.all_special_ids}
        special |= {i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        tokens = {i: t for t, i in self.tokenizer.get_vocab().items() if i not in special}
        decoders = _decoder_types(self.tokenizer)
        if "ByteLevel" in decoders:
            added = _spelled_bytes(tokens)
        else:
            # What a token adds after itself: the first of a text may lose the space before it.
            once = self.decode([[i] for i in tokens])
            twice = self.decode([[i, i] for i in tokens])
            texts = zip(tokens, once, twice, strict=True)
            added = {i: two[len(one) :].encode() for i, one, two in texts}
        if "ByteFallback" in decoders:
            matches = {i: _FALLBACK_BYTE.fullmatch(token) for i, token in tokens.items()}
            added |= {i: bytes.fromhex(match[1]) for i, match in matches.items() if match}
        return [added.get(i, b"") for i in range(vocab_size)]


def _decoder_types(tokenizer: Any) -> set[str]:
    """The types of the steps by which the tokenizers library makes tokens a text."""
    if not tokenizer.is_fast:
        return set()
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {"type": "none"}
    return {step["type"] for step in decoder.get("decoders", [decoder])}


def _spelled_bytes(tokens: dict[int, str]) -> dict[int, bytes]:
    """The bytes of tokens in GPT-2's spelling, a character for each byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}

    def of(token: str) -> bytes:
        # A token that was added as text is decoded as if spelled where it could be.
        spelled = all(char in byte_of for char in token)
        return bytes(byte_of[char] for char in token) if spelled else token.encode()

    return {i: of(token) for i, token in tokens.items()}


def _generation_eos_ids(folder: Path) -> tuple[int, ...]:
    """The end-of-sequence ids of a model's `generation_config.json`, which may name several."""
    path = folder / _GENERATION_CONFIG
    if not path.exists():
        return ()
    ids = json.loads(path.read_text()).get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
