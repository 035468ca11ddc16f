"""The largest value that fits, in few compilations."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_eqx import UserError
from grpo_eqx.planner.devices import local_target
from grpo_eqx.planner.make_plan import make_plan
from grpo_eqx.planner.search import fitting, largest_that_fits, search, settled


@given(
    values=st.lists(st.integers(1, 5000), min_size=1, unique=True).map(sorted),
    limit=st.integers(0, 6000),
    start=st.none() | st.integers(1, 5000),
)
def test_it_is_the_largest_and_nothing_is_tried_twice(values, limit, start) -> None:
    tried = []

    def fits(value):
        tried.append(value)
        return value <= limit

    expected = max((value for value in values if value <= limit), default=None)
    assert largest_that_fits(values, start, fits) == expected
    assert len(tried) == len(set(tried))


def test_few_values_are_tried() -> None:
    tried = []
    values = range(1, 1025)
    assert largest_that_fits(values, 8, lambda value: tried.append(value) or value <= 70) == 70
    assert len(tried) <= 12


@pytest.mark.slow
def test_of_micro_batches(tiny_run, with_memory, said) -> None:
    run, plenty = tiny_run(), with_memory(2**34)
    peaks = {
        size: make_plan(
            tiny_run(micro_batch_size_per_device=size), plenty, said.append, only=["update"]
        ).peak_bytes
        for size in (4, 6, 8)
    }
    assert peaks[4] < peaks[6] < peaks[8]
    found, best = search(run, with_memory(peaks[8] - 1), "micro_batch_size_per_device", said.append)
    assert (found.largest, found.most) == (6, 16)
    assert found.tried == {16: False, 8: False, 6: True, 4: True}
    assert best.cfg.micro_batch_size_per_device == 6
    assert "trying micro_batch_size_per_device 8" in said


@pytest.fixture
def growing(weighed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take a KiB for each token generated, and for each trained on at a time."""

    def generated(run) -> int:
        cfg = run.cfg
        return 1024 * cfg.prompts_per_step * cfg.num_generations * cfg.max_completion_length

    def trained(run) -> int:
        cfg = run.cfg
        size = cfg.micro_batch_size_per_device or cfg.prompts_per_step * cfg.num_generations
        return 1024 * size * cfg.max_completion_length

    plan = weighed(update=trained, generate=generated)
    monkeypatch.setattr("grpo_eqx.planner.search.make_plan", plan)
    # A config is made for each value, which takes long where types are checked.
    monkeypatch.setattr(
        "grpo_eqx.planner.search._MOST", {"num_generations": 64, "prompts_per_step": 64}
    )


@pytest.mark.slow
@pytest.mark.usefixtures("growing")
@pytest.mark.parametrize(
    ("setting", "step"),
    [("num_generations", 1), ("prompts_per_step", 1), ("max_completion_length", 128)],
)
def test_it_is_exact_over_batches_that_divide(tiny_run, with_memory, said, setting, step) -> None:
    """Of 4 prompts with 4 completions of 128 tokens; there is memory for 9 times as many."""
    run = tiny_run(micro_batch_size_per_device=2)
    found, best = search(run, with_memory(9 * 16 * 128 * 1024), setting, said.append)
    assert found.largest == 9 * getattr(run.cfg, setting)
    assert getattr(best.cfg, setting) == found.largest
    assert found.tried[found.largest + step] is False
    assert all(value % step == 0 for value in found.tried)


@pytest.mark.usefixtures("growing")
def test_micro_batches_that_are_auto_may_be_of_one(tiny_run, with_memory, said) -> None:
    run, target = tiny_run(micro_batch_size_per_device="auto"), with_memory(64 * 128 * 1024)
    found, best = search(run, target, "num_generations", said.append)
    assert found.largest == 16
    assert best.cfg.micro_batch_size_per_device == "auto"
    assert (
        settled(run, with_memory(9 * 128 * 1024), said.append).cfg
        == tiny_run(micro_batch_size_per_device=8).cfg
    )


@pytest.mark.usefixtures("growing")
def test_the_largest_there_is(tiny_run, with_memory, said) -> None:
    found, _ = search(tiny_run(), with_memory(2**40), "micro_batch_size_per_device", said.append)
    assert (found.largest, found.tried) == (16, {16: True})
    assert str(found).endswith("that fits is 16, the upper limit of the search.")


@pytest.mark.usefixtures("growing")
def test_where_nothing_fits(tiny_run, with_memory, said) -> None:
    found, best = search(tiny_run(), with_memory(1000), "micro_batch_size_per_device", said.append)
    assert found.largest is None
    assert best.cfg.micro_batch_size_per_device == 1
    assert "No micro_batch_size_per_device fits, not even the smallest, 1" in str(found)


def test_of_a_mesh_that_is_not_there(tiny_run, one_device, said) -> None:
    with pytest.raises(UserError, match="needs 4 devices"):
        search(tiny_run(mesh="4,1,1"), one_device, "num_generations", said.append)


def test_of_batches_that_nothing_divides(tiny_run, said) -> None:
    with pytest.raises(UserError, match="cannot be split evenly"):
        search(
            tiny_run(prompts_per_step=5, mesh="1,8,1"),
            local_target(jax.devices()),
            "max_completion_length",
            said.append,
        )


@pytest.mark.usefixtures("growing")
def test_auto_is_the_largest_that_fits_here(tiny_run, one_device, monkeypatch, said) -> None:
    memory = 8 * 128 * 1024
    monkeypatch.setattr("grpo_eqx.sharding.device_memory._attached_bytes", lambda devices: memory)
    run = tiny_run(micro_batch_size_per_device="auto")
    assert fitting(run, one_device.devices, said.append).cfg.micro_batch_size_per_device == 8
    assert said[-1] == "micro_batch_size_per_device auto: 8"


@pytest.mark.usefixtures("growing")
def test_auto_is_refused_where_nothing_fits(tiny_run, one_device, monkeypatch, said) -> None:
    monkeypatch.setattr("grpo_eqx.sharding.device_memory._attached_bytes", lambda devices: 1000)
    run = tiny_run(micro_batch_size_per_device="auto")
    with pytest.raises(UserError, match="is auto, and no size fits"):
        fitting(run, one_device.devices, said.append)
