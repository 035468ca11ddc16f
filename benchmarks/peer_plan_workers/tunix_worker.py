"""Compiles Tunix's GRPO step for a described TPU, for peer_plan.py: python tunix_worker.py WORK.

WORK is JSON. Writes the text of each compiled program and its memory into the folder that it names.
Learner, trainer and sampler are Tunix's own, made from shapes alone: no array of the model exists.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["WANDB_MODE"] = "disabled"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.generate import sampler as sampling
from tunix.models.qwen2 import model as qwen2
from tunix.rl import rl_cluster as cluster
from tunix.rl import utils as rl_utils
from tunix.rl.grpo import grpo_learner as grpo
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

MODELS = {"0.5B": qwen2.ModelConfig.qwen2p5_0p5b, "3B": qwen2.ModelConfig.qwen2p5_3b}
PAD_ID, EOS_ID = 0, 1
KV_CACHE_MARGIN = 256
"""Places of the cache beyond prompt and completion, as in its recipes."""
CLIP, LEARNING_RATE = 1.0, 1e-6


class Tokenizer:
    """The ids that Tunix asks a tokenizer for; nothing is encoded."""

    def encode(self, text: str, **options: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Any, **options: Any) -> str:
        raise NotImplementedError

    def bos_id(self) -> int:
        return PAD_ID

    def eos_id(self) -> int:
        return EOS_ID

    def pad_id(self) -> int:
        return PAD_ID


def main(work: dict[str, Any]) -> None:
    devices = described_devices(work["topology"], work["chips_per_host"])
    mesh = Mesh(np.array(devices).reshape(work["mesh"]), ("fsdp", "tp"))
    folder = Path(work["folder"])
    facts = {"version": version("google-tunix"), "jax": jax.__version__}
    (folder / "facts.json").write_text(json.dumps(facts))
    with as_if_attached(mesh), mesh:
        sampler = make_sampler(work, mesh)
        state = sampling_state(sampler, work)
        if "prefill" in work["programs"]:
            prefill = record(folder, "prefill", lambda: lower_prefill(sampler, state))
            if prefill is not None:
                state = jax.tree.map(with_sharding, state, prefill.output_shardings)
        if "decode" in work["programs"]:
            record(folder, "decode", lambda: lower_decode(sampler, state))
        if "update" in work["programs"]:
            learner = make_learner(work, mesh)
            record(folder, "update", lambda: lower_train_step(learner, work, mesh))


def described_devices(topology: str, chips_per_host: list[int]) -> list[Any]:
    options: dict[str, Any] = {"chips_per_host_bounds": tuple(chips_per_host)}
    if topology.startswith("v4"):
        options["chip_config_name"] = "megacore"
    return list(topologies.get_topology_desc(topology, "tpu", **options).devices)


@contextlib.contextmanager
def as_if_attached(mesh: Mesh) -> Iterator[None]:
    """Lets Tunix find the described devices where it asks for attached ones, and make no arrays.

    Its model leaves out all constraints of shardings if `jax.devices()` are CPUs. Its cluster asks
    arrays on which mesh they are and copies the weights to the host, and the optimizer's state
    would be zeros of twice the model's size or more.
    """
    optimizer = nnx.Optimizer

    def optimizer_of_shapes(model: Any, tx: Any, wrt: Any) -> Any:
        return nnx.eval_shape(lambda model: optimizer(model, tx, wrt=wrt), model)

    with (
        mock.patch.object(jax, "devices", return_value=list(mesh.devices.flat)),
        mock.patch.object(nnx, "Optimizer", optimizer_of_shapes),
        mock.patch.object(rl_utils, "get_pytree_mesh_info", return_value=mesh),
        mock.patch.object(rl_utils, "put_params_on_memory_kind", lambda params, _: params),
    ):
        yield


def make_learner(work: dict[str, Any], mesh: Mesh) -> grpo.GRPOLearner:
    roles = (cluster.Role.ACTOR, cluster.Role.REFERENCE, cluster.Role.ROLLOUT)
    return grpo.GRPOLearner(
        rl_cluster=cluster.RLCluster(
            actor=model_of_shapes(work, mesh),
            reference=None,
            tokenizer=Tokenizer(),
            cluster_config=cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, mesh),
                rollout_engine="vanilla",
                offload_to_cpu=False,
                training_config=cluster.RLTrainingConfig(
                    actor_optimizer=optax.chain(
                        optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE)
                    ),
                    eval_every_n_steps=1000,
                    mini_batch_size=work["prompts"],
                    train_micro_batch_size=work["micro_batch"] // work["group"],
                    rollout_micro_batch_size=work["prompts"],
                ),
                rollout_config=RolloutConfig(
                    max_tokens_to_generate=work["completion_length"],
                    max_prompt_length=work["prompt_length"],
                    kv_cache_size=cache_size(work),
                    temperature=1.0,
                    top_p=1.0,
                    top_k=None,
                    eos_tokens=[EOS_ID],
                ),
            ),
        ),
        reward_fns=lambda prompts, completions, **columns: [0.0] * len(completions),
        algo_config=grpo.GRPOConfig(num_generations=work["group"], num_iterations=1, beta=0.0),
    )


def make_sampler(work: dict[str, Any], mesh: Mesh) -> sampling.Sampler:
    """Its rollout's sampler, with a model that recomputes nothing, as in its recipe.

    With one that does, tracing the loop over tokens fails: "Cannot mutate Param from a different
    trace level".
    """
    model = model_of_shapes({**work, "remat": "none"}, mesh)
    cache = CacheConfig(
        cache_size=cache_size(work),
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
    )
    return VanillaRollout(model, Tokenizer(), cache)._sampler


def cache_size(work: dict[str, Any]) -> int:
    return work["prompt_length"] + work["completion_length"] + KV_CACHE_MARGIN


def model_of_shapes(work: dict[str, Any], mesh: Mesh) -> qwen2.Qwen2:
    """Its model, each parameter a shape with the sharding that its loader of weights gives it."""
    config = MODELS[work["model"]]()
    config = dataclasses.replace(
        config,
        num_layers=work["layers"] or config.num_layers,
        dtype=jnp.dtype(work["dtype"]),
        param_dtype=jnp.dtype(work["param_dtype"]),
        remat_config=qwen2.RematConfig[work["remat"].upper()],
        use_flash_attention=work["flash_attention"],
        flash_attention_block_size=work["flash_block"],
    )
    abstract = nnx.eval_shape(lambda: qwen2.Qwen2(config, rngs=nnx.Rngs(params=0)))
    graph, state = nnx.split(abstract)
    return nnx.merge(graph, jax.tree.map(with_sharding, state, nnx.get_named_sharding(state, mesh)))


def with_sharding(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def lower_train_step(
    learner: grpo.GRPOLearner, work: dict[str, Any], mesh: Mesh
) -> jax.stages.Lowered:
    """The function that its trainer jits: loss, gradients, accumulation and optimizer."""
    trainer = learner.rl_cluster.actor_trainer
    state = nnx.state(trainer.optimizer, nnx.optimizer.OptState)
    shardings = nnx.get_named_sharding(state, mesh)
    nnx.update(trainer.optimizer, jax.tree.map(with_sharding, state, shardings))
    trainer._shard_optimizer = lambda mesh: None  # it is, as shapes
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=False)
    rows, tokens = work["micro_batch"], work["completion_length"]
    split = NamedSharding(mesh, PartitionSpec("fsdp"))

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    example = grpo.TrainExample(
        prompt_ids=array(rows, work["prompt_length"]),
        prompt_mask=array(rows, work["prompt_length"], dtype=bool),
        completion_ids=array(rows, tokens),
        completion_mask=array(rows, tokens, dtype=bool),
        advantages=array(rows, dtype=jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )
    return step.func.lower(*step.args, example)


def sampling_state(sampler: sampling.Sampler, work: dict[str, Any]) -> Any:
    """Shapes of what its sampler makes of the prompts. Like the sampler, states no sharding."""
    length = work["prompt_length"]
    ids = jax.ShapeDtypeStruct((work["prompts"] * work["group"], length), jnp.int32)
    sampler.eos_ids = jnp.array([EOS_ID])
    state = jax.eval_shape(
        lambda ids: sampler.init_sample_state(
            ids,
            include_logits=False,
            total_sampling_steps=length + work["completion_length"],
            forbidden_token_ids=None,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            seed=jnp.zeros(2, jnp.uint32),  # a raw key
            beam_size=None,
        ),
        ids,
    )
    return dataclasses.replace(state, num_input_tokens=length)


def lower_prefill(sampler: sampling.Sampler, state: Any) -> jax.stages.Lowered:
    weights = sampler._flattened_transformer_state
    return sampler._compiled_prefill_fn.lower(weights, state, None, echo=False)


def lower_decode(sampler: sampling.Sampler, state: Any) -> jax.stages.Lowered:
    return sampler._compiled_decode_fn.lower(sampler._flattened_transformer_state, state)


def record(folder: Path, name: str, lower: Any) -> jax.stages.Compiled | None:
    """Compiles a program and writes what is known of it; `None` where the compiler refuses."""
    start = time.monotonic()
    try:
        compiled = lower().compile()
    except Exception as error:  # whatever stops it is a finding
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - start}
        (folder / f"{name}.json").write_text(json.dumps(said))
        return None
    memory = compiled.memory_analysis()
    sizes = {
        f"{part}_bytes": getattr(memory, f"{part}_size_in_bytes")
        for part in ("argument", "output", "alias", "temp", "generated_code")
    }
    sizes["peak_bytes"] = getattr(memory, "peak_memory_in_bytes", 0)
    flops = (compiled.cost_analysis() or {}).get("flops")
    said = {**sizes, "flops": flops, "seconds": time.monotonic() - start}
    (folder / f"{name}.hlo").write_text(compiled.as_text())
    (folder / f"{name}.json").write_text(json.dumps(said))
    return compiled


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
