"""Groups in flight: begun by one step, and finished by it or by a later one."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from grpo_eqx.data.batches import PromptBatches
from grpo_eqx.data.trajectory import (
    Address,
    Group,
    Trajectory,
    arrays_of,
    joined,
    with_arrays,
)


@dataclasses.dataclass
class GroupInFlight:
    """A group that no step has learned from."""

    index: int
    """Position of its prompt in the data."""
    place: int
    """Its place among the groups in flight."""
    group: Group

    @property
    def order(self) -> tuple[int, int]:
        """Batch of its prompt, and row in it: older groups come first."""
        return self.group[0].address[:2]

    @property
    def is_whole(self) -> bool:
        """Whether all of its completions have ended."""
        return all(each.finish_reason is not None for each in self.group)

    @property
    def oldest(self) -> int | None:
        """Version of the weights that drew its first token; `None` before that."""
        first = (each.versions[each.written][:1].tolist() for each in self.group)
        return min((version for each in first for version in each), default=None)


class GroupsInFlight:
    """Groups that are sampled together, of which each step takes some that are whole.

    With `S` carried steps, up to `S + 1` batches are in flight, and each has a place, which it
    keeps. A step takes `P` groups in the order in which they have become whole. It passes over one
    only where groups that would become too old need all that is left of the step.
    """

    def __init__(
        self,
        prompts: PromptBatches,
        num_generations: int,
        carried_steps: int,
        num_batches: int | None = None,
    ):
        """**Arguments:**

        - `prompts`: the order of the prompts.
        - `num_generations`: completions of a group.
        - `carried_steps`: steps by which a token may be older than the weights that its group ends
          with.
        - `num_batches`: batches that the run takes in all, if that is known.
        """
        self._prompts, self._num_generations = prompts, num_generations
        self._carried_steps, self._num_batches = carried_steps, num_batches
        self.places: list[GroupInFlight | None]
        """The groups, by their places; `None` where a step has taken one."""
        self.places = [None] * ((carried_steps + 1) * prompts.batch_size)
        self._begun = 0
        """Batches whose groups have been begun."""
        self._whole: list[int] = []
        """Places of groups that are whole, in the order in which they have become so."""
        self._ended: list[int] = []
        """Completions of each place that have ended."""
        self._deadlines: list[int] = []
        """Steps until the group of each place must be taken."""

    def begin(self, taken: int, step: int) -> None:
        """Begins new groups in free places, before `P` groups are taken once more.

        **Arguments:**

        - `taken`: how many times `P` groups have been taken.
        - `step`: the number of the step.
        """
        G, end = self._num_generations, taken + self._carried_steps + 1
        if self._num_batches is not None:
            end = min(end, self._num_batches)
        free = iter([place for place, each in enumerate(self.places) if each is None])
        for batch in range(self._begun, end):
            for row, index in enumerate(self._prompts.indices(batch)):
                tokens = self._prompts.data.tokens[index]
                group = [Trajectory(tokens, Address(batch, row, sample)) for sample in range(G)]
                place = next(free)
                self.places[place] = GroupInFlight(int(index), place, group)
        self._begun = max(self._begun, end)
        self._ended = [
            G if each is None else sum(x.finish_reason is not None for x in each.group)
            for each in self.places
        ]
        oldest = (step if x is None or x.oldest is None else x.oldest for x in self.places)
        self._deadlines = [first + self._carried_steps - step for first in oldest]

    def trajectories(self) -> list[Trajectory]:
        """Returns all completions, place by place; in places that are free, ended ones."""
        some = next(each for each in self.places if each is not None)
        nothing = Trajectory(some.group[0].prompt_ids, Address(-1, 0, 0), finish_reason="stop")
        return [
            trajectory
            for place, each in enumerate(self.places)
            for trajectory in (
                [
                    dataclasses.replace(nothing, address=Address(-1, place, sample))
                    for sample in range(self._num_generations)
                ]
                if each is None
                else each.group
            )
        ]

    def are_enough(self, ended: Sequence[int]) -> bool:
        """Notes completions that have ended, by number; returns whether `P` groups can be taken."""
        for number in ended:
            place = number // self._num_generations
            self._ended[place] += 1
            if self._ended[place] == self._num_generations:
                self._whole.append(place)
        return len(self._chosen()) == self._prompts.batch_size

    def update(self, trajectories: Sequence[Trajectory], ended: Sequence[int] = ()) -> None:
        """Replaces all completions by what they are now.

        **Arguments:**

        - `trajectories`: the completions.
        - `ended`: completions that have ended, in that order, where `are_enough` was called in
          other processes.
        """
        G = self._num_generations
        for place, each in enumerate(self.places):
            if each is not None:
                each.group = list(trajectories[place * G : (place + 1) * G])
        new = dict.fromkeys(number // G for number in reversed(ended))
        for place in [*reversed(new), *range(len(self.places))]:
            group = self.places[place]
            if group is not None and group.is_whole and place not in self._whole:
                self._whole.append(place)

    def take(self) -> list[GroupInFlight]:
        """Takes `P` groups, in the order of their places."""
        chosen, taken = self._chosen(), []
        for place in chosen:
            group = self.places[place]
            assert group is not None
            taken.append(group)
            self.places[place] = None
        self._whole = [place for place in self._whole if place not in chosen]
        return sorted(taken, key=lambda each: each.place)

    @property
    def num_waiting(self) -> int:
        """Number of groups that are whole and wait for a later step."""
        return len(self._whole)

    def _chosen(self) -> list[int]:
        """Returns the places of groups that a step can take so far.

        Of the groups that must be taken within `k` more steps, all but the `k P` that those steps
        can take must be taken now: a group that leaves no room for them is passed over.
        """
        P, chosen = self._prompts.batch_size, list[int]()
        in_time = [
            {p for p, x in enumerate(self.places) if x is not None and self._deadlines[p] <= k}
            for k in range(self._carried_steps + 1)
        ]
        for place in self._whole:
            if len(chosen) == P:
                break
            after = {*chosen, place}
            needed = max(len(due) - k * P - len(due & after) for k, due in enumerate(in_time))
            if needed <= P - len(after):
                chosen.append(place)
        return chosen

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns all that a checkpoint must hold of the groups, but for arrays that are empty."""
        return {name: x for name, x in self._arrays().items() if x.size}

    def _arrays(self) -> dict[str, np.ndarray]:
        groups = [(place, x) for place, x in enumerate(self.places) if x is not None]
        each = [trajectory for _, x in groups for trajectory in x.group]
        return {
            "places": np.array([place for place, _ in groups], np.int32),
            "indices": np.array([x.index for _, x in groups], np.int32),
            "orders": np.array([x.order for _, x in groups], np.int32).reshape(-1, 2),
            "whole": np.array(self._whole, np.int32),
            "begun": np.array([self._begun], np.int32),
            **arrays_of(each),
        }

    def restore(self, arrays: Mapping[str, np.ndarray], *, restarts: bool = False) -> None:
        """Restores the groups from `arrays`, or none where they are empty.

        **Arguments:**

        - `arrays`: the arrays.
        - `restarts`: whether completions begin anew, as where they act in environments.
        """
        nothing = GroupsInFlight(self._prompts, 0, self._carried_steps)._arrays()
        G, arrays = self._num_generations, {**nothing, **arrays}
        self._begun = int(arrays["begun"][0])
        self.places = [None] * len(self.places)
        indices = arrays["indices"].tolist()
        trajectories = [
            Trajectory(self._prompts.data.tokens[index], Address(batch, row, sample))
            for index, (batch, row) in zip(indices, arrays["orders"].tolist(), strict=True)
            for sample in range(G)
        ]
        if not restarts:
            trajectories = with_arrays(trajectories, arrays)
        for number, (place, index) in enumerate(
            zip(arrays["places"].tolist(), indices, strict=True)
        ):
            group = trajectories[number * G : (number + 1) * G]
            self.places[place] = GroupInFlight(index, place, group)
        self._whole = [] if restarts else arrays["whole"].tolist()


def staleness_of(groups: Iterable[Group], step: int) -> Int[np.ndarray, " tokens"]:
    """Returns how many steps older each token is that the model wrote than the step."""
    return step - joined((each.versions[each.written] for x in groups for each in x), np.int32)
