"""What the learner has its updates count."""

import dataclasses
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.loop.learner import Learner
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models.causal_attention import BlockedAttention
from grpo_eqx.rewards import Rewards
from grpo_eqx.rollout.rollout import Rollout
from grpo_eqx.run.passes import Passes
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.training import Forward, Rows, RowShape, Scorer, TokenScores, TrainState, Updater

P, G = 4, 3
ADVANTAGES = np.arange(1.0, P * G + 1).reshape(P, G)
LENGTHS = np.array([[3, 5, 2], [4, 4, 1], [5, 2, 3], [1, 5, 4]])


def rollout(finished: np.ndarray, failed: np.ndarray | None = None) -> Rollout:
    def completion(p: int, g: int) -> Trajectory:
        return Trajectory([7, 8, 9], Address(0, p, g)).completed(
            np.arange(LENGTHS[p, g], dtype=np.int32),
            finish_reason="stop" if finished[p, g] else "length",
        )

    return Rollout(
        [Prompt("?", {})] * P,
        [[completion(p, g) for g in range(G)] for p in range(P)],
        Mock(spec=ChatTokenizer),
        rewards=Rewards.of(["correct"], np.zeros((1, P, G)), [1.0], failed),
    )


def learned(made: Rollout, scored: Any = None, **settings: Any) -> tuple[Learner, list[Rows]]:
    """The learner, and the rows of its updates."""
    cfg = dataclasses.replace(
        GRPOConfig(prompts_per_step=P, num_generations=G, max_completion_length=5), **settings
    ).resolved()
    mesh = parse_mesh("auto").build(jax.devices()[:1])
    forward = Forward(
        backend=ChunkedLoss(), mesh=mesh, dtype=jnp.dtype("float32"), remat="none",
        attention=BlockedAttention(),
    )  # fmt: skip
    whole, share = (
        RowShape.of(
            number, G, prompt_length=3, completion_length=5, num_shards=1, size=None,
            most_tokens=64,
        )
        for number in (P, P // cfg.steps_per_generation)
    )  # fmt: skip
    state, updated = Mock(spec=TrainState, model=None, reference_model=None), []

    def update(state: TrainState, rows: Rows, routes: None) -> Any:
        updated.append(rows)
        return state, {}

    updater = Mock(spec=Updater, side_effect=update)
    passes = Passes(old_policy=scored is not None, reference=False, entropies=False)
    scorer = Mock(spec=Scorer, side_effect=scored, forward=forward)
    learner = Learner(scorer, updater, whole, share, cfg, passes)
    learner.begin(state, made)
    list(learner.learn(state, made, ADVANTAGES))
    return learner, updated


def num_counted(rows: Rows) -> int:
    assert rows.counted is not None
    return int(rows.counted.sum())


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_truncated_completions_can_be_left_out(steps_per_generation: int) -> None:
    finished = np.arange(P * G).reshape(P, G) % 3 > 0
    settings = {"steps_per_generation": steps_per_generation}
    for masks, counted in ((True, LENGTHS[finished].sum()), (False, LENGTHS.sum())):
        learner, rows = learned(rollout(finished), mask_truncated_completions=masks, **settings)
        assert learner.num_counted == counted
        assert sum(num_counted(each) for each in rows) == counted
        counts = [each.counts for each in rows if each.counts is not None]
        assert sum(int(each.tokens) for each in counts) == counted
        filled = finished.sum() if masks else finished.size
        assert sum(int(each.filled_sequences) for each in counts) == filled
        per_update = [float(each.tokens_per_update) for each in counts]
        assert per_update == [counted / steps_per_generation] * steps_per_generation


def test_completions_on_which_a_reward_failed_are_left_out() -> None:
    failed = np.arange(P * G).reshape(1, P, G) == 4
    learner, (rows,) = learned(rollout(np.ones((P, G), bool), failed))
    assert learner.num_counted == num_counted(rows) == LENGTHS.sum() - LENGTHS[1, 1]


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_scores_reach_the_tokens_that_they_are_of(steps_per_generation: int) -> None:
    """Here a token's score is its id, which no two tokens share."""
    made = rollout(np.ones((P, G), bool))
    for n, each in enumerate(made.trajectories):
        each.ids[:] = 10 * (n + 1) + np.arange(len(each))

    def score(model: Any, rows: Rows, routes: None = None) -> TokenScores:
        ids = rows.targets.astype(jnp.float32)
        return TokenScores(ids, ids)

    settings = {"steps_per_generation": steps_per_generation, "num_iterations": 2}
    _, updated = learned(made, score, **settings)
    assert len(updated) == 2 * steps_per_generation
    for rows in updated:
        assert rows.old_logps is not None
        there = np.asarray(rows.targets) >= 0
        np.testing.assert_array_equal(rows.old_logps[there], rows.targets[there])
    seen = {int(i) for rows in updated for i in np.asarray(rows.targets).ravel() if i >= 0}
    assert seen == {int(i) for each in made.trajectories for i in each.ids}


@pytest.mark.parametrize("steps_per_generation", [1, 2, 4])
def test_advantages_reach_their_completions(steps_per_generation: int) -> None:
    """Here a completion's tokens are its number."""
    made = rollout(np.ones((P, G), bool))
    for n, each in enumerate(made.trajectories):
        each.ids[:] = n
    _, updated = learned(made, steps_per_generation=steps_per_generation)
    assert len(updated) == steps_per_generation
    found = dict[int, float]()
    for rows in updated:
        assert rows.advantages is not None
        for m in range(len(rows.lengths)):
            of_batch = jax.tree.map(lambda x, m=m: x[m] if x.ndim > 2 else x, rows)
            first = np.asarray(of_batch.by_completion(of_batch.targets))[..., 0]
            for place in np.argwhere(np.asarray(rows.lengths[m]) > 0).tolist():
                found[int(first[tuple(place)])] = float(rows.advantages[m][tuple(place)])
    assert found == dict(enumerate(ADVANTAGES.reshape(-1).tolist()))


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_an_advantage_counts_for_each_trajectory_of_its_sample(steps_per_generation: int) -> None:
    """Here the tokens are the number of the sample and of its trajectory, whose prompts differ."""
    made, rng = rollout(np.ones((P, G), bool)), np.random.default_rng(0)
    for n, each in enumerate(made.trajectories):
        each.ids[:] = 100 * n
        forks = [
            dataclasses.replace(each, prompt_ids=prompt).completed(
                np.full(rng.integers(1, 6), 100 * n + k, np.int32)
            )
            for k, prompt in enumerate([[7, 8, 9], [5], [5, 6]][: n % 4], 1)
        ]
        made.groups[n // G][n % G] = dataclasses.replace(each, forks=forks)

    def score(model: Any, rows: Rows, routes: None = None) -> TokenScores:
        ids = rows.targets.astype(jnp.float32)
        return TokenScores(ids, ids)

    learner, updated = learned(made, score, steps_per_generation=steps_per_generation)
    all_of = [x for each in made.trajectories for x in each.all_of_sample]
    assert learner.num_counted == sum(map(len, all_of))
    counts = [rows.counts for rows in updated if rows.counts is not None]
    assert sum(int(x.sequences) for x in counts) == len(all_of)
    assert sum(int(x.tokens) for x in counts) == learner.num_counted
    found = set[tuple[int, float, int]]()
    for rows in updated:
        assert rows.old_logps is not None
        there = np.asarray(rows.targets) >= 0
        np.testing.assert_array_equal(rows.old_logps[there], rows.targets[there])
        for m in range(len(rows.lengths)):
            of_batch = jax.tree.map(lambda x, m=m: x[m] if x.ndim > 2 else x, rows)
            first = np.asarray(of_batch.by_completion(of_batch.targets))[..., 0]
            assert rows.advantages is not None
            for place in map(tuple, np.argwhere(np.asarray(rows.lengths[m]) > 0)):
                length, advantage = (x[m][place] for x in (rows.lengths, rows.advantages))
                found.add((int(first[place]), float(advantage), int(length)))
    flat = ADVANTAGES.reshape(-1)
    assert found == {(int(x.ids[0]), float(flat[x.ids[0] // 100]), len(x)) for x in all_of}


def test_a_trajectory_that_was_cut_is_left_out_by_itself() -> None:
    """Its sample may have others that have ended."""
    made = rollout(np.ones((P, G), bool))
    each = made.groups[1][2]
    cut = dataclasses.replace(each, forks=[]).completed(
        np.arange(4, dtype=np.int32), finish_reason="length"
    )
    made.groups[1][2] = dataclasses.replace(each, forks=[cut])
    learner, _ = learned(made, mask_truncated_completions=True)
    assert learner.num_counted == LENGTHS.sum()
    assert not made.finished[1, 2]
