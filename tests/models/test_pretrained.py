"""Hugging Face folders: what is saved is loaded again, and what is broken is refused by name."""

import json
import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import equinox as eqx
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors.numpy import load_file, save_file

from grpo_eqx.common.errors import UserError, WeightsError
from grpo_eqx.models import pretrained
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.pretrained import from_pretrained, model_folder, save_pretrained
from grpo_eqx.sharding import AutoMesh, ExplicitMesh

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


def random_model(seed: int = 0, **changes: Any) -> Qwen2:
    """A small model in which no two arrays, and no two layers, hold the same numbers."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
        **changes,
    }
    config = Qwen2Config(**sizes)
    shapes = jax.eval_shape(lambda key: Qwen2.init(config, key), jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)


def assert_same(left: Qwen2, right: Qwen2) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of every safetensors file of the folder."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound folder of one file."""
    save_pretrained(random_model(), tmp_path)
    return tmp_path


@pytest.fixture
def sharded_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound folder of several files of at most 4000 bytes and their index."""
    monkeypatch.setattr(pretrained, "_FILE_BYTES", 4000)
    save_pretrained(random_model(), tmp_path)
    return tmp_path


# What is saved is loaded again.


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_saved_model_loads_exactly(tmp_path: Path, tied: bool):
    model = random_model(tie_word_embeddings=tied)
    save_pretrained(model, tmp_path)
    assert_same(from_pretrained(tmp_path), model)
    assert (tmp_path / WEIGHTS).stat().st_mode == (tmp_path / "config.json").stat().st_mode
    assert not (tmp_path / INDEX).exists()


def test_a_head_dim_of_its_own_survives(tmp_path: Path):
    model = random_model(hidden_size=18, num_attention_heads=6, num_key_value_heads=3, head_dim=10)
    save_pretrained(model, tmp_path)
    assert_same(from_pretrained(tmp_path), model)


def test_a_folder_that_is_not_there_yet_is_made(tmp_path: Path):
    save_pretrained(random_model(), tmp_path / "run" / "final")
    assert_same(from_pretrained(tmp_path / "run" / "final"), random_model())


def test_tensors_have_hugging_face_names_and_layouts(tmp_path: Path):
    model = random_model(tie_word_embeddings=False)
    save_pretrained(model, tmp_path)
    tensors = tensors_of(tmp_path)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], model.embed_tokens)
    np.testing.assert_array_equal(tensors["model.norm.weight"], model.norm)
    np.testing.assert_array_equal(tensors["lm_head.weight"], model.lm_head)
    layers = model.layers
    for i in range(3):
        of_layer = {
            "input_layernorm.weight": layers.input_layernorm,
            "post_attention_layernorm.weight": layers.post_attention_layernorm,
            "self_attn.q_proj.weight": layers.q_proj.weight,
            "self_attn.q_proj.bias": layers.q_proj.bias,
            "self_attn.k_proj.weight": layers.k_proj.weight,
            "self_attn.k_proj.bias": layers.k_proj.bias,
            "self_attn.v_proj.weight": layers.v_proj.weight,
            "self_attn.v_proj.bias": layers.v_proj.bias,
            "self_attn.o_proj.weight": layers.o_proj.weight,
            "mlp.gate_proj.weight": layers.gate_proj.weight,
            "mlp.up_proj.weight": layers.up_proj.weight,
            "mlp.down_proj.weight": layers.down_proj.weight,
        }
        for name, stacked in of_layer.items():
            np.testing.assert_array_equal(tensors.pop(f"model.layers.{i}.{name}"), stacked[i])
    assert sorted(tensors) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_a_tied_head_is_not_written_twice(folder: Path):
    assert "lm_head.weight" not in tensors_of(folder)


# Dtypes.


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_narrow_dtype_rounds_as_jnp_does(tmp_path: Path, dtype: Any):
    model = random_model()
    rounded = model.astype(dtype)
    save_pretrained(model, tmp_path, dtype=dtype)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype.__name__
    assert_same(from_pretrained(tmp_path, dtype=dtype), rounded)
    assert_same(from_pretrained(tmp_path), rounded.astype(jnp.float32))


def test_a_model_is_saved_in_its_own_dtype_by_default(tmp_path: Path):
    model = random_model().astype(jnp.bfloat16)
    save_pretrained(model, tmp_path)
    assert {x.dtype for x in tensors_of(tmp_path).values()} == {jnp.dtype(jnp.bfloat16)}
    assert_same(from_pretrained(tmp_path, dtype=jnp.bfloat16), model)


def test_loading_in_a_narrow_dtype_rounds_as_jnp_does(folder: Path):
    loaded = from_pretrained(folder, dtype=jnp.bfloat16)
    assert_same(loaded, random_model().astype(jnp.bfloat16))


# Several files.


def test_a_large_model_is_split_over_files_with_an_index(sharded_folder: Path):
    index = json.loads((sharded_folder / INDEX).read_text())
    files = sorted(path.name for path in sharded_folder.glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for file in files:
        tensors = load_file(sharded_folder / file)
        assert sum(x.nbytes for x in tensors.values()) <= 4000
        assert {index["weight_map"].pop(name) for name in tensors} == {file}
    assert not index["weight_map"]
    total = sum(x.nbytes for x in jax.tree.leaves(random_model()))
    assert index["metadata"]["total_size"] == total


def test_a_tensor_larger_than_a_file_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pretrained, "_FILE_BYTES", 1)
    save_pretrained(random_model(), tmp_path)
    assert {len(load_file(file)) for file in tmp_path.glob("*.safetensors")} == {1}
    assert_same(from_pretrained(tmp_path), random_model())


def test_a_split_model_loads_exactly(sharded_folder: Path):
    assert_same(from_pretrained(sharded_folder), random_model())


def test_a_missing_file_of_several_is_named(sharded_folder: Path):
    next(sharded_folder.glob("model-00002-*")).unlink()
    with pytest.raises(WeightsError, match="has no model-00002-of-"):
        from_pretrained(sharded_folder)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": []}'])
def test_an_index_that_is_no_index_is_named(sharded_folder: Path, content: str):
    (sharded_folder / INDEX).write_text(content)
    with pytest.raises(WeightsError, match=r"model.safetensors.index.json"):
        from_pretrained(sharded_folder)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("../model.safetensors", "is '../model.safetensors': expected the name of"),
        ("/etc/passwd", "is '/etc/passwd': expected the name of"),
        ("", "is '': expected the name of"),
        (["model.safetensors"], r"is \['model.safetensors'\]: expected the name of"),
        (3, "is 3: expected the name of"),
        ("..", r"is '\.\.': expected the name of"),
        ("config.json", "is 'config.json': expected the name of"),
        ("a\0b", r"is 'a.x00b': expected the name of"),
        ("model-9.safetensors", "has no model-9.safetensors, which .*index.json names"),
    ],
)
def test_files_of_an_index_are_names_within_the_folder(
    sharded_folder: Path, place: Any, message: str
):
    index = json.loads((sharded_folder / INDEX).read_text())
    index["weight_map"][DOWN_PROJ] = place
    (sharded_folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=message):
        from_pretrained(sharded_folder)


def test_an_index_and_files_that_disagree_are_refused(sharded_folder: Path):
    index = json.loads((sharded_folder / INDEX).read_text())
    first, second, *_ = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][name] = second
    (sharded_folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=f"tensor '{name}' is in {second}, and it is not"):
        from_pretrained(sharded_folder)
    tensors = load_file(sharded_folder / first), load_file(sharded_folder / second)
    save_file({**tensors[1], name: tensors[0][name]}, sharded_folder / second)
    with pytest.raises(WeightsError, match=f"'{name}' is in {first} and in {second}"):
        from_pretrained(sharded_folder)


def test_a_file_beside_an_old_index_is_not_passed_over(sharded_folder: Path):
    """transformers reads the file, and leaves out the index."""
    save_file({DOWN_PROJ: np.zeros((16, 24), np.float32)}, sharded_folder / WEIGHTS)
    with pytest.raises(WeightsError, match=r"does not name .* which is there too"):
        from_pretrained(sharded_folder)


def test_files_that_are_not_found_by_their_names_are_listed(sharded_folder: Path):
    (sharded_folder / INDEX).unlink()
    with pytest.raises(
        WeightsError, match=r"has model-00001-of-\d+.safetensors and \d+ more, but no"
    ):
        from_pretrained(sharded_folder)
    for path in sharded_folder.glob("model-*"):
        path.rename(sharded_folder / "weights.safetensors")
    with pytest.raises(WeightsError, match=r"no model.safetensors, but weights.safetensors: ren"):
        from_pretrained(sharded_folder)


@pytest.mark.parametrize("target", ["of/a/cache", WEIGHTS])
def test_a_link_to_nowhere_is_named(folder: Path, target: str):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(target)
    with pytest.raises(WeightsError, match=f"is a link to {target}, which does not exist: copy"):
        from_pretrained(folder)


# Weights that are not those of the model.


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Changes the tensors of the folder's one file."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.2.self_attn.k_proj.bias",
        DOWN_PROJ,
    ],
)
def test_a_missing_tensor_is_named(folder: Path, name: str):
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError, match=f"'{name}' is missing"):
        from_pretrained(folder)


def test_weights_that_automodel_saved_are_named(folder: Path):
    tensors = {name.removeprefix("model."): x for name, x in tensors_of(folder).items()}
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(WeightsError, match=r"'model.embed.*AutoModelForCausalLM instead, and save"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.input_layernorm.weight",  # of a deeper model
        "model.layers.0.self_attn.q_norm.weight",  # of another architecture
        "model.layers.0.self_attn.rotary_emb.cos_cached",  # no frequencies
        "rotary_emb.inv_freq",  # of another module
    ],
)
def test_a_tensor_too_many_is_named(folder: Path, name: str):
    rewrite(folder, lambda tensors: tensors.update({name: np.zeros(16, np.float32)}))
    with pytest.raises(WeightsError, match=f"'{name}' does not belong"):
        from_pretrained(folder)


def test_stored_rotary_frequencies_are_ignored(folder: Path):
    """As transformers does: it stored them once for each layer, later once for all."""
    names = ["model.rotary_emb.inv_freq", "model.layers.2.self_attn.rotary_emb.inv_freq"]
    frequencies = np.zeros(2, np.float32)
    rewrite(folder, lambda tensors: tensors.update(dict.fromkeys(names, frequencies)))
    assert_same(from_pretrained(folder), random_model())


def add_head(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Stores a head beside the tied embedding that it should be."""

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].copy())

    rewrite(folder, add)


def test_a_head_that_is_its_tied_embedding_is_no_tensor_too_many(folder: Path):
    add_head(folder, lambda embedding: embedding)
    assert_same(from_pretrained(folder), random_model())


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, number: float):
    model = random_model()
    q_proj = model.layers.q_proj.weight.at[1, 0, 0].set(number)
    save_pretrained(eqx.tree_at(lambda m: m.layers.q_proj.weight, model, q_proj), tmp_path)
    with pytest.raises(WeightsError, match=r"'model.layers.1.self_attn.q_proj.weight' has numbers"):
        from_pretrained(tmp_path)


def changed_at_the_end(embedding: np.ndarray) -> np.ndarray:
    embedding[-1, -1] += 1e-6
    return embedding


@pytest.mark.parametrize(
    "change",
    [
        changed_at_the_end,
        lambda embedding: embedding[:-1].copy(),
        lambda embedding: embedding.astype(np.float16),
    ],
    ids=["one-number", "a-row-less", "another-dtype"],
)
def test_a_head_that_is_not_its_tied_embedding_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray], np.ndarray]
):
    monkeypatch.setattr(pretrained, "_COMPARED_ROWS", 7)  # of 40: the last rows are fewer
    add_head(folder, change)
    with pytest.raises(WeightsError, match=r"'lm_head.weight' differs from") as error:
        from_pretrained(folder)
    assert "set tie_word_embeddings to false there, or remove the tensor" in str(error.value)


def test_only_a_few_rows_of_a_head_are_in_memory_at_a_time():
    class Stored:
        """A tensor that is too large to be read as a whole."""

        def __init__(self) -> None:
            self.read: list[int] = []

        def get_shape(self) -> list[int]:
            return [10_000, 3]

        def get_dtype(self) -> str:
            return "F32"

        def __getitem__(self, rows: slice) -> np.ndarray:
            self.read += [*range(10_000)[rows]]
            assert rows.stop - rows.start <= 1024
            return np.zeros((rows.stop - rows.start, 3), np.float32)

    head = Stored()
    tensors = {"lm_head.weight": head, "model.embed_tokens.weight": Stored()}
    pretrained._check_tied_head(Path("folder"), tensors, *tensors)
    assert head.read == [*range(10_000)]


def test_a_head_that_is_not_tied_may_be_the_embedding(tmp_path: Path):
    model = random_model(tie_word_embeddings=False)
    save_pretrained(model, tmp_path)
    add_head(tmp_path, lambda embedding: embedding)
    np.testing.assert_array_equal(from_pretrained(tmp_path).lm_head, model.embed_tokens)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path):
    rewrite(folder, lambda tensors: tensors.update({DOWN_PROJ: np.zeros((16, 25), np.float32)}))
    with pytest.raises(WeightsError, match=rf"'{DOWN_PROJ}' has shape \(16, 25\).*\(16, 24\)"):
        from_pretrained(folder)


def test_a_transposed_tensor_is_refused_even_though_its_size_is_right(folder: Path):
    rewrite(folder, lambda tensors: tensors.update({DOWN_PROJ: tensors[DOWN_PROJ].T.copy()}))
    with pytest.raises(WeightsError, match=DOWN_PROJ):
        from_pretrained(folder)


def test_weights_of_another_config_are_refused(folder: Path):
    untied = random_model(tie_word_embeddings=False).config.to_json()
    (folder / "config.json").write_text(json.dumps(untied))
    with pytest.raises(WeightsError, match=r"'lm_head.weight' is missing"):
        from_pretrained(folder)


# Files that cannot be read.


@pytest.mark.parametrize("tensor", [DOWN_PROJ, "model.norm.weight"])
def test_a_truncated_file_is_named_with_the_tensor_it_ends_in(folder: Path, tensor: str):
    content = (folder / WEIGHTS).read_bytes()
    header_size = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + header_size])[tensor]["data_offsets"]
    cut = 8 + header_size + (begin + end) // 2
    (folder / WEIGHTS).write_bytes(content[:cut])
    with pytest.raises(WeightsError, match=f"ends at byte {cut}, inside tensor '{tensor}'") as info:
        from_pretrained(folder)
    assert str(folder / WEIGHTS) in str(info.value)


def test_a_file_truncated_within_its_header_is_named(folder: Path):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:100])
    with pytest.raises(WeightsError, match=r"model.safetensors cannot be read"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 1000,
        b"\xff" * 1000,
        b"<!DOCTYPE html><html><body>404</body></html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n",
        b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
    ],
    ids=["empty", "zeros", "ones", "html", "git-lfs-pointer", "header-is-a-list"],
)
def test_a_file_that_is_no_safetensors_is_named(folder: Path, content: bytes):
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(WeightsError, match=r"model.safetensors cannot be read"):
        from_pretrained(folder)


def test_a_pipe_in_place_of_weights_is_not_waited_for(folder: Path):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    with pytest.raises(WeightsError, match="is neither a file nor a folder"):
        from_pretrained(folder)


def test_a_pickle_is_never_loaded(folder: Path):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model.bin is a pickle, which is never loaded"):
        from_pretrained(folder)


def test_a_folder_without_weights_is_refused(folder: Path):
    (folder / WEIGHTS).unlink()
    with pytest.raises(WeightsError, match=r"no model.safetensors: only safetensors are loaded"):
        from_pretrained(folder)


def test_a_field_that_is_not_known_is_named_and_the_model_loads(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "my_note": 1}))
    with pytest.warns(UserWarning, match="my_note"):
        loaded = from_pretrained(folder)
    assert_same(loaded, random_model())


def test_a_folder_without_config_is_refused(folder: Path):
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json"):
        from_pretrained(folder)


# Names, without a network.


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("cannot find an appropriate cached snapshot folder\nand more"),
        OSError("no space left on device"),
        TimeoutError(),
        HFValidationError("repo id must be in the form 'repo_name'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_model_that_cannot_be_downloaded_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def no_download(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_download)
    with pytest.raises(UserError, match="'nobody/no-such-model'") as info:
        from_pretrained("nobody/no-such-model")
    assert type(error).__name__ in str(info.value)
    assert str(error).partition("\n")[0] in str(info.value)
    assert "\n" not in str(info.value)


def test_a_hub_name_is_downloaded_without_pickles_and_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: dict[str, Any] = {}

    def download(name: str, *, allow_patterns: list[str], **settings: object) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("grpo_eqx.models.hub._snapshots", {})
    assert_same(from_pretrained("somebody/some-model"), random_model())
    assert asked["name"] == "somebody/some-model"

    def wanted(file: str) -> bool:
        return any(fnmatch(file, pattern) for pattern in asked["patterns"])

    needed = [WEIGHTS, INDEX, "config.json", "tokenizer.json", "tokenizer_config.json"]
    assert all(map(wanted, needed))
    assert not any(map(wanted, ["pytorch_model.bin", "modeling_x.py", "training_args.pt", "a.pkl"]))


def test_a_folder_comes_before_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def no_download(*args: object, **kwargs: object) -> str:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_download)
    assert model_folder(folder) == folder
    assert model_folder(str(folder)) == folder


# Loading onto a mesh.


def devices(count: int) -> list[jax.Device]:
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices: set --xla_force_host_platform_device_count={count}")
    return jax.devices()[:count]


@pytest.mark.parametrize(
    "mesh",
    [ExplicitMesh(1, 8, 1), ExplicitMesh(2, 2, 2), ExplicitMesh(1, 2, 4), ExplicitMesh(8, 1, 1)],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_array_is_loaded_into_its_sharding(tmp_path: Path, mesh: ExplicitMesh, tied: bool):
    model = random_model(tie_word_embeddings=tied)
    save_pretrained(model, tmp_path)
    built = mesh.build(devices(8))
    loaded = from_pretrained(tmp_path, mesh=built)
    assert_same(loaded, model)
    wanted = jax.tree.leaves(model.shardings(built))
    assert [leaf.sharding for leaf in jax.tree.leaves(loaded)] == wanted
    # Heads are split over tp and the hidden size over fsdp: a device holds only its part.
    [part, *_] = loaded.layers.q_proj.weight.addressable_shards
    assert part.data.shape == (3, 16 // mesh.tp, 16 // mesh.fsdp)


def test_a_dimension_that_an_axis_does_not_divide_is_whole(tmp_path: Path):
    model = random_model(vocab_size=41, hidden_size=18, head_dim=4)
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path, mesh=ExplicitMesh(1, 4, 2).build(devices(8)))
    assert_same(loaded, model)
    assert loaded.embed_tokens.sharding.is_fully_replicated
    assert not loaded.layers.q_proj.weight.sharding.is_fully_replicated


def test_without_a_mesh_every_device_is_used(folder: Path):
    loaded = from_pretrained(folder)
    assert loaded.norm.sharding == loaded.shardings(AutoMesh().build()).norm


def test_what_is_saved_from_a_mesh_is_whole(folder: Path, tmp_path: Path):
    loaded = from_pretrained(folder, mesh=ExplicitMesh(1, 4, 2).build(devices(8)))
    save_pretrained(loaded, tmp_path / "again", dtype=jnp.float32)
    assert_same(from_pretrained(tmp_path / "again"), random_model())
