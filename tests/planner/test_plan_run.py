"""What is proposed where a run does not fit, fits."""

import pytest

from grpo_eqx.planner.make_plan import make_plan
from grpo_eqx.planner.plan_run import plan_run


def quiet(_: str) -> None:
    pass


@pytest.mark.slow
def test_smaller_micro_batches_for_an_update(tiny_run, with_memory) -> None:
    """Compiled, all of it."""
    smaller = tiny_run(micro_batch_size_per_device=8)
    needed = make_plan(smaller, with_memory(2**34), quiet).peak_bytes
    plan = plan_run(tiny_run(micro_batch_size_per_device=16), with_memory(needed), quiet)
    assert plan.too_large == ("update",)
    assert plan.change is not None
    assert plan.change.settings == {"micro_batch_size_per_device": 8}
    assert plan.change.plan.peak_bytes == needed
    assert "It fits with --micro-batch-size-per-device 8" in plan.verdict


@pytest.fixture
def weigh(weighed, monkeypatch: pytest.MonkeyPatch):
    """Lets programs take what a test says."""

    def use(**weigh) -> None:
        for module in ("search", "plan_run"):
            monkeypatch.setattr(f"grpo_eqx.planner.{module}.make_plan", weighed(**weigh))

    return use


def test_less_for_the_backward_pass_where_micro_batches_do_not_help(
    tiny_run, with_memory, weigh
) -> None:
    weigh(
        update=lambda run: 100 * (run.cfg.loss_backend == "dense") + 50 * (run.cfg.remat != "full")
    )
    run = tiny_run(loss_backend="dense", remat="none")
    assert plan_run(run, with_memory(60), quiet).change.settings == {
        "loss_backend": "chunked",
        "micro_batch_size_per_device": 16,
    }
    assert plan_run(run, with_memory(10), quiet).change.settings == {
        "loss_backend": "chunked",
        "remat": "full",
        "micro_batch_size_per_device": 16,
    }


def test_fewer_slots_for_decoding(tiny_run, with_memory, weigh) -> None:
    weigh(update=lambda run: 1, generate=lambda run: run.cfg.max_num_seqs or 16)
    plan = plan_run(tiny_run(), with_memory(5), quiet)
    assert plan.too_large == ("generate",)
    assert plan.change.flags == "--max-num-seqs 4"


def test_both_where_both_are_too_large(tiny_run, with_memory, weigh) -> None:
    weigh(
        update=lambda run: run.cfg.micro_batch_size_per_device,
        generate=lambda run: run.cfg.max_num_seqs or 16,
    )
    plan = plan_run(tiny_run(micro_batch_size_per_device=16), with_memory(9), quiet)
    assert plan.change.settings == {"micro_batch_size_per_device": 8, "max_num_seqs": 8}


def test_nothing_where_nothing_helps(tiny_run, with_memory, weigh) -> None:
    weigh(update=lambda run: 100, generate=lambda run: 100)
    plan = plan_run(tiny_run(), with_memory(10), quiet)
    assert not plan.fits
    assert plan.change is None
    assert "No setting that was tried makes it fit" in plan.verdict


def test_no_help_where_none_is_wanted(tiny_run, with_memory, weigh) -> None:
    weigh(update=lambda run: run.cfg.micro_batch_size_per_device)
    run = tiny_run(micro_batch_size_per_device=16)
    assert plan_run(run, with_memory(8), quiet).change is not None
    assert plan_run(run, with_memory(8), quiet, help_if_not=False).change is None


def test_micro_batches_of_the_default_size_are_made_smaller(tiny_run, with_memory, weigh) -> None:
    weigh(update=lambda run: 9 if run.cfg.micro_batch_size_per_device is None else 1)
    run, target = tiny_run(), with_memory(8)
    change = plan_run(run, target, quiet).change
    mesh = run.mesh(target.devices)
    smaller = [n for n in run.micro_batch_sizes(mesh) if n < run.micro_batch_size(mesh)]
    assert change.settings == {"micro_batch_size_per_device": smaller[-1]}
