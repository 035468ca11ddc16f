"""Writes a checkpoint as a Hugging Face folder."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from safetensors import SafetensorError

from grpo_eqx.checkpoint.checkpoints import located
from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.checkpoint.saved import OtherArraysError, SavedStep, complete_steps
from grpo_eqx.common.durable import replace_durably
from grpo_eqx.common.errors import UserError, first_line
from grpo_eqx.common.random_keys import make_key
from grpo_eqx.data.run_inputs import PLAIN, tokenizer_in
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.lora import Lora, prepared
from grpo_eqx.models.pretrained import (
    base_model,
    from_pretrained,
    model_folder,
    save_pretrained,
)
from grpo_eqx.models.registry import read_config
from grpo_eqx.settings.types import refuse_address
from grpo_eqx.sharding.mesh import AutoMesh
from grpo_eqx.training.lowering import model_shapes


class Exported(NamedTuple):
    """Result of an export."""

    checkpoint: Path
    num_parameters: int


class _Loaded(NamedTuple):
    checkpoint: Path
    model: CausalLM
    base: str
    """Name of the model beneath adapters, or its folder."""
    tokenizer: ChatTokenizer


def export(
    source: Path,
    output: Path,
    dtype: jax.typing.DTypeLike,
    say: Callable[[str], None],
    model: str | None = None,
    *,
    merge: bool = False,
) -> Exported:
    """Writes the model of a checkpoint, with its tokenizer, as a run writes its final one.

    **Arguments:**

    - `source`: a run folder, of which the newest readable checkpoint is exported, or a checkpoint.
    - `output`: the folder to write, missing or empty.
    - `dtype`: dtype of the tensors.
    - `say`: shows the user a line.
    - `model`: a model with the architecture and tokenizer of the run; by default the one that the
      run started from.
    - `merge`: whether adapters are merged into the model. Otherwise they are written as PEFT does.

    Loads no more than the parameters, onto one device. The output appears when it is complete.
    Raises `UserError` where anything is missing, damaged or in the way.
    """
    refuse_address("checkpoint", source)
    refuse_address("output", output)
    unfinished = _unfinished(output, source)
    try:
        loaded = _load(source, model, say, merge)
        if loaded.model.has_adapters and jnp.dtype(dtype) != jnp.float32:
            raise UserError("adapters are float32: leave dtype out, or set merge.")
    except UserError:
        with suppress(OSError):  # something is in it, from an export that was killed
            unfinished.rmdir()
        raise
    try:
        save_pretrained(loaded.model, unfinished, dtype, base=loaded.base)
        loaded.tokenizer.save_pretrained(unfinished)
        replace_durably(unfinished, output)
    except (OSError, SafetensorError) as error:
        raise _unwritable(output, error) from error
    written = eqx.filter(loaded.model, loaded.model.trainable)
    size = sum(x.size for x in jax.tree.leaves(written))
    return Exported(loaded.checkpoint, size)


def _unfinished(output: Path, source: Path) -> Path:
    """Creates the folder to write to, which takes its name when all is written."""
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            one, other = output.resolve(), source.resolve()
            overlap = one.is_relative_to(other) or other.is_relative_to(one)
            raise UserError(
                f"output is {str(output)!r}, which exists and is not an empty folder: choose "
                f"another{'' if overlap else ', or delete it first'}."
            )
        unfinished = output.absolute().with_name(f"{output.absolute().name}.unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(output, error) from error
    return unfinished


def _unwritable(output: Path, error: OSError | SafetensorError) -> UserError:
    reason = error.strerror if isinstance(error, OSError) else first_line(error)
    return UserError(
        f"output is {str(output)!r}, which cannot be written ({reason}): choose another folder, or "
        f"make room there."
    )


def _load(source: Path, model: str | None, say: Callable[[str], None], merge: bool) -> _Loaded:
    folder, step = located("checkpoint", source)
    steps = complete_steps(folder) if step is None else [step]
    failures = []
    for saved in (SavedStep(folder, each) for each in steps):
        try:
            return _load_step(saved, model, say, merge)
        except UserError:
            raise
        except Exception as error:  # whatever Orbax and TensorStore find wrong with it
            failures.append(f"{saved.path}: {first_line(error)}")
            if step is None:
                say(f"warning: cannot read the checkpoint {failures[-1]}")
    if step is not None:
        raise UserError(
            f"cannot read the checkpoint {failures[0]}. Give the run folder instead of the "
            f"checkpoint, to export the newest one that can be read."
        )
    raise UserError(
        f"none of the {len(failures)} checkpoints in {str(folder)!r} can be read ({failures[0]}): "
        f"restore one from a backup."
    )


def _load_step(
    saved: SavedStep, model: str | None, say: Callable[[str], None], merge: bool
) -> _Loaded:
    path, facts = saved.path, RunFacts.saved(saved)
    name = _source(facts) if model is None else model
    started = "" if model is not None else ", from which the run started,"
    fix = "Give the folder of the model that the run trains, as --model FOLDER."
    try:
        named = model_folder(name)
        config = read_config(named / "config.json")
        template = facts.config.get("chat_template")
        variables = facts.config.get("chat_template_kwargs", ())
        if model is not None and template != PLAIN:  # the folder has the one to write
            template, variables = None, ()
        tokenizer = tokenizer_in(named, facts.config["system_prompt"], template, variables)
    except UserError as error:
        raise UserError(f"the checkpoint {str(path)!r} needs its model: {error} {fix}") from error
    tokenizer.check_belongs_to(config.vocab_size)
    if tokenizer.fingerprint() != facts.fingerprints["the tokenizer"]:
        other = f"the tokenizer of {name!r}{started} is not the tokenizer that the run used"
        if model is None:
            raise UserError(f"{other}: one was passed to GRPOTrainer, or it has changed. {fix}")
        say(f"warning: {other}")
    mesh = AutoMesh().build(jax.devices()[:1])
    lora = Lora.of_settings(facts.config)
    shapes = model_shapes(config, mesh, lora=lora)
    try:
        parameters = saved.model(eqx.filter(shapes, shapes.trainable))
    except OtherArraysError as error:
        raise UserError(
            f"the checkpoint {str(path)!r} is of another model than {name!r}{started} ({error}): "
            f"one was passed to GRPOTrainer, or it has changed. {fix}"
        ) from error
    if lora is not None:
        frozen = shapes
        if merge:
            whole = from_pretrained(base_model(name), mesh)
            frozen = prepared(whole, lora, jnp.float32, make_key(0))
        parameters = eqx.combine(parameters, frozen)
        parameters = parameters.merged() if merge else parameters
    elif merge:
        raise UserError(
            f"the checkpoint {str(path)!r} has no adapters, and is a whole model: leave merge out."
        )
    return _Loaded(path, parameters, base_model(name), tokenizer)


def _source(facts: RunFacts) -> str:
    """Names the model that a run started from, with its commit if it is on the hub."""
    name, commit = facts.config["model"], facts.commits.get("model")
    return name if commit is None else f"{name.partition('@')[0]}@{commit}"
