"""Completions of several turns are those of a sampler that decodes one sequence at a time."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.data.trajectory import Trajectory
from grpo_eqx.generation import Stopping
from grpo_eqx.generation.cpu import CpuDecoding
from grpo_eqx.generation.sampler import Responder
from grpo_eqx.models.decoder import Decoder
from grpo_eqx.models.kv_cache import CACHE_BLOCK
from grpo_eqx.sharding import ExplicitMesh
from grpo_eqx.sharding.arrays import shapes_of
from grpo_eqx.training.compilation import CompilationCounter

from .scripted_dialogues import (
    CONFIGS,
    EOS,
    ONE_DEVICE,
    SAMPLING,
    VOCAB,
    G,
    P,
    check_same,
    one_at_a_time,
    reply,
    sampler,
    trajectories,
)  # fmt: skip


class Scripted(Responder):
    """Replies when it likes: at once, in another order, or when it has to."""

    def __init__(self, seed: int | None = None) -> None:
        self.rng = None if seed is None else random.Random(seed)
        self.turns = [0] * (P * G)
        self.asked: list[int] = []

    def take(self, number: int, trajectory: Trajectory) -> None:
        assert trajectory.ids[-1] in EOS
        assert trajectory.written[-1]
        self.asked.append(number)

    def replies(self, wait: bool) -> Sequence[tuple[int, Sequence[int] | None]]:
        ready = list(self.asked)
        if self.rng is not None:
            self.rng.shuffle(ready)
            ready = ready[: self.rng.randint(int(wait), len(ready))]
        self.asked = [number for number in self.asked if number not in ready]
        return list(self._replied(ready))

    def _replied(self, numbers: list[int]) -> Iterator[tuple[int, list[int] | None]]:
        for number in numbers:
            self.turns[number] += 1
            yield number, reply(number, self.turns[number])


def sampled(
    model: Decoder,
    seed: int | None = None,
    mesh: ExplicitMesh | None = None,
    num_prompts: int = P,
    **options: Any,
) -> list[Trajectory]:
    made = sampler(mesh, **options)
    made.set_weights(jax.device_put(model, model.shardings(made.mesh)), 7)
    prompts = trajectories()[: num_prompts * G]
    return made.submit(prompts, responder=Scripted(seed)).result().trajectories


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return Decoder.init(CONFIGS[request.param], jax.random.key(0), std=0.3)


@pytest.fixture(scope="module")
def expected(model: Decoder) -> list[Trajectory]:
    made = one_at_a_time(model)
    assert {each.finish_reason for each in made} == {"stop", "length"}
    assert max(np.diff(each.written).sum() for each in made) >= 4
    return made


@pytest.mark.grid
@pytest.mark.parametrize("form", [None, CpuDecoding()], ids=["as_stored", "cpu"])
@pytest.mark.parametrize("slots", [None, 8])
@pytest.mark.parametrize(
    "mesh",
    [ONE_DEVICE, ExplicitMesh(dp=2, fsdp=2, tp=2), ExplicitMesh(dp=2, fsdp=2, tp=1)],
    ids=["one device", "2,2,2", "2,2,1"],
)
def test_they_are_those_of_one_sequence_at_a_time(
    model: Decoder,
    expected: list[Trajectory],
    mesh: ExplicitMesh,
    slots: int | None,
    form: CpuDecoding | None,
) -> None:
    found = sampled(model, None, mesh, max_num_seqs=slots, decoding_form=form)
    check_same(found, expected, 1e-4)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": jnp.dtype("int8")},
        {"rollout_dtype": jnp.dtype("int8"), "max_num_seqs": 8},
        {"max_completion_length": 3 * CACHE_BLOCK, "stopping": Stopping.of_ids((3,), VOCAB)},
        {"max_completion_length": 2 * CACHE_BLOCK + 3, "decoding_form": CpuDecoding()},
        {"mesh": ExplicitMesh(dp=2, fsdp=2, tp=2), "max_num_seqs": 8},
        {"mesh": ExplicitMesh(dp=2, fsdp=1, tp=2), "max_num_seqs": 8},
    ],
    ids=["int8 cache", "int8 weights", "long", "parts", "devices", "slots of a device"],
)
def test_with_other_options_too_it_does_not_matter_when_replies_come(
    options: dict[str, Any],
) -> None:
    model = Decoder.init(CONFIGS["qwen2"], jax.random.key(0), std=0.3)
    check_same(sampled(model, 1, **options), sampled(model, None, **options), 0)


def test_slots_are_refilled_before_it_waits(model: Decoder) -> None:
    """No device is idle while a completion could have a slot. Here, each token ends a turn."""

    class Slow(Scripted):
        def take(self, number: int, trajectory: Trajectory) -> None:
            self.asked.append(number)

        def replies(self, wait: bool) -> Sequence[tuple[int, Sequence[int] | None]]:
            if not wait:
                return []
            assert len(self.asked) == 8
            numbers, self.asked = self.asked, []
            return [(number, None) for number in numbers]

    made = sampler(max_num_seqs=8, stopping=Stopping.of_ids(range(VOCAB), VOCAB))
    made.set_weights(model, 0)
    made.submit(trajectories(), responder=Slow()).result()


@pytest.mark.parametrize("slots", [None, 8])
def test_when_replies_come_changes_nothing(
    model: Decoder, expected: list[Trajectory], slots: int | None
) -> None:
    at_once = sampled(model, None, max_num_seqs=slots)
    for seed in range(3):
        check_same(sampled(model, seed, max_num_seqs=slots), at_once, 0)


def test_tokens_carry_the_version_of_the_weights_that_drew_them() -> None:
    model, made = Decoder.init(CONFIGS["qwen2"], jax.random.key(0), std=0.3), sampler()
    for version in (7, 8):
        made.set_weights(model, version)
        prompts = [Trajectory(each.prompt_ids, each.address) for each in trajectories()]
        for each in made.submit(prompts).result().trajectories:
            assert each.versions.tolist() == [version] * len(each)


def test_devices_that_share_the_completions_of_a_prompt_change_nothing() -> None:
    """Four prompts on eight devices: each has one completion of a prompt."""
    model = Decoder.init(CONFIGS["qwen2"], jax.random.key(0), std=0.3)
    found = sampled(model, 1, ExplicitMesh(dp=2, fsdp=2, tp=2), num_prompts=4)
    check_same(found, sampled(model, num_prompts=4), 1e-4)


@pytest.mark.grid
@pytest.mark.parametrize("form", [None, CpuDecoding()], ids=["as_stored", "cpu"])
@pytest.mark.parametrize("slots", [None, 8])
@pytest.mark.parametrize(
    "mesh", [ONE_DEVICE, ExplicitMesh(dp=2, fsdp=2, tp=2)], ids=["one device", "2,2,2"]
)
def test_it_calls_the_programs_that_are_compiled_from_shapes(
    mesh: ExplicitMesh, slots: int | None, form: CpuDecoding | None
) -> None:
    model = Decoder.init(CONFIGS["qwen2"], jax.random.key(0), std=0.3)
    sampled(model, None, mesh, max_num_seqs=slots, decoding_form=form)  # and what the host calls
    made = sampler(mesh, max_num_seqs=slots, decoding_form=form)
    on_devices = jax.device_put(model, model.shardings(made.mesh))
    shapes = shapes_of(model, model.shardings(made.mesh))
    names = []
    for program in made.turns(P, G).to_compile(shapes, 9, SAMPLING):
        names.append(program.key.program)
        program.lower().compile()
    assert names == [
        "weights",
        "prefill",
        "slots",
        "decode",
        "extend",
        *["admit"] * (slots is not None),
    ]
    made.set_weights(on_devices, 7)
    counter = CompilationCounter()
    made.submit(trajectories(), responder=Scripted()).result()
    assert counter.metrics()["compile/num_programs"] == 0
