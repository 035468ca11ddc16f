r"""Rewards for GSM8K and its like: problems whose answer is one number.

`correct` scores the answer; `format` and `tags` score the `<think>`/`<answer>` layout. All three
have TRL's reward signature and take time linear in the text, whatever the model wrote.

A number here is an exact decimal in ASCII digits: `1,080`, `-$5`, `$-5`, `.5`, `72.`, `50%` (50)
and LaTeX's `\$1{,}080`. Fractions and exponents are two numbers: `1/2` holds a 1 and a 2.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from numbers import Number
from typing import Final

from grpo_eqx.errors import RewardError

_Span = tuple[int, int]

_TAGS: Final = ("<think>", "</think>", "<answer>", "</answer>")

# `{,}` comes last, for `{\,}` and `{,\!}` become it.
_PLAIN_SPELLINGS: Final = (
    ("\u2212", "-"),
    (r"\$", "$"),
    (r"\!", ""),
    (r"\,", ","),
    ("{,}", ","),
)

_NUMBER: Final = re.compile(
    r"""
    (?:
        # After an operand, a minus subtracts (`10-3`, `x-3`, `10 -3`) or spans a range (`$5-$7`).
        (?<! [0-9A-Za-z)\]}%-] ) (?<! [0-9][ .$€£] )
        (?P<minus> - )
    )?
    (?: [$€£] [ ]? )?
    (?P<magnitude>
        (?:
            # A comma groups digits in threes; in `1,2,345` and `1,2345` it separates a list.
            (?<! [0-9], ) [1-9][0-9]{0,2} (?: ,[0-9]{3} )++ (?! [0-9] )
            | [0-9]++
        )
        (?: \.[0-9]++ )?
        # After a word or a number, the period ends a sentence (`apples.5`) or a section (`1.2.3`).
        | (?<! [\w.)\]}] ) \.[0-9]++
    )
    """,
    re.VERBOSE,
)
_HASH_MARK: Final = re.compile(r"(?<!#)####(?!#)")
_BRACE: Final = re.compile(r"\\boxed\s*+\{|\\[\\{}]|[{}]")
_ANSWER_TAG: Final = re.compile(r"<(/?)answer>")


def correct(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    answer: Sequence[object],
    **columns: object,
) -> list[float]:
    """Scores 1.0 where the completion's last number equals the gold one exactly, else 0.0.

    **Arguments:**

    - `prompts`: unused; part of the reward signature.
    - `completions`: the model's texts, one per row.
    - `answer`: the gold answers, one per row, as `gold_number` reads them.
    - `columns`: the other dataset columns; unused.

    **Returns:** one score per completion, 0.0 or 1.0.

    **Raises:** `RewardError` where a gold answer does not hold one number; it names the row.
    """
    return _compare(last_number, completions, answer)


def correct_strict(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    answer: Sequence[object],
    **columns: object,
) -> list[float]:
    r"""Scores 1.0 where the completion's marked number equals the gold one exactly, else 0.0.

    A number is marked as `marked_number` reads it: `#### n`, `\boxed{n}` or
    `<answer>n</answer>`. Arguments, return and errors are those of `correct`.
    """
    return _compare(marked_number, completions, answer)


def format(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    r"""Scores 1.0 where the whole completion has the layout, else 0.0.

    The layout is `<think>.*?</think>\n<answer>.*?</answer>`, where `.` matches newlines too, with
    nothing before or after it: the template of DeepSeek-R1-Zero (arXiv:2501.12948, table 1).

    **Arguments:** as `correct`'s; only `completions` is used.

    **Returns:** one score per completion, 0.0 or 1.0.
    """
    return [float(_has_layout(completion)) for completion in completions]


def tags(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """Scores 0.25 for each of the four layout tags that appears exactly once.

    **Arguments:** as `correct`'s; only `completions` is used.

    **Returns:** one score per completion, from 0.0 to 1.0.
    """
    return [_tag_score(completion) for completion in completions]


def last_number(text: str) -> Decimal | None:
    """Reads the last number of `text`; `None` where it holds none."""
    last = deque(_number_matches(text), maxlen=1)
    return _decimal(last[0]) if last else None


def marked_number(text: str) -> Decimal | None:
    r"""Reads the number in the last answer mark of `text`.

    A mark is `#### n` (to the end of its line), `\boxed{n}` or `<answer>n</answer>`. Of nested
    marks the inner one is the later. A mark that never closes is none.

    **Returns:** the number, or `None` where there is no mark or the last holds not exactly one.
    """
    marks = (_last_hash_mark(text), _last_box(text), _last_answer_tag(text))
    spans = [span for span in marks if span is not None]
    if not spans:
        return None
    start, end = max(spans)
    return _only_number(text[start:end])


def gold_number(answer: object) -> Decimal:
    """Reads the number of a dataset's gold answer.

    **Arguments:**

    - `answer`: a number (a float means its shortest decimal, so `0.1` is one tenth), a text that
        holds exactly one number, or GSM8K's worked solution, whose `#### n` alone counts.

    **Returns:** the number, exactly.

    **Raises:** `RewardError` where there is not exactly one number; it quotes the answer.
    """
    number = _worked_number(answer) if isinstance(answer, str) else _finite_number(answer)
    if number is None:
        raise RewardError(
            "a gold answer must be one number, or a solution that ends in '#### number'; "
            f"got {answer!r}"
        )
    return number


def _gold_numbers(answer: Sequence[object]) -> Iterator[Decimal]:
    for row, gold in enumerate(answer):
        try:
            yield gold_number(gold)
        except RewardError as error:
            raise RewardError(f"correct: row {row}: {error}") from None


def _worked_number(solution: str) -> Decimal | None:
    mark = _last_hash_mark(solution)
    start, end = mark or (0, len(solution))
    return _only_number(solution[start:end])


def _finite_number(answer: object) -> Decimal | None:
    if not isinstance(answer, Number):
        return None
    try:
        number = Decimal(str(answer))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _compare(
    read: Callable[[str], Decimal | None], completions: Sequence[str], answer: Sequence[object]
) -> list[float]:
    pairs = zip(completions, _gold_numbers(answer), strict=True)
    return [float(read(completion) == gold) for completion, gold in pairs]


def _only_number(text: str) -> Decimal | None:
    matches = _number_matches(text)
    first = next(matches, None)
    if first is None or next(matches, None) is not None:
        return None
    return _decimal(first)


def _number_matches(text: str) -> Iterator[re.Match[str]]:
    for spelling, plain in _PLAIN_SPELLINGS:
        text = text.replace(spelling, plain)
    return _NUMBER.finditer(text)


def _decimal(match: re.Match[str]) -> Decimal:
    # The sign goes in with the digits: negating a Decimal rounds it to the context's precision.
    return Decimal((match["minus"] or "") + match["magnitude"].replace(",", ""))


def _last_hash_mark(text: str) -> _Span | None:
    start = None
    for mark in _HASH_MARK.finditer(text):
        start = mark.end()
    if start is None:
        return None
    newline = text.find("\n", start)
    return start, len(text) if newline == -1 else newline


def _last_box(text: str) -> _Span | None:
    r"""Spans the content of the closed `\boxed{}` that opens last."""
    last: _Span | None = None
    # Where each open box's content starts; None for a brace that opens no box.
    open_braces: list[int | None] = []
    for token in _BRACE.finditer(text):
        if token[0] == "{":
            open_braces.append(None)
        elif token[0].startswith(r"\boxed"):
            open_braces.append(token.end())
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = start, token.start()
    return last


def _last_answer_tag(text: str) -> _Span | None:
    last: _Span | None = None
    start: int | None = None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            last, start = (start, tag.start()), None
    return last


def _has_layout(text: str) -> bool:
    # The pattern itself is quadratic on a text that repeats its middle; its parts cannot overlap.
    opened, closed = text.startswith("<think>"), text.endswith("</answer>")
    return opened and closed and "</think>\n<answer>" in text


def _tag_score(text: str) -> float:
    return 0.25 * sum(text.count(tag) == 1 for tag in _TAGS)
