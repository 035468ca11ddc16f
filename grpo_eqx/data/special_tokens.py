"""Special tokens around prompts, and the tags that built-in rewards read in completions."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from grpo_eqx.data.prompts import Prompt

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
        """Finds the tokens by encoding a letter, or else a text, with and without them."""
        for text in itertools.chain("a1", texts):
            bare, whole = (
                tokenizer([text], add_special_tokens=adds)["input_ids"][0] for adds in (False, True)
            )
            for start in range(len(whole) - len(bare) + 1 if bare else 0):
                if whole[start : start + len(bare)] == bare:
                    return cls(whole[:start], whole[start + len(bare) :])
        return cls([], [])


class SpecialTokens:
    """The special tokens of a tokenizer of transformers, and where they stand in prompts."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._added: AddedTokens | None = None

    @functools.cached_property
    def ids(self) -> set[int]:
        """Ids of special tokens."""
        added = self._tokenizer.added_tokens_decoder.items()
        return {*self._tokenizer.all_special_ids, *(i for i, token in added if token.special)}

    def begun(
        self, tokens: Sequence[list[int]], texts: Sequence[str], *, plain: bool
    ) -> list[list[int]]:
        """Returns the tokens of prompts without doubled begin-of-sequence tokens.

        `plain` texts also begin with the tokens that the tokenizer puts before texts.
        """
        before = self._added_to(texts).before if plain else []
        return [begun(ids, before, self._tokenizer.bos_token_id) for ids in tokens]

    def notes(
        self,
        prompts: Sequence[Prompt],
        tokens: Sequence[list[int]],
        ends: Sequence[int],
        is_plain: Callable[[Prompt], bool],
    ) -> Iterator[str]:
        """Yields a line for each way in which special tokens in prompts are not as expected.

        **Arguments:**

        - `prompts`, `tokens`: the prompts, and their tokens.
        - `ends`: ids that end a completion.
        - `is_plain`: tells prompts that are texts, without a chat template.
        """
        texts = [prompt.text for prompt in prompts if is_plain(prompt)]
        if texts:
            before, after = self._added_to(texts)
            if before:
                start = self._tokenizer.decode(before)
                if any(text.startswith(start) for text in texts):
                    yield f"texts begin with {start!r}, which is not put before them again"
            if after:
                end = self._tokenizer.decode(after)
                yield f"the tokenizer appends {end!r} to texts, and prompts go without it"
        elif written := self._in_question(prompts):
            yield (
                f"questions contain the special token {written!r}, as texts do that a chat "
                f"template has rendered: for these, name the column prompt"
            )
        pairs = list(zip(prompts, tokens, strict=True))
        twice = next((prompt for prompt, ids in pairs if self._begins_twice(ids)), None)
        if twice is not None:
            where = "texts" if is_plain(twice) else "chat template or the messages"
            yield (
                f"prompts begin with {self._tokenizer.bos_token!r} twice, with space between: "
                f"leave it out of the {where}"
            )
        ended = ((prompt, self._end_of(ids, ends)) for prompt, ids in pairs)
        prompt, end = next((pair for pair in ended if pair[1] is not None), (None, None))
        if prompt is not None:
            of_text = "leave it out of the texts"
            of_template = "end the chat template with what begins the assistant's message"
            yield (
                f"prompts end with {end!r}, which ends what the model writes: "
                f"{of_text if is_plain(prompt) else of_template}"
            )

    def _added_to(self, texts: Sequence[str]) -> AddedTokens:
        if self._added is None:
            self._added = AddedTokens.of(self._tokenizer, texts)
        return self._added

    def _begins_twice(self, ids: list[int]) -> bool:
        """Returns whether a prompt begins with two begin-of-sequence tokens and space between."""
        bos = self._tokenizer.bos_token_id
        if bos is None or ids[0] != bos or bos not in ids[1:]:
            return False
        return not self._tokenizer.decode(ids[1 : ids.index(bos, 1)]).strip()

    def _end_of(self, ids: list[int], ends: Sequence[int]) -> str | None:
        """Returns the token at a prompt's end that ends completions; only space may follow it."""
        last = next((i for i in range(1, min(len(ids), 4) + 1) if ids[-i] in ends), None)
        if last is None or self._tokenizer.decode(ids[len(ids) - last + 1 :]).strip():
            return None
        return str(self._tokenizer.decode([ids[-last]]))

    def _in_question(self, prompts: Sequence[Prompt]) -> str | None:
        """Returns a special token, other than a tag, that is written in a question, if any."""
        names = self._tokenizer.convert_ids_to_tokens(sorted(self.ids))
        anyone = re.compile("|".join(re.escape(name) for name in names if name not in TAGS))
        questions = (prompt.content for prompt in prompts if isinstance(prompt.content, str))
        found = (anyone.search(question) for question in questions)
        return next((match[0] for match in found if match and match[0]), None)


def begun(ids: list[int], before: Sequence[int], bos: int | None) -> list[int]:
    """Returns a prompt that begins once with the tokens that a tokenizer puts before texts.

    **Arguments:**

    - `ids`: the prompt's tokens.
    - `before`: the tokens to begin with.
    - `bos`: the tokenizer's begin-of-sequence token, which is never doubled.
    """
    if ids[: len(before)] != before:
        ids = [*before, *ids]
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def opened_by_turn(text: str) -> str:
    """Returns a generation prompt from its first tag on, if its last tag opens; otherwise, ""."""
    tags = list(_TAG.finditer(text))
    return text[tags[0].start() :] if tags and not tags[-1][1] else ""


def opened_at_end(text: str) -> str:
    """Returns the tags at the end of a text, if the last tag opens; otherwise, ""."""
    found = _OPEN_AT_END.search(text[-200:])
    return "" if found is None else found[0]
