r"""Rewards for GSM8K and similar data: problems whose answer is one number.

`correct` and `correct_strict` score the answer; `format` and `tags` score the `<think>`/`<answer>`
layout. All have TRL's reward signature and take time linear in the text, whatever the model wrote.
In a run, their texts begin with the tags that the prompt opened, and include tags that are special
tokens.

`grpo_eqx.rewards.numbers` defines what a number is.
"""

import re
from collections.abc import Callable, Iterator, Sequence, Sized
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from numbers import Number
from typing import Final

from grpo_eqx.common.errors import RewardError, UserError
from grpo_eqx.data.prompts import Conversation, Prompt, last_text, quoted
from grpo_eqx.data.special_tokens import TAGS
from grpo_eqx.rewards.numbers import MAX_EXPONENT, only_number, opening_number
from grpo_eqx.rewards.numbers import last_number as last_number

_Span = tuple[int, int]

_HASH_MARK: Final = re.compile(r"(?<!#)####(?!#)")
_BRACE: Final = re.compile(r"\\boxed\s*+\{|\\[\\{}]|[{}]")
_ANSWER_TAG: Final = re.compile(r"<(/?)answer>")


def correct(
    prompts: Sequence[str | Conversation],
    completions: Sequence[str | Conversation],
    *,
    answer: Sequence[object],
    **columns: object,
) -> list[float]:
    """Scores 1.0 if the completion's number equals the gold number exactly, else 0.0.

    `answer_number` reads the completion's number: the marked number, or without one, the last.

    **Arguments:**

    - `prompts`: unused; part of the reward signature.
    - `completions`: the model's texts, one per row, or its messages.
    - `answer`: the gold answers, one per row, as `gold_number` reads them.
    - `columns`: the other columns of the data; unused.

    **Returns:** one score per completion, 0.0 or 1.0.

    **Raises:** `RewardError`, which names the row, if a gold answer does not hold one number.
    """
    return _compare(answer_number, completions, answer)


def correct_strict(
    prompts: Sequence[str | Conversation],
    completions: Sequence[str | Conversation],
    *,
    answer: Sequence[object],
    **columns: object,
) -> list[float]:
    r"""Scores 1.0 if the completion's marked number equals the gold number exactly, else 0.0.

    `marked_number` reads the marks `#### n`, `\boxed{n}` and `<answer>n</answer>`. Arguments,
    return and errors are the same as for `correct`.
    """
    return _compare(marked_number, completions, answer)


def format(
    prompts: Sequence[str | Conversation],
    completions: Sequence[str | Conversation],
    **columns: object,
) -> list[float]:
    r"""Scores 1.0 if the whole completion has the layout, else 0.0.

    The layout is `<think>.*?</think>\n<answer>.*?</answer>`, where `.` matches newlines too, with
    nothing before or after it: the template of DeepSeek-R1-Zero (arXiv:2501.12948, table 1).

    **Returns:** one score per completion, 0.0 or 1.0.
    """
    _check_list("completions", completions)
    return [float(_has_layout(last_text(completion))) for completion in completions]


def tags(
    prompts: Sequence[str | Conversation],
    completions: Sequence[str | Conversation],
    **columns: object,
) -> list[float]:
    """Scores 0.25 for each of the four layout tags that appears exactly once.

    **Returns:** one score per completion, from 0.0 to 1.0.
    """
    _check_list("completions", completions)
    return [_tag_score(last_text(completion)) for completion in completions]


def answer_number(text: str) -> Fraction | None:
    """Reads the number that `text` gives as its answer, marked or not.

    Considers the last mark of each kind that `marked_number` reads.

    **Returns:** the number in the latest of these marks that holds one, or else `last_number`.
    """
    marked = (number for number in _marked_numbers(text) if number is not None)
    number = next(marked, None)
    return last_number(text) if number is None else number


def marked_number(text: str) -> Fraction | None:
    r"""Reads the number in the last answer mark of `text`.

    A mark is `#### n`, `\boxed{n}` or `<answer>n</answer>`. Of nested marks, the inner mark counts
    as the later. An unclosed mark does not count. A box or a tag must hold exactly one number.
    After `####`, a number right at the beginning counts, whatever follows it; otherwise, the line
    must hold exactly one number.

    **Returns:** the number, or `None` without a mark, or if the last mark holds no such number.
    """
    return next(_marked_numbers(text), None)


def gold_number(answer: object) -> Fraction:
    """Reads the number of a data set's gold answer.

    **Arguments:**

    - `answer`: a number (a float means its shortest decimal, so `0.1` is one tenth), a text that
        holds exactly one number, or GSM8K's worked solution, where only the last `####` counts, as
        in a completion.

    **Returns:** the number, exactly.

    **Raises:** `RewardError`, which quotes the answer, if there is no such number.
    """
    number = _worked_number(answer) if isinstance(answer, str) else _finite_number(answer)
    if number is None:
        raise RewardError(
            "a gold answer must be one number, or a solution that ends in '#### number'; "
            f"got {answer!r}"
        )
    return number


def check_answers(
    prompts: Sequence[Prompt], instead: str = "reward_funcs and eval_func", kind: str = "problem"
) -> None:
    """Raises `UserError` for problems that `correct` cannot score, before anything is generated.

    **Arguments:**

    - `prompts`: the problems.
    - `instead`: for messages: what to pass for problems without numbers.
    - `kind`: for messages: what to call a problem.
    """
    for number, prompt in enumerate(prompts, start=1):
        if "answer" not in prompt.columns:
            has = f"only {', '.join(prompt.columns)}" if prompt.columns else "nor any other"
            raise UserError(
                f"the {kind}s have no column answer to compare with, {has}: add one, or pass "
                f"{instead} of your own to GRPOTrainer."
            )
        try:
            gold_number(prompt.columns["answer"])
        except RewardError as error:
            raise UserError(
                f"{kind} {number} ({quoted(prompt.text)}): {error}; for other answers, pass "
                f"{instead} of your own."
            ) from error


def _gold_numbers(answer: Sequence[object]) -> Iterator[Fraction]:
    for row, gold in enumerate(answer):
        try:
            yield gold_number(gold)
        except RewardError as error:
            raise RewardError(f"correct: row {row}: {error}") from None


def _worked_number(solution: str) -> Fraction | None:
    mark = _last_hash_mark(solution)
    if mark is None:
        return only_number(solution)
    start, end = mark
    return _line_number(solution[start:end])


def _finite_number(answer: object) -> Fraction | None:
    if not isinstance(answer, Number):
        return None
    try:
        number = Decimal(str(answer))
    except InvalidOperation:
        return None
    if not number.is_finite() or abs(number.adjusted()) > MAX_EXPONENT:
        return None
    return Fraction(number)


def _compare(
    read: Callable[[str], Fraction | None],
    completions: Sequence[str | Conversation],
    answer: Sequence[object],
) -> list[float]:
    _check_list("completions", completions)
    _check_list("answer", answer)
    if len(answer) != len(completions):
        raise RewardError(
            f"len(answer) is {len(answer)} and len(completions) is {len(completions)}: pass lists "
            f"with one entry per completion."
        )
    pairs = zip(completions, _gold_numbers(answer), strict=True)
    return [float(read(last_text(completion)) == gold) for completion, gold in pairs]


def _check_list(name: str, value: object) -> None:
    """Rejects a single text or number, which a user's own call may pass."""
    if isinstance(value, str) or not isinstance(value, Sized):
        raise RewardError(
            f"{name} is {quoted(value) if isinstance(value, str) else repr(value)}: pass a list "
            f"with one entry per completion."
        )


def _marked_numbers(text: str) -> Iterator[Fraction | None]:
    """Yields the numbers in the last mark of each kind, from the latest mark in the text on."""
    marks = (
        (_last_hash_mark(text), _line_number),
        (_last_box(text), only_number),
        (_last_answer_tag(text), only_number),
    )
    found = [(span, read) for span, read in marks if span is not None]
    for (start, end), read in sorted(found, key=lambda mark: mark[0], reverse=True):
        yield read(text[start:end])


def _line_number(line: str) -> Fraction | None:
    """Reads the text after `####` as GSM8K's own script does: a number at its beginning counts."""
    number = opening_number(line)
    return only_number(line) if number is None else number


def _last_hash_mark(text: str) -> _Span | None:
    start = None
    for mark in _HASH_MARK.finditer(text):
        start = mark.end()
    if start is None:
        return None
    newline = text.find("\n", start)
    return start, len(text) if newline == -1 else newline


def _last_box(text: str) -> _Span | None:
    r"""Returns the span of the content of the closed `\boxed{}` that opens last."""
    last: _Span | None = None
    # Start of the content of each open box; None for a brace that opens no box.
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
    # Equivalent to the regex, whose time is quadratic for a text that repeats its middle. The parts
    # cannot overlap.
    opened, closed = text.startswith("<think>"), text.endswith("</answer>")
    return opened and closed and "</think>\n<answer>" in text


def _tag_score(text: str) -> float:
    return 0.25 * sum(text.count(tag) == 1 for tag in TAGS)
