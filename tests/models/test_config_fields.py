"""What each field of a `config.json` does: it is used, refused by its name, or without effect."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.common.plain_data import brief
from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.models.registry import read_config
from grpo_eqx.models.rotary import YarnScaling

SIZES = {
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "3B": (2048, 11008, 36, 16, 2),
    "7B": (3584, 18944, 28, 28, 4),
    "14B": (5120, 13824, 48, 40, 8),
    "32B": (5120, 27648, 64, 40, 8),
    "72B": (8192, 29568, 80, 64, 8),
}
"""Hidden and intermediate size, layers, heads, and heads of keys and values."""


def published(
    size: str, positions: int, window_layers: int, window: int, **others: Any
) -> dict[str, Any]:
    """The `config.json` of a model on the hub, where all were written by transformers 4."""
    hidden, intermediate, layers, heads, key_value_heads = SIZES[size]
    tied = size in ("0.5B", "1.5B", "3B")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": positions,
        "max_window_layers": window_layers,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": key_value_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": window,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936 if tied else 152064,
        **others,
    }


BASE_2: dict[str, Any] = {"eos_token_id": 151643, "transformers_version": "4.40.1"}
BASE: dict[str, Any] = {**BASE_2, "use_mrope": False}
MATH: dict[str, Any] = {"rope_theta": 10000.0, "transformers_version": "4.44.0"}
LONG = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
PUBLISHED = {
    "Qwen2-0.5B": published("0.5B", 131072, 24, 131072, **BASE_2),
    "Qwen2-1.5B": published("1.5B", 131072, 28, 131072, **BASE_2),
    "Qwen2-7B": published("7B", 131072, 28, 131072, **BASE_2),
    "Qwen2-72B": published("72B", 131072, 80, 131072, **BASE_2, rms_norm_eps=1e-05),
    "Qwen2-0.5B-Instruct": published("0.5B", 32768, 24, 32768),
    "Qwen2-1.5B-Instruct": published("1.5B", 32768, 28, 32768),
    "Qwen2-7B-Instruct": published("7B", 32768, 28, 131072),
    "Qwen2-72B-Instruct": published("72B", 32768, 80, 131072),
    "Qwen2-Math-1.5B": published("1.5B", 4096, 28, 4096, **MATH),
    "Qwen2-Math-7B-Instruct": published("7B", 4096, 28, 4096, **MATH),
    "Qwen2-Math-72B": published("72B", 4096, 80, 4096, **MATH),
    "Qwen2.5-0.5B": published("0.5B", 32768, 24, 32768, **BASE),
    "Qwen2.5-1.5B": published("1.5B", 131072, 28, 131072, **BASE),
    "Qwen2.5-3B": published("3B", 32768, 36, 32768, **BASE),
    "Qwen2.5-7B": published("7B", 131072, 28, 131072, **BASE),
    "Qwen2.5-14B": published("14B", 131072, 48, 131072, **BASE),
    "Qwen2.5-32B": published("32B", 131072, 64, 131072, **BASE),
    "Qwen2.5-72B": published("72B", 131072, 80, 131072, **BASE, rms_norm_eps=1e-05),
    "Qwen2.5-0.5B-Instruct": published("0.5B", 32768, 21, 32768),
    "Qwen2.5-1.5B-Instruct": published("1.5B", 32768, 21, 32768),
    "Qwen2.5-3B-Instruct": published("3B", 32768, 70, 32768),
    "Qwen2.5-7B-Instruct": published("7B", 32768, 28, 131072),
    "Qwen2.5-14B-Instruct": published("14B", 32768, 70, 131072),
    "Qwen2.5-32B-Instruct": published("32B", 32768, 70, 131072),
    "Qwen2.5-72B-Instruct": published("72B", 32768, 70, 131072),
    "Qwen2.5-Math-1.5B": published("1.5B", 4096, 28, 4096, **BASE | MATH),
    "Qwen2.5-Math-7B-Instruct": published("7B", 4096, 28, 4096, **MATH),
    "Qwen2.5-Math-72B": published("72B", 4096, 80, 4096, **BASE | MATH),
    "Qwen2.5-Coder-0.5B": published("0.5B", 32768, 24, 32768, **BASE),
    "Qwen2.5-Coder-7B": published("7B", 32768, 28, 131072, **BASE),
    "Qwen2.5-Coder-32B-Instruct": published("32B", 32768, 70, 131072),
    "Qwen2.5-7B-Instruct-1M": published(
        "7B", 1010000, 28, 32768, rms_norm_eps=1e-05, rope_theta=10000000.0, rope_scaling=None,
        dual_chunk_attention_config=LONG,
    ),
    "a distilled 7B": published(
        "7B", 131072, 28, 4096, eos_token_id=151643, rope_theta=10000, use_mrope=False
    ),
}  # fmt: skip
AN_INSTRUCT = PUBLISHED["Qwen2.5-7B-Instruct"]


def as_transformers_5(fields: dict[str, Any]) -> dict[str, Any]:
    """The same file, loaded and saved by transformers 5."""
    replaced = ("rope_theta", "rope_scaling", "torch_dtype")
    kept = {name: value for name, value in fields.items() if name not in replaced}
    return kept | {
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * fields["num_hidden_layers"],
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": fields["rope_theta"], "rope_type": "default"},
        "sliding_window": None,
        "transformers_version": "5.23.0",
    }


# What `to_json_string(use_diff=False)` of transformers 4 has besides the fields of Qwen2.
ALL_OF_TRANSFORMERS_4: dict[str, Any] = {
    "_attn_implementation_autoset": False,
    "_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
    "add_cross_attention": False,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "pad_token_id": None,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "rope_scaling": None,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
}


def read(folder: Path, fields: dict[str, Any]) -> Qwen2Config:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return Qwen2Config.from_json(path)


def refusal(folder: Path, fields: dict[str, Any]) -> str:
    """The one sentence with which a file is refused, which names the file."""
    with pytest.raises(UserError) as error:
        read(folder, fields)
    message = str(error.value)
    assert message.startswith(f"{folder / 'config.json'}: ")
    assert message.endswith(".")
    assert "\n" not in message
    return message


# Published models.


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_no_field_that_is_unknown_or_refused(tmp_path: Path, name: str):
    """A field that is not known would warn, and a warning fails the test."""
    fields = PUBLISHED[name]
    config = read(tmp_path, fields)
    for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                  "num_key_value_heads", "vocab_size", "max_position_embeddings", "rope_theta",
                  "rms_norm_eps", "tie_word_embeddings"):  # fmt: skip
        assert getattr(config, field) == fields[field]
    assert read(tmp_path, as_transformers_5(fields)) == config


def test_everything_that_transformers_4_can_write_is_known(tmp_path: Path):
    config = read(tmp_path, ALL_OF_TRANSFORMERS_4 | AN_INSTRUCT)
    assert config == Qwen2Config.from_name("7B")


# Fields that are not known.


def test_unknown_fields_are_named_in_one_warning(tmp_path: Path):
    fields = {"my_note": 1, **AN_INSTRUCT, "logit_scale": 0.5}
    with pytest.warns(UserWarning, match="ignored: my_note, logit_scale") as caught:
        config = read(tmp_path, fields)
    assert config == Qwen2Config.from_name("7B")
    [warning] = caught
    assert str(tmp_path / "config.json") in str(warning.message)


def test_a_file_that_is_read_twice_warns_once(tmp_path: Path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        read(tmp_path, {**AN_INSTRUCT, "my_note": 1})
        read(tmp_path, {**AN_INSTRUCT, "my_note": 1})
    assert len(caught) == 1


# Fields that change what a model computes.

NOT_COMPUTED = {
    "add_cross_attention": True,
    "attention_bias": False,
    "attention_dropout": 0.1,
    "compression_config": {"format": "pack-quantized"},
    "configuration_files": ["config.5.0.0.json"],
    "cross_attention_hidden_size": 64,
    "hidden_act": "gelu",
    "is_causal": False,
    "is_encoder_decoder": True,
    "layer_types": ["chunked_attention"] * 28,
    "mlp_bias": True,
    "model_type": "llama",
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"0": {"hidden_size": 64}},
    "pruned_heads": {"0": [1]},
    "quantization_config": {"bits": 4, "quant_method": "awq"},
    "tie_encoder_decoder": True,
    "transformers_weights": "others.safetensors",
    "use_bidirectional_attention": True,
    "use_mrope": True,
}


@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_what_is_not_computed_is_refused_by_its_name(tmp_path: Path, name: str):
    message = refusal(tmp_path, {**AN_INSTRUCT, name: NOT_COMPUTED[name]})
    assert f": {name}=" in message
    assert "or use another model" in message or message.endswith("is not 'qwen2'.")


@pytest.mark.parametrize("name", sorted(NOT_COMPUTED.keys() - {"model_type"}))
def test_null_is_as_good_as_absent(tmp_path: Path, name: str):
    assert read(tmp_path, {**AN_INSTRUCT, name: None}) == Qwen2Config.from_name("7B")


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_bias": True, "mlp_bias": False, "is_causal": True, "attention_dropout": 0},
        {"partial_rotary_factor": 1, "layer_types": ["full_attention"] * 28},
    ],
)
def test_what_is_computed_may_be_said(tmp_path: Path, fields: dict[str, Any]):
    assert read(tmp_path, {**AN_INSTRUCT, **fields}) == Qwen2Config.from_name("7B")


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["full_attention"] * 27, "layer_types has 27 layers, and num_hidden_layers is 28"),
        ([], "layer_types has 0 layers, and num_hidden_layers is 28"),
        ("full_attention", "layer_types='full_attention' is not supported"),
        ({}, "layer_types={} is not supported"),
        (["sliding_attention"] * 28, "layer_types has 'sliding_attention': set sliding_window"),
    ],
)
def test_every_layer_has_its_type(tmp_path: Path, types: Any, message: str):
    assert message in refusal(tmp_path, {**AN_INSTRUCT, "layer_types": types})


def test_windows_that_are_in_use_are_read(tmp_path: Path):
    used = {**AN_INSTRUCT, "use_sliding_window": True, "sliding_window": 7}
    assert read(tmp_path, {**used, "max_window_layers": 26}).windows == (None,) * 26 + (7, 7)
    assert read(tmp_path, {**used, "max_window_layers": 28}) == Qwen2Config.from_name("7B")
    assert read(tmp_path, {**used, "use_sliding_window": False}) == Qwen2Config.from_name("7B")


def test_a_window_that_no_layer_has_is_refused():
    with pytest.raises(UserError, match="sliding_window is 7, and no layer has one"):
        dataclasses.replace(Qwen2Config.from_name("7B"), sliding_window=7)


def test_a_long_value_is_cut_short(tmp_path: Path):
    message = refusal(tmp_path, {**AN_INSTRUCT, "layer_types": ["other_attention"] * 28})
    assert len(message) < len(str(tmp_path)) + 450


# Rotary positions.

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def rotary(**fields: Any) -> dict[str, Any]:
    """A file with these fields of rotary positions, and no others."""
    return {name: x for name, x in AN_INSTRUCT.items() if name != "rope_theta"} | fields


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type="),
        ({"rope_scaling": {"rope_type": "linear", "beta": 2.0}}, "rope_scaling.beta="),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": DEFAULT},
            "rope_parameters=",
        ),
        (
            {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "dynamic"}},
            "rope_parameters.rope_type=",
        ),
        ({"rope_parameters": {**DEFAULT, "type": "yarn"}}, "rope_parameters.type="),
        (
            {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor=",
        ),
        (
            {"rope_parameters": {**DEFAULT, "mrope_section": [16, 24, 24]}},
            "rope_parameters.mrope_section=",
        ),
        ({"rope_parameters": {"full_attention": DEFAULT}}, "rope_parameters.full_attention="),
        ({"rope_scaling": "linear"}, "rope_scaling="),
    ],
)
def test_other_rotary_positions_are_refused(tmp_path: Path, fields: dict[str, Any], named: str):
    message = refusal(tmp_path, rotary(**fields))
    assert f": {named}" in message
    assert "or use another model" in message


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear"}, "rope_scaling lacks factor, which rope_type 'linear' needs"),
        ({"type": "yarn", "factor": 4.0}, "lacks original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": -1.0}, "rope_scaling.factor=-1.0 is not a number above"),
    ],
)
def test_a_scaling_needs_its_fields(tmp_path: Path, rope: dict[str, Any], message: str):
    assert message in refusal(tmp_path, rotary(rope_scaling=rope))


def test_a_scaling_is_read_as_qwen_documents_it(tmp_path: Path):
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read(tmp_path, {**AN_INSTRUCT, "rope_scaling": rope})
    assert config.rope_scaling == YarnScaling(factor=4.0, original_max_position_embeddings=32768)
    assert config.rope_theta == AN_INSTRUCT["rope_theta"]


@pytest.mark.parametrize(
    ("fields", "base"),
    [
        ({}, 10000.0),
        ({"rope_theta": 500, "rope_scaling": None, "rope_parameters": None}, 500.0),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "default"}}, 500.0),
        ({"rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}}, 500.0),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 500.0}}, 500.0),
        ({"rope_theta": 500.0, "rope_parameters": {"rope_theta": 500.0}}, 500.0),
        ({"rope_scaling": {"rope_theta": 500.0}, "rope_parameters": {}}, 500.0),
        ({"rope_parameters": {**DEFAULT, "partial_rotary_factor": 1.0, "factor": None}}, 10000.0),
    ],
)
def test_the_base_is_read_wherever_it_stands(tmp_path: Path, fields: dict[str, Any], base: float):
    assert read(tmp_path, rotary(**fields)).rope_theta == base


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500.0, "rope_parameters": DEFAULT},
        {"rope_scaling": {"rope_theta": 500.0}, "rope_parameters": DEFAULT},
        # transformers 5 looks into rope_scaling alone, finds none there, and takes 10000.
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 500.0}},
    ],
)
def test_two_bases_are_refused(tmp_path: Path, fields: dict[str, Any]):
    message = refusal(tmp_path, rotary(**fields))
    assert "500.0" in message
    assert "10000.0" in message
    assert "keep the value that the model was trained with" in message


# Values of the wrong type.


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("num_hidden_layers", 0, "a whole number above 0"),
        ("num_hidden_layers", -1, "a whole number above 0"),
        ("num_key_value_heads", 0, "a whole number above 0"),
        ("num_attention_heads", True, "a whole number above 0"),
        ("hidden_size", 896.0, "a whole number above 0"),
        ("vocab_size", None, "a whole number above 0"),
        ("max_position_embeddings", [32768], "a whole number above 0"),
        ("head_dim", "128", "a whole number above 0"),
        ("rope_theta", "x", "a number above 0"),
        ("rope_theta", 0, "a number above 0"),
        pytest.param("rope_theta", 10**400, "a number above 0", id="more than a float holds"),
        ("rms_norm_eps", None, "a number above 0"),
        ("rms_norm_eps", float("nan"), "a number above 0"),
        ("rms_norm_eps", -1e-6, "a number above 0"),
        ("tie_word_embeddings", "no", "true or false"),
        ("tie_word_embeddings", 1, "true or false"),
        ("tie_word_embeddings", None, "true or false"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(tmp_path: Path, name: str, value: Any, wanted: str):
    message = refusal(tmp_path, {**AN_INSTRUCT, name: value})
    assert message.endswith(f": {name}={brief(value)} is not {wanted}.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is not at most 10"),
        ({"num_hidden_layers": 10**400}, "is not at most 10,000"),
        ({"hidden_size": 10**12}, r"hidden_size=1000000000000 is not at most 2\^31"),
        ({"vocab_size": 10**12}, r"vocab_size=1000000000000 is not at most 2\^31"),
        ({"use_sliding_window": True, "num_hidden_layers": 10**9}, "at most 10,000"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 10**9}, "at most 10,000"),
        ({"model_type": "qwen3_moe", "num_experts": 10**9}, "at most 10,000"),
    ],
)
def test_sizes_that_no_model_has_are_refused_at_once(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    """Layers were listed one by one, for hours."""
    (tmp_path / "config.json").write_text(json.dumps({**AN_INSTRUCT, **changes}))
    with pytest.raises(UserError, match=message):
        read_config(tmp_path / "config.json")


def test_a_base_of_the_wrong_type_is_refused_inside_rope_parameters(tmp_path: Path):
    message = refusal(tmp_path, rotary(rope_parameters={"rope_theta": "x"}))
    assert message.endswith(": rope_theta='x' is not a number above 0.")


def test_whole_numbers_are_numbers(tmp_path: Path):
    assert isinstance(read(tmp_path, {**AN_INSTRUCT, "rope_theta": 500}).rope_theta, float)
