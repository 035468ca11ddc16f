"""Generate and update of a model, and the same compiled for described devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from qwen2_sizes import MODELS as MODELS

from grpo_eqx.common.random_keys import make_key
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.generation import LocalSampler, SamplerOptions, Sampling, Stopping
from grpo_eqx.generation.cpu import CpuDecoding
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models.causal_attention import best_attention
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.objective import Objective
from grpo_eqx.run.by_device import vector_size
from grpo_eqx.sharding import parse_rollout_sharding
from grpo_eqx.sharding.rules import num_batch_shards
from grpo_eqx.training import Forward, RowShape, UpdateOptions, Updater
from grpo_eqx.training.lowering import model_shapes, optimizer_shapes
from grpo_eqx.training.rows import shapes_of_rows


@dataclasses.dataclass(frozen=True)
class Work:
    """Prompts with a group of completions each, all of one length, and the model of them."""

    model: Qwen2Config
    prompts: int
    group: int
    prompt_length: int
    completion_length: int

    @property
    def tokens(self) -> int:
        """Of all completions."""
        return self.prompts * self.group * self.completion_length


def make_sampler(
    work: Work, style: str, mesh: jax.sharding.Mesh, *, loops_over_layers: bool = False
) -> LocalSampler:
    """The sampler with one rollout sharding; nothing ends a completion before the limit.

    With `loops_over_layers`, decoding loops over layers on CPUs too, as on accelerators.
    """
    options = SamplerOptions(
        sampling=Sampling(),
        max_prompt_length=work.prompt_length,
        max_completion_length=work.completion_length,
        stopping=Stopping.of_ids((), work.model.vocab_size),
        pad_id=0,
        seed=0,
        dtype=_dtype(mesh),
        kv_head_multiple=vector_size(mesh),
        decoding_form=CpuDecoding() if _on_cpu(mesh) and not loops_over_layers else None,
        rollout_sharding=parse_rollout_sharding(style),
        attention=best_attention(mesh),
    )
    return LocalSampler(options, mesh)


def make_updater(
    mesh: jax.sharding.Mesh, optimizer: optax.GradientTransformation | None = None
) -> Updater:
    """The update, as runs on these devices make it; by default with AdamW."""
    forward = Forward(
        backend=ChunkedLoss(),
        mesh=mesh,
        dtype=_dtype(mesh),
        remat="none" if _on_cpu(mesh) else "full",
        attention=best_attention(mesh),
    )
    options = UpdateOptions(temperature=1.0, objective=Objective(loss_type="dapo"))
    return Updater(options, forward, optimizer or optax.adamw(1e-6))


def _on_cpu(mesh: jax.sharding.Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def _dtype(mesh: jax.sharding.Mesh) -> jnp.dtype:
    return jnp.dtype("float32" if _on_cpu(mesh) else "bfloat16")


def random_model(work: Work, mesh: jax.sharding.Mesh) -> Qwen2:
    """On the mesh, each device its own part."""
    shardings = jax.tree.map(lambda x: x.sharding, model_shapes(work.model, mesh))
    return jax.jit(lambda key: Qwen2.init(work.model, key), out_shardings=shardings)(make_key(0))


def random_prompts(work: Work) -> list[Trajectory]:
    """Draws prompts, the same in every process, for each of their completions."""
    shape = work.prompts, work.prompt_length
    ids = np.random.default_rng(0).integers(work.model.vocab_size, size=shape, dtype=np.int32)
    return [
        Trajectory(prompt, Address(0, p, g))
        for p, prompt in enumerate(ids.tolist())
        for g in range(work.group)
    ]


def compile_generate(sampler: LocalSampler, work: Work) -> jax.stages.Compiled:
    """For the devices of the sampler's mesh, which may be described ones."""
    model = model_shapes(work.model, sampler.mesh)
    return sampler.lower(model, work.prompts, work.group, work.prompt_length).compile()


def compile_update(
    updater: Updater, work: Work, micro_batch: int | None = None
) -> jax.stages.Compiled:
    """For the devices of the updater's mesh, which may be described ones.

    `micro_batch` is the number of completions that a device processes at a time; by default as many
    as in a run.
    """
    mesh = updater.forward.mesh
    shape = RowShape.of(
        work.prompts,
        work.group,
        prompt_length=work.prompt_length,
        completion_length=work.completion_length,
        num_shards=num_batch_shards(mesh),
        size=micro_batch,
        most_tokens=1024 if _on_cpu(mesh) else 8192,
        multiple=vector_size(mesh),
    )
    model = model_shapes(work.model, mesh)
    rows = shapes_of_rows(shape, mesh, replays=False, of_loss=())
    return updater.lower(model, optimizer_shapes(updater, model), rows, None).compile()
