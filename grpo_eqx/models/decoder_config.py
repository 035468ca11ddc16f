"""The configs of all families that `Decoder` computes: sizes, an architecture, a file format."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from grpo_eqx.common.errors import UserError
from grpo_eqx.common.plain_data import brief
from grpo_eqx.models.architecture import Architecture, ExpertsShape, LayerKind
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.config_fields import FULL, WINDOWED, read_fields, used_fields
from grpo_eqx.models.rotary import Rope, RopeScaling


def _unchanged(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def _all_full(number: int) -> tuple[str, ...]:
    return (FULL,) * number


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileFormat:
    """Form of a family's config in a Hugging Face `config.json`."""

    model_type: str
    architecture: str
    """Class of transformers, such as `Qwen2ForCausalLM`."""
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of absent fields, where they are not the defaults of the config."""
    constant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields that are not in the config, which must have these values, and are written so."""
    unwritten: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields that must have these values too, and are not written."""
    layer_types: Callable[[int], tuple[str, ...]] = _all_full
    """The types of so many layers, where a file does not name them."""
    read: Callable[[dict[str, Any]], dict[str, Any]] = _unchanged
    """Translates the fields of a file, before anything else looks at them."""
    write: Callable[[dict[str, Any]], dict[str, Any]] = _unchanged
    """Translates the fields to write."""


class DecoderConfig(ModelConfig):
    """Config of a family: a frozen dataclass with at least these fields.

    Fields are named as in Hugging Face's config of the family.
    """

    file_format: ClassVar[FileFormat]
    intermediate_size: int
    head_dim: int | None
    """Size of one head; `None` means `hidden_size // num_attention_heads`."""
    rope_theta: float
    rope_scaling: RopeScaling | None
    sliding_window: int | None
    """Number of positions that queries see in layers of `sliding_attention`."""
    layer_types: tuple[str, ...] | None
    """`full_attention` or `sliding_attention` for each layer; `None`: as the family has it."""
    rms_norm_eps: float

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise UserError(
                    f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                    f"({self.num_attention_heads}), or set head_dim."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.head_size % 2:
            raise UserError(f"head_dim ({self.head_dim}) must be even for rotary embeddings.")
        self._check_windows()
        experts = self.architecture.experts
        if experts is not None and experts.per_token > experts.number:
            raise UserError(
                f"num_experts_per_tok ({experts.per_token}) is above num_experts "
                f"({experts.number})."
            )

    def _check_windows(self) -> None:
        """Refuses types of other layers, and a window that has no layer, or the other way around.

        Sets `layer_types` to `None` where they are the family's, so that equal configs are equal.
        """
        usual, given = self.file_format.layer_types(self.num_hidden_layers), self.layer_types
        if given is not None and len(given) != self.num_hidden_layers:
            raise UserError(
                f"layer_types has {len(given)} layers, and num_hidden_layers is "
                f"{self.num_hidden_layers}: give one for each."
            )
        if given is not None and WINDOWED in given and self.sliding_window is None:
            raise UserError(f"layer_types has {WINDOWED!r}: set sliding_window too.")
        if self.sliding_window is not None and WINDOWED not in (given or usual):
            raise UserError(
                f"sliding_window is {self.sliding_window}, and no layer has one: name those that "
                f"do in layer_types, or set it to None."
            )
        if given == usual:
            object.__setattr__(self, "layer_types", None)

    @property
    @abc.abstractmethod
    def architecture(self) -> Architecture:
        """Architecture of the family, with these sizes."""

    @property
    def types(self) -> tuple[str, ...]:
        """Resolved `layer_types`."""
        return self.layer_types or self.file_format.layer_types(self.num_hidden_layers)

    @property
    def rope(self) -> Rope:
        """Rotary frequencies, those of full attention where there are two."""
        return Rope(self.rope_theta, self.rope_scaling)

    @property
    def head_size(self) -> int:
        """Resolved `head_dim`."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.architecture.windows

    @property
    def logit_softcap(self) -> float | None:
        return self.architecture.logit_softcap

    @property
    def experts(self) -> ExpertsShape | None:
        return self.architecture.experts

    @property
    def num_layer_parameters(self) -> int:
        shape = self.architecture.experts
        return self._num_layer_parameters(1 if shape is None else shape.number)

    @property
    def num_active_parameters(self) -> int:
        shape = self.architecture.experts
        return self._num_layer_parameters(1 if shape is None else shape.per_token)

    def _num_layer_parameters(self, num_experts: int) -> int:
        """Counts the parameters of all layers with so many experts in each, or one MLP."""
        queries = self.num_attention_heads * self.head_size
        keys = self.num_key_value_heads * self.head_size
        attention = 2 * self.hidden_size * (queries + keys)
        shape = self.architecture.experts
        size = self.intermediate_size if shape is None else shape.intermediate_size
        router = 0 if shape is None else shape.number * self.hidden_size
        mlps = 3 * self.hidden_size * size * num_experts
        return self.num_hidden_layers * (attention + router + mlps)

    @classmethod
    def from_json(cls, path: str | Path) -> "DecoderConfig":
        """Reads a Hugging Face `config.json`.

        Raises `UserError` for a field that asks for something unsupported, such as an unknown kind
        of rotary positions, and for a value of the wrong type. Warns about unknown fields.
        """
        form, fields = cls.file_format, read_fields(path)
        found = fields.get("model_type")
        if found != form.model_type:
            raise UserError(f"{path}: model_type={brief(found)} is not {form.model_type!r}.")
        try:
            fields = form.read(fields)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise UserError(f"{path} has a value of the wrong type: {error}.") from error
        supported = {**form.constant, **form.unwritten}
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        values = {**form.absent, **used_fields(fields, kinds, supported, path)}
        if values.get("layer_types") is not None and WINDOWED not in values["layer_types"]:
            values["sliding_window"] = None
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.default is dataclasses.MISSING and field.name not in values:
                raise UserError(f"{path} lacks the field {field.name}.")
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of a `config.json` that Hugging Face transformers (4 and 5) reads."""
        form, fields = self.file_format, dataclasses.asdict(self)  # type: ignore[call-overload]
        optional = ("sliding_window", "layer_types", "rope_scaling")
        fields = {k: v for k, v in fields.items() if v is not None or k not in optional}
        if self.rope_scaling is not None:
            given = {k: v for k, v in fields["rope_scaling"].items() if v is not None}
            fields["rope_scaling"] = {"rope_type": self.rope_scaling.rope_type, **given}
        written = {
            "architectures": [form.architecture],
            "model_type": form.model_type,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            **form.constant,
            **fields,
        }
        return form.write(written)


def layer_kinds(config: DecoderConfig) -> tuple[LayerKind, ...]:
    """Returns the layers of a config that rotates alike in all of them."""
    return tuple(
        LayerKind(config.rope, config.sliding_window if each == WINDOWED else None)
        for each in config.types
    )
