"""Tokens of a completion with their probabilities, shown as colors or digits."""

import math
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from grpo_eqx.tracking.safe_console import literal

_LEVELS = (
    (0.9, "at least 90 %", ""),
    (0.5, "50 %", "black on #fff3b0"),
    (0.1, "10 %", "black on #ffd27f"),
    (0.01, "1 %", "black on #ff9d6c"),
    (0.0, "less", "white on #b02a4a"),
)
"""Lower bound of a probability, its words and its style, from likely to unlikely."""

_NOT_WRITTEN = "dim italic"


def legend(*, colored: bool) -> Text:
    """Returns a line that explains the colors, or the digits."""
    if not colored:
        return Text(
            "digits: tenths of a token's probability when it was drawn; none: it was not", "dim"
        )
    shown = Text().append("probability of a token: ", "dim")
    for _, words, style in _LEVELS:
        shown.append(f" {words} ", style).append(" ")
    return shown.append("not the model's", _NOT_WRITTEN)


def heat_strip(
    tokens: Sequence[str],
    logps: Sequence[float],
    *,
    colored: bool,
    width: int,
    encoding: str = "utf-8",
) -> Text:
    """Returns tokens in the colors of their probabilities, or above the digits of their tenths.

    **Arguments:**

    - `tokens`, `logps`: the texts of the tokens, and their log-probs; NaN for tokens that the model
      did not write.
    - `colored`: whether the output has colors.
    - `width`: columns to use, for digits.
    - `encoding`: the encoding of the output.
    """
    probabilities = [None if math.isnan(x) else math.exp(min(0.0, x)) for x in logps]
    texts = [literal(token, newlines=False, encoding=encoding).plain for token in tokens]
    if not colored:
        return _over_digits(texts, probabilities, width)
    shown = Text()
    for token, text, probability in zip(tokens, texts, probabilities, strict=True):
        # The line breaks of a token are both spelled and made.
        shown.append(text, _style(probability)).append("\n" * token.count("\n"))
    return shown


def _style(probability: float | None) -> str:
    if probability is None:
        return _NOT_WRITTEN
    return next((style for least, _, style in _LEVELS if probability >= least), "")


def _over_digits(texts: Sequence[str], probabilities: Sequence[float | None], width: int) -> Text:
    """Returns lines of tokens above lines of digits; each digit stands below its token's start."""
    lines, above, below = [], "", ""
    for text, probability in zip(texts, probabilities, strict=True):
        size = cell_len(text)
        if above and cell_len(above) + size > width:
            lines += [above, below]
            above = below = ""
        digit = " " if probability is None else str(min(9, int(probability * 10)))
        above, below = above + text, below + digit.ljust(size) if size else below
    return Text("\n".join(line.rstrip() for line in (*lines, above, below)))
