"""The description of a run, from which the trainer and the planner build the same objects."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_eqx.checkpoint.run_moment import run_moment
from grpo_eqx.common.choices import Remat
from grpo_eqx.common.compiler import Compiler
from grpo_eqx.common.errors import UserError
from grpo_eqx.common.prng import make_key
from grpo_eqx.data.batches import TokenizedPrompts, padded_length
from grpo_eqx.data.load import is_hub_name
from grpo_eqx.data.run_inputs import Inputs, check_positions, hub_commits, load_inputs
from grpo_eqx.data.token_files import vocabulary_files
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.distributed.exchange import assert_same_on_all_hosts, least, raise_on_all_hosts
from grpo_eqx.generation import LocalSampler, SamplerOptions, Sampling, Stopping
from grpo_eqx.generation.local_sampler import sampling_weights
from grpo_eqx.loss_backends import LOSS_BACKENDS, ChunkedLoss, LossBackend
from grpo_eqx.models.causal_attention import best_attention
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.lora import Lora, check_fits, prepared
from grpo_eqx.models.pretrained import (
    base_model,
    check_adapter,
    find_config,
    is_local,
    model_folder,
    shard_model,
)
from grpo_eqx.models.registry import read_config
from grpo_eqx.objective import Objective
from grpo_eqx.rollout.layout_choice import AutoSharding, DecodingWork
from grpo_eqx.run.passed import Passed
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.arrays import relabeled
from grpo_eqx.sharding.device_memory import usable_bytes
from grpo_eqx.sharding.layout_report import bytes_per_device
from grpo_eqx.sharding.mesh import check_hosts, parse_mesh
from grpo_eqx.sharding.rollout_sharding import RolloutSharding, lay_out, parse_rollout_sharding
from grpo_eqx.sharding.rules import batch_sharding, num_batch_shards
from grpo_eqx.training.forward import Forward
from grpo_eqx.training.lowering import model_shapes, optimizer_shapes, reference_shapes
from grpo_eqx.training.optimizer import OptimizerNumbers, make_optimizer
from grpo_eqx.training.options import UpdateOptions
from grpo_eqx.training.reference import copied
from grpo_eqx.training.row_shape import RowShape
from grpo_eqx.training.scorer import SCORE, SCORE_REFERENCE, Scorer
from grpo_eqx.training.state import TrainState
from grpo_eqx.training.updater import Updater

_TOKENS = 8192
"""Tokens of a micro-batch that keep an accelerator busy, and its links idle enough."""
_TOKENS_ON_CPU = 1024
_KEPT_ON_CPU = 2**24
"""Logits, 64 MiB, that a CPU reads back in less time than it computes them again."""
_LANES = 128
"""Elements of a TPU's vectors. Stored heads fill whole ones: where heads of 64 did not, XLA laid
the cache out by positions, and copied all of it in every layer to write a single one. So do rows of
tokens: where rows of 4,351 did not, every change between rows and a list of all tokens shifted the
data within its vectors, and four rows at a time took several times as long to compile as one."""


class PromptLengths(NamedTuple):
    """Lengths of prompts, in tokens, and how many problems there are."""

    train: int
    """Tokens of the longest problem to train on."""
    heldout: int
    """Width that held-out problems are padded to."""
    num_heldout: int
    """Problems of an evaluation."""
    num_train: int | None
    """Problems to train on. `None`: the lengths are not the problems', but the longest allowed."""

    @property
    def known(self) -> bool:
        """Whether the lengths are those of the run's problems."""
        return self.num_train is not None

    @classmethod
    def of(
        cls, train: TokenizedPrompts, heldout: TokenizedPrompts, max_length: int
    ) -> "PromptLengths":
        """Measures problems."""
        longest = [max(map(len, problems.tokens)) for problems in (train, heldout)]
        return cls(longest[0], padded_length(longest[1], max_length), len(heldout), len(train))

    @classmethod
    def longest(cls, cfg: GRPOConfig) -> "PromptLengths":
        """Returns the longest lengths that the settings allow."""
        return cls(cfg.max_prompt_length, cfg.max_prompt_length, cfg.eval_problems, None)


class Passes(NamedTuple):
    """The forward passes over a step's completions besides those of its updates."""

    old_policy: bool
    """For the log-probs that ratios divide by. A single update is on-policy: its ratios are 1."""
    reference: bool
    """For the log-probs of the KL term."""
    entropies: bool
    """For the entropies of the policy before each of its updates."""

    @classmethod
    def of(cls, cfg: GRPOConfig) -> "Passes":
        """Decides which passes the settings need."""
        return cls(
            old_policy=cfg.updates_per_step > 1,
            reference=cfg.beta > 0,
            entropies=cfg.top_entropy_quantile < 1,
        )

    @property
    def row_fields(self) -> list[str]:
        """Fields of an update's `Rows` that the passes fill."""
        filled = {
            "old_logps": self.old_policy,
            "ref_logps": self.reference,
            "entropies": self.entropies,
        }
        return [name for name, fills in filled.items() if fills]

    def num_scores(self, cfg: GRPOConfig) -> dict[str, int]:
        """Counts the passes over a step's rollout, by scoring program."""
        entropies = cfg.num_iterations if self.entropies else 0
        return {
            SCORE: int(self.old_policy) + entropies,
            SCORE_REFERENCE: int(self.reference),
        }


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

    @classmethod
    def describe(cls, cfg: GRPOConfig, passed: Passed | None = None) -> "RunSpec":
        """Describes the run of a config for planning; of a model only its `config.json` is needed.

        Problems are read for the lengths of prompts where they, and the model's tokenizer, are on
        this machine. What is passed may be strategies and an optimizer.
        """
        cfg = cfg.resolved()
        model = find_config(cfg.model)
        _check_router_replay(cfg, model)
        _check_lora(cfg, model, None)
        prompts = _prompt_lengths(cfg, model)
        if prompts.num_train is not None:
            cfg = cfg.for_problems(prompts.num_train)
        return cls(cfg, model, prompts, passed or Passed())

    @classmethod
    def load(cls, cfg: GRPOConfig, passed: Passed) -> tuple["RunSpec", Inputs]:
        """Reads a run's inputs and describes the run, for all devices that JAX sees.

        Raises `UserError`, in all processes, where batches do not fit the devices, or where inputs
        are missing, do not belong together or differ between processes.
        """
        mesh = _build_mesh(cfg, passed)
        check_hosts(mesh)
        _check_batches(cfg, mesh, _rollout_sharding(cfg, passed))
        model = raise_on_all_hosts(lambda: _architecture(cfg, passed.model))
        raise_on_all_hosts(lambda: _check_router_replay(cfg, model))
        raise_on_all_hosts(lambda: _check_lora(cfg, model, passed.model))
        moment = run_moment(cfg)
        inputs = raise_on_all_hosts(
            lambda: load_inputs(
                cfg,
                passed.tokenizer,
                passed.train_data,
                passed.eval_data,
                model_passed=passed.model is not None,
                moment=moment,
            )
        )
        if jax.process_count() > 1:
            commits = {f"the commit of {name}": x for name, x in hub_commits(cfg).items()}
            assert_same_on_all_hosts(inputs.fingerprints() | commits)
        inputs.check_belong_to(model, cfg)
        lengths = PromptLengths.of(inputs.train, inputs.heldout, cfg.max_prompt_length)
        # Agreed on once: all processes must choose the same layouts, and plan on their own.
        memory = least(_device_bytes(mesh)) if jax.process_count() > 1 else None
        return cls(cfg.for_problems(len(inputs.train)), model, lengths, passed, memory), inputs

    @property
    def passes(self) -> Passes:
        """The forward passes of a step besides its updates."""
        return Passes.of(self.cfg)

    def without_passed_model(self) -> "RunSpec":
        """Returns the run without the model that was passed, whose arrays can then be freed."""
        return dataclasses.replace(self, passed=dataclasses.replace(self.passed, model=None))

    @property
    def rollout_sharding(self) -> RolloutSharding:
        """The strategy that was passed, or the one that the config names."""
        return _rollout_sharding(self.cfg, self.passed)

    def changed(self, **settings: Any) -> "RunSpec":
        """Returns the run with other settings; raises `UserError` where they are impossible."""
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, **settings))

    def build_mesh(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
        """Builds the mesh over `devices`, by default all that JAX sees."""
        return _build_mesh(self.cfg, self.passed, devices)

    def mesh(self, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
        """Builds the mesh; raises `UserError` where it, or the batches, do not fit the devices."""
        mesh = self.build_mesh(devices)
        self.check_batches(mesh)
        return mesh

    def check_batches(self, mesh: jax.sharding.Mesh) -> None:
        """Refuses batches that a mesh cannot split, or that are larger than the data."""
        wanted, available = self.cfg.prompts_per_step, self.prompts.num_train
        if available is not None and available < wanted:
            raise UserError(
                f"{self.cfg.data} has {available} problems to train on, and prompts_per_step is "
                f"{wanted}: lower it or add problems."
            )
        _check_batches(self.cfg, mesh, self.rollout_sharding)

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
        return shape.num_scored // self._length * shape.num_rows // shape.num_shards

    @property
    def rollout_shape(self) -> tuple[int, int]:
        """Prompts of a rollout, and completions of each."""
        return self.cfg.prompts_per_step, self.cfg.num_generations

    @property
    def update_shape(self) -> tuple[int, int]:
        """Prompts of an update's batch, and completions of each."""
        return self.cfg.prompts_per_step // self.cfg.steps_per_generation, self.cfg.num_generations

    def _decoding_work(self, options: SamplerOptions, updater: Updater) -> DecodingWork:
        """Returns the sizes from which rollouts of each layout are estimated."""
        mesh, state = updater.forward.mesh, self.state_shapes(updater)
        read = functools.partial(sampling_weights, options=options)
        return DecodingWork(
            config=self.model,
            weights=jax.eval_shape(read, state.model),
            itemsize=options.compute_dtype.itemsize,
            kv_itemsize=options.kv_itemsize(self.model.head_size),
            prompt_length=self.prompts.train,
            completion_length=self._length,
            resident_bytes=bytes_per_device((state.model, state.opt_state, state.reference)),
            usable_bytes=self.device_bytes or _device_bytes(mesh),
            device_kind=mesh.devices.flat[0].device_kind,
        )

    @property
    def _length(self) -> int:
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
            completion_length=self._length,
            num_shards=num_batch_shards(mesh),
            size=size,
            most_tokens=_tokens_per_micro_batch(mesh),
            multiple=vector_size(mesh),
        )

    def programs(
        self,
        mesh: jax.sharding.Mesh,
        tokenizer: ChatTokenizer | None = None,
        on_compile: Callable[[str], None] = lambda name: None,
    ) -> Programs:
        """Makes what runs on the devices, for a run whose micro-batches are not `auto`.

        **Arguments:**

        - `mesh`: the devices.
        - `tokenizer`: the tokenizer, without which programs are for planning, as shapes depend on
          its vocabulary alone.
        - `on_compile`: called with a program's name before it is compiled.
        """
        compiler = Compiler(on_compile)
        forward = Forward(
            backend=self.passed.loss_backend or _loss_backend(self.cfg.loss_backend, mesh),
            mesh=mesh,
            dtype=_dtype(self.cfg, mesh),
            remat=self.cfg.remat if self.cfg.remat != "auto" else _remat(mesh),
            attention=best_attention(mesh),
        )
        updates = UpdateOptions(
            temperature=self.cfg.temperature,
            objective=_objective(self.cfg),
            optimizer=OptimizerNumbers.of(self.cfg) if self.passed.optimizer is None else None,
            top_entropy_quantile=self.cfg.top_entropy_quantile,
        )
        optimizer = self.passed.optimizer or make_optimizer(self.cfg)
        updater = Updater(updates, forward, optimizer, compiler)
        options = _sampler_options(self, mesh, tokenizer)
        if isinstance(self.rollout_sharding, AutoSharding) and mesh.size > 1:
            fastest = AutoSharding(self._decoding_work(options, updater))
            options = dataclasses.replace(options, rollout_sharding=fastest)
        return Programs(
            LocalSampler(options, mesh, compiler),
            Scorer(forward, self.cfg.temperature, compiler),
            updater,
            self.row_shape(mesh, *self.rollout_shape),
            self.row_shape(mesh, *self.update_shape),
            compiler,
        )

    def initial_state(self, updater: Updater) -> TrainState:
        """Places model, optimizer state and reference on the devices, before the first step."""
        return self.untrained_state(updater, self.initial_model(updater.forward))

    def initial_model(self, forward: Forward) -> CausalLM:
        """Places the model on the devices, with the adapters that are to be trained."""
        source = self.cfg.model if self.passed.model is None else self.passed.model
        lora, mesh = self.lora, forward.mesh
        dtype = jnp.dtype(jnp.float32) if lora is None else forward.dtype
        model = raise_on_all_hosts(lambda: shard_model(source, mesh, dtype))
        if lora is not None:
            key = make_key(self.cfg.seed)
            prepare = functools.partial(prepared, lora=lora, dtype=dtype)
            shardings = jax.eval_shape(prepare, model, key=key).shardings(mesh)
            model = jax.jit(prepare, out_shardings=shardings, donate_argnums=0)(model, key=key)
            model = jax.tree.map(relabeled, model, shardings)
        return model

    def untrained_state(self, updater: Updater, model: CausalLM) -> TrainState:
        """Places optimizer state and reference beside a model, as before its first update."""
        state = updater.init(model)
        if not self._keeps_reference:
            return state
        reference = copied(model, self._reference_dtype(updater.forward), updater.forward.mesh)
        return dataclasses.replace(state, reference=reference)

    def _reference_dtype(self, forward: Forward) -> jnp.dtype | None:
        """Returns the dtype of the reference's layers; `None`: float32, to be mixed."""
        return None if self.cfg.sync_ref_model else forward.dtype

    @property
    def lora(self) -> Lora | None:
        """The adapters to train; `None`: all parameters are trained."""
        return Lora.of_settings(vars(self.cfg))

    @property
    def base_model(self) -> str | None:
        """The name of the model beneath the adapters, or its folder; `None` if it was passed."""
        return base_model(self.cfg.model) if self.passed.model is None else None

    @property
    def _keeps_reference(self) -> bool:
        """Whether a reference model takes up memory: for a KL term, unless adapters have one."""
        return self.passes.reference and self.lora is None

    def state_shapes(self, updater: Updater) -> TrainState:
        """Returns the shapes and shardings of the state, without anything on the devices."""
        forward = updater.forward
        model = model_shapes(self.model, forward.mesh, self.lora, forward.dtype)
        reference = None
        if self._keeps_reference:
            reference = reference_shapes(model, self._reference_dtype(forward), forward.mesh)
        return TrainState(model, optimizer_shapes(updater, model), reference)


def _device_bytes(mesh: jax.sharding.Mesh) -> int:
    """Returns the memory of each device; without limit where JAX does not report it."""
    try:
        return usable_bytes(list(mesh.devices.flat))
    except UserError:
        return sys.maxsize


def _build_mesh(
    cfg: GRPOConfig, passed: Passed, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    return (parse_mesh(cfg.mesh) if passed.mesh is None else passed.mesh).build(devices)


def _rollout_sharding(cfg: GRPOConfig, passed: Passed) -> RolloutSharding:
    if passed.rollout_sharding is not None:
        return passed.rollout_sharding
    if cfg.rollout_sharding == "auto":
        return AutoSharding()
    return parse_rollout_sharding(cfg.rollout_sharding)


def _check_batches(
    cfg: GRPOConfig, mesh: jax.sharding.Mesh, rollout_sharding: RolloutSharding
) -> None:
    """Refuses batches of rollouts that cannot be split."""
    batch = cfg.prompts_per_step, cfg.num_generations
    lay_out(rollout_sharding, mesh, *batch, cfg.max_num_seqs)
    batch_sharding(mesh, *batch)


def _check_lora(cfg: GRPOConfig, config: ModelConfig, passed: CausalLM | None) -> None:
    """Refuses adapters that do not fit the model, or are not those that it has."""
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


def _check_router_replay(cfg: GRPOConfig, config: ModelConfig) -> None:
    if cfg.router_replay and config.experts is None:
        raise UserError(
            "router_replay is on, and the model has no experts to choose from: leave it out."
        )


def _architecture(cfg: GRPOConfig, given: CausalLM | None) -> ModelConfig:
    if given is not None:
        return given.config
    return read_config(model_folder(cfg.model) / "config.json")


def _prompt_lengths(cfg: GRPOConfig, model: ModelConfig) -> PromptLengths:
    data = [name for name in (cfg.data, cfg.eval_data) if name is not None]
    has_tokenizer = is_local(cfg.model) and vocabulary_files(model_folder(cfg.model))
    if not has_tokenizer or any(map(is_hub_name, data)):
        check_positions(cfg, model, "an empty prompt", 0)
        return PromptLengths.longest(cfg)
    inputs = load_inputs(cfg, moment=datetime.now())
    inputs.check_belong_to(model, cfg)
    return PromptLengths.of(inputs.train, inputs.heldout, cfg.max_prompt_length)


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
    assert cfg.max_completion_length is not None  # resolved
    return SamplerOptions(
        sampling=Sampling(
            temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p
        ),
        max_prompt_length=run.prompts.train,
        max_completion_length=cfg.max_completion_length,
        stopping=_stopping(cfg, tokenizer, run.model.vocab_size),
        pad_id=0 if tokenizer is None else tokenizer.pad_id,
        seed=cfg.seed,
        dtype=_dtype(cfg, mesh),
        rollout_dtype=None if cfg.rollout_dtype == "auto" else jnp.dtype(cfg.rollout_dtype),
        kv_cache_dtype=None if cfg.kv_cache_dtype == "auto" else jnp.dtype(cfg.kv_cache_dtype),
        kv_head_multiple=vector_size(mesh),
        max_num_seqs=cfg.max_num_seqs,
        decodes_on_cpu=_on_cpu(mesh),
        records_routes=cfg.router_replay,
        rollout_sharding=run.rollout_sharding,
        attention=best_attention(mesh),
    )


def _dtype(cfg: GRPOConfig, mesh: jax.sharding.Mesh) -> jnp.dtype:
    """Returns the dtype that layers compute in; raises `UserError` for one that devices lack."""
    on_cpu = _on_cpu(mesh)
    for name in ("dtype", "rollout_dtype"):
        if on_cpu and getattr(cfg, name) == "bfloat16":
            raise UserError(
                f"{name} is bfloat16, but the devices are CPUs, whose compiler lacks bfloat16 "
                f"products with float32 results: use auto."
            )
    return jnp.dtype(cfg.dtype if cfg.dtype != "auto" else "float32" if on_cpu else "bfloat16")


def _remat(mesh: jax.sharding.Mesh) -> Remat:
    return "none" if _on_cpu(mesh) else "full"


def _on_cpu(mesh: jax.sharding.Mesh) -> bool:
    return _platform(mesh) == "cpu"


def _platform(mesh: jax.sharding.Mesh) -> str:
    return mesh.devices.flat[0].platform


def vector_size(mesh: jax.sharding.Mesh) -> int:
    """Returns the divisor of sizes that must fill whole vectors."""
    return _LANES if _platform(mesh) == "tpu" else 1


def _tokens_per_micro_batch(mesh: jax.sharding.Mesh) -> int:
    return _TOKENS_ON_CPU if _on_cpu(mesh) else _TOKENS


def _loss_backend(name: str, mesh: jax.sharding.Mesh) -> LossBackend:
    if name == "chunked" and _on_cpu(mesh):
        return ChunkedLoss(max_kept_logits=_KEPT_ON_CPU)
    return LOSS_BACKENDS[name]()


def _objective(cfg: GRPOConfig) -> Objective:
    fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(Objective)}
    # Fields that are None do not apply to the config's combination of options.
    return Objective(**{name: value for name, value in fields.items() if value is not None})
