"""Answers, held against what a run takes for a whole completion."""

from collections.abc import Sequence

import numpy as np

from grpo_eqx.generation.remote.connection import AnswerError
from grpo_eqx.generation.remote.engine import Answer, Asked
from grpo_eqx.generation.stopping import Stopping


class Ends:
    """Ends of completions, as the run's own sampler finds them."""

    def __init__(self, stopping: Stopping):
        self._next_state, self._end = np.asarray(stopping.next_state), stopping.end
        self.vocab_size = self._next_state.shape[1]

    def checked(self, asked: Asked, answer: Answer) -> Answer:
        """Returns an answer up to the token that ends it; raises `AnswerError` if it is not whole.

        Servers may look for stop strings once for several tokens.
        """
        ids, logps, reason, version = answer
        if outside := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise AnswerError(
                f"the answer has the token {outside[0]}, and the model has {self.vocab_size}"
            )
        if not 0 < len(ids) <= asked.max_tokens:
            raise AnswerError(f"the answer has {len(ids)} tokens of {asked.max_tokens}")
        length = self._length_to_end(ids)
        if length is None and not (reason == "length" and len(ids) == asked.max_tokens):
            raise AnswerError(
                f"the answer ends by {reason!r} after {len(ids)} of {asked.max_tokens} tokens, "
                f"with the token {ids[-1]}, which ends no completion of the run"
            )
        if asked.sampling.temperature is None:
            logps = [0.0] * len(ids)  # greedy tokens come from a point mass
        return Answer(ids[:length], logps[:length], "length" if length is None else "stop", version)

    def _length_to_end(self, ids: Sequence[int]) -> int | None:
        """Returns the number of tokens up to the one that ends a completion."""
        state = 0
        for number, following in enumerate(self._next_state[:, ids].T.tolist(), start=1):
            state = following[state]
            if state == self._end:
                return number
        return None
