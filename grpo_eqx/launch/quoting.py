"""Quoting of arbitrary values in shell scripts, YAML and Kubernetes manifests."""

import json
import os
import shlex
from collections.abc import Sequence

from grpo_eqx.common.errors import UserError


def shell_line(arguments: Sequence[str]) -> str:
    """Quotes the arguments for bash, on one line whatever they contain."""
    return " ".join(_shell_word(argument) for argument in arguments)


def _shell_word(argument: str) -> str:
    if argument.isprintable():
        return shlex.quote(argument)
    # Bytes, not characters: the output of \u depends on the locale.
    return "$'" + "".join(_ansi_c(byte) for byte in os.fsencode(argument)) + "'"


def _ansi_c(byte: int) -> str:
    character = chr(byte)
    plain = character.isascii() and character.isprintable() and character not in "'\\"
    return character if plain else f"\\x{byte:02x}"


def yaml_text(text: str) -> str:
    """Returns a double-quoted YAML scalar."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{text!r} is not UTF-8, which YAML needs: write it in UTF-8.") from error
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def kubernetes_argument(argument: str) -> str:
    """Escapes an argument, in which Kubernetes would otherwise expand `$(NAME)`."""
    return argument.replace("$", "$$")
