"""The strategies that a config names, and the programs they make."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from grpo_eqx.config import GRPOConfig
from grpo_eqx.errors import UserError
from grpo_eqx.generation import Sampling, Stopping
from grpo_eqx.loss_backends import ChunkedLoss, DenseLoss, LossBackend, PallasLoss
from grpo_eqx.models.causal_attention import best_attention
from grpo_eqx.objective import make_objective
from grpo_eqx.sharding.mesh import Mesh, parse_mesh
from grpo_eqx.sharding.rollout import RolloutSharding, parse_rollout_sharding
from grpo_eqx.sharding.rules import batch_sharding
from grpo_eqx.training.micro_batches import MicroBatches
from grpo_eqx.training.optimizer import make_optimizer
from grpo_eqx.training.programs import ProgramOptions, Programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategies:
    """The objects that stand in for what a config names; `None`: what it names."""

    mesh: Mesh | None = None
    rollout_sharding: RolloutSharding | None = None
    loss_backend: LossBackend | None = None
    optimizer: optax.GradientTransformation | None = None

    def build_mesh(
        self, cfg: GRPOConfig, devices: Sequence[jax.Device] | None = None
    ) -> jax.sharding.Mesh:
        """The mesh over `devices`, by default all there are."""
        return (parse_mesh(cfg.mesh) if self.mesh is None else self.mesh).build(devices)

    def rollout(self, cfg: GRPOConfig) -> RolloutSharding:
        """The rollout sharding."""
        if self.rollout_sharding is not None:
            return self.rollout_sharding
        return parse_rollout_sharding(cfg.rollout_sharding)

    def programs(
        self, cfg: GRPOConfig, mesh: jax.sharding.Mesh, stopping: Stopping, pad_id: int
    ) -> Programs:
        """The three programs of a config, whose micro-batches are no longer `auto`."""
        return Programs(
            program_options(cfg, mesh, self.rollout(cfg), stopping, pad_id),
            mesh,
            self.loss_backend or loss_backend(cfg),
            self.optimizer or make_optimizer(cfg),
        )


def check_hosts(mesh: jax.sharding.Mesh) -> None:
    """Refuses meshes that leave out a host of this run."""
    hosts = {device.process_index for device in mesh.devices.flat}
    if idle := sorted(set(range(jax.process_count())) - hosts):
        raise UserError(
            f"the mesh has no device of process {', '.join(map(str, idle))}: give every host a "
            f"part, or start fewer."
        )


def check_batches(
    cfg: GRPOConfig, mesh: jax.sharding.Mesh, rollout_sharding: RolloutSharding
) -> None:
    """Refuses batches that cannot be split: of rollouts, which are scored, and of updates."""
    G, size = cfg.num_generations, cfg.micro_batch_size_per_device
    rollout_sharding.layout(mesh, cfg.prompts_per_step, G, cfg.max_num_seqs)
    for P in (cfg.prompts_per_step, cfg.prompts_per_step // cfg.steps_per_generation):
        MicroBatches.plan(P, G, batch_sharding(mesh, P, G), None if size == "auto" else size)


def micro_batch_sizes(cfg: GRPOConfig, mesh: jax.sharding.Mesh) -> list[int]:
    """The values of `micro_batch_size_per_device` that cut a config's batches evenly, ascending."""
    G, counts = cfg.num_generations, {1, cfg.steps_per_generation}
    updates = (cfg.prompts_per_step // count for count in counts)
    sizes = (MicroBatches.sizes(P, G, batch_sharding(mesh, P, G)) for P in updates)
    return sorted(set.intersection(*(set(valid) for valid in sizes)))


def program_options(
    cfg: GRPOConfig,
    mesh: jax.sharding.Mesh,
    rollout_sharding: RolloutSharding,
    stopping: Stopping,
    pad_id: int,
) -> ProgramOptions:
    """What the programs need to know of a config, on the devices of a mesh."""
    assert cfg.max_completion_length is not None  # resolved
    assert cfg.micro_batch_size_per_device != "auto"  # replaced by what fits
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu and cfg.dtype == "bfloat16":
        raise UserError(
            "dtype is bfloat16, and these devices are CPUs, whose compiler lacks its products with "
            "a float32 result: use auto or float32."
        )
    dtype = cfg.dtype if cfg.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    return ProgramOptions(
        sampling=sampling(cfg),
        max_completion_length=cfg.max_completion_length,
        stopping=stopping,
        pad_id=pad_id,
        seed=cfg.seed,
        dtype=jnp.dtype(dtype),
        kv_cache_dtype=None if cfg.kv_cache_dtype == "auto" else jnp.dtype(cfg.kv_cache_dtype),
        max_num_seqs=cfg.max_num_seqs,
        transposed_decoding=on_cpu,
        remat=cfg.remat if cfg.remat != "auto" else "none" if on_cpu else "full",
        rollout_sharding=rollout_sharding,
        attention=best_attention(mesh),
        objective=make_objective(cfg),
        mask_truncated_completions=cfg.mask_truncated_completions,
        top_entropy_quantile=cfg.top_entropy_quantile,
        micro_batch_size_per_device=cfg.micro_batch_size_per_device,
    )


def sampling(cfg: GRPOConfig) -> Sampling:
    """How training draws tokens."""
    return Sampling(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p)


def loss_backend(cfg: GRPOConfig) -> LossBackend:
    backends = {"dense": DenseLoss, "chunked": ChunkedLoss, "pallas": PallasLoss}
    return backends[cfg.loss_backend]()
