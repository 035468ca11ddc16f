"""Every family here and in Hugging Face transformers: the same folder gives the same numbers."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from grpo_eqx.common.random_keys import sample_keys
from grpo_eqx.generation import Stopping, generate
from grpo_eqx.generation.cpu import CpuDecoding
from grpo_eqx.generation.sampling import GREEDY, Sampling
from grpo_eqx.models import Decoder, from_pretrained, save_pretrained
from grpo_eqx.models.registry import FAMILIES, read_config
from grpo_eqx.sharding import AutoMesh
from grpo_eqx.training.micro_batches import RowShape
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.rows import pack, take_tokens

from ..training.runner import sample_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
"""The largest difference between logits, as a share of the largest logit."""
LENGTHS = (3, 24, 17)
WIDTH = 24
PAD = 0
SIZES = dict(
    hidden_size=48, intermediate_size=75, num_attention_heads=6, num_key_value_heads=2,
    head_dim=10, num_hidden_layers=3, vocab_size=97, rope_theta=1e4, rms_norm_eps=1e-5,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
GEMMA = dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=7, sliding_window=5)
EXPERTS = dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=20)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, with a window in the last layer": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=6, max_window_layers=2),
    ),
    "qwen2, yarn": ("Qwen2", dict(rope_scaling=YARN, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True)),
    "qwen3, untied, biases, window": (
        "Qwen3",
        dict(attention_bias=True, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    "qwen3, yarn with all of its fields": (
        "Qwen3",
        dict(rope_scaling={**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 1.3}),
    ),
    "qwen3 moe": ("Qwen3Moe", dict(**EXPERTS, norm_topk_prob=True)),
    "qwen3 moe, tied, not normalized, window, biases": (
        "Qwen3Moe",
        dict(
            **EXPERTS, norm_topk_prob=False, tie_word_embeddings=True, attention_bias=True,
            use_sliding_window=True, sliding_window=6,
        ),
    ),
    "llama 3": ("Llama", dict(rope_scaling=LLAMA3, tie_word_embeddings=True)),
    "llama, linear": ("Llama", dict(rope_scaling=dict(rope_type="linear", factor=3.0))),
    "llama, biases": ("Llama", dict(attention_bias=True, num_key_value_heads=6)),
    "mistral": ("Mistral", dict(sliding_window=5)),
    "mistral, without a window": ("Mistral", dict(sliding_window=None)),
    "gemma 2": (
        "Gemma2",
        dict(**GEMMA, attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
    ),
    "gemma 2, untied, without caps": (
        "Gemma2",
        dict(
            **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None,
            tie_word_embeddings=False,
        ),
    ),
    "gemma 3": (
        "Gemma3",
        dict(
            **GEMMA, rope_local_base_freq=100.0, num_hidden_layers=7,
            rope_scaling=dict(rope_type="linear", factor=8.0),
        ),
    ),
}  # fmt: skip

logits = jax.jit(Decoder.logits)
_STATIC = "sampling", "max_length", "decoding_form"
jitted_generate = jax.jit(generate, static_argnames=_STATIC)


def random_array(rng: np.random.Generator, name: str, parameter: Any) -> np.ndarray:
    """Norms near what they are initialized to, and biases that matter."""
    noise = rng.standard_normal(tuple(parameter.shape), dtype=np.float32)
    if "norm" in name:
        return parameter.detach().numpy() + 0.3 * noise
    return 0.5 * noise if "bias" in name else noise * parameter.shape[-1] ** -0.5


def random_theirs(case: str) -> Any:
    """Hugging Face's model of a case, with random weights."""
    family, fields = CASES[case]
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(
        **{**SIZES, **fields}, attn_implementation="eager", pad_token_id=None
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(random_array(rng, name, parameter)))
    return model


class Pair(NamedTuple):
    """One set of random weights on both sides, in a folder that they wrote."""

    theirs: Any
    ours: Decoder
    folder: Path


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    theirs, folder = random_theirs(request.param), tmp_path_factory.mktemp("pair")
    theirs.save_pretrained(folder)
    ours = from_pretrained(folder, mesh=AutoMesh().build(jax.devices()[:1]))
    assert isinstance(ours, Decoder)
    return Pair(theirs, ours, folder)


def their_logits(model: Any, ids: Any, mask: Any) -> np.ndarray:
    mask = torch.tensor(np.asarray(mask))
    with torch.no_grad():
        result = model(
            torch.tensor(np.asarray(ids)),
            attention_mask=mask.long(),
            position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
        )
    return result.logits.float().numpy()


def padded_rows(side: str) -> tuple[Array, Array]:
    """Ids and mask of random rows, padded to `WIDTH`."""
    rng = np.random.default_rng(1)
    ids, mask = np.full((len(LENGTHS), WIDTH), PAD, np.int32), np.zeros((len(LENGTHS), WIDTH), bool)
    for i, length in enumerate(LENGTHS):
        where = slice(WIDTH - length, None) if side == "left" else slice(length)
        ids[i, where] = rng.integers(0, SIZES["vocab_size"], length, dtype=np.int32)
        mask[i, where] = True
    return jnp.asarray(ids), jnp.asarray(mask)


def assert_close(ours: Any, theirs: Any) -> None:
    assert np.abs(theirs).max() > 0.5
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


def test_every_family_is_compared():
    compared = {transformers.CONFIG_MAPPING[name] for name in FAMILIES}
    named = {name if name != "Gemma3" else "Gemma3Text" for name, _ in CASES.values()}
    assert {each.__name__ for each in compared} == {f"{name}Config" for name in named}


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_agree(pair: Pair, side: str):
    ids, mask = padded_rows(side)
    assert_close(logits(pair.ours, ids, mask)[mask], their_logits(pair.theirs, ids, mask)[mask])


def their_completions(model: Any, max_length: int) -> np.ndarray:
    ids, mask = padded_rows("left")
    with torch.no_grad():
        result = model.generate(
            torch.tensor(np.asarray(ids)),
            attention_mask=torch.tensor(np.asarray(mask)).long(),
            do_sample=False,
            max_new_tokens=max_length,
            eos_token_id=None,
            pad_token_id=PAD,
        )
    return result[:, WIDTH:].numpy()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("side", "unrolled"),
    [
        ("left", False),
        ("right", True),
        pytest.param("left", True, marks=pytest.mark.long),
        pytest.param("right", False, marks=pytest.mark.long),
    ],
)
def test_greedy_completions_are_theirs(pair: Pair, side: str, unrolled: bool):
    theirs = their_completions(pair.theirs, max_length=12)
    made = jitted_generate(
        pair.ours,
        *padded_rows(side),
        sample_keys(0, jnp.asarray(0), jnp.arange(len(LENGTHS)), num_generations=2),
        sampling=GREEDY,
        max_length=12,
        stopping=Stopping.of_ids([], SIZES["vocab_size"]),
        decoding_form=CpuDecoding() if unrolled else None,
    )
    for sample in range(2):
        np.testing.assert_array_equal(made.ids[:, sample], theirs)


def test_sampler_and_trainer_agree(pair: Pair):
    P, G, T = len(LENGTHS), 3, 14
    ids, mask = padded_rows("left")
    made = jitted_generate(
        pair.ours,
        ids,
        mask,
        sample_keys(0, jnp.asarray(0), jnp.arange(P), num_generations=G),
        sampling=Sampling(),
        max_length=T,
        stopping=Stopping.of_ids([], SIZES["vocab_size"]),
    )
    shape = RowShape.of(
        P, G, prompt_length=max(LENGTHS), completion_length=T, num_shards=1, size=None,
        most_tokens=2**20,
    )  # fmt: skip
    plan = Packing.plan(np.array(LENGTHS), np.full((P, G), T), shape)
    drawn, logps, lengths, finished = map(
        np.asarray, (made.ids, made.logps, made.lengths, made.finished)
    )
    prompts = [
        np.asarray(row)[own].tolist() for row, own in zip(ids, np.asarray(mask), strict=True)
    ]
    sample = sample_of(prompts, drawn, lengths, logps, finished)
    rows = pack(sample.groups, plan, AutoMesh().build(jax.devices()[:1]))
    own = rows.micro_batch(jnp.int32(0))
    hidden = pair.ours.hidden(own.ids, own.positions, own.visible).states
    hidden = jnp.take_along_axis(hidden, own.scored[..., None], axis=1)
    logprobs = jax.nn.log_softmax(pair.ours.project_logits(hidden))
    trained = jnp.take_along_axis(logprobs, own.targets[..., None], axis=-1)[..., 0]
    found = np.stack(take_tokens(np.asarray(trained)[None], plan)).reshape(P, G, T)
    np.testing.assert_allclose(found, logps, rtol=0, atol=1e-4)


def test_there_and_back_changes_no_tensor_and_no_field(pair: Pair, tmp_path: Path):
    save_pretrained(pair.ours, tmp_path)
    assert read_config(tmp_path / "config.json") == pair.ours.config
    back, info = type(pair.theirs).from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(back.state_dict()[k], x) for k, x in pair.theirs.state_dict().items())
    ids, mask = padded_rows("left")
    np.testing.assert_array_equal(
        their_logits(back.eval(), ids, mask), their_logits(pair.theirs, ids, mask)
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        (
            "Qwen3",
            dict(
                hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936,
                rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True,
            ),
        ),
        (
            "Llama",
            dict(
                hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                num_attention_heads=32, num_key_value_heads=8, head_dim=64, vocab_size=128256,
                rope_theta=5e5, rms_norm_eps=1e-5, tie_word_embeddings=True,
                rope_scaling={
                    **LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192,
                },
            ),
        ),
    ],
    ids=["Qwen3-0.6B", "Llama-3.2-1B"],
)  # fmt: skip
def test_the_published_shapes_agree(family: str, fields: dict[str, Any], tmp_path: Path):
    config = getattr(transformers, f"{family}Config")(**fields, attn_implementation="eager")
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path)
    ids, mask = padded_rows("left")
    expected = their_logits(theirs, ids, mask)[np.asarray(mask)]
    del theirs
    ours = logits(from_pretrained(tmp_path, AutoMesh().build(jax.devices()[:1])), ids, mask)
    np.testing.assert_allclose(
        ours[mask], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max()
    )
