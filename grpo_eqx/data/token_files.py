"""The files of a model about tokens: its tokenizer, and the ids that end a completion."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_eqx.common.errors import UserError, listed
from grpo_eqx.common.plain_data import brief
from grpo_eqx.common.read_files import read_object
from grpo_eqx.models import peft
from grpo_eqx.models.hub import VOCABULARY_FILES, failed_download
from grpo_eqx.models.pretrained import folder_beneath

GENERATION_CONFIG = "generation_config.json"
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")
"""First line of a vocabulary in tiktoken's format: a token in base64, and its id."""


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """The files of a model about its tokens."""

    folder: Path
    generation_config: Mapping[str, Any]
    """Contents of `generation_config.json`, to be saved with the model again."""
    eos_ids: tuple[int, ...]
    """Ids that end a completion according to `generation_config.json`, then to `config.json`."""

    @classmethod
    def read(cls, folder: str | Path) -> "TokenFiles":
        """Reads a model's folder; of an adapter without `generation_config.json`, also its model's.

        Raises `UserError` for an unreadable file, or an end that is not an id.
        """
        folder = Path(folder)
        of_generation, of_model = (
            read_object(folder / name, optional=True) for name in (GENERATION_CONFIG, "config.json")
        )
        generation_config: Mapping[str, Any] = of_generation
        eos_ids = (
            *_eos_ids(of_generation, folder / GENERATION_CONFIG),
            *_eos_ids(of_model, folder / "config.json"),
        )
        if (folder / peft.CONFIG).exists() and not (folder / GENERATION_CONFIG).exists():
            beneath = cls.read(folder_beneath(peft.SavedAdapter.read(folder)))
            generation_config, eos_ids = beneath.generation_config, (*beneath.eos_ids, *eos_ids)
        return cls(folder, generation_config, tuple(dict.fromkeys(eos_ids)))

    def tokenizer(self) -> Any:
        """Loads the tokenizer; raises `UserError` if it is missing or unreadable."""
        # transformers would advise users to install torch, which is not needed here.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer

        folder = self.folder
        vocabularies = vocabulary_files(folder)
        if not vocabularies:
            raise UserError(
                f"{folder} contains no tokenizer: copy tokenizer.json and tokenizer_config.json of "
                f"the model into it, or pass GRPOTrainer a tokenizer."
            )
        _check_packages(vocabularies)
        try:
            # Tokenizers of mistral-common, if it is installed, have another interface.
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, mistral_format=False
            )
        except Exception as error:  # the tokenizers library raises no other class
            for path in sorted(folder.glob("*.json")):
                if (fault := failed_download(path)) is not None:
                    raise UserError(f"{path} cannot be read: {fault}.") from error
            # transformers also reads config.json, and may name a faulty field on the second line.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{folder} contains no usable tokenizer: {reason}") from error
        if len(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()) < 2:
            names = listed([path.name for path in vocabularies])
            raise UserError(
                f"{folder} contains no tokenizer of this model: {type(tokenizer).__name__} finds "
                f"no tokens in {names}; add the model's tokenizer.json."
            )
        return tokenizer

    def own_tokenizer(self) -> Any | None:
        """Loads the tokenizer, if there is a readable one."""
        with contextlib.suppress(UserError):
            return self.tokenizer()
        return None


def vocabulary_files(folder: Path) -> list[Path]:
    """Lists the files in a model's folder that hold a tokenizer's tokens."""
    return sorted({path for pattern in VOCABULARY_FILES for path in folder.glob(pattern)})


def _check_packages(vocabularies: Sequence[Path]) -> None:
    """Raises `UserError` if each vocabulary needs a package that is not installed."""
    missing = None
    for path in vocabularies:
        package = _package_for(path)
        if package is None or find_spec(package) is not None:
            return
        missing = missing or (path, package)
    if missing is not None:
        path, package = missing
        raise UserError(
            f"the tokenizer in {path.parent} is {path.name}, which takes the package {package} to "
            f"read: pip install {package}, or add the model's tokenizer.json."
        )


def _package_for(path: Path) -> str | None:
    """Returns the package that transformers needs to read a vocabulary, if any."""
    if path.suffix in (".json", ".txt"):
        return None
    with path.open("rb") as file:
        is_text = _TIKTOKEN.match(file.read(1000)) is not None
    return "tiktoken" if is_text else "sentencepiece"


def check_same_ids(given: Any, own: Any, folder: Path) -> None:
    """Raises `UserError` unless a tokenizer has all tokens of the model's own, with the same ids.

    The tokenizer may have more tokens.

    **Arguments:**

    - `given`, `own`: the tokenizers.
    - `folder`: the folder of the model, for messages.
    """
    found, expected = given.get_vocab(), own.get_vocab()
    others = sorted((i, token) for token, i in expected.items() if found.get(token) != i)
    if others:
        (i, token), names = others[0], {i: name for name, i in found.items()}
        there = repr(names[i]) if i in names else "no token"
        raise UserError(
            f"the tokenizer that was passed is not the model's: id {i} is {there} of it, and "
            f"{token!r} of the tokenizer in {folder} ({len(others):,} of {len(expected):,} tokens "
            f"differ): pass none, or the model's own; if the model was trained with this one, "
            f"save it into the model's folder."
        )


def _eos_ids(fields: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """Returns the end-of-sequence ids in a model's file."""
    named = fields.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise UserError(
            f"{path}: eos_token_id={brief(named)} is neither a token id nor a list of token ids."
        )
    return tuple(ids)
