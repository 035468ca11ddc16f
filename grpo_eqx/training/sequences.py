"""Sequences: what rows hold of a batch, each a prompt with a completion of its own."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from grpo_eqx.data.trajectory import Group, Trajectory


class Sequences(NamedTuple):
    """All trajectories of a batch, those with one prompt together."""

    groups: list[Group]
    samples: list[int]
    """The sample that each is of, by its number in the batch."""

    def with_samples(self) -> Iterator[tuple[Trajectory, int]]:
        """Yields each trajectory with the number of its sample."""
        return zip(itertools.chain.from_iterable(self.groups), self.samples, strict=True)


def sequences_of(groups: Sequence[Group]) -> Sequences:
    """Returns the trajectories of all samples, forks included.

    **Arguments:**

    - `groups`: the samples of each prompt, as many of each.
    """
    found, samples, number = list[Group](), list[int](), 0
    for group in groups:
        # Agents may have had another prompt in each of the samples, and in each fork.
        by_prompt = dict[tuple[int, ...], list[tuple[Trajectory, int]]]()
        for sample in group:
            for each in sample.all_of_sample:
                by_prompt.setdefault(tuple(each.prompt_ids), []).append((each, number))
            number += 1
        for members in by_prompt.values():
            found.append([each for each, _ in members])
            samples += [sample for _, sample in members]
    return Sequences(found, samples)
