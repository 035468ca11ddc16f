"""The rollout: what it returns, and that nothing about the batch changes it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.common.random_keys import gumbel, sample_keys
from grpo_eqx.generation import Sampling, SlotCounts, Stopping, generate
from grpo_eqx.generation.cpu import CpuDecoding
from grpo_eqx.generation.engine import Generated, _sizes
from grpo_eqx.generation.sampling import GREEDY
from grpo_eqx.generation.slots import Slots
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.kv_cache import CACHE_BLOCK, StoredKV
from grpo_eqx.models.prompt_cache import PromptCache
from grpo_eqx.sharding import ExplicitMesh, RolloutLayout

CONFIG = Qwen2Config(
    vocab_size=29,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
MODEL = Qwen2.init(CONFIG, jax.random.key(0), std=0.3)
EOS = 3
STOPPING = Stopping.of_ids([EOS], CONFIG.vocab_size)
LENGTHS = np.array([7, 4, 1])


def prompts(width: int = 7, side: str = "right") -> tuple[jax.Array, jax.Array]:
    """Three prompts of different lengths, padded on one side with tokens that mean something."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(4, 29, size=length) for length in LENGTHS]
    ids, mask = rng.integers(29, size=(3, width)), np.zeros((3, width), bool)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = row, True
    return jnp.asarray(ids, jnp.int32), jnp.asarray(mask)


FORMS = {False: None, True: CpuDecoding()}
"""Forms of decoding, by whether layers are unrolled, as on CPUs."""


@functools.partial(
    jax.jit,
    static_argnames=(
        "sampling", "group", "max_length", "num_slots", "refill_at", "layout", "kv_cache_dtype",
        "kv_head_multiple", "decoding_form",
    ),
)  # fmt: skip
def _run(
    model: Qwen2, ids: jax.Array, mask: jax.Array, stopping: Stopping, *, sampling: Sampling,
    group: int, max_length: int, **options: Any,
) -> Generated:  # fmt: skip
    keys = sample_keys(0, jnp.int32(5), jnp.arange(len(ids)), group)
    return generate(
        model, ids, mask, keys,
        sampling=sampling, max_length=max_length, stopping=stopping, **options,
    )  # fmt: skip


class Drawn(NamedTuple):
    """Prompts, and completions without what follows their ends."""

    prompt_ids: np.ndarray
    prompt_mask: np.ndarray
    ids: np.ndarray
    mask: np.ndarray
    logps: np.ndarray
    finished: np.ndarray
    lengths: np.ndarray


def run_counted(
    ids: jax.Array,
    mask: jax.Array,
    sampling: Sampling = Sampling(),  # noqa: B008 - immutable
    group: int = 4,
    max_length: int = 12,
    stopping: Stopping = STOPPING,
    **options: Any,
) -> tuple[Drawn, SlotCounts]:
    """Generates with a program that equal shapes and options share."""
    made = _run(
        MODEL, ids, mask, stopping, sampling=sampling, group=group, max_length=max_length, **options
    )
    own = np.arange(max_length) < np.asarray(made.lengths)[..., None]
    drawn = Drawn(
        np.asarray(ids), np.asarray(mask), np.where(own, made.ids, 0), own,
        np.where(own, made.logps, 0.0), np.asarray(made.finished), np.asarray(made.lengths),
    )  # fmt: skip
    return drawn, made.counts


def shards(number: int) -> RolloutLayout:
    """Prompts split over so many devices."""
    return RolloutLayout(ExplicitMesh(dp=number).build(jax.devices()[:number]), ("dp",), (), "")


def run(*args: Any, **kwargs: Any) -> Drawn:
    return run_counted(*args, **kwargs)[0]


def test_completions_end_with_their_eos() -> None:
    rollout = run(*prompts(), stopping=Stopping.of_ids([EOS, 5, 6], CONFIG.vocab_size))
    ids, lengths = np.asarray(rollout.ids), np.asarray(rollout.lengths)
    finished = np.asarray(rollout.finished)
    assert finished.any()
    for p, g in np.ndindex(lengths.shape):
        row, length = ids[p, g], lengths[p, g]
        assert not np.isin(row[: length - 1], (EOS, 5, 6)).any()
        assert np.isin(row[length - 1], (EOS, 5, 6)) == finished[p, g]
        assert finished[p, g] or length == 12


def test_slots_that_cannot_be_are_refused() -> None:
    for options in ({"num_slots": 0}, {"num_slots": 4, "layout": shards(3)}, {"refill_at": -1}):
        with pytest.raises(ValueError, match="slots, "):
            run(*prompts(), **options)


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("side", ["left", "right"])
def test_sampler_logps_are_the_trainers(temperature: float, side: str) -> None:
    """The decode loop and the training pass read the same model: log-probs agree to 1e-4."""
    check_logps(run(*prompts(width=11, side=side), Sampling(temperature=temperature)), temperature)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [False, True], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("num_slots", [None, 5])
def test_so_they_are_beyond_a_block_of_the_cache(num_slots: int | None, unrolled: bool) -> None:
    endless = Stopping.of_ids([], CONFIG.vocab_size)
    ids, mask = prompts()
    slots = {"num_slots": num_slots, "decoding_form": FORMS[unrolled]}
    rollout = run(ids, mask, max_length=2 * CACHE_BLOCK + 9, stopping=endless, **slots)
    assert (rollout.lengths == 2 * CACHE_BLOCK + 9).all()
    check_logps(rollout, 1.0)


def trainers_logps(rollout: Drawn, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of each prompt's completions, as sequences of their own."""
    found = []
    for p, ids in enumerate(rollout.ids):
        prompt = rollout.prompt_ids[p][rollout.prompt_mask[p]]
        both = jnp.concatenate([jnp.tile(prompt, (len(ids), 1)), ids], axis=1)
        logits = jax.jit(Qwen2.logits)(MODEL, both)[:, len(prompt) - 1 : -1]
        logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
        found.append(jnp.take_along_axis(logprobs, ids[..., None], axis=-1)[..., 0])
    return np.stack(found)


def check_logps(rollout: Drawn, temperature: float) -> None:
    trainers = trainers_logps(rollout, temperature)
    mask = np.asarray(rollout.mask)
    np.testing.assert_allclose(rollout.logps[mask], trainers[mask], atol=1e-4)


def test_padding_of_prompts_changes_nothing() -> None:
    first = run(*prompts())
    for width, side in [(16, "right"), (7, "left"), (20, "left")]:
        other = run(*prompts(width, side))
        assert (first.ids == other.ids).all()
        np.testing.assert_allclose(first.logps, other.logps, atol=1e-5)


def test_a_sample_is_the_same_alone_and_in_a_larger_group_or_batch() -> None:
    ids, mask = prompts()
    full = run(ids, mask, group=4)
    assert (run(ids, mask, group=2).ids == full.ids[:, :2]).all()
    assert (run(ids[:1], mask[:1]).ids == full.ids[:1]).all()


def test_samples_differ_between_prompts_samples_and_steps() -> None:
    keys = [sample_keys(0, jnp.int32(step), jnp.arange(3), 4) for step in (0, 1)]
    data = np.concatenate([np.asarray(jax.random.key_data(k)).reshape(-1, 2) for k in keys])
    assert len(np.unique(data, axis=0)) == 24
    other_seed = sample_keys(1, jnp.int32(0), jnp.arange(3), 4)
    assert not (jax.random.key_data(other_seed) == jax.random.key_data(keys[0])).all()


def test_a_longer_limit_only_continues() -> None:
    short, long = run(*prompts(), max_length=6), run(*prompts(), max_length=12)
    mask = np.asarray(short.mask)
    assert (short.ids[mask] == long.ids[..., :6][mask]).all()


def test_greedy_needs_no_keys_and_repeats_within_a_group() -> None:
    ids = np.asarray(run(*prompts(), GREEDY).ids)
    assert (ids == ids[:, :1]).all()


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_slots", "refill_at"), [(1, None), (3, 1), (3, 3), (8, None), (8, 8), (20, 5), (100, None)]
)
@pytest.mark.parametrize("unrolled", [False, True], ids=["scanned", "unrolled"])
def test_slots_change_nothing(num_slots: int, refill_at: int | None, unrolled: bool) -> None:
    """However few they are, whenever they are refilled, and however layers are run."""
    every = {"group": 8, "max_length": 150}
    expected = run(*prompts(), **every)
    lengths = np.asarray(expected.lengths)
    assert lengths.max() > 100
    assert lengths.min() < 10
    slots = {"num_slots": num_slots, "refill_at": refill_at, "decoding_form": FORMS[unrolled]}
    found = run(*prompts(), **every, **slots)
    for name in ("ids", "mask", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    # Products of other shapes sum in another order: rounding, which a row's cache passes on.
    difference = np.asarray(found.logps) - np.asarray(expected.logps)
    assert np.sqrt(np.mean(difference[np.asarray(expected.mask)] ** 2)) < 1e-5
    assert np.abs(difference).max() < 1e-4


@pytest.mark.grid
@pytest.mark.parametrize(
    ("num_shards", "num_slots", "unrolled"),
    [
        (3, 6, False),
        pytest.param(3, 6, True, marks=pytest.mark.slow),
        pytest.param(3, 9, False, marks=pytest.mark.slow),
        pytest.param(1, 9, False, marks=pytest.mark.slow),
    ],
)
def test_each_shard_refills_its_slots_from_its_own_prompts(
    num_shards: int, num_slots: int, unrolled: bool
) -> None:
    every = {"group": 8, "max_length": 60}
    expected = run(*prompts(), **every)
    slots = {"num_slots": num_slots, "decoding_form": FORMS[unrolled]}
    found = run(*prompts(), **every, **slots, layout=shards(num_shards))
    np.testing.assert_array_equal(found.ids, expected.ids)


@pytest.mark.slow
def test_steps_and_slots_are_counted() -> None:
    every = {"group": 8, "max_length": 40}
    never = Stopping.of_ids([], CONFIG.vocab_size)
    _, counts = run_counted(*prompts(), **every, stopping=never)
    assert (counts.steps, counts.slots) == (40, 40 * 24)
    _, counts = run_counted(*prompts(), **every, stopping=never, num_slots=6)
    assert (counts.steps, counts.slots) == (4 * 40, 4 * 40 * 6)
    often = Stopping.of_ids(range(3, 8), CONFIG.vocab_size)
    rollout, counts = run_counted(*prompts(), **every, stopping=often, num_slots=6)
    assert counts.slots >= rollout.lengths.sum()
    _, waiting = run_counted(*prompts(), **every, stopping=often, num_slots=6, refill_at=6)
    assert counts.steps < waiting.steps


@pytest.mark.parametrize(
    ("slots_per_row", "prompt_width", "cache_length", "expected"),
    [
        (8, 100, 128, [64, 16, 8]),  # a half reads 0.81 of what all slots read: skipped
        (1, 100, 128, [8, 4]),  # no fewer than four
        (8, 16, 512, [64, 32, 16, 8]),
    ],
)
def test_slots_are_reduced_where_a_step_reads_a_third_less(
    slots_per_row: int, prompt_width: int, cache_length: int, expected: list[int]
) -> None:
    R, W = 8, slots_per_row
    kv = StoredKV(*jnp.zeros((2, 1, R, 1, 1, prompt_width, 1)))
    ids = jnp.zeros(R, jnp.int32)
    prompt = PromptCache([kv], jnp.zeros((R, prompt_width), bool), ids, ids)
    slots = Slots.of_prompts(prompt, jnp.zeros((R, W), jnp.int32), cache_length)
    assert _sizes(slots) == expected


@pytest.mark.slow
def test_the_share_of_the_cache_that_is_read_is_counted() -> None:
    """The first 128 tokens read one of two blocks, and the last 72 both."""
    never = Stopping.of_ids([], CONFIG.vocab_size)
    _, counts = run_counted(*prompts(), group=8, max_length=200, stopping=never)
    assert counts.cache_share / counts.slots == pytest.approx((0.5 * 128 + 72) / 200)


def test_stop_strings_end_completions_and_stay_in_them() -> None:
    letters = [bytes([97 + i % 3]) if i else b"" for i in range(CONFIG.vocab_size)]
    rollout = run(
        *prompts(), group=8, max_length=60, num_slots=5,
        stopping=Stopping.of_strings([EOS], ["abc"], letters),
    )  # fmt: skip
    stopped = 0
    for p, g in np.ndindex(3, 8):
        ids = rollout.ids[p, g, : rollout.lengths[p, g]].tolist()
        text = b"".join(letters[i] for i in ids)
        assert b"abc" not in b"".join(letters[i] for i in ids[:-1])
        stopped += text.endswith(b"abc")
        assert rollout.finished[p, g] == (ids[-1] == EOS or text.endswith(b"abc"))
    assert stopped > 3


@pytest.mark.grid
@pytest.mark.parametrize(
    ("dtype", "most", "unrolled"),
    [
        pytest.param("bfloat16", 0.05, False, marks=pytest.mark.slow),
        ("int8", 0.1, False),
        ("int8", 0.1, True),
    ],
)
def test_a_rounded_cache_samples_nearly_the_same_distribution(
    dtype: str, most: float, unrolled: bool
) -> None:
    """Its log-probs are off those of the model by rounding, and they are what is recorded."""
    rollout = run(
        *prompts(),
        group=8,
        kv_cache_dtype=jnp.dtype(dtype),
        num_slots=5,
        decoding_form=FORMS[unrolled],
    )
    mask = np.asarray(rollout.mask)
    gap = np.abs(np.asarray(rollout.logps) - trainers_logps(rollout))[mask]
    assert 1e-4 < gap.max() < most


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_zeros_after_the_heads_of_a_cache_change_no_token(dtype: str) -> None:
    every = {"group": 8, "kv_cache_dtype": jnp.dtype(dtype), "num_slots": 5}
    expected, found = run(*prompts(), **every), run(*prompts(), **every, kv_head_multiple=16)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.logps, expected.logps, atol=1e-5)


def test_the_first_sampled_tokens_are_those_of_the_model() -> None:
    """By hand, without a cache: the plain pass over the prompt, and one draw with the key."""
    ids, mask = prompts()
    rollout = run(ids, mask)
    keys = sample_keys(0, jnp.int32(5), jnp.arange(len(ids)), 4)
    draw = jax.jit(lambda key: gumbel(jax.random.fold_in(key, 0), CONFIG.vocab_size))
    for p, length in enumerate(LENGTHS):
        logits = MODEL.logits(ids[p : p + 1, :length])[0, -1]
        for g in range(4):
            assert rollout.ids[p, g, 0] == jnp.argmax(logits + draw(keys[p, g]))
