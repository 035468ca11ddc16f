r"""How GSM8K's own script, verl and this package read the same texts, side by side.

The scripts read the longest run of digits, periods and commas as it stands. People read `1/2` as a
half and `1 000` as a thousand, and so does this package, which compares numbers and not texts.
"""

import re
from fractions import Fraction
from typing import NamedTuple

import pytest

from grpo_eqx.rewards.gsm8k import answer_number, marked_number

INVALID = "[invalid]"


def official(text: str) -> str:
    """The reading of `extract_answer` in grade-school-math's dataset.py; it compares texts."""
    match = re.search(r"#### (\-?[0-9\.\,]+)", text)
    return match[1].strip().replace(",", "") if match else INVALID


def verl_strict(text: str) -> str | None:
    """The reading of `extract_solution` in verl/utils/reward_score/gsm8k.py; it compares texts."""
    marked = re.findall(r"#### (\-?[0-9\.\,]+)", text[-300:])
    return marked[-1].replace(",", "").replace("$", "") if marked else None


def verl_flexible(text: str) -> str | None:
    """The reading of the same function with `method="flexible"`."""
    runs = re.findall(r"(\-?[0-9\.\,]+)", text[-300:])
    return next((run for run in reversed(runs) if run not in ("", ".")), None)


class Row(NamedTuple):
    """A text, what each script reads in it, and why ours differ."""

    text: str
    official: str
    verl_strict: str | None
    verl_flexible: str | None
    correct: str | None
    """What `correct` compares with the gold answer."""
    strict: str | None
    """What `correct_strict` compares with it."""
    why: str = ""
    """Why one of ours is not the official reading (verl's flexible one, where that is none)."""


# fmt: off
TABLE = [Row(*row) for row in (
    # text, official, verl strict, verl flexible, correct, correct_strict, why
    # The script's own form.
    ("6 * 12 = 72\n#### 72", "72", "72", "72", "72", "72"),
    ("#### -72", "-72", "-72", "-72", "-72", "-72"),
    ("#### 1,080", "1080", "1080", "1,080", "1080", "1080"),
    ("#### 72.50", "72.50", "72.50", "72.50", "72.5", "72.5"),
    ("#### 72.", "72.", "72.", "72.", "72", "72"),
    ("#### .5", ".5", ".5", ".5", "0.5", "0.5"),
    ("#### 1.000", "1.000", "1.000", "1.000", "1", "1"),
    ("#### 72%", "72", "72", "72", "72", "72"),
    ("#### 5 (that is 10/2)", "5", "5", "2", "5", "5"),
    ("#### 70 or 72", "70", "70", "72", "70", "70"),
    ("#### 72 = 72", "72", "72", "72", "72", "72"),
    ("#### 10-3", "10", "10", "-3", "10", "10"),
    ("#### 2024-05-07", "2024", "2024", "-07", "2024", "2024"),
    ("#### 1, 72", "1", "1", "72", "1", "1"),
    ("#### 72 dollars\nThat took 3 steps.", "72", "72", "3", "72", "72"),
    ("#### 72\n\\boxed{70 or 71}", "72", "72", "71", "72", None, "the last mark holds two numbers"),
    ("#### 72\n" + "Let me check that. " * 20, "72", None, None, "72", "72"),
    ("#### 1\n#### 72", "1", "72", "72", "72", "72", "the last line counts"),
    ("#### 70\n\\boxed{72}", "70", "70", "72", "72", "72", "the last mark counts"),
    ("##### 72", "72", "72", "72", "72", None, "five make no mark"),
    ("#### seventy-two", INVALID, None, None, None, None),
    ("#### ...", "...", "...", "...", None, None, "no digits"),
    # What may stand before the number.
    ("####72", INVALID, None, "72", "72", "72", "no space is needed"),
    ("####  72", INVALID, None, "72", "72", "72", "two spaces are fine"),
    ("#### $72", INVALID, None, "72", "72", "72", "a currency sign"),
    ("#### -$72", INVALID, None, "72", "-72", "-72", "a currency sign"),
    (r"#### \$72", INVALID, None, "72", "72", "72", "a currency sign"),
    ("#### **72**", INVALID, None, "72", "72", "72", "emphasis"),
    (r"#### \(72\)", INVALID, None, "72", "72", "72", "a bracket"),
    (r"#### \boxed{72}", INVALID, None, "72", "72", "72", "a box"),
    ("#### x = 72", INVALID, None, "72", "72", "72", "the only number"),
    ("#### +5", INVALID, None, "5", "5", "5", "a plus"),
    ("#### \u22125", INVALID, None, "5", "-5", "-5", "a minus sign"),
    # Fractions.
    ("#### 1/2", "1", "1", "2", "0.5", "0.5", "by its value"),
    ("#### -1/2", "-1", "-1", "2", "-0.5", "-0.5", "by its value"),
    ("#### 10 / 2", "10", "10", "2", "5", "5", "by its value"),
    (r"#### \frac{1}{2}", INVALID, None, "2", "0.5", "0.5", "by its value"),
    (r"#### \frac12", INVALID, None, "12", "0.5", "0.5", "by its value"),
    ("#### 3 1/2", "3", "3", "2", "3.5", "3.5", "a mixed number"),
    (r"#### 3\frac{1}{2}", "3", "3", "2", "3.5", "3.5", "a mixed number"),
    ("#### 2½", "2", "2", "2", "2.5", "2.5", "a mixed number"),
    # Exponents.
    ("#### 1e3", "1", "1", "3", "1000", "1000", "by its value"),
    ("#### 2.5E-3", "2.5", "2.5", "-3", "0.0025", "0.0025", "by its value"),
    ("#### 10^3", "10", "10", "3", "1000", "1000", "by its value"),
    ("#### 2 x 10^3", "2", "2", "3", "2000", "2000", "by its value"),
    (r"#### 2 \times 10^{3}", "2", "2", "3", "2000", "2000", "by its value"),
    (r"#### 7.2\cdot 10^1", "7.2", "7.2", "1", "72", "72", "by its value"),
    ("#### 2^3", "2", "2", "3", "8", "8", "by its value"),
    # Groups.
    ("#### 1 000", "1", "1", "000", "1000", "1000", "a space groups"),
    ("#### 100 200 300", "100", "100", "300", "100200300", "100200300", "a space groups"),
    ("#### 1\u00a0000", "1", "1", "000", "1000", "1000", "a no-break space groups"),
    (r"#### 1\,080", "1", "1", ",080", "1080", "1080", "a thin space groups"),
    (r"#### 1{,}080", "1", "1", "080", "1080", "1080", "LaTeX's comma"),
    ("#### 1.000.000", "1.000.000", "1.000.000", "1.000.000", "1000000", "1000000", "dots group"),
    # Ambiguous forms.
    ("#### 1,2,3", "123", "123", "1,2,3", "3", None, "a list"),
    ("#### 12345,678", "12345678", "12345678", "12345,678", "678", None, "a list"),
    ("#### 1.080,50", "1.08050", "1.08050", "1.080,50", "50", None, "a list"),
    ("#### 5:30", "5", "5", "30", None, None, "a time"),
    ("#### 3:2", "3", "3", "2", None, None, "a ratio"),
    ("#### 1.2.3", "1.2.3", "1.2.3", "1.2.3", None, None, "a version"),
    ("#### 12/25/2024", "12", "12", "2024", None, None, "a date"),
    ("#### 1/2/3", "1", "1", "3", None, None, "a chain"),
    ("#### 1/0", "1", "1", "0", None, None, "over zero"),
    ("#### 1e999", "1", "1", "999", None, None, "too large"),
    # Without the script's mark.
    ("72", INVALID, None, "72", "72", None),
    ("I think it is 70, no: 72", INVALID, None, "72", "72", None),
    ("It is $2,000.", INVALID, None, "2,000.", "2000", None, "a period ends the sentence"),
    ("It is 72, I think", INVALID, None, "72,", "72", None, "a comma ends the clause"),
    (r"\boxed{72} after 3 steps", INVALID, None, "3", "72", "72", "a box"),
    ("<answer>72</answer>", INVALID, None, "72", "72", "72", "a tag"),
    ("10-3", INVALID, None, "-3", "3", None, "the minus subtracts"),
    (r"So $\frac{1}{2}$", INVALID, None, "2", "0.5", None, "by its value"),
    ("It takes 3 1/2 hours", INVALID, None, "2", "3.5", None, "a mixed number"),
    ("It is 1e3", INVALID, None, "3", "1000", None, "by its value"),
    ("It is 2 × 10³", INVALID, None, "10", "2000", None, "by its value"),
    ("It is 1 000", INVALID, None, "000", "1000", None, "a space groups"),
    ("It is 1.000.000", INVALID, None, "1.000.000", "1000000", None, "dots group"),
    ("72 at 5:30", INVALID, None, "30", None, None, "a time"),
    ("The ratio is 3:2", INVALID, None, "2", None, None, "a ratio"),
    ("Version 1.2.3", INVALID, None, "1.2.3", None, None, "a version"),
    ("On 12/25/2024", INVALID, None, "2024", None, None, "a date"),
    ("50 m^2", INVALID, None, "2", "50", None, "a unit's exponent"),
    ("seventy-two", INVALID, None, None, None, None),
)]
# fmt: on


def number(reading: str | None) -> Fraction | str | None:
    """The number of a reading, or the reading itself where it is none, as in `1.2.3`."""
    if reading is None or reading == INVALID:
        return None
    try:
        return Fraction(reading)
    except ValueError:
        return reading


def test_the_table_has_many_different_texts() -> None:
    assert len({row.text for row in TABLE}) == len(TABLE) >= 60


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.text)
def test_each_script_reads_what_the_table_says(row: Row) -> None:
    assert official(row.text) == row.official
    assert verl_strict(row.text) == row.verl_strict
    assert verl_flexible(row.text) == row.verl_flexible
    assert answer_number(row.text) == number(row.correct)
    assert marked_number(row.text) == number(row.strict)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.text)
def test_a_row_says_why_exactly_where_we_differ(row: Row) -> None:
    flexible = row.verl_flexible if row.official == INVALID else row.official
    agrees = number(row.correct) == number(flexible) and number(row.strict) == number(row.official)
    assert agrees == (row.why == "")
