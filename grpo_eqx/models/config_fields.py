"""The fields of a Hugging Face `config.json`: which are used, refused, or without effect."""

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_eqx.errors import UserError

_COMPUTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": True,  # on queries, keys and values; outputs have none
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "per_layer_config": None,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "quantization_config": None,
    "compression_config": None,
    # These make transformers read other files of the folder.
    "configuration_files": None,
    "transformers_weights": None,
}
"""Supported values: a field that is present and not null must have the value given here."""

_ROPE: dict[str, Any] = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
"""Supported values inside `rope_scaling` and `rope_parameters`, besides `rope_theta`."""

_WITHOUT_EFFECT = frozenset({
    # Origin, purpose and training of the model.
    "_name_or_path", "name_or_path", "_commit_hash", "architectures", "transformers_version",
    "tokenizer_class", "prefix", "finetuning_task", "task_specific_params", "problem_type",
    "num_labels", "id2label", "label2id", "initializer_range", "gradient_checkpointing",
    # Storage of its arrays; here the dtype is an argument of loading.
    "dtype", "torch_dtype", "use_bfloat16", "torchscript", "tf_legacy_loss",
    # Choices of transformers among equivalent implementations, and of what it returns.
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_cache",
    "is_decoder", "chunk_size_feed_forward", "return_dict", "output_attentions",
    "output_hidden_states", "output_scores", "return_dict_in_generate", "tie_last_hidden_states",
    # Effective only with `use_sliding_window`.
    "sliding_window", "max_window_layers",
    # Qwen2.5-1M: transformers ignores it, as does vLLM up to its chunk size (262144 tokens).
    "dual_chunk_attention_config",
    # Special tokens; `eos_token_id` is left to the tokenizer to read.
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    # Generation parameters, which transformers 4 could write here.
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "remove_invalid_values", "exponential_decay_length_penalty",
})  # fmt: skip

_SHOWN = 200
"""Maximum number of characters of a refused value in its message."""


def used_fields(
    fields: Mapping[str, Any], kinds: Mapping[str, Any], path: str | Path
) -> dict[str, Any]:
    """Checks a `config.json` and picks the fields that are used; `rope_theta` may be nested.

    **Arguments:** all fields; the names and types of those used; the file's path, for messages.

    Raises `UserError` for a value of the wrong type, and for a field that asks for something
    unsupported. Warns about unknown fields.
    """
    if fields.get("model_type") != "qwen2":
        raise UserError(
            f"{path}: model_type={fields.get('model_type')!r} is not supported, only 'qwen2': use "
            "a Qwen2 or Qwen2.5 model."
        )
    for name, computed in _COMPUTED.items():
        value = fields.get(name)
        if value is not None and value != computed:
            raise _unsupported(path, name, value, json.dumps(computed))
    used = {name: fields[name] for name in kinds if name in fields}
    used["rope_theta"] = _rope_theta(fields, path)
    for name, value in used.items():
        _check_value(path, name, kinds[name], value)
    used = {name: float(x) if kinds[name] is float else x for name, x in used.items()}
    _check_layer_types(fields, path)
    known = {"model_type", "layer_types", "rope_scaling", "rope_parameters"}
    known |= {*kinds, *_COMPUTED, *_WITHOUT_EFFECT}
    if unknown := [name for name in fields if name not in known]:
        # Python shows a warning once per line it is attributed to: here the same line for every
        # reader, as a run reads the file twice.
        warnings.warn(
            f"{path}: unknown fields are ignored: {', '.join(unknown)}. "
            "Make sure that they do not change what the model computes.",
            stacklevel=2,
        )
    return used


def _rope_theta(fields: Mapping[str, Any], path: str | Path) -> Any:
    """Returns the base of the rotary frequencies; refuses other frequencies, and two bases."""
    ropes = {name: fields.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    for name, rope in ropes.items():
        plain = isinstance(rope, dict) and all(
            key == "rope_theta" or value is None or value == _ROPE.get(key)
            for key, value in rope.items()
        )
        if not plain:
            raise _unsupported(path, name, rope, '{"rope_type": "default"} and a rope_theta')
    # As in `convert_rope_params_to_dict` of transformers 5: rope_scaling replaces rope_parameters,
    # a base inside it precedes the one outside, and the default is 10000. All must agree, as
    # transformers 4 reads only the base outside.
    rope = ropes["rope_scaling"] or ropes["rope_parameters"]
    taken = next(
        (x for x in (rope.get("rope_theta"), fields.get("rope_theta")) if x is not None), 10_000.0
    )
    for each in (fields, *ropes.values()):
        other = each.get("rope_theta")
        if other is not None and other != taken:
            raise UserError(
                f"{path}: rope_theta is {taken!r} in one place and {other!r} in another: keep the "
                "one that the model was trained with."
            )
    return taken


def _check_value(path: str | Path, name: str, kind: Any, value: Any) -> None:
    """Raises `UserError` for a value of the wrong type (a bool is not a number) or not above 0."""
    if kind is bool:
        right, wanted = isinstance(value, bool), "true or false"
    elif kind is float:
        right = type(value) in (int, float) and 0 < value <= sys.float_info.max
        wanted = "a number above 0"
    else:
        right = (type(value) is int and value > 0) or (value is None and kind is not int)
        wanted = "a whole number above 0"
    if not right:
        raise UserError(f"{path}: {name}={value!r} is not {wanted}.")


def _check_layer_types(fields: Mapping[str, Any], path: str | Path) -> None:
    """Refuses anything but full attention in every layer."""
    types, layers = fields.get("layer_types"), fields.get("num_hidden_layers")
    if types is None or layers is None:
        return
    full = isinstance(types, list) and all(each == "full_attention" for each in types)
    if not full or len(types) != layers:
        wanted = f'"full_attention" for each of the {layers} layers'
        raise _unsupported(path, "layer_types", types, wanted)


def _unsupported(path: str | Path, name: str, value: Any, wanted: str) -> UserError:
    found = repr(value)
    found = found if len(found) <= _SHOWN else f"{found[:_SHOWN]}..."
    return UserError(
        f"{path}: {name}={found} is not supported, only {wanted}: set it so in the file if the "
        "model does not depend on it, or use another model."
    )
