"""Stop conditions of a completion: an end-of-sequence token, or a string in its text.

Stop strings are matched as bytes, since a token may hold only part of one, or of a character. The
byte automaton is then tabulated for whole tokens, so that a compiled loop needs one lookup per
token.
"""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from grpo_eqx.common.errors import UserError


class Stopping(eqx.Module):
    """Automaton over a completion's tokens: state 0 is the start, the last state the end.

    A completion ends with an end-of-sequence id, or with the first token after which its text
    contains a stop string. The string may begin and end within tokens; the rest of the last token
    stays in the text.
    """

    next_state: Int[Array | np.ndarray, "S V"]
    """Next state for each state and token, in the smallest signed integer type that fits."""

    @classmethod
    def of_ids(cls, eos_ids: Sequence[int], vocab_size: int) -> "Stopping":
        """Creates an automaton that ends only at these ids."""
        return cls.of_strings(eos_ids, (), [b""] * vocab_size)

    @classmethod
    def of_strings(
        cls, eos_ids: Sequence[int], stop: Sequence[str], token_bytes: Sequence[bytes]
    ) -> "Stopping":
        """Creates an automaton that also ends at stop strings, from the bytes that each token adds.

        Raises `UserError` for an empty stop string, and for an id outside the vocabulary.
        """
        if "" in stop:
            raise UserError("a stop string is empty: every completion would end at once.")
        vocab_size = len(token_bytes)
        if outside := [i for i in eos_ids if not 0 <= i < vocab_size]:
            raise UserError(
                f"end-of-sequence id {outside[0]} is not in the vocabulary of {vocab_size} tokens."
            )
        next_state = _of_tokens(_of_bytes([string.encode() for string in stop]), token_bytes)
        next_state[:, list(eos_ids)] = len(next_state) - 1
        return cls(next_state)

    @property
    def end(self) -> int:
        """State of completions that have ended."""
        return self.next_state.shape[0] - 1

    def advance(
        self, state: Int[Array, "*batch"], tokens: Int[Array, "*batch"]
    ) -> tuple[Int[Array, "*batch"], Bool[Array, "*batch"]]:
        """Returns the int32 states after one more token each, and whether completions end there."""
        state = jnp.asarray(self.next_state)[state, tokens].astype(jnp.int32)
        return state, state == self.end


def _of_bytes(stop: Sequence[bytes]) -> Int[np.ndarray, "S 256"]:
    """Builds the automaton of Aho and Corasick (1975) over bytes, with an absorbing end state.

    Every other state is a prefix of a stop string: the longest one that the text ends with.
    """
    prefixes = {string[:n] for string in stop for n in range(len(string))} | {b""}
    live = [prefix for prefix in prefixes if not any(string in prefix for string in stop)]
    # A total order, so that every process of a run numbers the states alike.
    shortest_first = sorted(live, key=lambda prefix: (len(prefix), prefix))
    states = {prefix: state for state, prefix in enumerate(shortest_first)}
    end = len(states)
    # The smallest signed type that holds -end - 1 also holds end.
    next_state = np.zeros((end + 1, 256), np.min_scalar_type(-end - 1))
    for prefix, state in states.items():
        if prefix:
            suffixes = (prefix[n:] for n in range(1, len(prefix) + 1))
            next_state[state] = next_state[next(states[s] for s in suffixes if s in states)]
        for byte in range(256):
            text = prefix + bytes([byte])
            if text in stop:
                next_state[state, byte] = end
            elif text in states:
                next_state[state, byte] = states[text]
    next_state[end] = end
    return next_state


def _of_tokens(
    of_bytes: Int[np.ndarray, "S 256"], token_bytes: Sequence[bytes]
) -> Int[np.ndarray, "S V"]:
    """Tabulates the byte automaton for tokens: where their bytes lead from each state."""
    lengths = np.array([len(token) for token in token_bytes])
    starts = np.cumsum(lengths) - lengths
    joined = np.frombuffer(b"".join(token_bytes), np.uint8)

    def read(state: int, tokens: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Returns the states after reading each of `tokens`, which come longest first."""
        reached = np.full(len(tokens), state, of_bytes.dtype)
        position = 0
        while len(tokens := tokens[lengths[tokens] > position]):
            unread = reached[: len(tokens)]
            unread[:] = of_bytes[unread, joined[starts[tokens] + position]]
            position += 1
        return reached

    end = len(of_bytes) - 1
    next_state = np.repeat(np.arange(end + 1, dtype=of_bytes.dtype)[:, None], len(lengths), axis=1)
    tokens = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    first = joined[starts[tokens]]
    from_start = read(0, tokens)
    for state in range(end):
        next_state[state, tokens] = from_start
        # Few first bytes lead elsewhere than from the start: only their tokens are read again.
        apart = tokens[of_bytes[state, first] != of_bytes[0, first]]
        next_state[state, apart] = read(state, apart)
    return next_state
