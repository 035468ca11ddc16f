r"""What counts as a right answer to a GSM8K problem, and as a well laid out one."""

import json
import re
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from grpo_eqx.common.errors import RewardError
from grpo_eqx.rewards import RewardFunc, gsm8k
from grpo_eqx.rewards.gsm8k import answer_number, gold_number, last_number, marked_number

GSM8K_TRAIN = Path(__file__).parents[2] / "../shared/data/gsm8k/train.jsonl"
MODES: dict[str, RewardFunc] = {"flexible": gsm8k.correct, "strict": gsm8k.correct_strict}


def score(completion: str, answer: object, mode: str) -> float:
    [only] = MODES[mode](["?"], [completion], answer=[answer])
    return only


def layout_score(completion: str) -> float:
    [only] = gsm8k.format(["?"], [completion])
    return only


def tag_score(completion: str) -> float:
    [only] = gsm8k.tags(["?"], [completion])
    return only


# Where strict mode finds the answer.


@pytest.mark.parametrize(
    "text",
    [
        "6 * 12 = 72\n#### 72",
        "####72",
        "#### $72.00",
        "#### **72**",
        "#### 72 dollars\nThat took 3 steps.",
        "#### 72\r\n",
        r"\boxed{72}",
        r"\boxed {72}",
        r"So \(x = \boxed{\$72}\) after 3 steps.",
        r"\boxed{72.}",
        r"\boxed{x = 72}",
        r"\boxed{72\text{ dollars}}",
        r"\boxed{72\%}",
        r"\boxed{\textbf{72}}",
        r"\boxed{\{72\}}",
        r"a stray } and { and \boxed{72}",
        "<answer>72</answer>",
        "<think>3 steps</think>\n<answer>\n72 dollars\n</answer>",
    ],
)
def test_strict_reads_a_marked_answer(text: str) -> None:
    assert marked_number(text) == 72


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 72.",
        "### 72",
        "##### 72",
        "####\n72",
        r"\boxed 72",
        r"\boxed{72",
        r"\boxed{72\}",
        r"boxed{72}",
        "<answer>72",
        "72</answer>",
        "</answer>72<answer>",
        "<ANSWER>72</ANSWER>",
    ],
)
def test_strict_reads_nothing_else(text: str) -> None:
    assert marked_number(text) is None


@pytest.mark.parametrize(
    "content",
    ["", "none", "70 or 72", "1, 72", "72 = 72", "10-3", "5:30", "1.2.3", r"\frac{72}{0}"],
)
@pytest.mark.parametrize("mark", [r"\boxed{{{}}}", "<answer>{}</answer>"])
def test_a_mark_must_hold_exactly_one_number(mark: str, content: str) -> None:
    assert marked_number("#### 72\n" + mark.format(content)) is None


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ("1/2", "0.5"),
        (r"\frac{72}{1}", "72"),
        (r"3\frac{1}{2}", "3.5"),
        ("1e3", "1000"),
        (r"7.2\cdot 10^1", "72"),
        ("1 080", "1080"),
        ("1.000.000", "1000000"),
    ],
)
@pytest.mark.parametrize("mark", ["#### {}", r"\boxed{{{}}}", "<answer>{}</answer>"])
def test_a_mark_may_hold_any_kind_of_number(mark: str, content: str, number: str) -> None:
    for read in (marked_number, answer_number):
        assert read("#### 5\n" + mark.format(content)) == Decimal(number)


@pytest.mark.parametrize(
    "line",
    [
        "72 (that is 144/2)",
        "72 or 70",
        "72, 70",
        "72 = 6 * 12",
        "72-3",
        "72: 6 * 12",
        "72 apples.5 pears",
        "$72 of $100",
        "**72** of 100",
        r"\(72\) of 100",
    ],
)
def test_after_four_hashes_the_first_number_counts(line: str) -> None:
    for read in (marked_number, answer_number):
        assert read(f"6 * 12\n#### {line}\nThat took 3 steps.") == 72
    assert gold_number(f"6 * 12\n#### {line}") == 72


@pytest.mark.parametrize("line", ["x = 72", "about 72 apples", "it's - 72", "+72"])
def test_after_four_hashes_and_a_word_the_only_number_counts(line: str) -> None:
    assert marked_number(f"#### {line}") == 72
    assert marked_number(f"#### x = 70 or {line}") is None


@pytest.mark.parametrize(
    "line",
    [
        *("", "none", "x = 70 or 72"),
        # Ambiguous numbers, and lists without spaces.
        *("5:30", "5:30 or 72", "1.2.3", "1/2/3", "1/0"),
        *("1,2,3", "1,2345", "12345,678", "1,080,5", "1,080,0001", "1,2,345", "0,125"),
        *(r"1{,}2345", "1.080,50"),
    ],
)
def test_four_hashes_may_mark_no_number(line: str) -> None:
    assert marked_number(f"#### 72\n#### {line}") is None


# Where flexible mode finds the answer.


@pytest.mark.parametrize(
    "text",
    [
        "#### 72\nThat took 3 steps.",
        r"\boxed{72} after 3 steps",
        "<answer>72</answer> after 3 steps",
        # The last mark holds no number, one before it does.
        "#### 72\n\\boxed{x} after 3 steps",
        "<answer>72</answer> \\boxed{70 or 71} after 3 steps",
        r"\boxed{72} is #### 5:30",
        # No mark holds a number.
        "72",
        "It took 3 steps: 72",
        r"\boxed{70 or 72}",
        "<answer>70 or 72</answer>",
        "#### none\nso 72",
        r"\boxed{72",
    ],
)
def test_flexible_reads_the_marked_number_or_else_the_last(text: str) -> None:
    assert answer_number(text) == 72
    assert score(text, 72, "flexible") == 1.0


@pytest.mark.parametrize("text", ["", "none", "72 at 5:30", "#### 5:30", r"72 or \boxed{1/2/3}"])
def test_flexible_reads_no_number_where_the_last_is_ambiguous(text: str) -> None:
    assert answer_number(text) is None
    assert [score(text, gold, "flexible") for gold in (72, 30, 3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        "#### 1\n#### 72",
        r"\boxed{1} \boxed{72}",
        "<answer>1</answer><answer>72</answer>",
        "#### 1\n\\boxed{72}",
        "\\boxed{1}\n#### 72",
        "<answer>1</answer> #### 72",
        "#### 1\n<answer>72</answer>",
        r"\boxed{1} <answer>72</answer>",
        r"<answer>1</answer> \boxed{72}",
        # Nested: the inner mark starts later.
        r"<answer>\boxed{72}</answer>",
        r"<answer>6 * 12 = \boxed{72}</answer>",
        r"\boxed{1 + \boxed{72}}",
        "<answer>#### 72</answer>",
        r"#### 6 * 12 = \boxed{72}",
        "<answer>1<answer>72</answer>",
        # A mark that does not close, or does not open, is none.
        "<answer>72</answer> or 1</answer>",
        "#### 72\n\\boxed{1",
        r"\boxed{1 then \boxed{72}",
        "#### 72\n<answer>1",
    ],
)
def test_the_last_mark_of_any_kind_wins(text: str) -> None:
    assert marked_number(text) == 72


# Scoring against the gold answer.


@pytest.mark.parametrize(
    "gold",
    [
        72,
        72.0,
        Decimal("72.00"),
        Decimal("7.2E+1"),
        "72",
        " 72. ",
        "$72",
        "#### 72",
        "1 + 71\n#### 72",
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_gold_answer_is_a_number_or_a_worked_solution(gold: object, mode: str) -> None:
    assert gold_number(gold) == 72
    assert score("#### 72", gold, mode) == 1.0
    assert score("#### 71", gold, mode) == 0.0


@pytest.mark.parametrize(
    ("gold", "number"),
    [
        (0.1, "0.1"),
        (1e16, "1e16"),
        (10**40 + 1, f"{10**40 + 1}"),
        (-7, "-7"),
        ("-1,080.5", "-1080.5"),
        ("1/2", "0.5"),
        ("3 + 4\n#### 1/2", "0.5"),
        ("1 080", "1080"),
        (1e308, "1e308"),
        (5e-324, "5e-324"),
    ],
)
def test_a_gold_number_is_exact(gold: object, number: str) -> None:
    assert gold_number(gold) == Decimal(number)


@pytest.mark.parametrize(
    "gold",
    ["", "no number", "3 + 4\n#### seven", "3 + 4\n####", "1 or 2", "5:30", "1/0", "3\n#### 5:30"],
)
def test_a_gold_text_must_hold_one_number(gold: str) -> None:
    with pytest.raises(RewardError, match=rf"row 1: .*{re.escape(repr(gold))}$"):
        gsm8k.correct(["?", "?"], ["1", "1"], answer=["1", gold])


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "gold",
    [None, True, [72], 2j, Fraction(1, 2), NAN, INFINITY, Decimal(NAN), Decimal("1e999999999")],
)
def test_a_gold_object_must_be_a_finite_number(gold: object) -> None:
    with pytest.raises(RewardError, match=rf"row 1: .*{re.escape(repr(gold))}$"):
        gsm8k.correct(["?", "?"], ["1", "1"], answer=["1", gold])


def test_each_row_is_scored_against_its_own_gold_answer() -> None:
    assert gsm8k.correct(["?"] * 3, ["1", "2", ""], answer=[1, 1, 1]) == [1.0, 0.0, 0.0]
    assert gsm8k.correct(["?"] * 3, ["1", "2", "3"], answer=[3, 2, 1]) == [0.0, 1.0, 0.0]
    assert gsm8k.correct([], [], answer=[]) == []


@pytest.mark.parametrize("reward", [gsm8k.correct, gsm8k.format, gsm8k.tags])
def test_rewards_have_trls_signature(reward: Callable[..., list[float]]) -> None:
    columns = {"answer": ["5"], "completion_ids": [[1, 2]], "trainer_state": None}
    completion = "<think>2 + 3</think>\n<answer>5</answer>"
    for scores in (
        reward(["?"], [completion], **columns),
        reward(prompts=["?"], completions=[completion], **columns),
        reward(["?"], [""], **columns),
    ):
        assert [type(one) for one in scores] == [float]


# Any number, in many spellings.

SPELLINGS: tuple[Callable[[int], str], ...] = (
    lambda n: f"{n}",
    lambda n: f"{n:+}",
    lambda n: f"{n:,}",
    lambda n: f"{n}.",
    lambda n: f"{n}.00",
    lambda n: f"{n:,}.0",
    lambda n: f"{n}%",
    lambda n: rf"{n}\%",
    lambda n: f"${n:,}",
    lambda n: rf"\${n:,}",
    lambda n: f"{'-' * (n < 0)}${abs(n):,}",
    lambda n: rf"{'-' * (n < 0)}\${abs(n)}",
    lambda n: f"{n}".replace("-", "\u2212"),
    lambda n: f"{n:,}".replace(",", "{,}"),
    lambda n: f"**{n:,}**",
    lambda n: rf"{n}\text{{ dollars}}",
    lambda n: f"x = {n} apples",
)
MARKS = (
    "#### {}",
    r"\boxed{{{}}}",
    r"$\boxed{{{}}}$",
    "<answer>{}</answer>",
    "<answer>\n{}\n</answer>",
)
INTEGERS = st.integers(-(10**4), 10**4) | st.integers(-(10**40), 10**40)


@settings(deadline=None)
@given(
    n=INTEGERS,
    spell=st.sampled_from(SPELLINGS),
    before=st.sampled_from(
        ["", "The answer is ", "3 + 4 = ", "12-7\n", "(", "**Answer:** ", "1, "]
    ),
    after=st.sampled_from(["", ".", "!", " dollars.", ")", "\n", ", I think"]),
)
def test_flexible_reads_any_integer_in_any_spelling(
    n: int, spell: Callable[[int], str], before: str, after: str
) -> None:
    completion = before + spell(n) + after
    assert last_number(completion) == n
    assert score(completion, n, "flexible") == 1.0
    assert score(completion, n, "strict") == 0.0


@settings(deadline=None)
@given(
    n=INTEGERS,
    spell=st.sampled_from(SPELLINGS),
    mark=st.sampled_from(MARKS),
    before=st.sampled_from(["", "3 + 4 = ", r"\boxed{5} or ", "#### 6\n", "<answer>7</answer>"]),
    after=st.sampled_from(["", "\nThat took 3 steps", "\n5 } 6"]),
)
def test_strict_reads_any_integer_in_any_mark(
    n: int, spell: Callable[[int], str], mark: str, before: str, after: str
) -> None:
    completion = before + mark.format(spell(n)) + after
    assert marked_number(completion) == n
    assert score(completion, n, "strict") == 1.0


@settings(deadline=None)
@given(n=INTEGERS, delta=INTEGERS, spell=st.sampled_from(SPELLINGS), mark=st.sampled_from(MARKS))
@example(n=10**40, delta=1, spell=SPELLINGS[0], mark=MARKS[0])  # equal as floats
@example(n=5, delta=-10, spell=SPELLINGS[8], mark=MARKS[1])  # the same digits, the other sign
def test_any_other_integer_scores_zero(
    n: int, delta: int, spell: Callable[[int], str], mark: str
) -> None:
    assume(delta != 0)
    completion = mark.format(spell(n + delta))
    assert [score(completion, n, mode) for mode in MODES] == [0.0, 0.0]


@settings(deadline=None)
@given(
    number=st.decimals(allow_nan=False, allow_infinity=False, places=30),
    mode=st.sampled_from(sorted(MODES)),
)
def test_decimals_are_compared_exactly(number: Decimal, mode: str) -> None:
    assert score(f"#### {number:f}", number, mode) == 1.0
    assert score(f"#### {number:f}", f"{number:f}000", mode) == 1.0
    assert score(f"#### {number:f}1", number, mode) == 0.0


@settings(deadline=None)
@given(
    text=st.text(
        st.sampled_from("0159,.-+$%{}\\ \nx\u2212/:^e") | st.characters(exclude_characters="#")
    )
)
def test_any_text_is_read_without_an_error(text: str) -> None:
    marked, last = marked_number(f"<answer>{text}</answer>"), last_number(text)
    assert marked is None or marked == last
    assert answer_number(text) == last


# Layout.


@pytest.mark.parametrize(
    "text",
    [
        "<think></think>\n<answer></answer>",
        "<think>2 + 3\n= 5</think>\n<answer>5</answer>",
        "<think>\n2 + 3\n</think>\n<answer>\n5\n</answer>",
    ],
)
def test_format_rewards_the_layout(text: str) -> None:
    assert layout_score(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "<think>2 + 3</think>",
        "<answer>5</answer>",
        "<think>2 + 3</think><answer>5</answer>",
        "<think>2 + 3</think>\n\n<answer>5</answer>",
        "<think>2 + 3</think> \n<answer>5</answer>",
        "<answer>5</answer>\n<think>2 + 3</think>",
        "<think>2 + 3\n<answer>5</answer>",
        "<think>2 + 3</think>\n<answer>5",
        " <think>2 + 3</think>\n<answer>5</answer>",
        "Sure! <think>2 + 3</think>\n<answer>5</answer>",
        "<think>2 + 3</think>\n<answer>5</answer>\n",
        "<think>2 + 3</think>\n<answer>5</answer> Done.",
        "<think></think>\n</answer>",
        "<think>\n<answer></answer>",
        "<Think>2 + 3</Think>\n<Answer>5</Answer>",
    ],
)
def test_format_rewards_nothing_else(text: str) -> None:
    assert layout_score(text) == 0.0


LAYOUT = re.compile(r"<think>.*?</think>\n<answer>.*?</answer>", re.DOTALL)
PIECES = ("<think>", "</think>", "\n", "<answer>", "</answer>", "5", "</think>\n<answer>")


@settings(deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=6), wrap=st.booleans())
def test_format_is_its_pattern(pieces: list[str], wrap: bool) -> None:
    text = "".join(["<think>", *pieces, "</answer>"] if wrap else pieces)
    assert layout_score(text) == float(LAYOUT.fullmatch(text) is not None)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("", 0.0),
        ("think answer", 0.0),
        ("<think>", 0.25),
        ("</think>", 0.25),
        ("<answer>", 0.25),
        ("</answer>", 0.25),
        ("<answer>5</answer>", 0.5),
        ("<think>2 + 3<answer>5</answer>", 0.75),
        ("<think>2 + 3</think>\n<answer>5</answer>", 1.0),
        ("</answer><answer></think><think>", 1.0),
        ("<think><think>2 + 3</think>\n<answer>5</answer>", 0.75),
        ("<think>2 + 3</think>\n<answer>5</answer><answer>5</answer>", 0.5),
    ],
)
def test_tags_rewards_each_tag_that_appears_once(text: str, reward: float) -> None:
    assert tag_score(text) == reward


# Hostile completions.

NUMBER_UNITS = ("1", ",", "1,", "1,000,", ",000", "-", "1-", "$", "-$", "$ ", "1.", ".", " ", "\n")
VALUE_UNITS = (
    *("/", "1/", "1/1 ", ":1", "1:", "1e", "1e9", "e", "^", "^1", "10^", "10^{", "10^{1}", "10**"),
    *("x10^1", "2 x 10^3 ", "³", "1³", "½", "1½", "3 1/2 ", "3 1", "1 000 ", " 000", "1 111 ", "~"),
    *("1.000.", "1.111", r"\ ", r"\,", r"\frac", r"\frac{", r"\frac{1}", r"\frac{1}{1}"),
    *(r"3\frac12", r"3\frac{1}{2}"),
)
BRACE_UNITS = ("{", "}", "{}", "{,}", "\\", r"\boxed", r"\boxed ", r"\boxed{", r"\boxed{1}")
MARK_UNITS = ("#", "####", "#### 1", "####1\n", "<answer>", "</answer>", "<answer>1</answer>")
LAYOUT_UNITS = ("<think>", "</think>", "</think>\n<answer>")


@pytest.mark.parametrize(
    "unit", NUMBER_UNITS + VALUE_UNITS + BRACE_UNITS + MARK_UNITS + LAYOUT_UNITS
)
@pytest.mark.parametrize("tail", ["", "0}</answer>"])
def test_a_hostile_completion_takes_linear_time(unit: str, tail: str) -> None:
    completion = "<think>" + unit * (100_000 // len(unit)) + tail
    start = time.process_time()
    for mode in MODES:
        score(completion, 5, mode)
    layout_score(completion)
    tag_score(completion)
    # Linear time is about 0.1 s here; quadratic time would be minutes.
    assert time.process_time() - start < 1.0


# The real problems.


@pytest.fixture(scope="module")
def solutions() -> list[str]:
    if not GSM8K_TRAIN.exists():
        pytest.skip(f"the GSM8K problems are not at {GSM8K_TRAIN}")
    with GSM8K_TRAIN.open(encoding="utf-8") as lines:
        return [json.loads(line)["answer"] for line in lines]


def final_number(solution: str) -> str:
    return solution.split("#### ")[1]


def with_final_number(solution: str, number: str) -> str:
    # Without a final number the steps often end in the right one, so they go too.
    steps = solution.split("#### ")[0] if re.search("[0-9]", number) else ""
    return f"{steps}#### {number}"


def scores(completions: list[str], answer: list[str], mode: str) -> set[float]:
    return set(MODES[mode]([""] * len(completions), completions, answer=answer))


@pytest.mark.parametrize("mode", MODES)
def test_every_gsm8k_solution_is_right(solutions: list[str], mode: str) -> None:
    assert len(solutions) == 7473
    numbers = [final_number(solution) for solution in solutions]
    boxes = [rf"So \boxed{{{number}}}." for number in numbers]
    for answer in (solutions, numbers):
        assert scores(solutions, answer, mode) == {1.0}
        assert scores(boxes, answer, mode) == {1.0}


def plus_one(number: str) -> str:
    return f"{int(number) + 1:,}"


def minus_one(number: str) -> str:
    return f"{int(number) - 1}"


def digit_added(number: str) -> str:
    return f"{number}1"


def digit_dropped(number: str) -> str:
    return number[:-1]


def tenth_added(number: str) -> str:
    return f"{number}.1"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("corrupt", [plus_one, minus_one, digit_added, digit_dropped, tenth_added])
def test_every_corrupted_gsm8k_solution_is_wrong(
    solutions: list[str], corrupt: Callable[[str], str], mode: str
) -> None:
    numbers = [final_number(solution).replace(",", "") for solution in solutions]
    wrong = [
        with_final_number(solution, corrupt(number))
        for solution, number in zip(solutions, numbers, strict=True)
    ]
    assert scores(wrong, solutions, mode) == {0.0}
