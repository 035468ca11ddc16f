"""Reads and writes adapters as PEFT's folders (`adapter_config.json`, safetensors)."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from grpo_eqx.common.errors import UserError, WeightsError, first_line
from grpo_eqx.common.plain_data import are_all, brief, field
from grpo_eqx.common.random_keys import make_key
from grpo_eqx.common.read_files import read_object, reading
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.models.interface import CausalLM, parameter_name
from grpo_eqx.models.layers import Linear
from grpo_eqx.models.lora import Lora, linear_names, with_adapters
from grpo_eqx.models.tensor_files import ADAPTER, open_file
from grpo_eqx.sharding.arrays import fetch_to_main, shard

CONFIG, WEIGHTS = "adapter_config.json", ADAPTER
_PREFIX = "base_model.model."
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "layer_replication": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "exclude_modules": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "use_qalora": False,
    "alora_invocation_tokens": None,
    "lora_bias": False,
}
"""Supported values of fields that would change what an adapter computes."""
_MERGE = "merge the adapter with PEFT, and use the model"
_UNCHANGED_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` with which PEFT leaves the weights beneath as they are."""


@dataclasses.dataclass(frozen=True)
class SavedAdapter:
    """The config of an adapter's folder."""

    folder: Path
    base: str
    """Name or folder of the model that it was trained on."""
    lora: Lora

    @classmethod
    def read(cls, folder: Path) -> "SavedAdapter":
        """Reads `adapter_config.json`; raises `UserError` for what is not supported."""
        path = folder / CONFIG
        called, fields = str(path), read_object(path)
        rank, alpha = (field(fields, "r", int, called), field(fields, "lora_alpha", float, called))
        if rank < 1 or not 0 < alpha < math.inf:
            raise UserError(
                f"{path} has r={brief(rank)} and lora_alpha={alpha}: copy the adapter again."
            )
        base = field(fields, "base_model_name_or_path", str, called)
        if not base:
            raise UserError(f"{path}: base_model_name_or_path is empty: name the model beneath.")
        if revision := field(fields, "revision", str, called, ""):
            base = f"{base}@{revision}"
        init = fields.get("init_lora_weights")
        if init is not None and init not in _UNCHANGED_BASE:
            raise UserError(
                f"{path}: init_lora_weights={brief(init)} changes the model beneath, which is not "
                f"supported: {_MERGE}."
            )
        for name, value in _PLAIN.items():
            if (fields.get(name) or value) != value:
                raise UserError(
                    f"{path}: {name}={brief(fields[name])} is not supported, only {value!r}: "
                    f"{_MERGE}."
                )
        lora = Lora(
            rank=rank,
            alpha=alpha,
            target=_targets(path, fields.get("target_modules")),
            rank_stabilized=field(fields, "use_rslora", bool, called, False),
        )
        saved = cls(folder, base, lora)
        saved.check_base(Path(base))
        return saved

    def check_base(self, folder: Path) -> None:
        """Raises `UserError` if the folder of the model beneath has an adapter, or is this one."""
        if os.path.exists(folder / CONFIG):
            raise UserError(
                f"{self.folder / CONFIG}: base_model_name_or_path is {self.base!r}, which is an "
                f"adapter too: merge that into its model with PEFT, and name the merged model."
            )

    def added_to(self, model: CausalLM, mesh: jax.sharding.Mesh) -> CausalLM:
        """Returns the model with this adapter, sharded over the mesh as the model is.

        Raises `UserError` for targets that the model does not have, and `WeightsError`, naming the
        tensor, where one is missing, unexpected or of another shape.
        """
        self.check_targets(model)
        adapted = jax.eval_shape(lambda model: with_adapters(model, self.lora, make_key(0)), model)
        expected = {
            _tensor_name(adapted, name, layer): _turned(name, np.empty(stack.shape[1:])).shape
            for name, stack in _stacks(adapted)
            for layer in range(stack.shape[0])
        }
        tensors = self._read_tensors()
        for name in sorted(expected.keys() | tensors.keys()):
            shape = expected.get(name, "none")
            found = tensors[name].shape if name in tensors else "missing"
            if shape != found:
                raise WeightsError(
                    f"{self.folder / WEIGHTS}: tensor {name!r} is {found}, and this model needs "
                    f"{shape}: {self._why(name, shape, found)}."
                )

        frozen = {parameter_name(path): x for path, x in jax.tree.leaves_with_path(model)}

        def load(
            path: tuple[object, ...],
            leaf: jax.ShapeDtypeStruct,
            is_adapter: bool,
            sharding: jax.sharding.Sharding,
        ) -> jax.Array:
            name = parameter_name(path)
            if not is_adapter:
                return frozen[name]
            names = [_tensor_name(adapted, name, i) for i in range(leaf.shape[0])]
            stacked = np.stack([_turned(name, tensors[each]) for each in names]).astype(np.float32)
            return shard(stacked, sharding)

        return jax.tree.map_with_path(load, adapted, adapted.trainable, adapted.shardings(mesh))

    def check_targets(self, model: CausalLM) -> None:
        """Raises `UserError` for targets and ranks that a model, or its shapes, cannot have."""
        path, known = self.folder / CONFIG, linear_names(model)
        others = [name for name in self.lora.target or () if name not in known]
        for name in others:
            if name not in _module_names(model):
                raise UserError(
                    f"{path} is of another model: target_modules has {name!r}, which this model "
                    f"does not have, but {', '.join(known)}: name the right one in "
                    f"base_model_name_or_path."
                )
        if others:
            raise UserError(
                f"{path}: target_modules has {others[0]!r}, and adapters of other modules than "
                f"{', '.join(known)} are not supported: {_MERGE}."
            )
        for name in self.lora.target or known:
            rows, columns = getattr(model.layers, name).weight.shape[-2:]
            if self.lora.rank > min(rows, columns):
                raise UserError(
                    f"{path}: r is {self.lora.rank}, and {name} has a matrix of {rows} x "
                    f"{columns}: ranks above the sizes of a matrix are not supported: {_MERGE}."
                )

    def _why(self, name: str, expected: tuple[int, ...] | str, found: tuple[int, ...] | str) -> str:
        """Returns why a tensor is not as expected, with the fix, as a clause."""
        if found == "missing":
            return f"{WEIGHTS} and {CONFIG} are of two adapters, or it was cut off; copy it again"
        if expected == "none":
            return f"{WEIGHTS} and {CONFIG} are of two adapters, or it has more; {_MERGE}"
        longer = slice(0, 1) if name.endswith("lora_B.weight") else slice(1, 2)
        if len(found) == 2 and found[longer] == expected[longer]:
            return f"{CONFIG} says r={self.lora.rank}; copy both files of one adapter"
        return f"the adapter was trained on another model than {self.base!r} is now"

    def _read_tensors(self) -> dict[str, np.ndarray]:
        path = self.folder / WEIGHTS
        if not path.exists():
            raise WeightsError(f"{self.folder} has no {WEIGHTS}: only safetensors are loaded.")
        with open_file(path) as file, reading(str(path)):
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            if not np.isfinite(tensor.astype(np.float32)).all():
                raise WeightsError(f"{path}: tensor {name!r} has numbers that are not finite.")
        return tensors


def _targets(path: Path, targets: Any) -> tuple[str, ...]:
    """Returns the names of the linear maps that have an adapter in every layer."""
    if not targets or not isinstance(targets, list) or not are_all(targets, str):
        raise UserError(
            f"{path}: target_modules={brief(targets)} is not supported, only a list of names: "
            f"{_MERGE}."
        )
    for name in targets:
        if any(part.isdigit() for part in name.split(".")):
            raise UserError(
                f"{path}: target_modules has {name!r}, the module of one layer, and adapters of "
                f"some layers are not supported: {_MERGE}."
            )
    return tuple(sorted({name.rsplit(".", 1)[-1] for name in targets}))


def _module_names(model: CausalLM) -> set[str]:
    """Returns the names of a model's modules, as transformers has them."""
    names = [parameter_name(path) for path, _ in jax.tree.leaves_with_path(model)]
    tensors = [model.tensor_name(name, *[0] * model.tensor_form(name).stacked) for name in names]
    return {"lm_head", *(part for tensor in tensors for part in tensor.split("."))}


def save_adapter(model: CausalLM, folder: Path, base: str) -> None:
    """Writes the adapters of a model as PEFT does. All processes must call this.

    **Arguments:**

    - `model`: the model.
    - `folder`: the folder to write.
    - `base`: name or folder of the model beneath the adapter.
    """
    tensors = {}
    for name, stack in _stacks(model):
        for layer in range(len(stack)):
            tensor = fetch_to_main(stack[layer])
            if tensor is not None:
                tensors[_tensor_name(model, name, layer)] = np.ascontiguousarray(
                    _turned(name, tensor)
                )
    if not is_main():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(_config(model, base), indent=2) + "\n")
    try:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # such as a full disk
        raise OSError(first_line(error)) from error
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)


def _config(model: CausalLM, base: str) -> dict[str, Any]:
    adapted = _adapted(model)
    adapter = next(iter(adapted.values())).adapter
    assert adapter is not None
    rank = adapter.a.shape[-2]
    name, _, revision = (base, "", "") if os.path.exists(base) else base.partition("@")
    return {
        **_PLAIN,
        "base_model_name_or_path": name,
        "revision": revision or None,
        "inference_mode": True,
        "lora_alpha": adapter.scale * rank,
        "lora_dropout": 0.0,
        "r": rank,
        "target_modules": sorted(adapted),
        "task_type": "CAUSAL_LM",
        "use_rslora": False,  # its root is in lora_alpha
    }


def _adapted(model: CausalLM) -> dict[str, Linear]:
    """Returns the linear maps with an adapter by their names."""
    found = {}
    for name in linear_names(model):
        linear = getattr(model.layers, name)
        if linear.adapter is not None:
            found[name] = linear
    return found


def _stacks(model: CausalLM) -> Iterator[tuple[str, jax.Array]]:
    """Yields the adapters' parameters by name, each of all layers."""
    for path, stack in jax.tree.leaves_with_path(eqx.filter(model, model.trainable)):
        yield parameter_name(path), stack


def _turned(name: str, matrix: np.ndarray) -> np.ndarray:
    """Returns a layer's matrix as PEFT has it, given ours, and the other way around."""
    return matrix.T if name.endswith(".b") else matrix


def _tensor_name(model: CausalLM, name: str, layer: int) -> str:
    owner, _, kind = name.rpartition(".adapter.")
    module = model.tensor_name(f"{owner}.weight", layer).removesuffix(".weight")
    return f"{_PREFIX}{module}.lora_{kind.upper()}.weight"
