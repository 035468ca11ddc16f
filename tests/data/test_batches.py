"""Order, padding and the policy for overlong prompts."""

import numpy as np
import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.batches import (
    PromptBatches,
    TokenizedPrompts,
    padded_length,
    prompt_widths,
)
from grpo_eqx.data.records import Records
from grpo_eqx.data.tokenizer import ChatTokenizer


class Letters:
    """A stand-in tokenizer: a token for each character, no chat template."""

    chat_template = None
    bos_token_id = None
    eos_token_id = 1
    pad_token_id = 0

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


TOKENIZER = ChatTokenizer(Letters(), plain=True)


def source(*texts: str) -> Records:
    return Records(rows=[{"question": text, "answer": "1"} for text in texts], name="letters")


def batches(*texts: str, batch_size: int = 2, max_length: int = 40, **kwargs: object):
    options = {"overlong": "error", "seed": 0, **kwargs}
    overlong, seed = options["overlong"], options["seed"]
    data = TokenizedPrompts(
        "letters", list(source(*texts)), TOKENIZER, max_length=max_length, overlong=overlong
    )
    return PromptBatches(data, batch_size=batch_size, seed=seed)


def texts_of(data: PromptBatches, step: int) -> list[str]:
    return [data.data.prompts[i].text for i in data.indices(step)]


def test_every_problem_once_per_epoch_also_where_batches_straddle_epochs() -> None:
    data = batches(*"abcde", batch_size=2)
    seen = [text for step in range(10) for text in texts_of(data, step)]
    epochs = [seen[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(epoch) == list("abcde") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize(("size", "batch_size"), [(5, 5), (5, 4), (7, 3), (9, 7), (16, 12)])
def test_no_batch_has_a_problem_twice(size: int, batch_size: int) -> None:
    data = batches(*"abcdefghijklmnop"[:size], batch_size=batch_size)
    seen = []
    for step in range(5 * size):
        indices = data.indices(step).tolist()
        assert len(set(indices)) == batch_size
        seen += indices
    epochs = np.sort(np.reshape(seen, (-1, size)), axis=1)
    assert (epochs == np.arange(size)).all()


def test_order_is_a_pure_function_of_seed_and_step() -> None:
    data, again = batches(*"abcdefgh"), batches(*"abcdefgh")
    backwards = {step: texts_of(again, step) for step in reversed(range(8))}
    for step in range(8):
        assert texts_of(data, step) == backwards[step]
    other = batches(*"abcdefgh", seed=1)
    assert [texts_of(data, s) for s in range(4)] != [texts_of(other, s) for s in range(4)]


def test_prompts_of_any_run_have_few_widths() -> None:
    assert sorted({padded_length(n, 100) for n in range(1, 101)}) == [32, 64, 100]


def test_a_second_width_is_one_that_most_batches_fit() -> None:
    """One of 100 problems is long: five of six batches of 16 are without it."""
    assert prompt_widths([10] * 99 + [100], batch_size=16) == (10, 100)
    assert prompt_widths([10] * 99 + [100], batch_size=100) == (100,)
    assert prompt_widths([95] * 99 + [100], batch_size=1) == (100,)  # would save a twentieth
    assert prompt_widths(list(range(1, 101)), batch_size=64) == (100,)
    assert prompt_widths([7], batch_size=1) == (7,)


def test_batches_have_the_narrower_width_that_they_fit() -> None:
    data = batches(*"abcdefghij", "k" * 30, batch_size=2)
    assert data.widths == (1, 30)
    for step in range(20):
        indices = data.indices(step)
        assert data.width(indices) == max(len(data.data.tokens[i]) for i in indices)


def test_over_long_prompts_follow_the_policy() -> None:
    texts = ["ab", "x" * 41, "cd"]
    with pytest.raises(
        UserError, match=r"problem 2 \('xxx.*41 tokens, and max_prompt_length is 40"
    ):
        batches(*texts)
    dropped = batches(*texts, overlong="drop")
    assert (len(dropped.data), dropped.data.num_dropped) == (2, 1)
    kept = batches("ab", "y" * 30 + "z" * 20, overlong="truncate_left")
    assert max(kept.data.tokens, key=len) == [ord("y")] * 20 + [ord("z")] * 20


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(UserError, match=r"letters: prompt 2 \(''\) has no tokens to complete"):
        batches("ab", "", "cd")


def test_nothing_usable_and_reserved_columns_are_refused() -> None:
    with pytest.raises(UserError, match=r"no usable problems \(1 overlong"):
        batches("a" * 50, overlong="drop")
    rows = Records(rows=[{"question": "a", "answer": "1", "prompts": "x"}], name="rows")
    with pytest.raises(UserError, match="rows has a column 'prompts'"):
        TokenizedPrompts("rows", list(rows), TOKENIZER, max_length=9, overlong="error")


def test_too_few_problems_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        UserError, match=r"letters has 3 problems to train on, and prompts_per_step is 4"
    ):
        batches(*"abc", batch_size=4)
    with pytest.raises(UserError, match=r"1 problems to train on \(2 overlong ones dropped\)"):
        batches("a", "b" * 50, "c" * 50, overlong="drop")
