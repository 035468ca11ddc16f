"""Whole runs, done again in float64 by code that shares nothing with the package.

Only the completions are the run's own; whatever follows from them is found anew.
"""

import dataclasses
import functools
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.data.prompts import Prompt, PromptSource
from grpo_eqx.models.pretrained import model_folder, save_pretrained
from grpo_eqx.sharding import ExplicitMesh, Mesh
from grpo_eqx.tracking import Tracker

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

torch.set_num_threads(1)

TOLERANCES = {
    "rewards": 0.0,
    "advantages": 1e-6,
    "loss": 1e-5,
    "gradient_norm": 1e-5,
    "gradients": 1e-4,
    "parameters": 1e-4,
}
"""Of differences: of gradients and parameters their norm, relative to that of the gradients' moving
average and of the parameters' change since the start."""
STEPS = 3
PROMPTS = 8
COMMON: dict[str, Any] = {
    "steps": STEPS,
    "prompts_per_step": PROMPTS,
    "num_generations": 4,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    # Adam moves a parameter whose gradient is mere rounding as far as any other, up or down, but
    # for its epsilon of 1e-8: gradients must not be large beside that.
    "max_grad_norm": 0.01,
    "log_completions_steps": 1,
    "eval_problems": 1,
}
UNCLIPPED = {"scale_rewards": "none", "reward_weights": (0.01,), "max_grad_norm": 10.0}
"""As small gradients by themselves."""


class Case(NamedTuple):
    fields: Mapping[str, Any]
    rewards: tuple[str, ...] = ("distinct",)
    devices: int = 1
    tied: bool = True
    clips: bool = False
    """Whether some ratios leave the clip range."""


CASES = {
    "grpo": Case({"loss_type": "grpo", "temperature": 0.7, "weight_decay": 0.1}),
    "bnpo": Case(
        {
            "loss_type": "bnpo",
            "steps_per_generation": 4,
            "micro_batch_size_per_device": 2,
            "warmup_steps": 2,
            "lr_scheduler_type": "cosine",
            **UNCLIPPED,
        },
        tied=False,
        clips=True,
    ),
    "dr_grpo": Case(
        {
            "loss_type": "dr_grpo",
            "lr_scheduler_type": "constant",
            **UNCLIPPED,
        },
        devices=8,
    ),
    "dapo": Case(
        {
            "loss_type": "dapo",
            "num_generations": 8,
            "steps_per_generation": 2,
            "num_iterations": 2,
            "epsilon_high": 0.28,
            "overlong_buffer": 0.4,
            "mask_truncated_completions": True,
        },
        rewards=("odd",),
        devices=8,
        clips=True,
    ),
    "cispo": Case(
        {
            "loss_type": "cispo",
            "epsilon_high": 5.0,
            "steps_per_generation": 4,
            "num_iterations": 2,
            "learning_rate": 5e-3,
            "scale_rewards": "batch",
            "reward_weights": (1.0, 0.5),
            "overlong_buffer": 0.4,
        },
        rewards=("share_of_gold", "odd"),
        clips=True,
    ),
    "sapo": Case(
        {
            "loss_type": "sapo",
            "steps_per_generation": 2,
            "num_iterations": 2,
            "advantage_estimator": "reinforce_plus_plus_baseline",
            "max_grad_norm": 0.1,
        },
        rewards=("distinct", "share_of_gold"),
    ),
    "gspo": Case(
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
            "steps_per_generation": 4,
        },
        clips=True,
    ),
    "unbiased_k3": Case(
        {
            "loss_type": "grpo",
            "beta": 0.2,
            "sync_ref_model": True,
            "ref_model_sync_steps": 1,
            "num_iterations": 2,
            "temperature": 0.7,
        },
        clips=True,
    ),
    "biased_k3": Case(
        {
            "loss_type": "dapo",
            "beta": 0.01,
            "use_bias_correction_kl": False,
            "sync_ref_model": True,
            "ref_model_sync_steps": 2,
            "ref_model_mixup_alpha": 0.3,
            "steps_per_generation": 2,
            "mask_truncated_completions": True,
            **UNCLIPPED,
        },
        clips=True,
    ),
    "k2": Case(
        {
            "loss_type": "bnpo",
            "beta": 0.2,
            "kl_estimator": "k2",
            "num_iterations": 2,
            "multi_objective_aggregation": "normalize_then_sum",
            "reward_weights": (1.0, 0.5),
            "mask_truncated_completions": True,
        },
        rewards=("distinct", "odd"),
        clips=True,
    ),
    "rloo": Case(
        {
            "loss_type": "dapo",
            "advantage_estimator": "rloo",
            "optimizer": "lion",
            "weight_decay": 0.1,
        },
        rewards=("odd",),
    ),
    "entropies": Case(
        {
            "loss_type": "dapo",
            "top_entropy_quantile": 0.3,
            "entropy_coef": 0.02,
            "steps_per_generation": 2,
            "num_iterations": 2,
        },
        rewards=("odd",),
        clips=True,
    ),
    "masks": Case(
        {
            "loss_type": "grpo",
            "delta": 1.25,
            "off_policy_mask_threshold": 0.1,
            "mask_truncated_completions": True,
            "num_iterations": 3,
            "micro_batch_size_per_device": 2,
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
        },
        clips=True,
    ),
}
OFTEN = "grpo", "dapo", "gspo"
"""Runs that together have most of the terms; `long` has the others."""

OTHERWISE: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "scale_rewards": "group",
    "reward_weights": None,
    "overlong_buffer": 0.0,
    "mask_truncated_completions": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "delta": None,
    "entropy_coef": 0.0,
    "beta": 0.0,
    "sync_ref_model": False,
    "warmup_steps": 0,
    "weight_decay": 0.0,
}
"""Values of settings that a case does not choose; with another it must not be the same run."""


class OneDevice(Mesh):
    """The first of the devices at hand."""

    def shape(self, devices: Sequence[Any]) -> tuple[int, int, int]:
        return 1, 1, 1

    def build(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
        return ExplicitMesh().build(jax.devices()[:1])


@dataclasses.dataclass(frozen=True)
class Sums(PromptSource):
    """Questions of different lengths."""

    name: str = "sums"

    def __len__(self) -> int:
        return STEPS * PROMPTS

    def __getitem__(self, index: int) -> Prompt:
        numbers = range(index % 7, index % 7 + index % 4 + 2)
        question = f"What is {' plus '.join(map(str, numbers))}?"
        return Prompt(question, {"gold": str(sum(numbers))})


def distinct(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [np.unique(ids).size / len(ids) for ids in completion_ids]


def odd(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if len(ids) in (3, 6, 9, 12) else int(np.sum(ids)) & 1 for ids in completion_ids]


def share_of_gold(completions: list[str], gold: list[str], **columns: Any) -> list[float | None]:
    counts = [sum(map(x.count, set(y))) for x, y in zip(completions, gold, strict=True)]
    return [n / len(x) if x else None for n, x in zip(counts, completions, strict=True)]


REWARD_FUNCS = {func.__name__: func for func in (distinct, odd, share_of_gold)}

Columns = Mapping[str, list[Any]]
Tensors = dict[str, np.ndarray]


def recording(func: Callable[..., Any], seen: list[Columns]) -> Callable[..., Any]:
    """A reward function that also keeps what it is given."""

    @functools.wraps(func)
    def recorded(**columns: list[Any]) -> Any:
        seen.append(columns)
        return func(**columns)

    return recorded


class Snapshots(Tracker):
    """Keeps the metrics of every step, the parameters and the optimizer's first moments."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.trainer: GRPOTrainer | None = None
        self.metrics: list[Mapping[str, float]] = []
        self.parameters: list[Tensors] = []
        self.first_moments: list[Tensors] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.trainer is not None
        state = self.trainer.state
        self.metrics.append(metrics)
        self.parameters.append(self._tensors(state.model))
        self.first_moments.append(self._tensors(optax.tree.get(state.opt_state, "mu")))

    def finish(self) -> None:
        pass

    def _tensors(self, tree: Any) -> Tensors:
        """By Hugging Face's names."""
        save_pretrained(tree, self.folder)
        return load_file(self.folder / "model.safetensors")


class Run(NamedTuple):
    cfg: GRPOConfig
    seen: list[Columns]
    """What reward functions were given in every step."""
    tables: list[list[dict[str, Any]]]
    """The completions of every step as the run recorded them."""
    snapshots: Snapshots


def run_case(case: Case, model: Path, folder: Path) -> Run:
    first, *others = (REWARD_FUNCS[name] for name in case.rewards)
    seen: list[Columns] = []
    snapshots = Snapshots(folder / "snapshot")
    trainer = GRPOTrainer(
        GRPOConfig(**{**COMMON, **case.fields}, model=str(model), output_dir=folder / "run"),
        reward_funcs=[recording(first, seen), *others],
        train_data=Sums(),
        eval_data=Sums(),
        mesh=OneDevice() if case.devices == 1 else None,
        trackers=[snapshots],
    )
    assert trainer.mesh.size == case.devices
    snapshots.trainer = trainer
    trainer.fit()
    paths = sorted((folder / "run" / "completions").iterdir())
    _trial, *steps = seen  # `fit` first tries the functions on one completion
    return Run(trainer.cfg, steps, [pq.read_table(path).to_pylist() for path in paths], snapshots)


class Recomputed:
    """The same run in float64, but for settings that are changed."""

    def __init__(self, reference: ModuleType, case: Case, run: Run, model: Path, **changed: Any):
        self.reference = reference
        self.run = run
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        fields = {**dataclasses.asdict(run.cfg), "reward_names": case.rewards, **changed}
        end_ids = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
        self.theirs = reference.Float64Run(model, SimpleNamespace(**fields), end_ids)
        self.start = self.parameters()
        self.clipped = 0.0
        """The largest share of a step's tokens whose ratio was clipped."""

    def differences(self) -> Iterator[dict[str, float]]:
        """Of every step, under the names of `TOLERANCES`."""
        for index, table in enumerate(self.run.tables):
            step = self.theirs.step(self.rows(index))
            self.clipped = max(self.clipped, step.clipped)
            metrics = self.run.snapshots.metrics[index]
            columns = [name if name == "reward" else f"rewards/{name}" for name in step.rewards]
            rewards = [[row[name] for row in table] for name in columns]
            advantages = [row["advantage"] for row in table]
            yield {
                "rewards": float(
                    not np.array_equal(rewards, list(step.rewards.values()), equal_nan=True)
                ),
                "advantages": float(np.abs(np.subtract(advantages, step.advantages)).max()),
                "loss": abs(metrics["loss"] - step.loss) / (0.1 + abs(step.loss)),
                "gradient_norm": abs(metrics["grad_norm"] / step.grad_norm - 1),
                "gradients": self.gradient_difference(index),
                "parameters": self.parameter_difference(index),
            }

    def rows(self, index: int) -> list[Any]:
        columns = self.run.seen[index]
        prompts = [self.prompt_ids(text) for text in columns["prompts"]]
        others = (columns[name] for name in ("completion_ids", "completions", "gold"))
        return [self.reference.Row(*row) for row in zip(prompts, *others, strict=True)]

    def prompt_ids(self, text: str) -> list[int]:
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )

    def parameters(self) -> Tensors:
        return {name: p.detach().numpy().copy() for name, p in self.theirs.parameters.items()}

    def gradient_difference(self, index: int) -> float:
        """The largest of any tensor's moving average."""
        ours = self.run.snapshots.first_moments[index]
        theirs = {name: m.numpy() for name, m in self.theirs.optimizer.first.items()}
        assert ours.keys() == theirs.keys()
        return max(norm(ours[name] - m) / norm(m) for name, m in theirs.items())

    def parameter_difference(self, index: int) -> float:
        """Of all parameters together, over their change since the start."""
        ours, theirs = self.run.snapshots.parameters[index], self.parameters()
        assert ours.keys() == theirs.keys()
        change = norm(*(p - self.start[name] for name, p in theirs.items()))
        return norm(*(ours[name] - p for name, p in theirs.items())) / (change or math.nan)


def norm(*arrays: np.ndarray) -> float:
    return math.sqrt(sum(float(np.square(x, dtype=np.float64).sum()) for x in arrays))


# Fixtures.


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    path = Path(__file__).with_name("float64_step.py")
    spec = importlib.util.spec_from_file_location("float64_step", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of small random models, with one table of embeddings or two.

    Every tenth token ends a completion, so that lengths differ.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder("tiny_qwen2"))
    folders = {}
    for tied in (True, False):
        config = transformers.Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
        )
        model = transformers.Qwen2ForCausalLM(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = torch.randn(p.shape, generator=generator)
                if p.ndim == 1:  # norms around one, and biases that matter
                    p.copy_(1 + 0.3 * noise if "norm" in name else 0.5 * noise)
                else:
                    p.copy_(noise * (0.35 if p.shape[0] == len(tokenizer) else p.shape[1] ** -0.5))
        folders[tied] = folder = tmp_path_factory.mktemp("tied" if tied else "untied")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ends = {"eos_token_id": list(range(2, len(tokenizer), 10)), "pad_token_id": 0}
        (folder / "generation_config.json").write_text(json.dumps(ends))
    return folders


# Tests.


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_every_step_of_a_run_is_that_of_float64(
    name: str, reference: ModuleType, models: dict[bool, Path], tmp_path: Path
) -> None:
    case = CASES[name]
    model = models[case.tied]
    run = run_case(case, model, tmp_path)
    shares = run.cfg.steps_per_generation
    for table, seen in zip(run.tables, run.seen, strict=True):
        assert [row["completion"] for row in table] == seen["completions"]
        assert len({row["truncated"] for row in table}) == 2
        lengths = np.reshape([row["length"] for row in table], (PROMPTS // shares, shares, -1))
        assert shares == 1 or np.ptp(lengths.sum(axis=(0, 2))) > 0
    recomputed = Recomputed(reference, case, run, model)
    for differences in recomputed.differences():
        assert beyond_tolerance(differences) == {}
    assert (recomputed.clipped > 0) == case.clips
    for setting, other in OTHERWISE.items():
        if getattr(run.cfg, setting) not in (None, other):
            changed = Recomputed(reference, case, run, model, **{setting: other})
            assert any(map(beyond_tolerance, changed.differences())), setting


def beyond_tolerance(differences: Mapping[str, float]) -> dict[str, float]:
    return {name: x for name, x in differences.items() if not x <= TOLERANCES[name]}
