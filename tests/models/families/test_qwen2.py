"""The architecture of a model: known sizes by name, and Hugging Face's `config.json` in and out."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config

# What both generations of transformers write for Qwen2.5-0.5B-Instruct, but for the rotary base.
SHARED_FIELDS: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TRANSFORMERS_4 = {
    **SHARED_FIELDS,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
}
TRANSFORMERS_5 = {
    **SHARED_FIELDS,
    "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 24,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": None,
    "transformers_version": "5.0.0",
}


def write(folder: Path, fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


# Known sizes.


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("0.5B", 494_032_768),
        ("1.5B", 1_543_714_304),
        ("3B", 3_085_938_688),
        ("7B", 7_615_616_512),
        ("14B", 14_770_033_664),
        ("32B", 32_763_876_352),
        ("72B", 72_706_203_648),
    ],
)
def test_every_size_has_the_published_number_of_parameters(size: str, parameters: int):
    config = Qwen2Config.from_name(size)
    shapes = jax.eval_shape(lambda key: Qwen2.init(config, key), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters


@pytest.mark.parametrize(
    ("size", "hidden_size", "num_hidden_layers", "heads", "key_value_heads", "tied"),
    [
        ("0.5B", 896, 24, 14, 2, True),
        ("1.5B", 1536, 28, 12, 2, True),
        ("3B", 2048, 36, 16, 2, True),
        ("7B", 3584, 28, 28, 4, False),
        ("14B", 5120, 48, 40, 8, False),
        ("32B", 5120, 64, 40, 8, False),
        ("72B", 8192, 80, 64, 8, False),
    ],
)
def test_every_size_has_its_shape(
    size: str,
    hidden_size: int,
    num_hidden_layers: int,
    heads: int,
    key_value_heads: int,
    tied: bool,
):
    config = Qwen2Config.from_name(size)
    assert config.hidden_size == hidden_size
    assert config.num_hidden_layers == num_hidden_layers
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, key_value_heads)
    assert config.head_size == (64 if size == "0.5B" else 128)
    assert config.tie_word_embeddings == tied
    assert config.vocab_size == (151936 if tied else 152064)
    assert (config.rope_theta, config.rms_norm_eps) == (1e6, 1e-6)
    assert config.max_position_embeddings == 32768


@pytest.mark.parametrize("name", ["3B", "Qwen2.5-3B", "Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-3B"])
def test_a_size_and_a_hub_name_are_the_same_model(name: str):
    assert Qwen2Config.from_name(name) == Qwen2Config.from_name("Qwen/Qwen2.5-3B-Instruct")


@pytest.mark.parametrize("name", ["4B", "", "3b", "Qwen/Qwen2.5-Coder-3B", "meta-llama/Llama-3B"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str):
    with pytest.raises(UserError, match=r"known sizes: 0.5B, 1.5B, 3B, 7B, 14B, 32B, 72B") as info:
        Qwen2Config.from_name(name)
    assert repr(name) in str(info.value)


# Fields that depend on one another.


def sizes(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **changes,
    }


def test_heads_share_the_hidden_size_unless_head_dim_says_otherwise():
    assert Qwen2Config(**sizes()).head_size == 6
    assert Qwen2Config(**sizes(head_dim=10)).head_size == 10
    assert Qwen2Config(**sizes(hidden_size=25, head_dim=10)).head_size == 10


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) .* num_key_value_heads \(3\)"),
        ({"hidden_size": 25}, r"hidden_size \(25\) .* num_attention_heads \(4\), or set head_dim"),
        ({"head_dim": 7}, r"head_dim \(7\) must be even"),
        ({"hidden_size": 20}, r"head_dim \(5\) must be even"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes: dict[str, int], fields: str):
    with pytest.raises(UserError, match=fields):
        Qwen2Config(**sizes(**changes))


# Reading config.json.


@pytest.mark.parametrize("fields", [TRANSFORMERS_4, TRANSFORMERS_5], ids=["v4", "v5"])
def test_both_generations_of_transformers_are_read(tmp_path: Path, fields: dict[str, Any]):
    assert Qwen2Config.from_json(write(tmp_path, fields)) == Qwen2Config.from_name("0.5B")


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_theta": 12345.0},
        {"rope_theta": 12345.0, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 12345.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 12345.0}},
    ],
)
def test_the_rotary_base_is_read_wherever_it_stands(tmp_path: Path, rotary: dict[str, Any]):
    config = Qwen2Config.from_json(write(tmp_path, {**SHARED_FIELDS, **rotary}))
    assert config.rope_theta == 12345.0


def test_every_field_is_read(tmp_path: Path):
    changed = {
        "hidden_size": 20,
        "intermediate_size": 33,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 77,
        "head_dim": 8,
        "max_position_embeddings": 99,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 5000.0,
    }
    path = write(tmp_path, {**TRANSFORMERS_4, **changed})
    assert Qwen2Config.from_json(path) == Qwen2Config(**changed)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"model_type": "qwen3"}, "model_type='qwen3'"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_types": ["sliding_attention"] * 24}, "set sliding_window too"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "lacks original_max_position"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "linear", "alpha": 2.0}}, "rope_scaling.alpha=2.0"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, change: dict[str, Any], named: str):
    path = write(tmp_path, {**TRANSFORMERS_4, **change})
    with pytest.raises(UserError) as info:
        Qwen2Config.from_json(path)
    assert str(path) in str(info.value)
    assert named in str(info.value)


def test_rope_scaling_is_refused_in_the_newer_place_too(tmp_path: Path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    path = write(tmp_path, {**TRANSFORMERS_5, "rope_parameters": yarn})
    with pytest.raises(UserError, match="yarn"):
        Qwen2Config.from_json(path)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_key_value_heads"])
def test_a_missing_field_is_named(tmp_path: Path, name: str):
    path = write(tmp_path, without(TRANSFORMERS_4, name))
    with pytest.raises(UserError, match=f"config.json lacks the field .*{name}"):
        Qwen2Config.from_json(path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe\x00", b"[]", b'"qwen2"'], ids=["", "{", "binary", "[]", "str"]
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"config.json"):
        Qwen2Config.from_json(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"config.json cannot be read: No such file"):
        Qwen2Config.from_json(tmp_path / "config.json")


# Writing config.json.


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config.from_name("0.5B"),
        Qwen2Config.from_name("7B"),
        Qwen2Config(**sizes(head_dim=10, rope_theta=5000.0, rms_norm_eps=1e-5, vocab_size=77)),
    ],
    ids=["tied", "untied", "odd"],
)
def test_what_is_written_is_read_back(tmp_path: Path, config: Qwen2Config):
    assert Qwen2Config.from_json(write(tmp_path, config.to_json())) == config


def test_what_is_written_says_which_class_loads_it():
    fields = Qwen2Config.from_name("0.5B").to_json()
    assert fields["architectures"] == ["Qwen2ForCausalLM"]
    assert fields["model_type"] == "qwen2"
