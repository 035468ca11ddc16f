"""What is read from a checkpoint is what was written to it, or an error."""

import dataclasses
import random
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.checkpoint.checksums import checksums
from grpo_eqx.checkpoint.saved import OtherArraysError, SavedStep, complete_steps
from grpo_eqx.checkpoint.store import CheckpointStore
from grpo_eqx.common.errors import RunError
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.training.state import TrainState

CONFIG = Qwen2Config(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def state() -> TrainState:
    model = Qwen2.init(CONFIG, jax.random.key(0))
    return TrainState(model, optax.adam(1e-3).init(model), step=3, next_batch=5, num_tokens=70)


def shapes(state: TrainState) -> TrainState:
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: (
            x if isinstance(x, int) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
        ),
        state,
    )


def restored(saved: SavedStep, like: TrainState) -> TrainState:
    return saved.verified(saved.read(shapes(like)), shapes(like))


def test_a_state_comes_back_with_its_counters(state: TrainState, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(state, {"config": {"seed": 1}})
    assert complete_steps(tmp_path) == [3]
    saved = SavedStep(tmp_path, 3)
    assert saved.facts["config"] == {"seed": 1}
    assert eqx.tree_equal(*jax.device_get((restored(saved, state), state)))


def test_an_earlier_step_is_not_silently_left_out(state: TrainState, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(state, {})
        with pytest.raises(RunError, match="step 3 is saved there already"):
            store.save(dataclasses.replace(state, step=2), {})


def test_other_arrays_are_named(state: TrainState, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(state, {})
    other = dataclasses.replace(state, opt_state=optax.sgd(1e-3, momentum=0.9).init(state.model))
    with pytest.raises(OtherArraysError, match=r"opt_state\..* here"):
        restored(SavedStep(tmp_path, 3), other)


def test_the_newest_are_kept(state: TrainState, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, save_total_limit=2) as store:
        for step in (1, 2, 10):
            store.save(eqx.tree_at(lambda s: s.step, state, step), {})
    assert complete_steps(tmp_path) == [10, 2]


def test_so_is_the_best(state: TrainState, tmp_path: Path) -> None:
    """However old it is."""
    scores = {1: 0.1, 2: 0.9, 3: -np.inf, 4: 0.5, 5: 0.2}
    with CheckpointStore(tmp_path, save_total_limit=2, best="reward") as store:
        for step, score in scores.items():
            store.save(eqx.tree_at(lambda s: s.step, state, step), {}, score)
    assert complete_steps(tmp_path) == [5, 4, 2]
    with CheckpointStore(tmp_path, save_total_limit=2, best="reward") as store:
        store.save(eqx.tree_at(lambda s: s.step, state, 6), {}, 1.0)
    assert complete_steps(tmp_path) == [6, 5]


def test_what_an_interrupted_save_left_is_no_checkpoint_and_is_deleted(
    state: TrainState, tmp_path: Path
) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(state, {})
    left = tmp_path / "step_4.orbax-checkpoint-tmp"
    left.mkdir()
    assert complete_steps(tmp_path) == [3]
    with CheckpointStore(tmp_path) as store:
        store.save(dataclasses.replace(state, step=4), {})
    assert not left.exists()
    assert complete_steps(tmp_path) == [4, 3]


@pytest.mark.slow
def test_a_flipped_bit_is_noticed_wherever_it_matters(state: TrainState, tmp_path: Path) -> None:
    """One bit of one file at a time: what is read is equal, or nothing is."""
    with CheckpointStore(tmp_path) as store:
        store.save(state, {})
    files = [path for path in (tmp_path / "step_3").rglob("*") if path.is_file()]
    files = sorted(path for path in files if path.stat().st_size)
    chance, refused = random.Random(0), 0
    for _ in range(40):
        file = chance.choice(files)
        whole = file.read_bytes()
        spoilt, bit = bytearray(whole), chance.randrange(8 * len(whole))
        spoilt[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bytes(spoilt))
        try:
            back = restored(SavedStep(tmp_path, 3), state)
            assert eqx.tree_equal(*jax.device_get((back, state))), (file, bit)
        except AssertionError:
            raise
        except Exception:
            refused += 1
        file.write_bytes(whole)
    assert refused > 5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_a_checksum_tells_any_changed_element(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 5, 4)) * 100, dtype)
    (expected,) = checksums({"x": x}).values()
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp")))
    assert checksums({"x": split}) == {"x": expected}
    for _ in range(20):
        index = tuple(rng.integers(0, x.shape))
        assert checksums({"x": x.at[index].add(1)})["x"] != expected
    assert checksums({"x": x[::-1]})["x"] != expected


def test_truth_values_have_checksums() -> None:
    """Some optimizers keep them."""
    x = jnp.array([True, False, True])
    assert checksums({"x": x}) != checksums({"x": ~x})
