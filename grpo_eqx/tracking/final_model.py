"""Writing of the trained model, to its run's folder or to a folder that the user names."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from grpo_eqx.common.durable import replace_durably, sync_tree
from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.common.read_files import expanded
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.tracking.run_folder import RunFolder


def write_model(save: Callable[[Path], None], path: str | Path) -> None:
    """Writes the trained model to a folder that the user names.

    **Arguments:**

    - `save`: writes the model to the folder that it is called with.
    - `path`: the folder.

    Raises `UserError` if `path` is empty, is a file or cannot be written.
    """
    folder = expanded(path)
    try:
        if not str(path):
            raise UserError("save_pretrained needs a folder: give its path.")
        if folder.is_file():
            raise UserError(f"{str(path)!r} is a file: give the path of a folder.")
        save(folder)
    except OSError as error:
        raise UserError(
            f"{str(path)!r} cannot be written ({_reason(error)}): choose another."
        ) from error


def write_final_model(save: Callable[[Path], None], folder: Path) -> None:
    """Writes the trained model to a folder or, if that fails, to a temporary one.

    **Arguments:**

    - `save`: writes the model to the folder that it is called with.
    - `folder`: the folder, which exists only once the whole model is in it.

    Raises `RunError` if the model is not in `folder`; the message says where the model is.
    """
    try:
        _write_whole(save, folder)
    except OSError as error:
        said = f"the trained model could not be written to {str(folder)!r} ({_reason(error)})"
        # The processes of several hosts write together, and the others have gone on.
        elsewhere = _write_elsewhere(save) if jax.process_count() == 1 else ""
        if isinstance(elsewhere, Path):
            raise RunError(f"{said}: it is in {str(elsewhere)!r} instead.") from error
        raise RunError(
            f"{said}{elsewhere}: {RunFolder(folder.parent).what_continues()}. A script's trainer "
            f"still has the model, for save_pretrained."
        ) from error


def _write_whole(save: Callable[[Path], None], folder: Path) -> None:
    beside = folder.with_suffix(".tmp")
    try:
        save(beside)
        if is_main():
            sync_tree(beside)
            if folder.exists():
                shutil.rmtree(folder)
            replace_durably(beside, folder)
    finally:
        if is_main():
            shutil.rmtree(beside, ignore_errors=True)


def _write_elsewhere(save: Callable[[Path], None]) -> Path | str:
    """Returns the temporary folder with the model, or the end of a sentence that says why not."""
    parent = tempfile.gettempdir()
    try:
        folder = Path(tempfile.mkdtemp(prefix="grpo_eqx-model-"))
        try:
            save(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        return f", nor to {parent!r} ({_reason(error)})"
    return folder


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
