"""Qwen2 here and in Hugging Face transformers: the same folder gives the same numbers."""

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Int
from safetensors.numpy import load_file, save_file

from grpo_eqx.common.random_keys import sample_keys
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.generation import Stopping, generate
from grpo_eqx.generation.sampling import GREEDY
from grpo_eqx.models import pretrained
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.pretrained import from_pretrained, model_folder, save_pretrained
from grpo_eqx.sharding import AutoMesh
from grpo_eqx.training.micro_batches import RowShape
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.rows import pack, take_tokens

from ..training.runner import sample_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

torch.set_num_threads(2)

TOLERANCE = 1e-4
"""The largest difference between logits, as a share of the largest logit."""
LENGTHS = (1, 7, 4)
WIDTH = 9
PAD = 0

logits = jax.jit(Qwen2.logits)
jitted_generate = jax.jit(generate, static_argnames=("sampling", "max_length"))


def random_sizes(queries_per_key: int, tied: bool) -> dict[str, Any]:
    """Sizes that are odd wherever they may be; every other one has a `head_dim` of its own."""
    rng = np.random.default_rng(queries_per_key)
    key_value_heads, head_dim = int(rng.integers(1, 4)), 2 * int(rng.integers(2, 6))
    heads = queries_per_key * key_value_heads
    sizes = {
        "hidden_size": heads * head_dim,
        "intermediate_size": 2 * int(rng.integers(10, 40)) + 1,
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": 2 * int(rng.integers(30, 60)) + 1,
        "rope_theta": float(rng.choice([50.0, 1e4, 1e6])),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5, 1e-2])),
        "tie_word_embeddings": tied,
    }
    if queries_per_key % 2:
        sizes |= {"hidden_size": 2 * int(rng.integers(8, 24)) + 1, "head_dim": head_dim}
    return sizes


ALL_SIZES = [random_sizes(n, tied=n in (1, 4, 6, 7)) for n in range(1, 9)]
A_TIED, AN_UNTIED = ALL_SIZES[6], ALL_SIZES[2]


def sizes_name(sizes: dict[str, Any]) -> str:
    queries = sizes["num_attention_heads"] // sizes["num_key_value_heads"]
    tied = "tied" if sizes["tie_word_embeddings"] else "untied"
    return f"{queries}-queries-per-key-{tied}"


def random_array(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms around one and biases as large as what they are added to, so that both matter."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return 1 + 0.3 * noise
    return 0.5 * noise if "bias" in name else noise * shape[-1] ** -0.5


def random_theirs(sizes: dict[str, Any], seed: int = 0) -> Any:
    """Hugging Face's model with random weights."""
    config = transformers.Qwen2Config(**sizes, attn_implementation="eager")
    model = transformers.Qwen2ForCausalLM(config).eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(random_array(rng, name, tuple(parameter.shape))))
    return model


def random_ours(config: Qwen2Config, seed: int = 0) -> Qwen2:
    """Our model with random weights."""
    shapes = jax.eval_shape(lambda key: Qwen2.init(config, key), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def fill(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        return jnp.asarray(random_array(rng, jax.tree_util.keystr(path), leaf.shape))

    return jax.tree.map_with_path(fill, shapes)


def load_theirs(folder: Path, **options: Any) -> Any:
    """Hugging Face's model of a folder, with not one tensor too many or too few."""
    model, info = transformers.Qwen2ForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, **options
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def load_ours(folder: Path) -> Qwen2:
    return from_pretrained(folder, mesh=AutoMesh().build(jax.devices()[:1]))


def their_logits(model: Any, ids: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> np.ndarray:
    mask = torch.tensor(np.asarray(mask))
    with torch.no_grad():
        result = model(
            torch.tensor(np.asarray(ids)),
            attention_mask=mask.long(),
            position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
        )
    return result.logits.float().numpy()


def random_rows(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]


def pad(rows: list[np.ndarray], side: str) -> tuple[Array, Array]:
    """Ids and mask of rows padded to `WIDTH`."""
    ids = np.full((len(rows), WIDTH), PAD, np.int32)
    mask = np.zeros((len(rows), WIDTH), bool)
    for i, row in enumerate(rows):
        where = slice(WIDTH - len(row), None) if side == "left" else slice(len(row))
        ids[i, where], mask[i, where] = row, True
    return jnp.asarray(ids), jnp.asarray(mask)


def padded_rows(vocab_size: int, padding: str) -> tuple[Array, Array]:
    lengths = (WIDTH,) * len(LENGTHS) if padding == "none" else LENGTHS
    return pad(random_rows(vocab_size, lengths), padding)


def assert_close(ours: Array, theirs: np.ndarray) -> None:
    assert np.abs(theirs).max() > 0.5
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


class Pair(NamedTuple):
    """One set of random weights on both sides."""

    theirs: Any
    ours: Qwen2


def pair_of(sizes: dict[str, Any], folder: Path) -> Pair:
    theirs = random_theirs(sizes)
    theirs.save_pretrained(folder)
    return Pair(theirs, load_ours(folder))


@pytest.fixture(scope="module", params=ALL_SIZES, ids=sizes_name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Every size, from Hugging Face to us."""
    return pair_of(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module", params=[A_TIED, AN_UNTIED], ids=["tied", "untied"])
def few(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two sizes, for what takes longer."""
    return pair_of(request.param, tmp_path_factory.mktemp("few"))


# Logits.


def test_the_sizes_are_as_odd_as_they_should_be():
    repeats = [s["num_attention_heads"] // s["num_key_value_heads"] for s in ALL_SIZES]
    assert repeats == list(range(1, 9))
    assert {s["tie_word_embeddings"] for s in ALL_SIZES} == {True, False}
    assert all(s["vocab_size"] % 2 and s["intermediate_size"] % 2 for s in ALL_SIZES)
    of_their_own = [s for s in ALL_SIZES if "head_dim" in s]
    assert any(s["hidden_size"] > s["num_attention_heads"] * s["head_dim"] for s in of_their_own)
    assert any(s["hidden_size"] < s["num_attention_heads"] * s["head_dim"] for s in of_their_own)


@pytest.mark.grid
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_logits_agree(pair: Pair, padding: str):
    ids, mask = padded_rows(pair.ours.config.vocab_size, padding)
    assert_close(logits(pair.ours, ids, mask)[mask], their_logits(pair.theirs, ids, mask)[mask])


def test_packed_rows_agree_with_theirs_over_prompt_and_completion(few: Pair):
    vocab_size = few.ours.config.vocab_size
    prompts = random_rows(vocab_size)
    rng = np.random.default_rng(2)
    P, G, T = len(prompts), 3, 5
    completions = rng.integers(0, vocab_size, (P, G, T), dtype=np.int32)
    lengths = np.array([len(prompt) for prompt in prompts])
    shape = RowShape.of(
        P, G, prompt_length=int(lengths.max()), completion_length=T, num_shards=1, size=None,
        most_tokens=2**20,
    )  # fmt: skip
    plan = Packing.plan(lengths, np.full((P, G), T), shape)
    sample = sample_of(
        [prompt.tolist() for prompt in prompts],
        completions,
        np.full((P, G), T),
        np.zeros((P, G, T)),
        np.ones((P, G), bool),
    )
    rows = pack(sample.groups, plan, AutoMesh().build(jax.devices()[:1]))
    own = rows.micro_batch(jnp.int32(0))
    hidden = few.ours.hidden(own.ids, own.positions, own.visible).states
    hidden = jnp.take_along_axis(hidden, own.scored[..., None], axis=1)
    ours = take_tokens(np.asarray(few.ours.project_logits(hidden))[None], plan)
    for i, prompt in enumerate(prompts):
        both = np.concatenate([np.tile(prompt, (G, 1)), completions[i]], axis=1)
        theirs = their_logits(few.theirs, both, np.ones_like(both))[:, len(prompt) - 1 : -1]
        for g in range(G):
            assert_close(ours[i * G + g], theirs[g])


# Greedy generation.


def their_completions(model: Any, eos_id: int | None, max_length: int) -> np.ndarray:
    """Hugging Face's greedy completions of the left-padded prompts, padded to `max_length`."""
    ids, mask = padded_rows(model.config.vocab_size, "left")
    with torch.no_grad():
        result = model.generate(
            torch.tensor(np.asarray(ids)),
            attention_mask=torch.tensor(np.asarray(mask)).long(),
            do_sample=False,
            max_new_tokens=max_length,
            eos_token_id=eos_id,
            pad_token_id=PAD,
        )
    completions = result[:, WIDTH:].numpy()
    short = max_length - completions.shape[1]
    return np.pad(completions, ((0, 0), (0, short)), constant_values=PAD)


@pytest.mark.grid
@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_completions_are_theirs(few: Pair, side: str):
    theirs = their_completions(few.theirs, None, max_length=12)
    assert len(np.unique(theirs)) > 4  # not one token again and again
    made = jitted_generate(
        few.ours,
        *padded_rows(few.ours.config.vocab_size, side),
        sample_keys(0, jnp.asarray(0), jnp.arange(len(LENGTHS)), num_generations=2),
        sampling=GREEDY,
        max_length=12,
        stopping=Stopping.of_ids([], few.ours.config.vocab_size),
    )
    for sample in range(2):
        np.testing.assert_array_equal(made.ids[:, sample], theirs)
    assert (made.lengths == 12).all()
    assert not made.finished.any()


@pytest.mark.grid
@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_completions_end_where_theirs_do(few: Pair, side: str):
    # A token that one completion draws early on, and some other never.
    endless = their_completions(few.theirs, None, max_length=12)
    eos_id = next(int(t) for t in endless[:, 1:5].ravel() if not (endless == t).any(axis=1).all())
    theirs = their_completions(few.theirs, eos_id, max_length=12)
    made = jitted_generate(
        few.ours,
        *padded_rows(few.ours.config.vocab_size, side),
        sample_keys(0, jnp.asarray(0), jnp.arange(len(LENGTHS)), num_generations=1),
        sampling=GREEDY,
        max_length=12,
        stopping=Stopping.of_ids([eos_id], few.ours.config.vocab_size),
    )
    ids = np.where(np.arange(12) < made.lengths[..., None], made.ids, PAD)
    np.testing.assert_array_equal(ids[:, 0], theirs)
    ended = (theirs == eos_id).any(axis=1)
    assert ended.any()
    assert not ended.all()
    np.testing.assert_array_equal(made.finished[:, 0], ended)
    lengths = np.where(ended, (theirs == eos_id).argmax(axis=1) + 1, 12)
    np.testing.assert_array_equal(made.lengths[:, 0], lengths)


# Folders.


@pytest.mark.parametrize("file_bytes", [5 * 10**9, 20_000], ids=["one-file", "sharded"])
@pytest.mark.parametrize("sizes", [A_TIED, AN_UNTIED], ids=["tied", "untied"])
def test_they_load_what_we_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], file_bytes: int
):
    monkeypatch.setattr(pretrained, "_FILE_BYTES", file_bytes)
    ours = random_ours(Qwen2Config(**sizes))
    save_pretrained(ours, tmp_path)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (file_bytes == 20_000)
    ids, mask = padded_rows(sizes["vocab_size"], "left")
    theirs = load_theirs(tmp_path)
    assert theirs.dtype == torch.float32
    assert_close(logits(ours, ids, mask)[mask], their_logits(theirs, ids, mask)[mask])


@pytest.mark.parametrize("sizes", [A_TIED, AN_UNTIED], ids=["tied", "untied"])
def test_we_load_what_they_shard(tmp_path: Path, sizes: dict[str, Any]):
    theirs = random_theirs(sizes)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids, mask = padded_rows(sizes["vocab_size"], "left")
    ours = logits(load_ours(tmp_path), ids, mask)
    assert_close(ours[mask], their_logits(theirs, ids, mask)[mask])


def test_there_and_back_changes_no_tensor(tmp_path: Path):
    theirs = random_theirs(AN_UNTIED)
    theirs.save_pretrained(tmp_path / "theirs")
    save_pretrained(load_ours(tmp_path / "theirs"), tmp_path / "ours")
    back = load_theirs(tmp_path / "ours").state_dict()
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[name], x) for name, x in theirs.state_dict().items())


def test_bfloat16_rounds_as_theirs_and_keeps_its_dtype(tmp_path: Path):
    theirs = random_theirs(AN_UNTIED)
    theirs.save_pretrained(tmp_path / "float32")
    save_pretrained(load_ours(tmp_path / "float32"), tmp_path / "ours", dtype=jnp.bfloat16)
    loaded, rounded = load_theirs(tmp_path / "ours", dtype="auto"), theirs.to(torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    for name, x in rounded.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x)
    rounded.save_pretrained(tmp_path / "theirs")
    ids, mask = padded_rows(AN_UNTIED["vocab_size"], "left")
    ours = logits(load_ours(tmp_path / "theirs"), ids, mask)
    assert_close(ours[mask], their_logits(rounded.float(), ids, mask)[mask])


@pytest.mark.parametrize("absent", ["rope_theta", "tie_word_embeddings", "rms_norm_eps"])
def test_a_field_that_is_absent_means_what_it_means_to_them(tmp_path: Path, absent: str):
    fields = Qwen2Config.from_name("0.5B").to_json()
    del fields[absent]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours = Qwen2Config.from_json(tmp_path / "config.json")
    theirs = transformers.Qwen2Config.from_pretrained(tmp_path)
    rope = getattr(theirs, "rope_parameters", None) or {"rope_theta": theirs.rope_theta}
    assert ours.rope_theta == rope["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps


# Fields of config.json. A field that is not known here would warn, and a warning fails the test.

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def write_their_config(folder: Path, config: Any, how: str) -> dict[str, Any]:
    """Writes `config.json` as theirs is written: all fields, those that differ, or a model's."""
    if how == "model":
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    elif how == "saved":
        config.save_pretrained(folder)
    else:
        (folder / "config.json").write_text(config.to_json_string(use_diff=how == "diff"))
    return json.loads((folder / "config.json").read_text())


@pytest.mark.grid
@pytest.mark.parametrize("how", ["full", "diff", "saved", "model"])
@pytest.mark.parametrize("sizes", [A_TIED, AN_UNTIED], ids=["tied", "untied"])
def test_every_field_that_they_write_is_known(tmp_path: Path, sizes: dict[str, Any], how: str):
    config = transformers.Qwen2Config(**sizes, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0)
    fields = write_their_config(tmp_path, config, how)
    assert fields["rope_parameters"] == {"rope_theta": sizes["rope_theta"], "rope_type": "default"}
    assert Qwen2Config.from_json(tmp_path / "config.json") == Qwen2Config(**sizes)


def test_every_attribute_of_theirs_is_known(tmp_path: Path):
    fields = transformers.Qwen2Config(**AN_UNTIED).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert Qwen2Config.from_json(tmp_path / "config.json") == Qwen2Config(**AN_UNTIED)


@pytest.mark.grid
@pytest.mark.parametrize("how", ["full", "diff", "saved"])
@pytest.mark.parametrize("rope", [YARN, LINEAR], ids=["yarn", "linear"])
@pytest.mark.parametrize("argument", ["rope_parameters", "rope_scaling"])
def test_their_scaled_rotary_positions_are_read(
    tmp_path: Path, argument: str, rope: dict[str, Any], how: str
):
    config = transformers.Qwen2Config(**AN_UNTIED, **{argument: dict(rope)})
    fields = write_their_config(tmp_path, config, how)
    assert fields["rope_parameters"].items() > rope.items()
    scaling = Qwen2Config.from_json(tmp_path / "config.json").rope_scaling
    assert scaling is not None
    found = {"rope_type": scaling.rope_type, **dataclasses.asdict(scaling)}
    assert found.items() >= rope.items()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}, "rope_parameters": {}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
)
def test_the_rotary_base_is_the_one_that_they_find(tmp_path: Path, fields: dict[str, Any]):
    sizes = {name: size for name, size in AN_UNTIED.items() if name != "rope_theta"}
    all_fields = {"model_type": "qwen2", **sizes, **fields}
    (tmp_path / "config.json").write_text(json.dumps(all_fields))
    theirs = transformers.Qwen2Config.from_pretrained(tmp_path).rope_parameters
    assert theirs["rope_type"] == "default"
    assert Qwen2Config.from_json(tmp_path / "config.json").rope_theta == theirs["rope_theta"]


def test_a_rotary_base_that_stands_in_rope_parameters_alone_is_used(tmp_path: Path):
    theirs = random_theirs({**AN_UNTIED, "rope_theta": 50.0})
    theirs.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in fields
    assert fields["rope_parameters"]["rope_theta"] == 50.0
    ids, mask = padded_rows(AN_UNTIED["vocab_size"], "left")
    expected = their_logits(theirs, ids, mask)[mask]
    assert_close(logits(load_ours(tmp_path), ids, mask)[mask], expected)
    other = their_logits(random_theirs({**AN_UNTIED, "rope_theta": 1e4}), ids, mask)[mask]
    assert np.abs(other - expected).max() > 100 * TOLERANCE * np.abs(expected).max()


# Tensors that need not be there.


def test_a_stored_tied_head_and_rotary_frequencies_change_nothing(tmp_path: Path):
    theirs = random_theirs(A_TIED)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids, mask = padded_rows(A_TIED["vocab_size"], "left")
    expected = their_logits(theirs, ids, mask)[mask]
    np.testing.assert_array_equal(their_logits(load_theirs(tmp_path), ids, mask)[mask], expected)
    assert_close(logits(load_ours(tmp_path), ids, mask)[mask], expected)


# How generation ends, and its other settings.


def folder_of_a_tiny_model(folder: Path, generation: dict[str, Any] | None, **fields: Any) -> Path:
    """The embedded model, with another `generation_config.json` and these fields of the config."""
    for path in model_folder("tiny_qwen2").iterdir():
        shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("generation", [None, {"eos_token_id": 7}, {"eos_token_id": [7, 8]}])
@pytest.mark.parametrize("of_config", [5, [5, 6]])
def test_completions_end_with_the_ids_of_theirs_and_all_others_that_are_named(
    tmp_path: Path, generation: dict[str, Any] | None, of_config: int | list[int]
):
    folder = folder_of_a_tiny_model(tmp_path, generation, eos_token_id=of_config)
    theirs = load_theirs(folder).generation_config.eos_token_id
    theirs = theirs if isinstance(theirs, list) else [theirs]
    tokenizer = ChatTokenizer.from_pretrained(folder)
    # Theirs knows no tokenizer, and config.json only without a generation_config.json.
    others = [*(of_config if isinstance(of_config, list) else [of_config])]
    ids = [*theirs, *others, tokenizer.tokenizer.eos_token_id]
    assert tokenizer.eos_ids == tuple(dict.fromkeys(ids))


def test_an_export_keeps_the_settings_of_generation(tmp_path: Path):
    """Those of Qwen2.5-7B-Instruct, but for ids that this tokenizer has."""
    generation = {
        "bos_token_id": 4,
        "do_sample": True,
        "eos_token_id": [7, 8, 2],
        "pad_token_id": 0,
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "transformers_version": "4.37.0",
    }
    (tmp_path / "model").mkdir()
    folder = folder_of_a_tiny_model(tmp_path / "model", generation)
    save_pretrained(load_ours(folder), tmp_path / "export")
    ChatTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "export")
    before, after = (
        transformers.GenerationConfig.from_pretrained(path)
        for path in (folder, tmp_path / "export")
    )
    assert after == before
    assert {name: getattr(after, name) for name in generation} == generation
    assert load_theirs(tmp_path / "export").generation_config == before


# A true size.


@pytest.mark.slow
def test_the_half_billion_model_agrees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretrained, "_FILE_BYTES", 5 * 10**8)  # the less to hold while writing
    config = Qwen2Config.from_name("0.5B")
    ids, mask = padded_rows(config.vocab_size, "left")
    with tempfile.TemporaryDirectory() as folder:  # 2 GB: gone at once
        model = random_ours(config)
        ours = np.asarray(logits(model, ids, mask))
        save_pretrained(model, folder)
        del model
        theirs = their_logits(load_theirs(Path(folder)), ids, mask)
    assert_close(ours[mask], theirs[mask])
