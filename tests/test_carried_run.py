"""Runs whose steps do not wait for their longest completions."""

import itertools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from grpo_eqx import Callback, Event, GRPOConfig, GRPOTrainer, Response
from grpo_eqx.common.errors import EXIT_PREEMPTED
from grpo_eqx.generation import turns
from grpo_eqx.loop.fit_result import FitResult
from grpo_eqx.rollout.in_flight import GroupsInFlight
from grpo_eqx.sharding.mesh import Device, Mesh

from .noted_runs import Seen, model_of

STEPS, P, G = 5, 8, 2


class OneDevice(Mesh):
    """The first device alone, on which any number of slots is possible."""

    def shape(self, devices: Sequence[Device]) -> tuple[int, int, int]:
        return 1, 1, 1

    def build(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
        return super().build(jax.devices()[:1])


def settings_of(folder: Path, **settings: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {
        "output_dir": folder, "steps": STEPS, "prompts_per_step": P, "num_generations": G,
        "learning_rate": 1e-30, "max_completion_length": 40, "seed": 7, "eval_problems": 8,
        "resume": "never",
    }  # fmt: skip
    return GRPOConfig(**{**defaults, **settings})


def fitted(
    folder: Path, mesh: Mesh | None = None, **settings: Any
) -> tuple[dict[str, list[list[int]]], FitResult]:
    """Runs without a change of weights; returns the completions of each prompt."""
    seen, cfg = Seen(), settings_of(folder, **settings)
    return seen.ids, GRPOTrainer(cfg, reward_funcs={"seen": seen}, mesh=mesh).fit()


def carried(folder: Path, **settings: Any) -> tuple[dict[str, list[list[int]]], FitResult]:
    return fitted(folder, importance_sampling_mode="token_truncate", **settings)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    ids, _ = fitted(tmp_path_factory.mktemp("synchronous"))
    lengths = [len(each) for group in ids.values() for each in group]
    assert len(ids) == STEPS * P
    assert max(lengths) > 2 * min(lengths)
    return ids


@pytest.mark.grid
@pytest.mark.parametrize(
    "settings",
    [
        {"max_staleness": 1},
        {"max_staleness": 1, "max_num_seqs": 5, "mesh": OneDevice()},
        {"max_staleness": 4, "max_num_seqs": 3, "mesh": OneDevice(), "carried_caches": "keep"},
        {"max_staleness": 7, "max_num_seqs": 8},
        {
            "max_staleness": 2,
            "max_num_seqs": 8,
            "carried_caches": "keep",
            "steps_per_generation": 2,
        },
    ],
    ids=["1 step", "few slots", "keep", "many steps", "keep, two updates"],
)
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_what_is_carried_over_is_what_a_synchronous_run_samples(
    tmp_path: Path,
    synchronous: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    chunk: int,
) -> None:
    """Token for token, whatever chunks, slots, staleness and order."""
    monkeypatch.setattr(turns, "MOST_STEPS", chunk)
    ids, result = carried(tmp_path, **settings)
    assert ids == synchronous
    ages = [metrics["staleness/max"] for metrics in result.history]
    assert 0 < max(ages) <= settings["max_staleness"]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_staleness": 2, "max_num_seqs": 8},
        {"max_staleness": 1, "dynamic_sampling": True, "max_generation_batches": 2},
    ],
    ids=["two steps", "dynamic sampling"],
)
def test_a_resumed_run_ends_with_the_model_of_an_unbroken_one(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Bit for bit: the completions that were not finished go on where they were."""

    class Stop(Callback):
        def on_step_end(self, event: Event) -> Response | None:
            return Response(stop="enough for now") if event.step == 3 else None

    unbroken, broken = (
        GRPOConfig(
            output_dir=tmp_path / name, steps=6, prompts_per_step=P, num_generations=G, seed=7,
            max_completion_length=40, eval_problems=8, importance_sampling_mode="token_truncate",
            learning_rate=1e-3, **settings,
        )
        for name in ("unbroken", "broken")
    )  # fmt: skip
    GRPOTrainer(unbroken).fit()
    first = GRPOTrainer(broken, callbacks=[Stop()])
    assert first.fit().stopped
    assert first.state.carried["ids"].size > 0
    result = GRPOTrainer(broken).fit()
    assert [metrics["step"] for metrics in result.history][-3:] == [4, 5, 6]
    expected, found = (model_of(tmp_path / name) for name in ("unbroken", "broken"))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("save_steps", "is_damaged"),
    [(None, False), (1, False), (1, True)],
    ids=["new checkpoint", "saved step", "damaged file"],
)
def test_a_run_that_is_to_end_keeps_the_tokens_of_the_step_that_it_is_in(
    tmp_path: Path,
    synchronous: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    save_steps: int | None,
    is_damaged: bool,
) -> None:
    are_enough, calls = GroupsInFlight.are_enough, itertools.count(1)

    def interrupted(groups: GroupsInFlight, ended: Sequence[int]) -> bool:
        is_third_step = groups._begun == 5
        if is_third_step and next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return are_enough(groups, ended)

    monkeypatch.setattr(GroupsInFlight, "are_enough", interrupted)
    seen = Seen()
    cfg = settings_of(
        tmp_path, max_staleness=2, max_num_seqs=8, importance_sampling_mode="token_truncate",
        save_steps=save_steps, save_minutes=None, resume="auto",
    )  # fmt: skip
    first = GRPOTrainer(cfg, reward_funcs={"seen": seen})
    with pytest.raises(SystemExit) as ended:
        first.fit()
    assert ended.value.code == EXIT_PREEMPTED
    drawn_later = first.state.carried["versions"] == 2
    assert drawn_later.any()
    saved = tmp_path / "checkpoints" / "step_2" / "carried.npz"
    assert saved.exists() == (save_steps is not None)
    second = GRPOTrainer(cfg, reward_funcs={"seen": seen})
    if is_damaged:
        saved.write_bytes(saved.read_bytes()[:100])
        with pytest.warns(UserWarning, match=r"carried\.npz is damaged .* is drawn again"):
            result = second.fit()
    else:
        result = second.fit()
    assert [metrics["step"] for metrics in result.history] == [1, 2, 3, 4, 5]
    assert seen.ids == synchronous
