"""Micro-batches: the shape of the rows that updates and scores process, known beforehand."""

import dataclasses
import math

from grpo_eqx.models.tiles import even_tile

MOST_WIDTH = 8192
"""Width beyond which a row holds no more than one completion of full length."""
_COPIES = 16
"""Least length of a row's completions over that of its prompt, as far as the group allows; bounds
what copies of prompts cost."""
_PLACES = 64
"""Completions that a row can hold, per completion of full length; short ones share its room."""


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Shape of a batch's rows, for any lengths; these decide how many micro-batches are in use."""

    most_micro_batches: int
    """Micro-batches that the batch needs if all completions have full length."""
    num_rows: int
    """Rows of a micro-batch, over all devices."""
    num_shards: int
    """Devices, or groups of them, that the rows are split over."""
    width: int
    """Tokens of a row."""
    num_scored: int
    """Tokens of completions in a row, of which log-probs are computed."""
    places: int
    """Completions in a row."""
    completion_length: int
    """Tokens of the longest completion."""

    @classmethod
    def of(
        cls,
        num_prompts: int,
        num_generations: int,
        *,
        prompt_length: int,
        completion_length: int,
        num_shards: int,
        size: int | None,
        most_tokens: int,
        multiple: int = 1,
    ) -> "RowShape":
        """Chooses the shape for batches of a run.

        **Arguments:**

        - `num_prompts`, `num_generations`: prompts of the batch, and completions of each.
        - `prompt_length`, `completion_length`: tokens of the longest prompt and completion.
        - `num_shards`: parts that rows are split into over devices.
        - `size`: completions of full length that a part processes at a time; by default as many as
          fit rows of `most_tokens` tokens, at least one.
        - `most_tokens`: tokens that a part processes at a time, where `size` is `None`.
        - `multiple`: divisor of the width.
        """
        kept = prompt_length - 1  # the last token is the first input of each completion
        full = min(num_generations, max(1, -(-_COPIES * kept // completion_length)))
        full = max(1, min(full, (MOST_WIDTH - kept) // completion_length))
        if size is not None:
            full = min(full, size)
        full = even_tile(num_generations, full)
        width = -(-(kept + full * completion_length) // multiple) * multiple
        needed = num_prompts * -(-num_generations // full)
        at_a_time = most_tokens // width if size is None else size // full
        rows = num_shards * max(1, min(at_a_time, -(-needed // num_shards)))
        return cls(
            most_micro_batches=-(-needed // rows),
            num_rows=rows,
            num_shards=num_shards,
            width=width,
            num_scored=full * completion_length,
            places=min(_PLACES * full, num_prompts * num_generations),
            completion_length=completion_length,
        )

    def least_micro_batches(self, *, num_tokens: int, num_scored: int, num_completions: int) -> int:
        """Returns a lower bound on the micro-batches that a batch needs."""
        rows = max(
            num_tokens / self.width, num_scored / self.num_scored, num_completions / self.places
        )
        return max(1, math.ceil(rows / self.num_rows))
