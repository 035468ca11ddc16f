"""Tokens of a completion, each with how likely it was, as a strip of colors or digits."""

import math
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from grpo_eqx.tracking.safe_text import literal

_LEVELS = (
    (0.9, "at least 90 %", ""),
    (0.5, "50 %", "black on #fff3b0"),
    (0.1, "10 %", "black on #ffd27f"),
    (0.01, "1 %", "black on #ff9d6c"),
    (0.0, "less", "white on #b02a4a"),
)
"""Least probability, its words and its style, from likely to unlikely."""


def legend(*, colored: bool) -> Text:
    """Returns what the colors, or the digits, stand for."""
    if not colored:
        return Text("digits: tenths of a token's probability, when it was drawn", "dim")
    shown = Text().append("probability of a token: ", "dim")
    for _, words, style in _LEVELS:
        shown.append(f" {words} ", style).append(" ")
    return shown


def heat_strip(
    tokens: Sequence[str],
    logps: Sequence[float],
    *,
    colored: bool,
    width: int,
    encoding: str = "utf-8",
) -> Text:
    """Returns tokens in the colors of their probabilities, or above digits of tenths of them.

    **Arguments:** the texts of the tokens; their log-probs; whether there are colors; the columns
    to use, for digits; the encoding of the output.
    """
    probabilities = [0.0 if math.isnan(x) else math.exp(min(0.0, x)) for x in logps]
    texts = [literal(token, newlines=False, encoding=encoding).plain for token in tokens]
    if not colored:
        return _over_digits(texts, probabilities, width)
    shown = Text()
    for token, text, probability in zip(tokens, texts, probabilities, strict=True):
        # The line ends of a token are shown, and made.
        shown.append(text, _style(probability)).append("\n" * token.count("\n"))
    return shown


def _style(probability: float) -> str:
    return next((style for least, _, style in _LEVELS if probability >= least), "")


def _over_digits(texts: Sequence[str], probabilities: Sequence[float], width: int) -> Text:
    """Returns lines of tokens, each over a line of digits that begin where the tokens do."""
    lines, above, below = [], "", ""
    for text, probability in zip(texts, probabilities, strict=True):
        size = cell_len(text)
        if above and cell_len(above) + size > width:
            lines += [above, below]
            above = below = ""
        digit = str(min(9, int(probability * 10)))
        above, below = above + text, below + digit.ljust(size) if size else below
    return Text("\n".join(line.rstrip() for line in (*lines, above, below)))
