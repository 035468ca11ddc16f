"""The description of a run, from which the trainer and the planner build the same objects."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from grpo_eqx.checkpoint.run_moment import run_moment
from grpo_eqx.common.errors import UserError
from grpo_eqx.data.run_inputs import Inputs, check_positions, hub_commits, load_inputs
from grpo_eqx.distributed.exchange import (
    assert_same_on_all_hosts,
    least,
    raise_on_all_hosts,
    spare_devices,
)
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.lora import Lora, check_fits
from grpo_eqx.models.pretrained import (
    base_model,
    check_adapter,
    find_config,
    model_folder,
)
from grpo_eqx.models.registry import read_config
from grpo_eqx.rollout.layout_choice import AutoSharding
from grpo_eqx.run.by_device import device_bytes, tokens_per_micro_batch, vector_size
from grpo_eqx.run.passed import Passed
from grpo_eqx.run.passes import Passes
from grpo_eqx.run.prompt_lengths import PromptLengths, lengths_for_plan
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.mesh import check_hosts, parse_mesh, rollout_mesh, split_devices
from grpo_eqx.sharding.rollout_sharding import RolloutSharding, lay_out, parse_rollout_sharding
from grpo_eqx.sharding.rules import batch_sharding, num_batch_shards
from grpo_eqx.training.micro_batches import RowShape


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """A run: its settings, its model's architecture and its inputs, without weights or devices."""

    cfg: GRPOConfig
    """The settings, resolved."""
    model: ModelConfig
    prompts: PromptLengths
    passed: Passed = dataclasses.field(default_factory=Passed)
    device_bytes: int | None = None
    """Memory of each device that all processes count on. `None`: as the devices say."""
    acts: bool = False
    """Whether completions may have several turns, as those that call tools."""

    @classmethod
    def describe(
        cls, cfg: GRPOConfig, passed: Passed | None = None, *, acts: bool = False
    ) -> "RunSpec":
        """Describes the run of a config for planning; of a model only its `config.json` is needed.

        Problems are read for the lengths of prompts where they, and the model's tokenizer, are on
        this machine. What is passed may be strategies and an optimizer. With `acts`, completions
        may have several turns.
        """
        cfg = cfg.resolved()
        model = find_config(cfg.model)
        _check_fits(cfg, model, None)
        prompts = lengths_for_plan(cfg, model)
        if prompts.num_train is not None:
            cfg = cfg.for_problems(prompts.num_train)
        return cls(cfg, model, prompts, passed or Passed(), acts=acts)

    @classmethod
    def load(cls, cfg: GRPOConfig, passed: Passed) -> tuple["RunSpec", Inputs]:
        """Reads a run's inputs and describes the run, for all devices that JAX sees.

        Raises `UserError`, in all processes, where batches do not fit the devices, or where inputs
        are missing, do not belong together or differ between processes.
        """
        mesh, of_rollouts = _build_mesh(cfg, passed), _rollout_mesh(cfg)
        check_hosts(mesh, of_rollouts or mesh)
        if of_rollouts is not None:
            spare_devices()
        _check_batches(cfg, mesh, of_rollouts or mesh, _rollout_sharding(cfg, passed))
        moment = run_moment(cfg)

        def read() -> tuple[ModelConfig, Inputs]:
            model = _architecture(cfg, passed.model)
            _check_fits(cfg, model, passed.model)
            inputs = load_inputs(
                cfg,
                passed.tokenizer,
                passed.train_data,
                passed.eval_data,
                model_passed=passed.model is not None,
                moment=moment,
                tools=passed.tools,
                needs_prompt=not passed.changes_prompts,
            )
            inputs.check_belong_to(model, cfg)
            if passed.changes_prompts:
                prompt = "the longest prompt that an environment may make"
                check_positions(cfg, model, prompt, cfg.max_prompt_length)
            return model, inputs

        model, inputs = raise_on_all_hosts(read)
        if jax.process_count() > 1:
            commits = {f"the commit of {name}": x for name, x in hub_commits(cfg).items()}
            assert_same_on_all_hosts(inputs.fingerprints() | commits)
        lengths = PromptLengths.of(inputs.train, inputs.heldout, cfg.max_prompt_length)
        if passed.changes_prompts:
            longest = cfg.max_prompt_length
            lengths = lengths._replace(train=longest, heldout=longest)
        # Agreed on once: all processes must choose the same layouts, and plan on their own.
        memory = least(device_bytes(mesh)) if jax.process_count() > 1 else None
        cfg = cfg.for_problems(len(inputs.train))
        return cls(
            cfg,
            model,
            lengths,
            passed,
            memory,
            acts=bool(passed.tools) or passed.rollout_func is not None,
        ), inputs

    @property
    def has_harness(self) -> bool:
        """Whether agents make the completions, over HTTP."""
        return self.cfg.harness is not None or self.passed.harness is not None

    @property
    def makes_completions(self) -> bool:
        """Whether a function or agents make whole completions."""
        return self.has_harness or self.passed.rollout_func is not None

    @property
    def open_shape(self) -> tuple[int, int]:
        """Slots that answer agents, and limit on the tokens of a request.

        Whatever the number of completions, programs are compiled for one number of slots.
        """
        cfg = self.cfg
        slots = cfg.max_num_seqs or cfg.prompts_per_step * cfg.num_generations
        return slots, cfg.max_prompt_length + self.completion_length

    @property
    def passes(self) -> Passes:
        """The forward passes of a step besides its updates."""
        return Passes.of(self.cfg)

    def without_passed_model(self) -> "RunSpec":
        """Returns the run without the model that was passed, whose arrays can then be freed."""
        return dataclasses.replace(self, passed=dataclasses.replace(self.passed, model=None))

    @property
    def rollout_sharding(self) -> RolloutSharding:
        """The strategy that was passed, or else that of the config."""
        return _rollout_sharding(self.cfg, self.passed)

    def changed(self, **settings: Any) -> "RunSpec":
        """Returns the run with other settings; raises `UserError` where they are impossible."""
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, **settings))

    def build_mesh(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
        """Builds the mesh of training, of `devices`, by default all that JAX sees."""
        return _build_mesh(self.cfg, self.passed, devices)

    def rollout_mesh(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh | None:
        """Builds the mesh of those `devices` that sample; `None` where all sample and train."""
        return _rollout_mesh(self.cfg, devices)

    def mesh(self, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
        """Builds the mesh of training, of `devices`.

        Raises `UserError` where it, or the batches, do not fit the devices.
        """
        mesh = self.build_mesh(devices)
        self.check_batches(mesh, self.rollout_mesh(devices))
        return mesh

    def check_batches(
        self, mesh: jax.sharding.Mesh, rollout_mesh: jax.sharding.Mesh | None = None
    ) -> None:
        """Refuses batches that the devices cannot split, or that are larger than the data.

        **Arguments:**

        - `mesh`: the devices that train.
        - `rollout_mesh`: the devices that sample, if they are others.
        """
        wanted, available = self.cfg.prompts_per_step, self.prompts.num_train
        if available is not None and available < wanted:
            raise UserError(
                f"{self.cfg.data} has {available} problems to train on, and prompts_per_step is "
                f"{wanted}: lower it or add problems."
            )
        _check_batches(self.cfg, mesh, rollout_mesh or mesh, self.rollout_sharding)

    def micro_batch_sizes(self, mesh: jax.sharding.Mesh) -> list[int]:
        """Lists the values of `micro_batch_size_per_device` worth choosing from, ascending.

        Of those that split a full batch into as many micro-batches, it is the smallest: the others
        take more memory, and leave the last micro-batch emptier.
        """
        prompts, group = self.update_shape
        most = -(-prompts * group // num_batch_shards(mesh))
        sizes = {
            self._row_shape(mesh, size, prompts, group).most_micro_batches: size
            for size in range(most, 0, -1)
        }
        return sorted(sizes.values())

    def micro_batch_size(self, mesh: jax.sharding.Mesh) -> int:
        """Returns the completions of full length that a device processes at a time, in effect."""
        shape = self.row_shape(mesh, *self.update_shape)
        return shape.num_scored // self.completion_length * shape.num_rows // shape.num_shards

    @property
    def rollout_shape(self) -> tuple[int, int]:
        """Prompts of a rollout, and completions of each."""
        return self.cfg.prompts_per_step, self.cfg.num_generations

    @property
    def sampled_shape(self) -> tuple[int, int]:
        """Prompts that are sampled together, and completions of each; more than a rollout's where
        groups are in flight across steps.
        """
        return (self.cfg.carried_steps + 1) * self.cfg.prompts_per_step, self.cfg.num_generations

    @property
    def update_shape(self) -> tuple[int, int]:
        """Prompts of an update's batch, and completions of each."""
        return self.cfg.prompts_per_step // self.cfg.steps_per_generation, self.cfg.num_generations

    @property
    def completion_length(self) -> int:
        """Tokens of the longest completion."""
        assert self.cfg.max_completion_length is not None  # resolved
        return self.cfg.max_completion_length

    def row_shape(self, mesh: jax.sharding.Mesh, num_prompts: int, group: int) -> RowShape:
        """Returns the shape of the rows of so many prompts, with `group` completions each."""
        size = self.cfg.micro_batch_size_per_device
        assert size != "auto"  # replaced by what fits
        return self._row_shape(mesh, size, num_prompts, group)

    def _row_shape(
        self, mesh: jax.sharding.Mesh, size: int | None, num_prompts: int, group: int
    ) -> RowShape:
        """Returns the shape of rows for a value of `micro_batch_size_per_device`."""
        return RowShape.of(
            num_prompts,
            group,
            prompt_length=self.prompts.train,
            completion_length=self.completion_length,
            num_shards=num_batch_shards(mesh),
            size=size,
            most_tokens=tokens_per_micro_batch(mesh),
            multiple=vector_size(mesh),
        )

    @property
    def lora(self) -> Lora | None:
        """The adapters to train; `None`: all parameters are trained."""
        return Lora.of_settings(vars(self.cfg))

    @property
    def base_model(self) -> str | None:
        """The name of the model beneath the adapters, or its folder; `None` if it was passed."""
        return base_model(self.cfg.model) if self.passed.model is None else None


def _build_mesh(
    cfg: GRPOConfig, passed: Passed, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    if cfg.rollout_devices is not None:
        devices = split_devices(devices or jax.devices(), cfg.rollout_devices)[0]
    return (parse_mesh(cfg.mesh) if passed.mesh is None else passed.mesh).build(devices)


def _rollout_mesh(
    cfg: GRPOConfig, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh | None:
    if cfg.rollout_devices is None:
        return None
    return rollout_mesh(*split_devices(devices or jax.devices(), cfg.rollout_devices))


def _rollout_sharding(cfg: GRPOConfig, passed: Passed) -> RolloutSharding:
    if passed.rollout_sharding is not None:
        return passed.rollout_sharding
    if cfg.rollout_sharding == "auto":
        return AutoSharding()
    return parse_rollout_sharding(cfg.rollout_sharding)


def _check_batches(
    cfg: GRPOConfig,
    mesh: jax.sharding.Mesh,
    rollout_mesh: jax.sharding.Mesh,
    rollout_sharding: RolloutSharding,
) -> None:
    """Refuses batches of rollouts that cannot be split."""
    batch = cfg.prompts_per_step, cfg.num_generations
    lay_out(rollout_sharding, rollout_mesh, *batch, cfg.max_num_seqs)
    batch_sharding(mesh, *batch)


def _check_fits(cfg: GRPOConfig, config: ModelConfig, passed: CausalLM | None) -> None:
    """Rejects router replay without experts, and adapter settings that do not suit the model."""
    if cfg.router_replay and config.experts is None:
        raise UserError(
            "router_replay is on, and the model has no experts to choose from: leave it out."
        )
    lora = Lora.of_settings(vars(cfg))
    if lora is not None:
        check_fits(config, lora)
    if passed is None:
        check_adapter(cfg.model, lora)
    elif passed.has_adapters:
        raise UserError(
            "the model that is passed has adapters: save it, and pass its folder as model, or pass "
            "model.merged()."
        )


def _architecture(cfg: GRPOConfig, given: CausalLM | None) -> ModelConfig:
    if given is not None:
        return given.config
    return read_config(model_folder(cfg.model) / "config.json")
