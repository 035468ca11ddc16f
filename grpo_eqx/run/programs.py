"""Objects that hold a run's device programs, made from its description."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_eqx.common.compiler import Compiler
from grpo_eqx.common.errors import UserError
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.generation import LocalSampler, SamplerOptions, Sampling, Stopping
from grpo_eqx.generation.cpu import CpuDecoding
from grpo_eqx.generation.options import sampling_weights
from grpo_eqx.generation.sent_weights import WeightSender
from grpo_eqx.loss_backends import LOSS_BACKENDS
from grpo_eqx.models.causal_attention import best_attention
from grpo_eqx.objective import Objective
from grpo_eqx.rollout.layout_choice import AutoSharding, DecodingWork
from grpo_eqx.run.by_device import (
    compute_dtype,
    default_remat,
    device_bytes,
    on_cpu,
    vector_size,
)
from grpo_eqx.run.initial_state import state_shapes
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.arrays import shapes_of
from grpo_eqx.sharding.layout_report import bytes_per_device
from grpo_eqx.training.forward import Forward
from grpo_eqx.training.micro_batches import RowShape
from grpo_eqx.training.optimizer import OptimizerNumbers, make_optimizer
from grpo_eqx.training.options import UpdateOptions
from grpo_eqx.training.scorer import Scorer
from grpo_eqx.training.updater import Updater


class Programs(NamedTuple):
    """Objects that hold the programs of a run, and what these need besides arrays."""

    sampler: LocalSampler
    scorer: Scorer
    updater: Updater
    rollout_rows: RowShape
    """Shape of a rollout's rows."""
    update_rows: RowShape
    """Shape of the rows of an update, which learns from the rollout or a share of it."""
    compiler: Compiler


def make_programs(
    run: RunSpec,
    mesh: jax.sharding.Mesh,
    tokenizer: ChatTokenizer | None = None,
    on_compile: Callable[[str], None] = lambda name: None,
    *,
    rollout_mesh: jax.sharding.Mesh | None = None,
) -> Programs:
    """Makes what runs on the devices, for a run whose micro-batches are not `auto`.

    **Arguments:**

    - `run`: the description of the run.
    - `mesh`: the devices that train.
    - `tokenizer`: the tokenizer, without which programs are for planning, as shapes depend on
      its vocabulary alone.
    - `on_compile`: called with a program's name before it is compiled.
    - `rollout_mesh`: the devices that sample; by default those that train.
    """
    compiler = Compiler(on_compile)
    forward = Forward(
        backend=run.passed.loss_backend or LOSS_BACKENDS[run.cfg.loss_backend](),
        mesh=mesh,
        dtype=compute_dtype(run.cfg, mesh),
        remat=run.cfg.remat if run.cfg.remat != "auto" else default_remat(mesh),
        attention=best_attention(mesh),
    )
    updates = UpdateOptions(
        temperature=run.cfg.temperature,
        objective=_objective(run.cfg),
        optimizer=OptimizerNumbers.of(run.cfg) if run.passed.optimizer is None else None,
        top_entropy_quantile=run.cfg.top_entropy_quantile,
    )
    optimizer = run.passed.optimizer or make_optimizer(run.cfg)
    updater = Updater(updates, forward, optimizer, compiler)
    options, sender = _sampler_options(run, mesh, tokenizer), None
    if isinstance(run.rollout_sharding, AutoSharding) and (rollout_mesh or mesh).size > 1:
        work = _decoding_work(run, options, updater, rollout_mesh)
        options = dataclasses.replace(options, rollout_sharding=AutoSharding(work))
    if rollout_mesh is not None:
        sender = WeightSender(options, mesh, rollout_mesh, compiler)
        options = dataclasses.replace(options, weights_are_sent=True)
    return Programs(
        LocalSampler(options, rollout_mesh or mesh, compiler, sender),
        Scorer(forward, run.cfg.temperature, compiler),
        updater,
        run.row_shape(mesh, *run.rollout_shape),
        run.row_shape(mesh, *run.update_shape),
        compiler,
    )


def _decoding_work(
    run: RunSpec, options: SamplerOptions, updater: Updater, rollout_mesh: jax.sharding.Mesh | None
) -> DecodingWork:
    """Returns the sizes from which rollouts of each layout are estimated."""
    mesh, state = updater.forward.mesh, state_shapes(run, updater)
    weights = jax.eval_shape(functools.partial(sampling_weights, options=options), state.model)
    resident: Any = state.model, state.opt_state, state.reference
    if rollout_mesh is not None:
        resident = shapes_of(weights, weights.shardings(rollout_mesh))
    return DecodingWork(
        config=run.model,
        weights=weights,
        itemsize=options.compute_dtype.itemsize,
        kv_itemsize=options.kv_itemsize(run.model.head_size),
        prompt_length=run.prompts.train,
        completion_length=run.completion_length,
        resident_bytes=bytes_per_device(resident),
        usable_bytes=run.device_bytes or device_bytes(mesh),
        device_kind=mesh.devices.flat[0].device_kind,
    )


def _stopping(cfg: GRPOConfig, tokenizer: ChatTokenizer | None, vocab_size: int) -> Stopping:
    """Returns what ends completions; without a tokenizer, an automaton of the same shape."""
    if tokenizer is None:
        return Stopping.of_strings((), cfg.stop_strings, [b""] * vocab_size)
    if not cfg.stop_strings:
        return Stopping.of_ids(tokenizer.eos_ids, vocab_size)
    for string in cfg.stop_strings:
        if special := [t for t in tokenizer.tokenizer.all_special_tokens if t in string]:
            raise UserError(
                f"stop string {string!r} contains the special token {special[0]!r}, which the text "
                f"of completions omits: rely on the tokenizer's end-of-sequence tokens instead."
            )
    token_bytes = tokenizer.token_bytes(vocab_size)
    return Stopping.of_strings(tokenizer.eos_ids, cfg.stop_strings, token_bytes)


def _sampler_options(
    run: RunSpec, mesh: jax.sharding.Mesh, tokenizer: ChatTokenizer | None
) -> SamplerOptions:
    cfg = run.cfg
    return SamplerOptions(
        sampling=Sampling(
            temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p
        ),
        max_prompt_length=run.prompts.train,
        max_completion_length=run.completion_length,
        stopping=_stopping(cfg, tokenizer, run.model.vocab_size),
        pad_id=0 if tokenizer is None else tokenizer.pad_id,
        seed=cfg.seed,
        dtype=compute_dtype(cfg, mesh),
        rollout_dtype=None if cfg.rollout_dtype == "auto" else jnp.dtype(cfg.rollout_dtype),
        kv_cache_dtype=None if cfg.kv_cache_dtype == "auto" else jnp.dtype(cfg.kv_cache_dtype),
        kv_head_multiple=vector_size(mesh),
        max_num_seqs=cfg.max_num_seqs,
        keeps_caches=cfg.carried_caches == "keep",
        decoding_form=CpuDecoding() if on_cpu(mesh) else None,
        records_routes=cfg.router_replay,
        rollout_sharding=run.rollout_sharding,
        attention=best_attention(mesh),
    )


def _objective(cfg: GRPOConfig) -> Objective:
    fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(Objective)}
    # Fields that are None do not apply to the config's combination of options.
    return Objective(**{name: value for name, value in fields.items() if value is not None})
