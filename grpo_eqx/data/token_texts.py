"""Texts and bytes of single tokens, as they occur within a decoded text."""

import functools
import json
import re
from collections.abc import Collection
from typing import Any

from grpo_eqx.data.special_tokens import SpecialTokens

_FALLBACK_BYTE = re.compile("<0x([0-9a-fA-F]{2})>")


class TokenTexts:
    """Texts of a tokenizer's tokens. Found texts are kept, because finding them takes time."""

    def __init__(self, tokenizer: Any, special: SpecialTokens):
        """**Arguments:**

        - `tokenizer`: a tokenizer of transformers.
        - `special`: its special tokens.
        """
        self._tokenizer, self._special = tokenizer, special
        self._texts: dict[int, str] = {}

    def bytes_of_all(self, vocab_size: int) -> list[bytes]:
        """Returns the bytes that each id adds to a decoded text; `ChatTokenizer.token_bytes`."""
        vocab = self._tokenizer.get_vocab()
        added = self._added_bytes({i: t for t, i in vocab.items() if i not in self._special.ids})
        return [added.get(i, b"") for i in range(vocab_size)]

    def of(self, ids: Collection[int]) -> list[str]:
        """Returns the text that each id adds to a decoded text; `ChatTokenizer.token_texts`."""
        new = sorted({*ids} - self._texts.keys())
        names = dict(zip(new, self._tokenizer.convert_ids_to_tokens(new), strict=True))
        self._texts |= {i: name or "" for i, name in names.items()}
        plain = {i: name for i, name in names.items() if name and i not in self._special.ids}
        added = self._added_bytes(plain) if plain else {}
        self._texts |= {i: text.decode(errors="replace") for i, text in added.items()}
        return [self._texts[i] for i in ids]

    @functools.cached_property
    def _decoders(self) -> set[str]:
        """Types of the steps in which the tokenizers library decodes tokens."""
        if not self._tokenizer.is_fast:
            return set()
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        decoder = state["decoder"] or {"type": "none"}
        return {step["type"] for step in decoder.get("decoders", [decoder])}

    def _added_bytes(self, tokens: dict[int, str]) -> dict[int, bytes]:
        """Returns the bytes that tokens, by id in the vocabulary's spelling, add to a text."""
        if "ByteLevel" in self._decoders:
            added = _spelled_bytes(tokens)
        else:
            # Measured behind a copy of the token, because a text's first token may lose its space.
            decode = functools.partial(self._tokenizer.batch_decode, skip_special_tokens=True)
            once, twice = decode([[i] for i in tokens]), decode([[i, i] for i in tokens])
            texts = zip(tokens, once, twice, strict=True)
            added = {i: two[len(one) :].encode() for i, one, two in texts}
        if "ByteFallback" in self._decoders:
            matches = {i: _FALLBACK_BYTE.fullmatch(token) for i, token in tokens.items()}
            added |= {i: bytes.fromhex(match[1]) for i, match in matches.items() if match}
        return added


def _spelled_bytes(tokens: dict[int, str]) -> dict[int, bytes]:
    """Returns the bytes of tokens in GPT-2's spelling, one character per byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}

    def of(token: str) -> bytes:
        # The decoder also decodes added plain tokens from this spelling, if it can.
        spelled = all(char in byte_of for char in token)
        return bytes(byte_of[char] for char in token) if spelled else token.encode()

    return {i: of(token) for i, token in tokens.items()}
