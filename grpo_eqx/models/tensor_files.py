"""The safetensors files of a model's folder, and their index."""

import contextlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo_eqx.common.errors import FileError, WeightsError
from grpo_eqx.common.plain_data import brief, field
from grpo_eqx.common.read_files import open_tensors, parsed, read_object, reading
from grpo_eqx.models.hub import failed_download

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
"""File of an adapter's tensors, which may lie beside those of its model."""


def open_all(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Opens every tensor in the folder's safetensors files, as slices to be read lazily."""
    place = _index(folder)
    file_of: dict[str, str] = {}
    tensors: dict[str, Any] = {}
    for file in sorted(set(place.values())) or [SINGLE_FILE]:
        handle = stack.enter_context(open_file(folder / file))
        for name in handle.keys():  # noqa: SIM118
            if name in file_of:
                raise WeightsError(
                    f"{folder}: tensor {name!r} is in {file_of[name]} and in {file}: copy or "
                    f"download the folder again."
                )
            file_of[name] = file
            tensors[name] = handle.get_slice(name)
    for name, file in place.items():
        if file_of.get(name) != file:
            raise WeightsError(
                f"{folder / INDEX} says that tensor {name!r} is in {file}, and it is not: copy or "
                f"download the folder again."
            )
    return tensors


def open_file(path: Path) -> Any:
    """Opens a file of tensors, to be read in parts, in a `with`; raises `WeightsError`."""
    try:
        return open_tensors(path)
    except FileError as error:
        raise WeightsError(_why_unreadable(path) or str(error)) from error


def _index(folder: Path) -> dict[str, str]:
    """Returns the file of each tensor where the folder has an index; none without one.

    Raises `WeightsError` for an index that cannot be the folder's, and for a folder without
    weights.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX
    if not index.exists():
        if not os.path.lexists(single):
            raise WeightsError(_without_weights(folder))
        return {}
    try:
        place = field(read_object(index), "weight_map", dict, str(index))
    except FileError as error:
        raise WeightsError(str(error)) from error
    for name, file in place.items():
        is_text = isinstance(file, str) and file.isprintable() and file.endswith(".safetensors")
        if not (is_text and file == Path(file).name):
            raise WeightsError(
                f"{index}: the file of tensor {name!r} is {brief(file)}: expected the name of a "
                f"safetensors file in the folder; copy or download it again."
            )
    if not place or (single.exists() and SINGLE_FILE not in place.values()):
        has = f"does not name {SINGLE_FILE}, which is there too" if place else "names no tensor"
        raise WeightsError(
            f"{index} {has}: remove it if the model is in {SINGLE_FILE}, or remove that file."
        )
    return place


def _without_weights(folder: Path) -> str:
    """Says what to do with a folder that has no weights, or others than are read."""
    start = f"{folder} has no {SINGLE_FILE}"
    if pickles := sorted(p.name for p in folder.glob("*.bin")):
        return (
            f"{start}, and {pickles[0]} is a pickle, which is never loaded: load it with "
            f"transformers, and write it with save_pretrained."
        )
    others = sorted(p.name for p in folder.glob("*.safetensors") if p.name != ADAPTER)
    if len(others) > 1:
        return (
            f"{folder} has {others[0]} and {len(others) - 1} more, but no {INDEX}, which says "
            f"what is in them: copy or download it too."
        )
    if others:
        return f"{start}, but {others[0]}: rename it, if it has all tensors of the model."
    return f"{start}: only safetensors are loaded."


def _why_unreadable(path: Path) -> str | None:
    """Returns why a file of weights cannot be read, where that is known."""
    with contextlib.suppress(FileError), reading(str(path)):
        if path.is_symlink() and not path.exists():
            return (
                f"{path} is a link to {os.readlink(path)}, which does not exist: copy or download "
                f"it again."
            )
        if not path.exists():
            return (
                f"{path.parent} has no {path.name}, which {INDEX} names: copy or download it again."
            )
        if not path.is_file():
            return None
        why = failed_download(path) or _truncation(path)
        return why and f"{path} cannot be read: {why}."
    return None


def _truncation(path: Path) -> str | None:
    """Describes the first tensor that a truncated safetensors file cuts off, as a clause."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if header_size >= size:  # something else, such as a git-lfs pointer
            return None
        header = parsed(file.read(header_size).decode())
    ends = {
        name: 8 + header_size + entry["data_offsets"][1]
        for name, entry in header.items()
        if name != "__metadata__"
    }
    missing = [(end, name) for name, end in ends.items() if end > size]
    if not missing:
        return None
    return f"it ends at byte {size}, inside tensor {min(missing)[1]!r}; download it again"
