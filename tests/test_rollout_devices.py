"""Runs that sample on other devices than those that train."""

import itertools
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from grpo_eqx import Callback, Event, GRPOConfig, GRPOTrainer, Response, UserError
from grpo_eqx.common.errors import EXIT_PREEMPTED
from grpo_eqx.loop.fit_result import FitResult
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.rollout.in_flight import GroupsInFlight
from grpo_eqx.training.updater import Updater

from .noted_runs import Seen, model_of

STEPS, P, G = 4, 8, 2
AHEAD = {"max_staleness": 1, "importance_sampling_mode": "token_truncate"}


def settings_of(folder: Path, **settings: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {
        "output_dir": folder, "steps": STEPS, "prompts_per_step": P, "num_generations": G,
        "max_completion_length": 40, "seed": 7, "eval_problems": 8, "learning_rate": 1e-3,
    }  # fmt: skip
    return GRPOConfig(**{**defaults, **settings})


def fitted(folder: Path, **settings: Any) -> tuple[dict[str, list[list[int]]], FitResult]:
    """Returns the completions of each prompt, and the result of a run."""
    seen = Seen()
    result = GRPOTrainer(settings_of(folder, **settings), reward_funcs={"seen": seen}).fit()
    return seen.ids, result


@pytest.fixture(scope="module")
def same_devices(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, list[list[int]]], FitResult]:
    return fitted(tmp_path_factory.mktemp("same"))


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_devices": 4},
        {"rollout_devices": 2, "rollout_sharding": "tensor:2", "prompts_per_step": 12},
        {"rollout_devices": 6, "prompts_per_step": 12},
        {"rollout_devices": 4, "lora_rank": 4},
        {"rollout_devices": 4, "mesh": "2,1,2", "max_num_seqs": 8},
    ],
    ids=["half", "fewer", "more", "LoRA", "other mesh and slots"],
)
def test_other_devices_sample_the_same_completions(
    tmp_path: Path,
    same_devices: tuple[dict[str, list[list[int]]], FitResult],
    settings: dict[str, Any],
) -> None:
    """Token for token, and the step learns the same."""
    ids, result = fitted(tmp_path / "others", **settings)
    del settings["rollout_devices"]
    for name in ("mesh", "rollout_sharding", "max_num_seqs", "rollout_dtype"):
        settings.pop(name, None)
    if "prompts_per_step" in settings:
        settings |= {"mesh": "2,2,2"}  # which twelve prompts can be split over
    expected = fitted(tmp_path / "same", **settings) if settings else same_devices
    assert ids == expected[0]
    for metrics, of_same in zip(result.history, expected[1].history, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            np.testing.assert_allclose(metrics[name], of_same[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_without_a_change_of_weights_what_is_sampled_ahead_is_the_same(
    tmp_path: Path, max_staleness: int
) -> None:
    settings = {"learning_rate": 1e-30}
    expected, _ = fitted(tmp_path / "same", **settings)
    settings |= {**AHEAD, "max_staleness": max_staleness, "rollout_devices": 4}
    ids, result = fitted(tmp_path / "ahead", **settings)
    assert ids == expected
    ages = [metrics["staleness/max"] for metrics in result.history]
    assert ages[:2] == [0, 1]
    assert max(ages) <= max_staleness


def test_completions_of_the_next_step_are_sampled_while_a_step_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update begins when the thread that samples has got on meanwhile."""
    got_on = threading.Event()
    are_enough, call = GroupsInFlight.are_enough, Updater.__call__

    def noted(groups: GroupsInFlight, ended: Sequence[int]) -> bool:
        if threading.current_thread() is not threading.main_thread() and ended:
            got_on.set()
        return are_enough(groups, ended)

    def waiting(*arguments: Any) -> Any:
        assert got_on.wait(60)
        got_on.clear()
        return call(*arguments)

    monkeypatch.setattr(GroupsInFlight, "are_enough", noted)
    monkeypatch.setattr(Updater, "__call__", waiting)
    settings = {**AHEAD, "max_staleness": 2, "steps": 2}
    cfg = settings_of(tmp_path, rollout_devices=4, **settings)
    trainer = GRPOTrainer(cfg, callbacks=[Stop(1)])
    assert trainer.fit().stopped


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, event: Event) -> Response | None:
        return Response(stop="enough for now") if event.step == self.step else None


@pytest.mark.parametrize(
    "settings", [{"max_staleness": 1}, {"max_staleness": 2}], ids=["whole batches", "carried over"]
)
def test_a_resumed_run_ends_with_the_model_of_an_unbroken_one(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Bit for bit: what the older weights have sampled ahead is saved with the newer ones."""
    unbroken, broken = (
        settings_of(
            tmp_path / name, rollout_devices=4, steps=6, eval_steps=4, **{**AHEAD, **settings}
        )
        for name in ("unbroken", "broken")
    )
    whole = GRPOTrainer(unbroken).fit()
    first = GRPOTrainer(broken, callbacks=[Stop(3)])
    assert first.fit().stopped
    assert first.state.carried["ids"].size > 0
    result = GRPOTrainer(broken).fit()
    assert [metrics["step"] for metrics in result.history][-3:] == [4, 5, 6]
    for metrics, of_whole in zip(result.history[-3:], whole.history[-3:], strict=True):
        assert {x: y for x, y in metrics.items() if x.startswith("staleness/")} == {
            x: y for x, y in of_whole.items() if x.startswith("staleness/")
        }
    expected, found = (model_of(tmp_path / name) for name in ("unbroken", "broken"))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("max_staleness", [1, 2], ids=["whole batches", "carried over"])
def test_a_run_that_is_to_end_does_not_wait_for_what_is_sampled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    """It keeps the tokens so far where completions go on from step to step."""
    call, steps = Updater.__call__, itertools.count(1)

    def interrupted(*arguments: Any) -> Any:
        if next(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return call(*arguments)

    monkeypatch.setattr(Updater, "__call__", interrupted)
    settings = {**AHEAD, "max_staleness": max_staleness, "rollout_devices": 4, "steps": 5}
    cfg = settings_of(tmp_path, **settings)
    first = GRPOTrainer(cfg)
    with pytest.raises(SystemExit) as ended:
        first.fit()
    assert ended.value.code == EXIT_PREEMPTED
    assert first.state.step == 2
    assert ("ids" in first.state.carried) == (max_staleness == 2)
    result = GRPOTrainer(cfg).fit()
    assert [metrics["step"] for metrics in result.history] == [1, 2, 3, 4, 5]
    assert max(metrics["staleness/max"] for metrics in result.history) <= max_staleness


def test_fresh_prompts_replace_groups_that_teach_nothing(tmp_path: Path) -> None:
    settings = {"dynamic_sampling": True, "max_generation_batches": 3, "rollout_devices": 4}
    _, result = fitted(tmp_path, **AHEAD, **settings)
    batches = [x["dynamic_sampling/num_generation_batches"] for x in result.history]
    assert max(batches) > 1
    assert [x["staleness/max"] for x in result.history][1:] == [1] * (STEPS - 1)


def test_callbacks_may_evaluate_and_generate_while_the_next_step_is_sampled(tmp_path: Path) -> None:
    texts = list[list[str]]()

    class Asks(Callback):
        def on_step_end(self, event: Event) -> None:
            texts.append(list(event.run.generate(["What is 3 plus 4?"])))
            event.run.evaluate()

    settings = {"learning_rate": 1e-30, "prompts_per_step": 12, "rollout_devices": 6}
    seen = Seen()
    cfg = settings_of(tmp_path / "asks", **AHEAD, **settings)
    GRPOTrainer(cfg, reward_funcs={"seen": seen}, callbacks=[Asks()]).fit()
    assert texts == texts[:1] * STEPS
    settings |= {"rollout_devices": None, "mesh": "2,2,2"}
    assert seen.ids == fitted(tmp_path / "same", **settings)[0]


def test_weights_are_sent_once_per_update_in_the_dtype_of_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, device_put = list[int](), jax.device_put

    def counted(x: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(x, CausalLM):
            leaves = jax.tree.leaves(device_put(x, *arguments, **options))
            sent.append(sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards))
        return device_put(x, *arguments, **options)

    monkeypatch.setattr(jax, "device_put", counted)
    cfg = settings_of(tmp_path, rollout_devices=4, eval_steps=2, **AHEAD)
    trainer = GRPOTrainer(cfg)
    trainer.fit()
    weights = sum(x.nbytes for x in jax.tree.leaves(trainer.state.model))
    # Before training and after updates 1, 2 and 4: the last rollout is sampled while update 3 is
    # made, and the evaluation after update 2 reads what the next rollout does.
    assert len(sent) == STEPS
    assert all(weights <= each < 1.01 * weights for each in sent)  # norms go to each device


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_devices": 8}, "of which at least one must train: lower it"),
        (
            {"rollout_devices": 4, "prompts_per_step": 6},
            "make prompts_per_step or num_generations a multiple of 4",
        ),
    ],
    ids=["all", "batch"],
)
def test_devices_that_cannot_be_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        GRPOTrainer(settings_of(tmp_path, **settings))
