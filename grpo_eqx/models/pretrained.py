"""Reads and writes models as Hugging Face folders (`config.json`, safetensors), without torch."""

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from grpo_eqx.common.errors import UserError, WeightsError, first_line
from grpo_eqx.common.random_keys import make_key
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.models import peft
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.hub import MODEL_FILES, HubName, download, downloaded
from grpo_eqx.models.interface import CausalLM, parameter_name
from grpo_eqx.models.lora import Lora, linear_names
from grpo_eqx.models.registry import init_model, published_config, read_config
from grpo_eqx.models.tensor_files import INDEX, open_all
from grpo_eqx.settings.embedded import EMBEDDED_FOLDER, EMBEDDED_MODEL
from grpo_eqx.sharding.arrays import fetch_own, fetch_to_main, shard
from grpo_eqx.sharding.mesh import AutoMesh

_FILE_BYTES = 5 * 10**9
_COMPARED_ROWS = 1024
_FLOATS = "F64", "F32", "F16", "BF16"
_FREQUENCIES = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Names of constants that old transformers versions stored with the weights, and all ignore."""


def model_folder(name_or_path: str | Path) -> Path:
    """Returns the folder of a model: a local one, the embedded one, or a download from the hub.

    A hub name can end in a branch, tag or commit, `owner/name@revision`. Downloads take
    safetensors, configs and tokenizer files, never pickles or code. Raises `UserError` for a model
    that is neither available locally nor can be downloaded.
    """
    path = Path(name_or_path)
    if os.path.isdir(path):
        _check_folder(path)
        return path
    if str(name_or_path) == EMBEDDED_MODEL:
        return EMBEDDED_FOLDER
    name = hub_model(str(name_or_path))
    try:
        return download("model", name, allow=MODEL_FILES)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {str(name_or_path)!r} is neither a folder nor {EMBEDDED_MODEL!r}, and could "
            f"not be downloaded from the Hugging Face hub ({type(error).__name__}: "
            f"{first_line(error)}): check its name and the network, or give a folder."
        ) from error


def folder_beneath(adapter: peft.SavedAdapter) -> Path:
    """Returns the folder of an adapter's model, as `model_folder` does; refuses another adapter."""
    folder = model_folder(adapter.base)
    adapter.check_base(folder)
    return folder


def _check_folder(path: Path) -> None:
    """Refuses folders that people take for a model's."""
    if (path / "metrics.jsonl").exists():
        raise UserError(f"model {str(path)!r} is the folder of a run: use {str(path / 'model')!r}.")
    if (path / "config.json").exists():
        return
    if (path / peft.CONFIG).exists():
        base = peft.SavedAdapter.read(path).base
        raise UserError(
            f"model {str(path)!r} is an adapter of {base!r} without the rest of the model: copy "
            f"config.json and the tokenizer of that model into its folder."
        )
    if (path / "state").is_dir() and (path / "facts").is_dir():
        raise UserError(
            f"model {str(path)!r} is a checkpoint: use the folder that grpo-eqx export makes of it."
        )
    if (path.parent / "metrics.jsonl").exists():
        raise UserError(
            f"model {str(path)!r} is part of a run: use {str(path.parent / 'model')!r}, or what "
            f"grpo-eqx export makes of a checkpoint."
        )
    raise UserError(
        f"model {str(path)!r} has no config.json: give a folder with config.json, safetensors and "
        f"a tokenizer."
    )


def is_local(model: str) -> bool:
    """Whether a model is on this machine, as a folder or with the package."""
    return model == EMBEDDED_MODEL or os.path.isdir(model)


def hub_model(name: str) -> HubName:
    """Parses the name of a model that is not local; raises `UserError` for what cannot be one."""
    if os.path.isfile(name):
        raise UserError(f"model {name!r} is a file: give its folder, {str(Path(name).parent)!r}.")
    of_hub = HubName.parse("model", name, EMBEDDED_MODEL)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", of_hub.repository):
        raise UserError(
            f"model {name!r} does not exist here, and is not a name on the Hugging Face hub such "
            f"as Qwen/Qwen2.5-3B-Instruct: give a folder that exists, or a name."
        )
    return of_hub


def find_config(name: str) -> ModelConfig:
    """Finds the config of a folder, of a published model by its name, or of any on the hub."""
    if is_local(name):
        return read_config(model_folder(name) / "config.json")
    of_hub = hub_model(name)
    return published_config(name) or read_config(_downloaded_config(of_hub, name))


def _downloaded_config(of_hub: HubName, name: str) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(of_hub.repository, "config.json", revision=of_hub.revision)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {name!r} is not a folder, and its config.json could not be downloaded from the "
            f"Hugging Face hub ({type(error).__name__}: {first_line(error)}): check its name and "
            f"the network, or give a folder."
        ) from error


def base_model(model: str) -> str:
    """Returns the name of the model to train adapters of, or its whole path."""
    saved = saved_adapter(model)
    if saved is not None:
        return saved.base
    return str(Path(model).absolute()) if os.path.isdir(model) else model


def check_adapter(model: str, lora: Lora | None) -> None:
    """Refuses to train a model that is an adapter, unless it is the one to go on with.

    An adapter on the hub is looked at if it is downloaded already.
    """
    found = saved_adapter(model)
    if found is None:
        return
    config = read_config(model_folder(model) / "config.json")
    shapes = jax.eval_shape(lambda key: init_model(config, key), make_key(0))
    found.check_targets(shapes)
    saved, known = found.lora, linear_names(shapes)
    targets = set(saved.target or known)
    stabilized = lora is not None and lora.rank_stabilized
    alpha = saved.scale * (saved.rank**0.5 if stabilized else saved.rank)
    fix = (
        f"set lora_rank to {saved.rank}, lora_alpha to {alpha:g} and lora_target to "
        f"{','.join(sorted(targets))}"
    )
    if lora is None:
        raise UserError(
            f"model {model!r} is an adapter, and lora_rank is not set: {fix}, to train or evaluate "
            f"it as it is, or merge it into its model, with PEFT or, for a run's, with grpo-eqx "
            f"export --merge."
        )
    same_scale = math.isclose(lora.scale, saved.scale, rel_tol=1e-4)
    if lora.rank != saved.rank or not same_scale or targets != set(lora.target or known):
        raise UserError(f"model {model!r} is another adapter than the settings': {fix}.")


def saved_adapter(model: str) -> peft.SavedAdapter | None:
    """Returns the config of a model on this machine that is an adapter; `None` for others."""
    folder: Path | None = Path(model)
    if not is_local(model):
        folder = downloaded("model", hub_model(model))
    if folder is None or not os.path.exists(folder / peft.CONFIG):
        return None
    return peft.SavedAdapter.read(folder)


def from_pretrained(
    name_or_path: str | Path,
    mesh: jax.sharding.Mesh | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> CausalLM:
    """Loads a model of a known family, each array directly into its sharding over `mesh`.

    Only the slices that this host's devices hold are read, one parameter at a time. Of an adapter's
    folder, as PEFT writes it, the model beneath is loaded too, and gets the float32 adapter.

    **Arguments:**

    - `name_or_path`: a folder or hub name.
    - `mesh`: a mesh of (dp, fsdp, tp); by default all devices on fsdp.
    - `dtype`: dtype of the arrays.

    Raises `UserError` for a model that cannot be found or an unknown dtype, and
    `WeightsError`, naming the tensor, where one is missing, unexpected, truncated or not of
    the shape that `config.json` implies. A stored head must equal the embedding if tied to it;
    stored rotary frequencies are ignored.
    """
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise UserError(f"dtype is {dtype!r}: use float32, bfloat16 or float16.") from error
    mesh = AutoMesh().build() if mesh is None else mesh
    folder = Path(name_or_path)
    if not os.path.exists(folder / peft.CONFIG):
        folder = model_folder(name_or_path)
    if os.path.exists(folder / peft.CONFIG):
        saved = peft.SavedAdapter.read(folder)
        return saved.added_to(from_pretrained(folder_beneath(saved), mesh, dtype), mesh)
    config = read_config(folder / "config.json")
    template = jax.eval_shape(lambda key: init_model(config, key), make_key(0))
    with ExitStack() as stack:
        tensors = open_all(folder, stack)
        _check_tensors(folder, template, tensors)

        def load(
            path: tuple[object, ...], leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
        ) -> jax.Array:
            name = parameter_name(path)
            form = template.tensor_form(name)

            def read(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None  # None only for arrays without data
                stacked, within = index[: form.stacked], index[form.stacked :]
                if form.is_transposed:
                    within = within[::-1]
                numbers = [range(n)[each] for n, each in zip(leaf.shape, stacked, strict=False)]
                parts = [
                    _part(folder, tensors, template.tensor_name(name, *each), within, dtype)
                    for each in itertools.product(*numbers)
                ]
                whole = np.stack([part.T if form.is_transposed else part for part in parts])
                return whole.reshape(*map(len, numbers), *whole.shape[1:])

            return jax.make_array_from_callback(leaf.shape, sharding, read, dtype=dtype)

        return jax.tree.map_with_path(load, template, template.shardings(mesh))


def _part(
    folder: Path, tensors: Mapping[str, Any], name: str, index: tuple[slice, ...], dtype: np.dtype
) -> np.ndarray:
    """Reads a part of a tensor; raises `WeightsError` if it is not finite."""
    part = tensors[name][index].astype(dtype)
    if not np.isfinite(part).all():
        raise WeightsError(
            f"{folder}: tensor {name!r} has numbers that are not finite: use another copy of the "
            f"model."
        )
    return part


def shard_model(
    model: str | CausalLM, mesh: jax.sharding.Mesh, dtype: jax.typing.DTypeLike = jnp.float32
) -> CausalLM:
    """Places parameters on a mesh: those of a name or folder, or a copy of a model's."""
    if isinstance(model, str):
        return from_pretrained(model, mesh, dtype)
    # A copy even where the model is in place already: updates will be written over it.
    copy = jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), model)
    shardings = model.shardings(mesh)
    if jax.process_count() > 1:
        return jax.tree.map(shard, fetch_own(copy), shardings)
    return jax.device_put(copy, shardings)


def save_pretrained(
    model: CausalLM,
    folder: str | Path,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    base: str | None = None,
) -> None:
    """Writes `config.json` and safetensors that Hugging Face transformers loads.

    Of a model with adapters, these are written, as PEFT does; to write the whole, save `merged()`.

    **Arguments:**

    - `model`, `folder`: the model, and the folder to write.
    - `dtype`: dtype of the tensors; by default that of the model.
    - `base`: name or folder of the model beneath adapters.

    Files hold at most 5 GB each, and one of them is in host memory at a time. All processes must
    call this; only the first one writes. Raises `OSError` where the folder cannot be written, and
    `UserError` for adapters without `base`, or in the folder of it.
    """
    folder = Path(folder)
    dtype = jnp.dtype(model.head.dtype if dtype is None else dtype)
    if model.has_adapters and base is None:
        raise UserError(
            "the model has adapters: give base, the name or folder of the model beneath, or save "
            "model.merged()."
        )
    if model.has_adapters and Path(str(base)).resolve() == folder.resolve():
        raise UserError(
            f"the adapters' folder is {str(folder)!r}, where the model beneath is: choose another."
        )
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        config = {**model.config.to_json(), "torch_dtype": dtype.name}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        stale = [*folder.glob("model*.safetensors"), folder / INDEX]
        for path in [*stale, folder / peft.CONFIG, folder / peft.WEIGHTS]:
            path.unlink(missing_ok=True)
    if base is not None and model.has_adapters:
        peft.save_adapter(model, folder, base)
        return
    slots = dict(_tensors(model))
    groups = _files(slots, dtype)
    if len(groups) == 1:
        _write_file(folder / "model.safetensors", groups[0], dtype)
        return
    weight_map = {}
    for i, group in enumerate(groups, start=1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        _write_file(folder / file, group, dtype)
        weight_map.update(dict.fromkeys(group, file))
    total = sum(x.size for group in groups for x in group.values()) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    if is_main():
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One tensor of a folder: a part of a parameter (or of its shape), read only on request."""

    array: Any
    index: tuple[int, ...]
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.array.shape[len(self.index) :])
        return shape[::-1] if self.is_transposed else shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self, dtype: np.dtype) -> np.ndarray | None:
        """Returns the tensor in process 0; all processes must call it."""
        part = fetch_to_main(self.array[self.index] if self.index else self.array)
        if part is None:
            return None
        return np.ascontiguousarray((part.T if self.is_transposed else part).astype(dtype))


def _tensors(model: CausalLM) -> Iterator[tuple[str, _Slot]]:
    """Yields every tensor of a folder by its name."""
    for path, leaf in jax.tree.leaves_with_path(model):
        name = parameter_name(path)
        form = model.tensor_form(name)
        for index in np.ndindex(*leaf.shape[: form.stacked]):
            yield model.tensor_name(name, *index), _Slot(leaf, index, form.is_transposed)


def _files(slots: Mapping[str, _Slot], dtype: np.dtype) -> list[dict[str, _Slot]]:
    """Groups the tensors into files of at most `_FILE_BYTES` (or of one tensor)."""
    groups: list[dict[str, _Slot]] = [{}]
    used = 0
    for name, slot in slots.items():
        size = slot.size * dtype.itemsize
        if groups[-1] and used + size > _FILE_BYTES:
            groups.append({})
            used = 0
        groups[-1][name] = slot
        used += size
    return groups


def _write_file(path: Path, slots: Mapping[str, _Slot], dtype: np.dtype) -> None:
    arrays = {name: slot.read(dtype) for name, slot in slots.items()}
    if is_main():
        try:
            save_file(
                {name: x for name, x in arrays.items() if x is not None},
                path,
                metadata={"format": "pt"},
            )
        except SafetensorError as error:  # such as a full disk
            raise OSError(first_line(error)) from error
        path.chmod((path.parent / "config.json").stat().st_mode)  # safetensors: the owner's alone


def _check_tensors(folder: Path, template: CausalLM, tensors: Mapping[str, Any]) -> None:
    known = set[str]()
    for name, slot in _tensors(template):  # which may be many more than there are
        known.add(name)
        if name not in tensors:
            raise WeightsError(
                f"{folder}: tensor {name!r} is missing{_reason_missing(name, tensors)}."
            )
        if (stored := tensors[name].get_dtype()) not in _FLOATS:
            raise WeightsError(
                f"{folder}: tensor {name!r} is stored as {stored}: quantized weights are not "
                f"supported."
            )
        found = tuple(tensors[name].get_shape())
        if found != slot.shape:
            raise WeightsError(
                f"{folder}: tensor {name!r} has shape {found}, but config.json says {slot.shape}."
            )
    head = template.tensor_name("lm_head")
    if template.config.tie_word_embeddings and head in tensors:
        _check_tied_head(folder, tensors, head, template.tensor_name("embed_tokens"))
        known.add(head)
    extra = sorted(name for name in tensors.keys() - known if not _FREQUENCIES.fullmatch(name))
    if extra:
        raise WeightsError(
            f"{folder}: tensor {extra[0]!r} does not belong to the model in config.json."
        )


def _reason_missing(name: str, tensors: Mapping[str, Any]) -> str:
    """Returns what to change where a tensor is missing, as a clause, if that is known."""
    longer = next((other for other in tensors if other.endswith(f".{name}")), None)
    if longer is not None:
        return f", but there is {longer!r}: remove the prefix from the tensors' names"
    if name.removeprefix("model.") in tensors:
        return (
            ", as AutoModel leaves out the head and the prefix 'model.': load the model with "
            "AutoModelForCausalLM instead, and save it again"
        )
    if name == "lm_head.weight":
        return ": set tie_word_embeddings to true in config.json, if the model ties them"
    if re.match(r"model\.layers\.\d+\.", name):
        found = {m[1] for other in tensors if (m := re.match(r"model\.layers\.(\d+)\.", other))}
        return (
            f": the files have {len(found)} of the layers that config.json says (num_hidden_layers)"
        )
    return ""


def _check_tied_head(
    folder: Path, tensors: Mapping[str, Any], head_name: str, embedding_name: str
) -> None:
    """Raises `WeightsError` where a stored head is not bitwise equal to its tied embedding."""
    head, embedding = tensors[head_name], tensors[embedding_name]
    same = head.get_shape() == embedding.get_shape() and head.get_dtype() == embedding.get_dtype()
    size = embedding.get_shape()[0]
    for start in range(0, size, _COMPARED_ROWS):  # a few at a time, to save memory
        rows = slice(start, min(start + _COMPARED_ROWS, size))
        same = same and head[rows].tobytes() == embedding[rows].tobytes()
    if not same:
        raise WeightsError(
            f"{folder}: tensor {head_name!r} differs from {embedding_name!r}, but "
            "config.json ties them: set tie_word_embeddings to false there, or remove the tensor."
        )
