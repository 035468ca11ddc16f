"""Generate and update of a model, and the same compiled for described devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from qwen2_sizes import MODELS as MODELS

from grpo_eqx.common.prng import make_key
from grpo_eqx.generation import Prompts, Sampling, Stopping
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models.causal_attention import best_attention
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.objective import Objective
from grpo_eqx.run.spec import vector_size
from grpo_eqx.sharding import parse_rollout_sharding
from grpo_eqx.training.lowering import lower_generate, lower_update, model_shapes
from grpo_eqx.training.options import ProgramOptions
from grpo_eqx.training.programs import Programs


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


def make_programs(
    work: Work, style: str, mesh: jax.sharding.Mesh, *, loops_over_layers: bool = False
) -> Programs:
    """The programs with one rollout sharding; nothing ends a completion before the limit.

    With `loops_over_layers`, decoding loops over layers on CPUs too, as on accelerators.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = ProgramOptions(
        sampling=Sampling(),
        max_prompt_length=work.prompt_length,
        max_completion_length=work.completion_length,
        stopping=Stopping.of_ids((), work.model.vocab_size),
        pad_id=0,
        seed=0,
        dtype=jnp.dtype("float32" if on_cpu else "bfloat16"),
        kv_head_multiple=vector_size(mesh),
        decodes_on_cpu=on_cpu and not loops_over_layers,
        remat="none" if on_cpu else "full",
        rollout_sharding=parse_rollout_sharding(style),
        attention=best_attention(mesh),
        objective=Objective(loss_type="dapo"),
        tokens_per_micro_batch=1024 if on_cpu else 8192,
        row_multiple=vector_size(mesh),
    )
    return Programs(options, mesh, ChunkedLoss(), optax.adamw(1e-6))


def random_model(work: Work, mesh: jax.sharding.Mesh) -> Qwen2:
    """On the mesh, each device its own part."""
    shardings = jax.tree.map(lambda x: x.sharding, model_shapes(work.model, mesh))
    return jax.jit(lambda key: Qwen2.init(work.model, key), out_shardings=shardings)(make_key(0))


def random_prompts(work: Work) -> Prompts:
    """Draws prompts, the same in every process."""
    shape = work.prompts, work.prompt_length
    ids = np.random.default_rng(0).integers(work.model.vocab_size, size=shape, dtype=np.int32)
    return Prompts(ids, np.ones(shape, bool))


def compile_generate(programs: Programs, work: Work) -> jax.stages.Compiled:
    """For the devices of the programs' mesh, which may be described ones."""
    model = model_shapes(work.model, programs.mesh)
    return lower_generate(programs, model, work.prompts, work.group, work.prompt_length).compile()


def compile_update(programs: Programs, work: Work) -> jax.stages.Compiled:
    """For the devices of the programs' mesh, which may be described ones."""
    model = model_shapes(work.model, programs.mesh)
    return lower_update(programs, model, work.prompts, work.group).compile()
