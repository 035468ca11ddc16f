"""Text to tokens and back, through a Hugging Face tokenizer and its chat template."""

import copy
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_eqx.common.errors import UserError, listed
from grpo_eqx.data.chat_template import ChatTemplate
from grpo_eqx.data.prompts import Prompt, quoted
from grpo_eqx.data.special_tokens import TAGS, AddedTokens, begun, opened_at_end
from grpo_eqx.data.token_files import GENERATION_CONFIG, TokenFiles, check_same_ids

_SMALLEST_SHARE = 0.8
"""Share of a model's vocabulary that its tokenizer has at least: the rest is padding."""
_FALLBACK_BYTE = re.compile("<0x([0-9a-fA-F]{2})>")


class ChatTokenizer:
    """A tokenizer with the chat template, end-of-sequence and padding ids of its model.

    That of transformers, for everything else, is its `tokenizer`.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Sequence[int] = (),
        system_prompt: str | None = None,
        *,
        plain: bool = False,
    ):
        """**Arguments:** a transformers tokenizer; the ids that end a completion, besides the
        tokenizer's own; the text of a system message before every prompt; whether to leave the
        chat template out, so that the model continues a problem's text.

        Raises `UserError` for a tokenizer that is not one of transformers, and for a system message
        without a chat template.
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
        self.template = ChatTemplate(tokenizer, system_prompt, datetime.now())
        # The contents of the model's generation_config.json, to be saved with the model again.
        self.generation_config: dict[str, Any] = {}
        self._texts: dict[int, str] = {}

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, system_prompt: str | None = None, *, plain: bool = False
    ) -> "ChatTokenizer":
        """Loads the tokenizer in a model's folder; the other arguments are `__init__`'s.

        Raises `UserError` where the folder has no tokenizer, or one that cannot be read.
        """
        files = TokenFiles.read(folder)
        return cls(files.tokenizer(), (), system_prompt, plain=plain).of_model(files)

    def of_model(self, files: TokenFiles, own: Any | None = None) -> "ChatTokenizer":
        """Returns it with the ends that a model's files name besides, and its generation config.

        **Arguments:** the files; the tokenizer among them, where this is another object. Raises
        `UserError` where that has other tokens.
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
        """Ids that end a completion: all that the model's files and the tokenizer name.

        Raises `UserError` where there are none.
        """
        if not self._ends:
            raise UserError("the tokenizer has no eos_token: set one, so that completions can end.")
        return self._ends

    @property
    def pad_id(self) -> int:
        """Id of padding: the tokenizer's, or the first end."""
        pad = self.tokenizer.pad_token_id
        return self.eos_ids[0] if pad is None else pad

    def describe_ends(self) -> str:
        """Says which tokens end a completion, in a line."""
        names = self.tokenizer.convert_ids_to_tokens(list(self.eos_ids))
        added = {*self._special, *self.tokenizer.added_tokens_decoder}
        ends = [
            f"{name!r} ({i})" if i in added else f"{name!r} ({i}, an ordinary token)"
            for name, i in zip(names, self.eos_ids, strict=True)
        ]
        return f"completions end at {listed(ends, 'or')}"

    def ids_without_token(self, vocab_size: int) -> frozenset[int]:
        """Returns the ids of a model's vocabulary for which the tokenizer has no token.

        They are rows that pad the model's head, and they can be drawn.
        """
        return frozenset(range(vocab_size)).difference(self.tokenizer.get_vocab().values())

    def at(self, moment: datetime) -> "ChatTokenizer":
        """Returns the tokenizer with its chat template at another moment."""
        other = copy.copy(self)
        other.template = ChatTemplate(self.tokenizer, self.system_prompt, moment)
        return other

    def check_belongs_to(self, vocab_size: int) -> None:
        """Raises `UserError` if it cannot be the tokenizer of a model with that vocabulary.

        It may have special tokens beyond, which prompts do without: Gemma 3's has one for images,
        of which the models of text alone have no row.
        """
        all_ids = set(self.tokenizer.get_vocab().values())
        ids = {i for i in all_ids if i < vocab_size}
        size, beyond = len(all_ids), all_ids - ids
        if not beyond <= self._special:
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
        """Raises `UserError` for a prompt with a token that the model has no row for.

        **Arguments:** the prompt's tokens; the size of the model's vocabulary; what to call the
        prompt.
        """
        if (highest := max(ids)) >= vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(highest)
            raise UserError(
                f"{called} has the token {token!r} ({highest}), and the model's vocabulary has "
                f"{vocab_size} tokens, without it: leave it out of the prompt."
            )

    def fingerprint(self) -> str:
        """Returns a short hash, equal for tokenizers that read and write the same tokens."""
        backend = self.tokenizer.backend_tokenizer.to_str() if self.tokenizer.is_fast else ""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        ends = self.eos_ids, self.pad_id, self.system_prompt
        template = None if self.plain else self.tokenizer.chat_template
        parts = (backend, vocabulary, template, ends)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the tokenizer, and `generation_config.json` with the ids used here."""
        self.tokenizer.save_pretrained(folder)
        eos = self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids)
        generation = {**self.generation_config, "eos_token_id": eos, "pad_token_id": self.pad_id}
        path = Path(folder) / GENERATION_CONFIG
        path.write_text(json.dumps(generation, indent=2) + "\n")

    def render(self, prompt: Prompt) -> str:
        """Renders a prompt up to where the assistant starts, as the model reads it.

        Raises `UserError` where that takes a chat template and there is none, or it fails.
        """
        content = prompt.content
        if isinstance(content, str):
            if self._is_plain(prompt):
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
        return self.template.render(content)

    def _is_plain(self, prompt: Prompt) -> bool:
        return self.plain or prompt.plain

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Renders and encodes prompts. Raises `UserError` for a prompt without tokens.

        A text begins with what the tokenizer puts before texts, once, and without what it appends:
        the model continues it.
        """
        tokens: list[list[int]] = [[]] * len(prompts)
        for plain in (False, True):  # a template brings its own special tokens
            indices = [i for i, prompt in enumerate(prompts) if self._is_plain(prompt) is plain]
            if not indices:
                continue
            rendered = [self.render(prompts[i]) for i in indices]
            encoded = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
            before = AddedTokens.of(self.tokenizer, rendered).before if plain else []
            for i, ids in zip(indices, encoded, strict=True):
                tokens[i] = begun(ids, before, self.tokenizer.bos_token_id)
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
        """Yields a line on each way in which special tokens in prompts are not as expected.

        **Arguments:** the prompts, and their tokens.
        """
        texts = [prompt.text for prompt in prompts if self._is_plain(prompt)]
        if texts:
            added = AddedTokens.of(self.tokenizer, texts)
            if added.before:
                start = self.tokenizer.decode(added.before)
                if any(text.startswith(start) for text in texts):
                    yield f"texts begin with {start!r}, which is not put before them again"
            if added.after:
                end = self.tokenizer.decode(added.after)
                yield f"the tokenizer appends {end!r} to texts, and prompts go without it"
        elif written := self._special_in_question(prompts):
            yield (
                f"questions contain the special token {written!r}, as texts do that a chat "
                f"template has rendered: for these, name the column prompt"
            )
        twice = next((i for i, ids in enumerate(tokens) if self._begins_twice(ids)), None)
        if twice is not None:
            where = "texts" if self._is_plain(prompts[twice]) else "chat template or the messages"
            yield (
                f"prompts begin with {self.tokenizer.bos_token!r} twice, with space between: leave "
                f"it out of the {where}"
            )
        ends = ((i, self._end_of(ids)) for i, ids in enumerate(tokens))
        ended, end = next(((i, end) for i, end in ends if end is not None), (None, None))
        if ended is not None:
            of_text = "leave it out of the texts"
            of_template = "end the chat template with what begins the assistant's message"
            yield (
                f"prompts end with {end!r}, which ends what the model writes: "
                f"{of_text if self._is_plain(prompts[ended]) else of_template}"
            )

    def _begins_twice(self, ids: list[int]) -> bool:
        """Returns whether a prompt has two beginnings of a sequence, and no text between them."""
        bos = self.tokenizer.bos_token_id
        if bos is None or ids[0] != bos or bos not in ids[1:]:
            return False
        return not self.tokenizer.decode(ids[1 : ids.index(bos, 1)]).strip()

    def _end_of(self, ids: list[int]) -> str | None:
        """Returns the token by which a prompt ends what the model writes; space may follow it."""
        last = next((i for i in range(1, min(len(ids), 4) + 1) if ids[-i] in self._ends), None)
        if last is None or self.tokenizer.decode(ids[len(ids) - last + 1 :]).strip():
            return None
        return str(self.tokenizer.decode([ids[-last]]))

    def _special_in_question(self, prompts: Sequence[Prompt]) -> str | None:
        """Returns a special token, tags aside, that is written in a question, if one is."""
        names = self.tokenizer.convert_ids_to_tokens(sorted(self._special))
        anyone = re.compile("|".join(re.escape(name) for name in names if name not in TAGS))
        questions = (prompt.content for prompt in prompts if isinstance(prompt.content, str))
        found = (anyone.search(question) for question in questions)
        return next((match[0] for match in found if match and match[0]), None)

    def check_template(self) -> None:
        """Raises `UserError` for a chat template whose text cannot be what its messages say."""
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
        """Returns completions as built-in rewards read them: tags that prompts opened included.

        So are tags that are special tokens, which the texts of completions omit.

        **Arguments:** the prompts; tokens and texts of their completions.
        """
        vocab = self.tokenizer.get_vocab()
        tags = {vocab[tag] for tag in TAGS if tag in vocab} & self._special
        if tags:
            omitted = self._special - tags
            kept = [[i for i in own if i not in omitted] for group in ids for own in group]
            decoded = iter(self.tokenizer.batch_decode(kept, skip_special_tokens=False))
            texts = [list(itertools.islice(decoded, len(group))) for group in ids]
        opened = [self._opened(prompt) for prompt in prompts]
        if not any(opened):
            return texts
        return [[tag + text for text in own] for tag, own in zip(opened, texts, strict=True)]

    def _opened(self, prompt: Prompt) -> str:
        """Returns what a prompt opens of the layout that built-in rewards read, or nothing."""
        if not self._is_plain(prompt):
            return self.template.opened
        assert isinstance(prompt.content, str)  # of a text
        return opened_at_end(prompt.content)

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        """Returns what each id adds to a decoded text, as bytes: it may be part of a character.

        Special tokens, and ids without a token, add nothing.
        """
        vocab = self.tokenizer.get_vocab()
        added = self._added_bytes({i: t for t, i in vocab.items() if i not in self._special})
        return [added.get(i, b"") for i in range(vocab_size)]

    def token_texts(self, ids: Collection[int]) -> list[str]:
        """Returns what each id adds to a decoded text, and the names of special tokens.

        A token that is part of a character has a replacement character. Takes time for ids that
        were not asked for before.
        """
        new = sorted({*ids} - self._texts.keys())
        names = dict(zip(new, self.tokenizer.convert_ids_to_tokens(new), strict=True))
        self._texts |= {i: name or "" for i, name in names.items()}
        plain = {i: name for i, name in names.items() if name and i not in self._special}
        added = self._added_bytes(plain) if plain else {}
        self._texts |= {i: text.decode(errors="replace") for i, text in added.items()}
        return [self._texts[i] for i in ids]

    @functools.cached_property
    def _special(self) -> set[int]:
        """Ids of special tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        return {*self.tokenizer.all_special_ids, *(i for i, token in added if token.special)}

    @functools.cached_property
    def _decoders(self) -> set[str]:
        return _decoder_types(self.tokenizer)

    def _added_bytes(self, tokens: dict[int, str]) -> dict[int, bytes]:
        """Returns what tokens, given by id as the vocabulary spells them, add to a text."""
        if "ByteLevel" in self._decoders:
            added = _spelled_bytes(tokens)
        else:
            # Measured after a copy of itself: a text's first token may lose its leading space.
            once = self.decode_completions([[i] for i in tokens])
            twice = self.decode_completions([[i, i] for i in tokens])
            texts = zip(tokens, once, twice, strict=True)
            added = {i: two[len(one) :].encode() for i, one, two in texts}
        if "ByteFallback" in self._decoders:
            matches = {i: _FALLBACK_BYTE.fullmatch(token) for i, token in tokens.items()}
            added |= {i: bytes.fromhex(match[1]) for i, match in matches.items() if match}
        return added


def _decoder_types(tokenizer: Any) -> set[str]:
    """Returns the types of the steps by which the tokenizers library decodes tokens."""
    if not tokenizer.is_fast:
        return set()
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {"type": "none"}
    return {step["type"] for step in decoder.get("decoders", [decoder])}


def _spelled_bytes(tokens: dict[int, str]) -> dict[int, bytes]:
    """Returns the bytes of tokens in GPT-2's spelling, one character per byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}

    def of(token: str) -> bytes:
        # A token added as plain text is also decoded from byte spelling where it can be.
        spelled = all(char in byte_of for char in token)
        return bytes(byte_of[char] for char in token) if spelled else token.encode()

    return {i: of(token) for i, token in tokens.items()}


def _union(*parts: Sequence[int]) -> tuple[int, ...]:
    """Returns ids once each, in the order in which they first occur."""
    return tuple(dict.fromkeys(i for part in parts for i in part))
