"""The fields of a Hugging Face `config.json`: which are used, refused, or without effect."""

import dataclasses
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from grpo_eqx.common.clean_text import clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.common.plain_data import brief
from grpo_eqx.common.read_files import read_object
from grpo_eqx.models.rotary import SCALINGS, RopeScaling

_COMPUTED: dict[str, Any] = {
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
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
"""Supported values, of all families: a field that is present and not null must have this value."""

FULL, WINDOWED = "full_attention", "sliding_attention"
_NESTED = {"rope_scaling", "rope_parameters", "layer_types"}
"""Fields with values of their own form."""

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
    # Of caches, of transformers.js, and of where SmolLM's weights came from.
    "cache_implementation", "transformers.js_config", "is_llama_config",
    # Qwen2.5-1M: transformers ignores it, as does vLLM up to its chunk size (262144 tokens).
    "dual_chunk_attention_config",
    # A loss and a result of transformers' own training, with experts.
    "router_aux_loss_coef", "output_router_logits",
    # Special tokens; `eos_token_id` is left to the tokenizer to read.
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    # Generation parameters, which transformers 4 could write here.
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "remove_invalid_values", "exponential_decay_length_penalty",
})  # fmt: skip

_MOST_PARTS = 10_000
"""Layers, and experts of a layer, that a model may have."""
_LARGEST = 2**31 - 1
_SHOWN = 200
"""Maximum number of characters of a refused value in its message."""


def read_fields(path: str | Path) -> dict[str, Any]:
    """Reads a `config.json`; raises `UserError` where it is none, or has too many layers."""
    fields = read_object(Path(path))
    # Before they are listed one by one.
    for name in ("num_hidden_layers", "num_experts", "num_local_experts"):
        number = fields.get(name)
        if type(number) is int and number > _MOST_PARTS:
            raise UserError(
                f"{path}: {name}={brief(number)} is not at most {_MOST_PARTS:,}: correct it, or "
                f"use another model."
            )
    return fields


def used_fields(
    fields: Mapping[str, Any],
    kinds: Mapping[str, Any],
    supported: Mapping[str, Any],
    path: str | Path,
) -> dict[str, Any]:
    """Checks a `config.json` and picks the fields that are used; `rope_theta` may be nested.

    **Arguments:**

    - `fields`: all fields of a file.
    - `kinds`: types of the fields that are used, by name.
    - `supported`: of other fields, the values that the family computes with.
    - `path`: path of the file, for messages.

    Raises `UserError` for a value of the wrong type, and for a field that asks for something
    unsupported. Warns about unknown fields.
    """
    supported = {**_COMPUTED, **supported}
    for name, computed in supported.items():
        value = fields.get(name)
        if value is not None and value != computed:
            raise _unsupported(path, name, value, json.dumps(computed))
    used = {name: fields[name] for name in kinds if name in fields and name not in _NESTED}
    used |= _rope(fields, path)
    for name, value in used.items():
        if name not in _NESTED:
            _check_value(path, name, kinds[name], value)
    used = {name: float(x) if kinds[name] is float else x for name, x in used.items()}
    if fields.get("layer_types") is not None:
        used["layer_types"] = _layer_types(fields["layer_types"], path)
    known = {"model_type", *_NESTED, *kinds, *supported, *_WITHOUT_EFFECT}
    if unknown := [name for name in fields if name not in known]:
        # Python shows a warning once per line it is attributed to: here the same line for every
        # reader, as a run reads the file twice.
        warnings.warn(
            clean(
                f"{path}: unknown fields are ignored: {', '.join(unknown)}. "
                "Make sure that they do not change what the model computes."
            ),
            stacklevel=2,
        )
    return used


def _rope(fields: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Returns the base of the rotary frequencies and their scaling; refuses two bases."""
    ropes = {name: fields.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    for name, each in ropes.items():
        if not isinstance(each, dict):
            raise _unsupported(path, name, each, "an object with a rope_type")
    # As in `convert_rope_params_to_dict` of transformers 5: rope_scaling replaces rope_parameters,
    # a base inside it precedes the one outside, and the default is 10000. All must agree, as
    # transformers 4 reads only the base outside.
    name = "rope_scaling" if ropes["rope_scaling"] else "rope_parameters"
    rope = ropes[name]
    taken = next(
        (x for x in (rope.get("rope_theta"), fields.get("rope_theta")) if x is not None), 10_000.0
    )
    for each in (fields, *ropes.values()):
        other = each.get("rope_theta")
        if other is not None and other != taken:
            raise UserError(
                f"{path}: rope_theta is {brief(taken)} in one place and {brief(other)} in another: "
                "keep the value that the model was trained with."
            )
    scalings = {each: _rope_scaling(fields, each, path) for each, fields in ropes.items() if fields}
    for each, scaling in scalings.items():
        if scaling != scalings[name]:
            raise UserError(
                f"{path}: {each}={brief(ropes[each], _SHOWN)} is not {name}={brief(rope, _SHOWN)}: "
                f"keep the value that the model was trained with, or use another model."
            )
    return {"rope_theta": taken, "rope_scaling": scalings.get(name)}


def _rope_scaling(rope: Mapping[str, Any], name: str, path: str | Path) -> RopeScaling | None:
    """Reads a `rope_scaling`; refuses unknown kinds, and fields that its kind does not have."""
    given = {key: value for key, value in rope.items() if value is not None and key != "rope_theta"}
    kind = given.pop("rope_type", given.get("type", "default"))
    older = given.pop("type", kind)
    if older != kind:
        raise _unsupported(path, f"{name}.type", older, json.dumps(kind))
    if given.get("partial_rotary_factor") == 1.0:
        del given["partial_rotary_factor"]
    if kind != "default" and (not isinstance(kind, str) or kind not in SCALINGS):
        wanted = ", ".join(json.dumps(each) for each in ("default", *SCALINGS))
        raise _unsupported(path, f"{name}.rope_type", kind, wanted)
    scaling = None if kind == "default" else SCALINGS[kind]
    known = {} if scaling is None else {x.name: x for x in dataclasses.fields(scaling)}  # type: ignore[arg-type]
    for key, value in given.items():
        if key not in known:
            allowed = f"a rope_type {json.dumps(kind)} with {', '.join(known) or 'a rope_theta'}"
            raise _unsupported(path, f"{name}.{key}", value, allowed)
        _check_value(path, f"{name}.{key}", known[key].type, value)
    for key, field in known.items():
        if key not in given and field.default is dataclasses.MISSING:
            raise UserError(f"{path}: {name} lacks {key}, which rope_type {kind!r} needs.")
    return None if scaling is None else scaling(**given)


def _check_value(path: str | Path, name: str, kind: Any, value: Any) -> None:
    """Raises `UserError` for a value of the wrong type (a bool is not a number) or not above 0."""
    if kind is bool:
        right, wanted = isinstance(value, bool), "true or false"
    elif float in (kind, *get_args(kind)):
        right = type(value) in (int, float) and 0 < value <= sys.float_info.max
        right |= value is None and kind is not float
        wanted = "a number above 0"
    else:
        right = (type(value) is int and value > 0) or (value is None and kind is not int)
        wanted = "a whole number above 0"
        if right and value is not None and value > _LARGEST:
            right, wanted = False, "at most 2^31 - 1"
    if not right:
        raise UserError(f"{path}: {name}={brief(value)} is not {wanted}.")


def _layer_types(types: Any, path: str | Path) -> tuple[str, ...]:
    if isinstance(types, list) and all(each in (FULL, WINDOWED) for each in types):
        return tuple(types)
    raise _unsupported(path, "layer_types", types, f"a list of {FULL!r} and {WINDOWED!r}")


def _unsupported(path: str | Path, name: str, value: Any, wanted: str) -> UserError:
    return UserError(
        f"{path}: {name}={brief(value, _SHOWN)} is not supported, only {wanted}: set it so in the "
        "file if the model does not depend on it, or use another model."
    )
