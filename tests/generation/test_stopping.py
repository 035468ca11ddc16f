"""A completion ends with the very token after which its text first contains a stop string."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_eqx.common.errors import UserError
from grpo_eqx.generation.stopping import Stopping


def first_end(stopping: Stopping, ids: Sequence[int]) -> int | None:
    """The place of the token with which a completion ends."""
    state = jnp.int32(0)
    for place, token in enumerate(ids):
        state, ended = stopping.advance(state, jnp.int32(token))
        if ended:
            assert int(state) == stopping.end
            return place
    return None


def expected_end(
    eos_ids: Sequence[int], stop: Sequence[str], vocab: Sequence[bytes], ids: Sequence[int]
) -> int | None:
    """The same by looking through the whole text after every token."""
    text = b""
    for place, token in enumerate(ids):
        text += vocab[token]
        if token in eos_ids or any(string.encode() in text for string in stop):
            return place
    return None


def spell(vocab: Sequence[bytes], *tokens: bytes) -> list[int]:
    return [vocab.index(token) for token in tokens]


VOCAB = [b"", b"a", b"b", b"ab", b"</", b"answer", b">", b"x</ans", b"wer>y", b"\xe2", b"\x82\xac"]


@pytest.mark.parametrize(
    ("stop", "tokens", "end"),
    [
        (["</answer>"], [b"</", b"answer", b">", b"a"], 2),
        (["</answer>"], [b"a", b"x</ans", b"wer>y", b"a"], 2),
        (["</answer>"], [b"</", b"", b"answer", b"", b">"], 4),
        (["</answer>"], [b"</", b"answer", b"a", b">"], None),
        (["b"], [b"a", b"ab"], 1),
        (["aab"], [b"a", b"a", b"a", b"b"], 3),
        (["aab", "aa"], [b"a", b"a", b"b"], 1),
        (["bab", "a"], [b"b", b"a", b"b"], 1),
        (["bab", "abaa"], [b"ab", b"ab"], 1),
        (["€"], [b"\xe2", b"a", b"\xe2", b"\x82\xac"], 3),
    ],
)
def test_a_stop_string_ends_wherever_tokens_divide_it(
    stop: list[str], tokens: list[bytes], end: int | None
) -> None:
    ids = spell(VOCAB, *tokens)
    assert first_end(Stopping.of_strings((), stop, VOCAB), ids) == end
    assert expected_end((), stop, VOCAB, ids) == end


# Tokens of any bytes: many hold parts of a character.
BYTES = sorted({*"ab€".encode()})


@given(
    stop=st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4),
    tokens=st.lists(st.lists(st.sampled_from(BYTES), max_size=5).map(bytes), max_size=8),
    eos_ids=st.sets(st.integers(0, len(BYTES) - 1), max_size=2),
    data=st.data(),
)
@settings(max_examples=150)
def test_any_strings_in_any_tokens(
    stop: list[str], tokens: list[bytes], eos_ids: set[int], data: st.DataObject
) -> None:
    vocab = [*tokens, *(bytes([byte]) for byte in BYTES)]
    stopping = Stopping.of_strings(sorted(eos_ids), stop, vocab)
    ids = data.draw(st.lists(st.integers(0, len(vocab) - 1), max_size=12))
    assert first_end(stopping, ids) == expected_end(eos_ids, stop, vocab, ids)


def test_long_tokens_and_many_completions_at_once_in_a_compiled_loop() -> None:
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(0, 5, 60).tolist(), 40, 300]
    vocab = [bytes(rng.choice(list(b"abc"), size=n).tolist()) for n in lengths]
    stop = ["abca", "bcab", "ccccc", "abcbabcb"]
    eos_ids = (3, 61)
    stopping = Stopping.of_strings(eos_ids, stop, vocab)
    ids = rng.integers(0, 60, (200, 12))
    ids[::9, 5] = 60
    ids[::10, 3] = 61

    @jax.jit
    def ends(stopping: Stopping, ids: jax.Array) -> jax.Array:
        start = jnp.zeros(len(ids), jnp.int32)
        # A bound method of a module that is traced has no hash, which `scan` needs.
        _, ended = jax.lax.scan(lambda *step: stopping.advance(*step), start, ids.T)
        return ended.T

    ended = np.asarray(ends(stopping, jnp.asarray(ids)))
    expected = [expected_end(eos_ids, stop, vocab, row) for row in ids]
    assert [int(row.argmax()) if row.any() else None for row in ended] == expected
    assert len(set(expected)) > 10
    # Once ended, a completion stays so.
    assert (np.diff(ended.astype(int), axis=1) >= 0).all()


def test_ids_alone() -> None:
    stopping = Stopping.of_ids((2, 5), vocab_size=6)
    assert first_end(stopping, [0, 1, 5, 2]) == 2
    assert first_end(stopping, [2]) == 0
    assert first_end(Stopping.of_ids((), vocab_size=6), [0, 1, 2, 3, 4, 5]) is None


def test_states_are_kept_in_as_few_bytes_as_hold_them() -> None:
    # A start, the prefixes of one string, and the end.
    for length, dtype in [(1, np.int8), (127, np.int8), (128, np.int16)]:
        stopping = Stopping.of_strings((), ["a" * length], [b"a", b"b"])
        assert stopping.next_state.dtype == dtype
        assert stopping.end == length
        assert first_end(stopping, [1] + [0] * length) == length


def test_the_state_is_int32_and_the_table_an_array_like_others() -> None:
    stopping = jax.tree.map(jnp.asarray, Stopping.of_strings((), ["ab"], VOCAB))
    tokens = jnp.array([[1, 2], [3, 0]])
    state, ended = eqx.filter_jit(stopping.advance)(jnp.zeros_like(tokens), tokens)
    assert (state.dtype, state.tolist()) == (jnp.int32, [[1, 0], [2, 0]])
    assert ended.tolist() == [[False, False], [True, False]]


def test_states_are_numbered_alike_in_every_process() -> None:
    stopping = Stopping.of_strings((), ["cx", "ax", "bx"], [b"a", b"b", b"c", b"x"])
    assert stopping.next_state.tolist() == [[1, 2, 3, 0], *[[1, 2, 3, 4]] * 3, [4, 4, 4, 4]]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="a stop string is empty"):
        Stopping.of_strings((), ["a", ""], VOCAB)
    for eos_id in (6, -1):
        with pytest.raises(UserError, match=f"id {eos_id} is not in the vocabulary of 6 tokens"):
            Stopping.of_ids((1, eos_id), vocab_size=6)
