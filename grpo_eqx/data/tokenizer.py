"""Text to tokens and back, through a Hugging Face tokenizer and its chat template."""

import copy
import hashlib
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_eqx.common.errors import UserError, listed
from grpo_eqx.common.plain_data import brief
from grpo_eqx.data.chat_template import ChatTemplate
from grpo_eqx.data.prompts import Prompt, quoted
from grpo_eqx.data.special_tokens import TAGS, SpecialTokens, opened_at_end
from grpo_eqx.data.token_files import GENERATION_CONFIG, TokenFiles, check_same_ids
from grpo_eqx.data.token_texts import TokenTexts

ENVIRONMENT = "environment"
"""Column of the data that names a problem's environment, where there are several."""
Tools = Mapping[str | None, Sequence[Mapping[str, Any]]]
"""Schemas of functions that the model can call, by the environment of a problem; `None`: any."""
_SMALLEST_SHARE = 0.8
"""Least share of a model's vocabulary that its tokenizer has; the rest is padding."""


class ChatTokenizer:
    """A tokenizer with the chat template, end-of-sequence and padding ids of its model.

    The attribute `tokenizer` is the tokenizer of transformers, for everything else.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Sequence[int] = (),
        system_prompt: str | None = None,
        *,
        plain: bool = False,
    ):
        """**Arguments:**

        - `tokenizer`: a tokenizer of transformers.
        - `eos_ids`: ids that end a completion, besides the tokenizer's own.
        - `system_prompt`: the text of a system message before every prompt.
        - `plain`: whether to use no chat template, so that the model continues a problem's text.

        Raises `UserError` for a tokenizer of another library, and for a system message without a
        chat template.
        """
        if plain and system_prompt is not None:
            raise UserError(
                "system_prompt is set and chat_template is none: without a template there are no "
                "messages; put the text into the problems, or set a template."
            )
        self.plain = plain
        try:
            own = tokenizer.eos_token_id
        except AttributeError as error:
            raise UserError(
                f"the tokenizer is of type {type(tokenizer).__name__}: pass one of transformers, "
                f"as AutoTokenizer.from_pretrained(...) returns."
            ) from error
        self.tokenizer = tokenizer
        self._ends = _union(eos_ids, () if own is None else (own,))
        self.system_prompt = system_prompt
        self.tools: Tools = {}
        self.template = ChatTemplate(tokenizer, system_prompt, datetime.now())
        # The contents of the model's generation_config.json, to be saved with the model again.
        self.generation_config: dict[str, Any] = {}
        self.special = SpecialTokens(tokenizer)
        self._texts = TokenTexts(tokenizer, self.special)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, system_prompt: str | None = None, *, plain: bool = False
    ) -> "ChatTokenizer":
        """Loads the tokenizer in a model's folder; the other arguments are as in `__init__`.

        Raises `UserError` if the folder has no tokenizer, or an unreadable one.
        """
        files = TokenFiles.read(folder)
        return cls(files.tokenizer(), (), system_prompt, plain=plain).of_model(files)

    def of_model(self, files: TokenFiles, own: Any | None = None) -> "ChatTokenizer":
        """Returns the tokenizer with the further ends and the generation config of a model's files.

        **Arguments:**

        - `files`: the files.
        - `own`: the tokenizer among them, if this one was not loaded from there.

        Raises `UserError` if `own` has other tokens.
        """
        chat, of_own = copy.copy(self), []
        if own is not None:
            check_same_ids(self.tokenizer, own, files.folder)
            of_own = [] if own.eos_token_id is None else [own.eos_token_id]
        chat._ends = _union(files.eos_ids, of_own, self._ends)
        chat.generation_config = dict(files.generation_config or self.generation_config)
        return chat

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, from the model's files and the tokenizer.

        Raises `UserError` if there are none.
        """
        if not self._ends:
            raise UserError("the tokenizer has no eos_token: set one, so that completions can end.")
        return self._ends

    @property
    def pad_id(self) -> int:
        """Id of padding, by default the first id that ends a completion."""
        pad = self.tokenizer.pad_token_id
        return self.eos_ids[0] if pad is None else pad

    def describe_ends(self) -> str:
        """Lists the tokens that end a completion, in a line."""
        names = self.tokenizer.convert_ids_to_tokens(list(self.eos_ids))
        added = {*self.special.ids, *self.tokenizer.added_tokens_decoder}
        ends = [
            f"{name!r} ({i})" if i in added else f"{name!r} ({i}, an ordinary token)"
            for name, i in zip(names, self.eos_ids, strict=True)
        ]
        return f"completions end at {listed(ends, 'or')}"

    def ids_without_token(self, vocab_size: int) -> frozenset[int]:
        """Returns the ids of a model's vocabulary for which the tokenizer has no token.

        These rows pad the model's head, and can be sampled.
        """
        return frozenset(range(vocab_size)).difference(self.tokenizer.get_vocab().values())

    def at(self, moment: datetime) -> "ChatTokenizer":
        """Returns the tokenizer with another moment in its chat template."""
        other = copy.copy(self)
        other.template = ChatTemplate(self.tokenizer, self.system_prompt, moment)
        return other

    def with_tools(self, tools: Tools) -> "ChatTokenizer":
        """Returns the tokenizer whose prompts describe tools."""
        other = copy.copy(self)
        other.tools = tools
        return other

    def tools_of(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        """Returns the schemas of the functions that the model can call for a prompt.

        Raises `UserError` for the name of an unknown environment.
        """
        if not self.tools:
            return ()
        name = None if None in self.tools else prompt.columns.get(ENVIRONMENT)
        if not isinstance(name, str | None) or name not in self.tools:
            names = f"{listed([str(known) for known in self.tools], 'or')}"
            if name is None:
                raise UserError(
                    f"a problem has no column {ENVIRONMENT}, which says its environment: pass "
                    f"train_data with it, with {names}, the names in environment_factory."
                )
            raise UserError(
                f"the column {ENVIRONMENT} of a problem is {brief(name)}: use {names}, the names "
                f"in environment_factory."
            )
        return self.tools[name]

    def check_belongs_to(self, vocab_size: int) -> None:
        """Raises `UserError` if this cannot be the tokenizer of a model with `vocab_size` rows.

        The tokenizer may have special tokens beyond, which prompts do without. For example, Gemma
        3's has a token for images, for which its text-only models have no row.
        """
        all_ids = set(self.tokenizer.get_vocab().values())
        ids = {i for i in all_ids if i < vocab_size}
        size, beyond = len(all_ids), all_ids - ids
        if not beyond <= self.special.ids:
            raise UserError(
                f"the tokenizer has {size} tokens, but the model's vocabulary has {vocab_size}, "
                f"without the id {max(beyond)}: use the model's own tokenizer."
            )
        if len(ids) < _SMALLEST_SHARE * vocab_size:
            raise UserError(
                f"the tokenizer has {size} tokens, far fewer than the {vocab_size} of the model's "
                f"vocabulary: use the model's own tokenizer."
            )
        named = [("eos_token_id", i) for i in self.eos_ids] + [("pad_token_id", self.pad_id)]
        for field, i in named:
            if i in beyond:
                raise UserError(
                    f"{field} is {i}, but the model's vocabulary has {vocab_size} tokens, without "
                    f"it: use the model's own tokenizer."
                )
            if i not in ids:
                raise UserError(
                    f"{field} is {i}, but the tokenizer's {size} tokens do not have it: use the "
                    f"tokenizer, generation_config.json and config.json of one model."
                )

    def check_ids(self, ids: Sequence[int], vocab_size: int, called: str) -> None:
        """Raises `UserError` for a prompt with a token for which the model has no row.

        **Arguments:**

        - `ids`: the prompt's tokens.
        - `vocab_size`: the rows of the model's embedding.
        - `called`: what to call the prompt.
        """
        if (highest := max(ids)) >= vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(highest)
            raise UserError(
                f"{called} has the token {token!r} ({highest}), and the model's vocabulary has "
                f"{vocab_size} tokens, without it: leave it out of the prompt."
            )

    def fingerprint(self) -> str:
        """Returns a short hash, equal for tokenizers that read and write the same tokens.

        Tools show in the tokens of problems.
        """
        backend = self.tokenizer.backend_tokenizer.to_str() if self.tokenizer.is_fast else ""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        ends = self.eos_ids, self.pad_id, self.system_prompt
        template = None if self.plain else self.tokenizer.chat_template
        parts = (backend, vocabulary, template, ends)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the tokenizer's files, and `generation_config.json` with the ends and padding."""
        self.tokenizer.save_pretrained(folder)
        eos = self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids)
        generation = {**self.generation_config, "eos_token_id": eos, "pad_token_id": self.pad_id}
        path = Path(folder) / GENERATION_CONFIG
        path.write_text(json.dumps(generation, indent=2) + "\n")

    def render(self, prompt: Prompt) -> str:
        """Renders a prompt up to the start of the assistant's message, as the model reads it.

        Raises `UserError` if this takes a chat template, and there is none, or it fails.
        """
        content = prompt.content
        if isinstance(content, str):
            if self._is_plain(prompt):
                if self.tools:
                    raise UserError(
                        "tools or environments are passed, and the problems are texts that the "
                        "model continues as they are: give a question or messages, which a chat "
                        "template renders."
                    )
                if self.system_prompt is not None:
                    raise UserError(
                        "system_prompt is set, and the problems are texts that the model continues "
                        "as they are: put it into the texts, or give a question or messages."
                    )
                return content
            content = [{"role": "user", "content": content}]
        if self.plain or not self.template.exists:
            if self.plain:
                raise UserError(
                    "the prompts are conversations, and chat_template is none: set it to a file "
                    "with a template, or give texts."
                )
            raise UserError(
                "the problems are messages, and the tokenizer has no chat template: set "
                "chat_template to a file with one, or to none for texts that the model continues "
                "as they are."
            )
        return self.template.render(content, tools=self.tools_of(prompt))

    def _is_plain(self, prompt: Prompt) -> bool:
        return self.plain or prompt.plain

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Renders and encodes prompts; raises `UserError` for a prompt without tokens.

        A plain text begins once with the tokens that the tokenizer puts before texts, but without
        the tokens that it appends, because the model continues the text.
        """
        tokens: list[list[int]] = [[]] * len(prompts)
        for plain in (False, True):  # a template brings its own special tokens
            indices = [i for i, prompt in enumerate(prompts) if self._is_plain(prompt) is plain]
            if not indices:
                continue
            rendered = [self.render(prompts[i]) for i in indices]
            encoded = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
            encoded = self.special.begun(encoded, rendered, plain=plain)
            for i, ids in zip(indices, encoded, strict=True):
                tokens[i] = ids
        if empty := [i for i, ids in enumerate(tokens) if not ids]:
            prompt = prompts[empty[0]]
            blame = (
                "use a text that the tokenizer can encode"
                if self._is_plain(prompt)
                else "the chat template renders it to nothing; fix the template"
            )
            raise UserError(
                f"prompt {empty[0] + 1} ({quoted(prompt.text)}) has no tokens to complete: {blame}."
            )
        return tokens

    def notes_on(self, prompts: Sequence[Prompt], tokens: Sequence[list[int]]) -> Iterator[str]:
        """Yields a line for each way in which special tokens in prompts are not as expected."""
        return self.special.notes(prompts, tokens, self._ends, self._is_plain)

    def check_template(self) -> None:
        """Raises `UserError` for a chat template that loses or changes messages."""
        if not self.plain and self.template.exists:
            self.template.check()

    def decode_completions(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Decodes completions to text, without special tokens."""
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def with_tags(
        self,
        prompts: Sequence[Prompt],
        ids: Sequence[Sequence[Sequence[int]]],
        texts: list[list[str]],
    ) -> list[list[str]]:
        """Returns completions as built-in rewards read them, with all tags of the layout.

        This adds tags that the prompts opened, and tags that are special tokens, which the texts of
        completions omit.

        **Arguments:**

        - `prompts`: the prompts.
        - `ids`, `texts`: tokens and texts of completions.
        """
        vocab = self.tokenizer.get_vocab()
        tags = {vocab[tag] for tag in TAGS if tag in vocab} & self.special.ids
        if tags:
            omitted = self.special.ids - tags
            kept = [[i for i in own if i not in omitted] for group in ids for own in group]
            decoded = iter(self.tokenizer.batch_decode(kept, skip_special_tokens=False))
            texts = [list(itertools.islice(decoded, len(group))) for group in ids]
        opened = [self._opened(prompt) for prompt in prompts]
        if not any(opened):
            return texts
        return [[tag + text for text in own] for tag, own in zip(opened, texts, strict=True)]

    def _opened(self, prompt: Prompt) -> str:
        """Returns the tags that a prompt opens at its end, or ""."""
        if not self._is_plain(prompt):
            return self.template.opened
        assert isinstance(prompt.content, str)  # a text
        return opened_at_end(prompt.content)

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        """Returns the bytes that each id adds to a decoded text, which may be part of a character.

        Special tokens, and ids without a token, add nothing.
        """
        return self._texts.bytes_of_all(vocab_size)

    def token_texts(self, ids: Collection[int]) -> list[str]:
        """Returns the text that each id adds to a decoded text, or the name of a special token.

        A token that is part of a character has a replacement character. The first call for an id
        takes time.
        """
        return self._texts.of(ids)


def _union(*parts: Sequence[int]) -> tuple[int, ...]:
    """Returns ids once each, in the order in which they first occur."""
    return tuple(dict.fromkeys(i for part in parts for i in part))
