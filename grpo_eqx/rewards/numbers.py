r"""Numbers in text, read as people write them: exactly, and in time linear in the text.

**One number**, in ASCII digits:

- plain: `72`, `72.`, `.5`, `-$5`, `$-5`, `50%` (which is 50);
- grouped in threes by commas (`1,080`, `\$1{,}080`), by spaces, also no-break and thin ones
  (`1 080`, `1\,080`), or by at least two dots (`1.000.000`; one dot is a decimal point, so `1.000`
  is 1). A space groups wherever it can: `100 200 300` is 100200300;
- a fraction, by its value: `1/2`, `10 / 2`, `\frac{1}{2}`, `\frac12`, `½`; also a mixed number:
  `3 1/2`, `3\frac{1}{2}`, `3½`;
- an exponent, by its value: `1e3`, `2.5E-3`, `10^3`, `10^{-3}`, `10**3`, `10³`, `2^3`, `2 x 10^3`,
  `7.2\cdot 10^1`.

**Several numbers**: lists (`1,2,3`, `1, 080` and so also `1.080,50`), differences and ranges
(`10-3`, `2024-05-07`), and all other arithmetic (`6 * 12`, `x = 72`).

**No number**, as a whole:

- ambiguous forms: times and ratios (`5:30`), versions (`1.2.3`), dates and other chains
  (`12/25/2024`, `1/2/3`, `2^3^2`), `3 10/2`, `1/2 000`;
- digits in no known grouping: `1,00,000`, `1000 000`, `1_000`, which would otherwise end in a 0;
- powers of brackets and with fractions: `(-2)^2`, `25^{1/2}`;
- fractions over zero, exponents past 400 and numbers of more than 400 characters.

An exponent of anything but a number is ignored: `50 m^2` is 50.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

MAX_EXPONENT: Final = 400
"""Largest exponent that is read, beyond any float's; a fraction's memory grows with it."""
_MAX_LENGTH: Final = 400

# `{,}` and `{ }` come last, because `{,\!}` and `{\,}` turn into them.
_SPELLINGS: Final = (
    (r"\$", "$"),
    (r"\!", ""),
    (r"\,", " "),
    (r"\ ", " "),
    (r"\times", "×"),
    (r"\cdot", "×"),
    ("{,}", ","),
    ("{ }", " "),
)
_VULGAR_FRACTIONS: Final = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_CHARACTERS: Final = str.maketrans(
    {
        "\u2212": "-",
        "·": "×",
        # The slashes of fractions and of division.
        **dict.fromkeys("\u2044\u2215", "/"),
        # No-break, narrow no-break and thin space; `~` is LaTeX's no-break space.
        **dict.fromkeys("\u00a0\u202f\u2009~", " "),
        # `½` is `1⁄2` in Unicode's compatibility form. The space separates what follows.
        **{
            char: unicodedata.normalize("NFKC", char).replace("\u2044", "/") + " "
            for char in _VULGAR_FRACTIONS
        },
    }
)
_SUPERSCRIPT: Final = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]++")
_BRACED_EXPONENT: Final = re.compile(r"\^[ ]?\{[ ]?([+-]?[0-9]++)[ ]?\}")
_ARGUMENT: Final = r"(?:\{[ ]?(-?[0-9., ]++)\}|([0-9]))"
_FRACTION: Final = re.compile(rf"\\[cdt]?frac[ ]?{_ARGUMENT}[ ]?{_ARGUMENT}")
_BEFORE_FRACTION: Final = re.compile(rf"(?<=[0-9])[ ]?(?=\\[cdt]?frac|[{_VULGAR_FRACTIONS}])")

_INTEGER: Final = r"""
    (?>
        # In `1,2,345` and `1,2345` a comma separates a list.
        (?<! [0-9], ) [1-9][0-9]{0,2} (?: ,[0-9]{3} )++ (?! [0-9] )
        # A space likewise, and in `12 200-page books` it separates two words.
        | (?<! [0-9][ ] ) [1-9][0-9]{0,2} (?: [ ][0-9]{3} )++ (?! [0-9] | -[A-Za-z] )
        | [0-9]++
    )
"""
_PLAIN: Final = rf"""
    (?>
        {_INTEGER} (?: \.[0-9]++ )*+
        # After a word or a number, the period ends a sentence: `apples.5`.
        | (?<! [\w.)\]}}] ) (?: \.[0-9]++ )++
    )
"""
_EXPONENT: Final = r"[+-]?[0-9]++ (?: \.[0-9]++ )*+"
# The longest run of plain numbers and what joins them. `_value` decides which runs are a number.
_NUMBER: Final = rf"""
    (?>
        (?:
            # After an operand, a minus subtracts (`10-3`, `x-3`, `10 -3`) or spans a range.
            (?<! [0-9A-Za-z)\]}}%-] ) (?<! [0-9][ .$€£] )
            (?P<minus> - )
        )?
        (?: [$€£] [ ]? )?
        (?P<number>
            (?: (?P<whole> {_INTEGER} ) [ ]{{1,2}} (?= [0-9]++/[0-9] ) )?+
            (?P<run>
                {_PLAIN}
                (?:
                    (?: [ ]?/[ ]?-? | : ) {_PLAIN}
                    | (?: [eE] | [ ]?\^[ ]? | \*\* ) {_EXPONENT}
                    | [ ]?[xX*×][ ]? (?= 10 (?: [ ]?\^[ ]? | \*\* ) [+-]?[0-9] ) 10
                )*+
            )
        )
    )
"""
_NUMBER_OR_EXPONENT: Final = re.compile(rf"{_NUMBER} | \^[ ]?{_EXPONENT}", re.VERBOSE)
_OPENING_NUMBER: Final = re.compile(
    rf"""
    (?: [\s$€£*_(\[{{] | \\[(\[] | \\(?: boxed | text[a-z]*+ | math[a-z]*+ )[ ]*+\{{ )*+
    {_NUMBER} (?! ,[0-9] )
    """,
    re.VERBOSE,
)
_JOINT: Final = re.compile(r"[ ]?([/:^eExX×]|\*\*?)[ ]?")
_STRAY_GROUP: Final = re.compile(r"(?<=[0-9])[^0-9A-Za-z\n]{1,2}00++")
_OPENS_EXPONENT: Final = re.compile(r"(?:\^|\*\*)[ ]?[({][ ]?")
_RAISED_BRACKET: Final = re.compile(r"[)\]}][ ]?\^")
_DOT_GROUPS: Final = re.compile(r"-?[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}")


def last_number(text: str) -> Fraction | None:
    """Reads the last number of `text`; `None` if it has none, or the last is ambiguous."""
    last = deque(_matches(text), maxlen=1)
    return _value(last[0]) if last else None


def only_number(text: str) -> Fraction | None:
    """Reads the number of `text`; `None` unless it holds exactly one."""
    matches = _matches(text)
    first = next(matches, None)
    if first is None or next(matches, None) is not None:
        return None
    return _value(first)


def opening_number(text: str) -> Fraction | None:
    r"""Reads the number that `text` begins with, whatever follows it.

    Spaces, currency signs, emphasis and opening brackets may come first: `**$5**`, `\(\boxed{5}`.

    **Returns:** the number, or `None` if something else comes first, the number is ambiguous, or it
    begins a list without spaces (`1,2,3`).
    """
    match = _OPENING_NUMBER.match(_plain_text(text))
    return _value(match) if match else None


def _matches(text: str) -> Iterator[re.Match[str]]:
    matches = _NUMBER_OR_EXPONENT.finditer(_plain_text(text))
    return (match for match in matches if match["number"])


def _plain_text(text: str) -> str:
    text = _SUPERSCRIPT.sub(lambda power: "^" + unicodedata.normalize("NFKC", power[0]), text)
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    # Two spaces, because a single space would group the digits of `3\frac{100}{200}`.
    text = _BEFORE_FRACTION.sub("  ", text)
    text = _FRACTION.sub(r"\1\2/\3\4 ", text.translate(_CHARACTERS))
    return _BRACED_EXPONENT.sub(r"^\1 ", text)


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match["number"]) > _MAX_LENGTH or _is_part_of_more(match):
        return None
    try:
        value = _run_value(match["run"])
        if match["whole"]:
            value = _mixed(_plain(match["whole"]), value)
    except (ValueError, ZeroDivisionError):
        return None
    return -value if match["minus"] else value


def _is_part_of_more(match: re.Match[str]) -> bool:
    """Returns whether a number is part of a larger form that is not read, such as a power."""
    text, start, end = match.string, match.start("number"), match.end()
    before = range(max(0, start - 4), start)
    return (
        any(_STRAY_GROUP.fullmatch(text, i, end) for i in before)
        or any(_OPENS_EXPONENT.fullmatch(text, i, start) for i in before)
        or _RAISED_BRACKET.match(text, end) is not None
    )


def _run_value(run: str) -> Fraction:
    match _JOINT.split(run):
        case [number]:
            return _plain(number)
        # In `1/2 000` the space may group digits or end the fraction.
        case [top, "/", bottom] if " " not in bottom:
            return _plain(top) / _plain(bottom)
        case [number, "e" | "E", exponent]:
            return _plain(number) * _power("10", exponent)
        case [base, "^" | "**", exponent]:
            return _power(base, exponent)
        case [number, "x" | "X" | "*" | "×", "10", "^" | "**", exponent]:
            return _plain(number) * _power("10", exponent)
    raise ValueError(f"{run!r} is ambiguous")


def _mixed(whole: Fraction, part: Fraction) -> Fraction:
    if part >= 1:
        raise ValueError("a mixed number's fraction must be less than 1")
    return whole + part


def _power(base: str, exponent: str) -> Fraction:
    if abs(int(exponent)) > MAX_EXPONENT:
        raise ValueError(f"the exponent {exponent} is too large")
    return _plain(base) ** int(exponent)


def _plain(number: str) -> Fraction:
    number = number.replace(",", "").replace(" ", "")
    if _DOT_GROUPS.fullmatch(number):
        number = number.replace(".", "")
    return Fraction(number)
