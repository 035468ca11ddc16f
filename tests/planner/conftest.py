"""A run that compiles in seconds, on one device whose memory a test chooses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.models.causal_attention import BlockSizes
from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.planner import Plan, PlannedProgram
from grpo_eqx.planner.compiled_program import CompiledProgram
from grpo_eqx.planner.devices import Target, local_target
from grpo_eqx.planner.make_plan import SETTINGS, TRAINING, Say
from grpo_eqx.planner.trips import Decoding, MicroBatches
from grpo_eqx.planner.work import Level, Work
from grpo_eqx.run.prompt_lengths import PromptLengths
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.tracking.device_peaks import DevicePeaks
from grpo_eqx.training.micro_batches import RowShape

TINY = Qwen2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)

_DEFAULTS = GRPOConfig().resolved()


@pytest.fixture(autouse=True)
def _compiled_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests share what they compile, also over processes: equal programs have equal figures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp().parent / "plans"))


@pytest.fixture
def tiny_run() -> Callable[..., RunSpec]:
    """Makes a run of the tiny model with other settings."""

    def make(**settings: Any) -> RunSpec:
        small = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 128}
        cfg = GRPOConfig(**{**small, "eval_problems": 4, **settings}).resolved()
        return RunSpec(cfg, TINY, PromptLengths(16, 16, num_heldout=4, num_train=8192))

    return make


@pytest.fixture
def one_device() -> Target:
    """A CPU device of this machine."""
    return local_target(jax.devices()[:1])


@pytest.fixture
def with_memory(one_device: Target) -> Callable[[int], Target]:
    """The same device with so many bytes."""
    return lambda num_bytes: dataclasses.replace(one_device, usable_bytes=num_bytes)


@pytest.fixture
def weighed() -> Callable[..., Callable[..., Plan]]:
    """Makes a planner that compiles nothing: programs take what is said of a run."""

    def make(**weigh: Callable[[RunSpec], int]) -> Callable[..., Plan]:
        def plan(
            run: RunSpec,
            target: Target,
            say: Say,
            *,
            only: Any = TRAINING,
            stop_early: bool = False,
        ) -> Plan:
            run.mesh(target.devices)
            return plan_of({name: f(run) for name, f in weigh.items() if name in only}, target)

        return plan

    return make


@pytest.fixture(name="plan_of")
def _plan_of() -> Callable[..., Plan]:
    return plan_of


def plan_of(peaks: dict[str, int], target: Target, **fields: Any) -> Plan:
    """A plan of programs that need so many bytes each, and half a second or a little more."""
    work = Level((), Work(1e12, 1e10))
    rows = RowShape(4, 1, 1, width=271, num_scored=256, places=16, completion_length=256)
    decoding = Decoding(
        num_completions=16, num_slots=16, num_shards=1, max_length=48, prompt_length=16,
        attention_blocks=BlockSizes(16, 16), cache_parts=1,
    )  # fmt: skip
    micro_batches = MicroBatches(
        rows=rows,
        num_prompts=2,
        num_generations=8,
        prompt_length=16,
        attention_blocks=BlockSizes(16, 16),
    )
    programs = {
        name: PlannedProgram(
            compiled=CompiledProgram(
                peak, peak, 0, 0, 0, accepted=True, seconds=1.0, levels=(work,)
            ),
            elsewhere_bytes=0,
            runs=int(name != "evaluate"),
            trips=decoding if name in ("generate", "evaluate") else micro_batches,
        )
        for name, peak in peaks.items()
    }
    return Plan(
        topology=target.name,
        device_kind=target.device_kind,
        num_devices=1,
        num_hosts=1,
        model="tiny",
        mesh={"dp": 1, "fsdp": 1, "tp": 1},
        rollout_sharding="legacy",
        rollout_devices=0,
        settings={name: getattr(_DEFAULTS, name) for name in SETTINGS},
        micro_batch_size=2,
        rows=rows,
        prompt_length=16,
        prompt_length_known=True,
        hbm_bytes=target.usable_bytes,
        resident={"parameters": 1, "optimizer_state": 2, "reference_model": 0},
        programs=programs,
        peaks=DevicePeaks(2e12, 1e11),
        **fields,
    )


@pytest.fixture
def said() -> list[str]:
    """What a test's planner says; pass its `append`."""
    return []
