"""Tokens that the model is still to read in slots, a number of them at once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from grpo_eqx.generation.turns import Readers
from grpo_eqx.sharding.arrays import shard
from grpo_eqx.sharding.rollout_layout import RolloutLayout


class _Run(NamedTuple):
    tokens: list[int]
    at_once: int


class Unread:
    """Runs of tokens by number, such as that of a completion, the first of which is read next."""

    def __init__(self, layout: RolloutLayout, num_readers: int, size_per_device: int):
        """**Arguments:**

        - `layout`: the layout of slots over devices.
        - `num_readers`: slots of each device that read at once.
        - `size_per_device`: slots of each device.
        """
        self._layout, self._size = layout, size_per_device
        self._shape = layout.num_shards, num_readers
        self._runs: dict[int, _Run] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def put(self, number: int, tokens: Sequence[int], at_once: int) -> None:
        """Has a slot read tokens, `at_once` of them at a time.

        **Arguments:**

        - `number`: number of the run, by which `take` asks for its slot.
        - `tokens`: the tokens, at least one.
        - `at_once`: one of `turn_programs.READS`.
        """
        self._runs[number] = _Run(list(tokens), at_once)

    def take(self, place: Callable[[int], tuple[int, int]]) -> tuple[Readers, dict[int, bool]]:
        """Takes the next tokens of as many runs as can be read at once.

        **Arguments:**

        - `place`: returns the device of a run's slot, and its number among those of the device.

        **Returns:** what is to be read; and by the number of each run, whether it has no more.
        """
        shape, at_once = self._shape, next(iter(self._runs.values())).at_once
        slots, resumes = np.full(shape, self._size, np.int32), np.zeros(shape, bool)
        ids, lengths = np.zeros((*shape, at_once), np.int32), np.zeros(shape, np.int32)
        number_of, are_read = [0] * len(slots), dict[int, bool]()
        for number, run in list(self._runs.items()):
            device, slot = place(number)
            if number_of[device] == shape[1] or run.at_once != at_once:
                continue
            reader = device, number_of[device]
            number_of[device] += 1
            now, later = run.tokens[:at_once], run.tokens[at_once:]
            slots[reader], lengths[reader], resumes[reader] = slot, len(now), not later
            ids[reader][: len(now)] = now
            self._runs[number] = _Run(later, at_once)
            are_read[number] = not later
        self._runs = {number: run for number, run in self._runs.items() if run.tokens}
        arrays = (
            slots.reshape(-1),
            ids.reshape(-1, 1, at_once),
            lengths.reshape(-1, 1),
            resumes.reshape(-1, 1),
        )
        by_row = self._layout.sharding(self._layout.prompts + self._layout.groups)
        return Readers(*shard(arrays, by_row)), are_read
