"""Which groups a step takes of those in flight, and when it waits."""

import dataclasses
import random
from collections.abc import Mapping

import numpy as np
import pytest

from grpo_eqx.data.batches import PromptBatches, TokenizedPrompts
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.models.pretrained import model_folder
from grpo_eqx.rollout.in_flight import GroupInFlight, GroupsInFlight, staleness_of

P, G = 4, 2


@pytest.fixture(scope="module")
def prompts() -> PromptBatches:
    tokenizer = ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))
    problems = [Prompt(f"What is {i} and {i}?", {}) for i in range(400)]
    data = TokenizedPrompts("problems", problems, tokenizer, max_length=64, overlong="error")
    return PromptBatches(data, batch_size=P, seed=0)


class Decoding:
    """A sampler that draws a token a time for every completion, until their lengths."""

    def __init__(self, groups: GroupsInFlight, lengths: Mapping[tuple[int, int, int], int]):
        self.groups, self.lengths = groups, lengths

    def step(self, number: int) -> list[GroupInFlight]:
        self.groups.begin(number, number)
        each = self.groups.trajectories()
        ended: list[int] = []
        while not self.groups.are_enough(ended):
            ended = []
            for n, trajectory in enumerate(each):
                if trajectory.finish_reason is None:
                    longer = trajectory.extended([7], np.zeros(1), version=number)
                    if len(longer) == self.lengths[trajectory.address]:
                        longer = dataclasses.replace(longer, finish_reason="stop")
                        ended.append(n)
                    each[n] = longer
        self.groups.update(each)
        return self.groups.take()


class Lengths(dict[tuple[int, int, int], int]):
    """Lengths with a long tail."""

    def __missing__(self, address: tuple[int, int, int]) -> int:
        rng = random.Random(f"{self['seed', 0, 0]} {address}")
        return min(200, 1 + int(rng.paretovariate(0.7)))


@pytest.mark.parametrize("staleness", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_no_token_is_too_old_no_group_is_lost_and_none_is_taken_twice(
    prompts: PromptBatches, staleness: int, seed: int
) -> None:
    steps = 30
    groups = GroupsInFlight(prompts, G, staleness, steps)
    decoding = Decoding(groups, Lengths({("seed", 0, 0): seed}))
    taken: list[tuple[int, int]] = []
    ages = []
    for step in range(steps):
        made = decoding.step(step)
        assert len(made) == P
        assert [x.place for x in made] == sorted(x.place for x in made)
        assert all(x.is_whole for x in made)
        ages.append(staleness_of((x.group for x in made), step).max())
        taken += [x.order for x in made]
    assert sorted(taken) == [(batch, row) for batch in range(steps) for row in range(P)]
    assert 0 < max(ages) <= staleness


def test_a_long_completion_is_waited_for_only_when_it_must_be(prompts: PromptBatches) -> None:
    long = {(0, 1, 0): 35}
    groups = GroupsInFlight(prompts, G, 2)
    decoding = Decoding(
        groups, {**{(b, r, s): 10 for b in range(9) for r in range(P) for s in range(G)}, **long}
    )
    orders = [sorted(x.order for x in decoding.step(step)) for step in range(3)]
    # All batches in flight are drawn together; the first ones in the order of their prompts.
    assert orders[0] == [(0, 0), (0, 2), (0, 3), (1, 0)]
    assert (0, 1) not in orders[1]
    assert (0, 1) in orders[2]


def test_they_are_restored_from_the_arrays_of_a_checkpoint(prompts: PromptBatches) -> None:
    lengths, steps = Lengths({("seed", 0, 0): 3}), 12
    unbroken, broken = (GroupsInFlight(prompts, G, 3, steps) for _ in range(2))
    expected, found = Decoding(unbroken, lengths), Decoding(broken, lengths)
    for step in range(steps):
        groups = found.groups = GroupsInFlight(prompts, G, 3, steps)
        if step:
            groups.restore(arrays)
        one, other = expected.step(step), found.step(step)
        arrays = groups.arrays()
        assert all(x.size for x in arrays.values())
        for mine, its in zip(one, other, strict=True):
            assert (mine.index, mine.order) == (its.index, its.order)
            for a, b in zip(mine.group, its.group, strict=True):
                assert (a.address, a.finish_reason) == (b.address, b.finish_reason)
                assert a.versions.tolist() == b.versions.tolist()
    assert set(arrays) == {"begun"}  # nothing is begun that no step will take
