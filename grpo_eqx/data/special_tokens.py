"""Special tokens around prompts, and the tags that built-in rewards read in completions."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
"""Tags of the layout that built-in rewards read."""
_TAG = re.compile(r"<(/?)(?:think|answer)>")
_OPEN_AT_END = re.compile(r"(?:</?(?:think|answer)>\s*)*<(?:think|answer)>\s*\Z")


class AddedTokens(NamedTuple):
    """Tokens that a tokenizer adds to a text."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: Any, texts: Iterable[str]) -> "AddedTokens":
        """Finds them, by encoding a letter, or one of the texts, with them and without."""
        for text in itertools.chain("a1", texts):
            bare, whole = (
                tokenizer([text], add_special_tokens=adds)["input_ids"][0] for adds in (False, True)
            )
            for start in range(len(whole) - len(bare) + 1 if bare else 0):
                if whole[start : start + len(bare)] == bare:
                    return cls(whole[:start], whole[start + len(bare) :])
        return cls([], [])


def begun(ids: list[int], before: Sequence[int], bos: int | None) -> list[int]:
    """Returns a prompt that begins with the tokens of a text's beginning once.

    **Arguments:** the prompt's tokens; those that belong before it; the beginning-of-sequence token
    of the tokenizer, which never comes twice.
    """
    if ids[: len(before)] != before:
        ids = [*before, *ids]
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def opened_by_turn(text: str) -> str:
    """Returns what a generation prompt opens of the layout, from its first tag on, or nothing."""
    tags = list(_TAG.finditer(text))
    return text[tags[0].start() :] if tags and not tags[-1][1] else ""


def opened_at_end(text: str) -> str:
    """Returns the tags at the end of a text, if the last of them opens."""
    found = _OPEN_AT_END.search(text[-200:])
    return "" if found is None else found[0]
