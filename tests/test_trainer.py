"""`GRPOTrainer` from outside: what it takes, what it leaves, and that it can be repeated."""

import dataclasses
import gc
import json
import types
import weakref
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.parquet as pq
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.common.errors import RewardError, RewardFailureError
from grpo_eqx.data.prompts import Prompt, PromptSource
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.generation import LocalSampler, Sampled, SamplingCounts
from grpo_eqx.loss_backends import DenseLoss
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.pretrained import from_pretrained, model_folder, shard_model
from grpo_eqx.run.passes import Passes
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.sharding import AutoMesh, ExplicitMesh
from grpo_eqx.tracking import Tracker
from grpo_eqx.tracking.recorded_run import RecordedRun
from grpo_eqx.training.scorer import Scorer, TokenScores
from grpo_eqx.training.state import TrainState
from grpo_eqx.training.updater import Updater

PROBLEMS = Path(__file__).with_name("problems.jsonl")
SMALL = {
    "data": str(PROBLEMS),
    "steps": 2,
    "prompts_per_step": 8,
    "num_generations": 2,
    "max_completion_length": 16,
    "eval_problems": 8,
    "log_completions_steps": 1,
}


@dataclasses.dataclass(frozen=True)
class Sums(PromptSource):
    """Additions of one-digit numbers."""

    name: str = "sums"
    size: int = 32

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        a, b = divmod(index, 8)
        return Prompt(f"What is {a} plus {b}?", {"answer": a + b})


class Recorder(Tracker):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.finished = False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def finish(self) -> None:
        self.finished = True


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    """Without what differs between two equal runs."""
    varying = ("time", "per_s", "compile/", "memory/")
    return {k: v for k, v in metrics.items() if not any(part in k for part in varying)}


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def lines(path: Path) -> list[dict[str, float]]:
    """The metrics of steps, without those of evaluations."""
    return [row for row in rows(path) if "step_time" in row]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[GRPOTrainer, Path]:
    path = tmp_path_factory.mktemp("run")
    trainer = GRPOTrainer(GRPOConfig(**SMALL, output_dir=path))
    trainer.fit()
    return trainer, path


def test_a_run_leaves_its_record(run: tuple[GRPOTrainer, Path]) -> None:
    trainer, path = run
    config = json.loads((path / "config.json").read_text())
    assert config["learning_rate"] == trainer.cfg.learning_rate is not None
    metrics = lines(path)
    assert [row["step"] for row in metrics] == [1, 2]
    for name in (
        "reward", "reward_std", "frac_reward_zero_std", "rewards/correct/mean", "loss", "grad_norm",
        "learning_rate", "entropy", "completions/mean_length", "completions/clipped_ratio",
        "clip_ratio/region_mean", "policy_ratio/mean", "effective_batch/completions", "update_norm",
        "sampling/sampling_logp_difference/max", "step_time",
        "time/train/rollout_s", "time/train/update_s", "perf/tokens_per_second/rollout",
        "perf/tokens_per_second/update", "sampling/importance_sampling_ratio/mean",
        "compile/num_programs", "compile/seconds",
    ):  # fmt: skip
        assert np.isfinite(metrics[0][name]), name
    parts = [metrics[0][f"time/train/{part}_s"] for part in ("rollout", "reward", "update")]
    assert sum(parts) == pytest.approx(metrics[0]["step_time"])
    for name in ("perf/slot_utilization", "perf/padding_share"):
        assert 0 < metrics[0][name] < 1
    assert metrics[0]["compile/num_shapes/generate"] == 1
    assert metrics[0]["compile/num_shapes/update"] == 1
    assert (path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    table = pq.read_table(path / "completions" / "step_000002.parquet").to_pylist()
    assert len(table) == 16
    assert set(table[0]) == {
        "step", "prompt_id", "prompt", "completion", "rewards/correct", "reward", "advantage",
        "length", "truncated", "tokens", "token_logps",
    }  # fmt: skip
    for row in table:
        assert len(row["tokens"]) == len(row["token_logps"]) == row["length"]
        assert max(row["token_logps"]) < 0


@pytest.mark.slow
def test_the_exported_model_is_the_trained_one(run: tuple[GRPOTrainer, Path]) -> None:
    trainer, path = run
    exported = from_pretrained(path / "model")
    assert eqx.tree_equal(*jax.device_get((exported, trainer.state.model)))
    tokenizer = ChatTokenizer.from_pretrained(path / "model")
    assert tokenizer.eos_ids == trainer.tokenizer.eos_ids
    again = GRPOTrainer(GRPOConfig(**SMALL, model=str(path / "model")))
    assert again.evaluate().solved.tolist() == trainer.evaluate().solved.tolist()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_metrics_and_keeps_the_earlier_run(
    run: tuple[GRPOTrainer, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = run
    first = [without_times(row) for row in lines(path)]
    GRPOTrainer(GRPOConfig(**SMALL, output_dir=path, resume="never")).fit()
    assert [without_times(row) for row in lines(path)] == first
    assert [without_times(row) for row in lines(path / "previous-1")] == first
    printed = "".join(capsys.readouterr()).replace("\n", " ")
    assert f"an earlier run in {path} is kept in {path / 'previous-1'}" in printed


def test_everything_can_be_passed_as_an_object(tmp_path: Path) -> None:
    seen = []

    def short(prompts: list[str], completions: list[str], **columns: list[int]) -> list[float]:
        seen.extend(columns["answer"])
        return [-float(len(completion)) for completion in completions]

    model = from_pretrained("tiny_qwen2", ExplicitMesh(fsdp=-1).build())
    recorder = Recorder()
    trainer = GRPOTrainer(
        GRPOConfig(**SMALL, output_dir=tmp_path, num_iterations=2),
        model=model,
        tokenizer=ChatTokenizer.from_pretrained(model_folder("tiny_qwen2")),
        reward_funcs=[short],
        train_data=Sums(),
        eval_data=Sums(),
        optimizer=optax.sgd(1e-2),
        mesh=ExplicitMesh(dp=2, fsdp=-1),
        loss_backend=DenseLoss(),
        trackers=[recorder],
    )
    history = trainer.fit().history
    assert recorder.steps == [1, 2]
    assert recorder.finished
    assert set(seen) <= set(range(15))
    assert "rewards/short/mean" in history[0]
    assert "learning_rate" not in history[0]
    kinds = {
        "reward_funcs": "short", "model": "Decoder", "data": "Sums", "eval_data": "Sums",
        "mesh": "ExplicitMesh", "loss_backend": "DenseLoss",
        "optimizer": "GradientTransformationExtraArgs",
    }  # fmt: skip
    recorded = RecordedRun.read(tmp_path).settings
    assert {name: recorded[name] for name in kinds} == {
        name: f"{kind}, passed to GRPOTrainer" for name, kind in kinds.items()
    }
    assert recorded["rollout_sharding"] == "auto"
    assert not eqx.tree_equal(
        *jax.device_get((model, trainer.state.model))
    )  # and the passed model still lives


def test_a_passed_model_can_be_freed() -> None:
    """The trainer has a copy of its own; two may not fit the devices."""
    model = from_pretrained("tiny_qwen2", ExplicitMesh(fsdp=-1).build())
    tokenizer = ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))
    passed = weakref.ref(model.embed_tokens)
    trainer = GRPOTrainer(GRPOConfig(**SMALL), model=model, tokenizer=tokenizer)
    del model
    gc.collect()
    assert passed() is None
    assert trainer.state.model.embed_tokens.size > 0


class Calls:
    """Stands in for the device programs of a step, and keeps what they were called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scored: list[Any] = []
        self.first_prompts: list[int] = []
        self.tokens_per_update: list[float] = []
        self.prompt_tokens = 0
        monkeypatch.setattr(Scorer, "__call__", self._score)
        monkeypatch.setattr(Updater, "__call__", self._update)
        monkeypatch.setattr(LocalSampler, "submit", self._submit)

    def _submit(self, trajectories: Any, sampling: Any = None, **_: Any) -> Any:
        self.prompt_tokens = sum(len(each.prompt_ids) for each in trajectories)
        done = [
            each.completed(np.full(16, each.address.prompt + 3, np.int32)) for each in trajectories
        ]
        counts = SamplingCounts(16, 16 * 32, 16.0 * 32)
        return types.SimpleNamespace(result=lambda: Sampled(done, counts), release=lambda: None)

    def _score(
        self, model: Any, rows: Any, routes: Any = None, *, is_reference: bool = False
    ) -> TokenScores:
        self.scored.append(model)
        return TokenScores(rows.sampler_logps, rows.sampler_logps)

    def _update(self, state: Any, rows: Any, routes: Any = None) -> tuple[Any, dict[str, Any]]:
        self.tokens_per_update.append(float(rows.counts.tokens_per_update))
        rewarded = np.asarray(rows.targets)[np.asarray(rows.counted)]
        self.first_prompts.append(int(rewarded.min()) - 3)
        return state, {"loss": jnp.zeros(()), "skipped_updates": jnp.zeros(())}


def calls_of_a_step(
    monkeypatch: pytest.MonkeyPatch, path: Path, **fields: Any
) -> tuple[Calls, dict[str, float]]:
    cfg = GRPOConfig(**{**SMALL, "steps": 2, "prompts_per_step": 16, **fields}, output_dir=path)
    trainer = GRPOTrainer(cfg, train_data=Sums(), eval_data=Sums())
    calls = Calls(monkeypatch)
    trainer.cfg = dataclasses.replace(trainer.cfg, steps=1)
    return calls, dict(trainer.fit().history[0])


@pytest.mark.parametrize(
    ("fields", "scores", "updates"),
    [
        ({}, 0, 1),  # on-policy: ratios are 1, and nothing needs scoring
        ({"num_iterations": 2}, 1, 2),
        ({"beta": 0.1}, 1, 1),  # the reference's
        ({"beta": 0.1, "num_iterations": 3}, 2, 3),
        ({"top_entropy_quantile": 0.5, "num_iterations": 2}, 3, 2),
    ],
)
def test_no_forward_pass_is_made_that_is_not_needed(
    fields: dict[str, Any], scores: int, updates: int, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    calls, _ = calls_of_a_step(monkeypatch, tmp_path, **fields)
    assert len(calls.scored) == scores
    cfg = GRPOConfig(**fields)
    assert sum(Passes.of(cfg).num_scores(cfg).values()) == scores  # as a plan counts them
    assert calls.tokens_per_update == [16 * 2 * 16] * updates


def test_every_pass_updates_on_every_share_of_the_rollout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fields = {"steps_per_generation": 2, "num_iterations": 2, "learning_rate": 1.0}
    calls, metrics = calls_of_a_step(monkeypatch, tmp_path, **fields)
    assert calls.first_prompts == [0, 1, 0, 1]
    assert len(calls.scored) == 1
    assert calls.tokens_per_update == [16 * 2 * 16 / 2] * 4
    # Of the fourth of the run's eight updates, on a line from 1 to 0.
    assert metrics["learning_rate"] == pytest.approx(1 - 3 / 8)
    assert metrics["num_tokens"] == calls.prompt_tokens + 16 * 2 * 16


def test_no_reference_model_is_kept_without_a_kl_term() -> None:
    sums = {"train_data": Sums(), "eval_data": Sums()}
    assert GRPOTrainer(GRPOConfig(**SMALL), **sums).state.reference is None
    assert GRPOTrainer(GRPOConfig(**SMALL, beta=0.1), **sums).state.reference is not None


def shouting(completions: list[str], **columns: Any) -> list[float]:
    """A reward that leads far away from what the model writes."""
    return [float(len(completion)) for completion in completions]


@pytest.mark.slow
def test_a_second_update_has_ratios_off_1_and_clips(tmp_path: Path) -> None:
    fields = {**SMALL, "learning_rate": 3e-3, "epsilon": 0.01, "lr_scheduler_type": "constant"}
    cfg = GRPOConfig(**fields, num_iterations=2, output_dir=tmp_path / "2")
    metrics = GRPOTrainer(cfg, reward_funcs=[shouting]).fit().history[-1]
    assert metrics["policy_ratio/min"] < 0.99 < 1.01 < metrics["policy_ratio/max"]
    assert metrics["clip_ratio/region_mean"] > 0
    cfg = GRPOConfig(**fields, output_dir=tmp_path / "1")
    once = GRPOTrainer(cfg, reward_funcs=[shouting]).fit().history[-1]
    assert once["policy_ratio/min"] == once["policy_ratio/max"] == 1
    assert once["clip_ratio/region_mean"] == 0


@pytest.mark.slow
def test_a_kl_term_holds_the_policy_near_the_reference(tmp_path: Path) -> None:
    """Measured by the logged estimate, which a vanishing beta leaves at its own course."""
    drift = {}
    for beta in (1e-9, 1.0):
        cfg = GRPOConfig(
            **{**SMALL, "steps": 6, "num_generations": 4}, beta=beta, learning_rate=1e-3,
            lr_scheduler_type="constant", output_dir=tmp_path / str(beta),
        )  # fmt: skip
        history = GRPOTrainer(cfg, reward_funcs=[shouting]).fit().history
        assert history[0]["kl"] == pytest.approx(0, abs=1e-6)
        drift[beta] = np.mean([metrics["kl"] for metrics in history[-3:]])
    assert drift[1e-9] > 0.05
    assert drift[1.0] < drift[1e-9] / 3


@pytest.mark.slow
def test_the_reference_follows_where_it_is_synchronized(tmp_path: Path) -> None:
    cfg = GRPOConfig(
        **{**SMALL, "steps": 3}, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2,
        ref_model_mixup_alpha=1.0, learning_rate=1e-3, lr_scheduler_type="constant",
        output_dir=tmp_path,
    )  # fmt: skip
    kl = [metrics["kl"] for metrics in GRPOTrainer(cfg).fit().history]
    assert kl[1] > 1e-6
    assert kl[0] == pytest.approx(0, abs=1e-7)
    assert kl[2] == pytest.approx(0, abs=1e-7)


@pytest.mark.slow
def test_the_soft_overlong_penalty_is_one_more_reward(tmp_path: Path) -> None:
    cfg = GRPOConfig(**SMALL, overlong_buffer=1.0 - 1e-9, output_dir=tmp_path)
    metrics = GRPOTrainer(cfg).fit().history[0]
    lengths = metrics["completions/mean_length"]
    assert metrics["rewards/soft_overlong/mean"] == pytest.approx(-lengths / 16)
    total = metrics["rewards/correct/mean"] + metrics["rewards/soft_overlong/mean"]
    assert metrics["reward"] == pytest.approx(total)


@pytest.mark.slow
def test_programs_are_compiled_for_few_shapes(tmp_path: Path) -> None:
    """Ragged lengths compile one `update`, and steps after the first compile no more of it."""
    cfg = GRPOConfig(
        **{**SMALL, "steps": 10, "num_generations": 4, "max_completion_length": 48},
        output_dir=tmp_path,
    )  # fmt: skip
    history = GRPOTrainer(cfg).fit().history
    assert {metrics["compile/num_shapes/update"] for metrics in history} == {1}
    assert history[-1]["compile/num_shapes/generate"] == 1  # all prompts have about one length
    # Ahead of their calls, and not again.
    assert [metrics["compile/num_programs"] for metrics in history] == [2] + 9 * [0]
    startup = "time/startup/first_rollout_s", "time/startup/first_update_s"
    assert 0 < history[0][startup[0]] < history[0][startup[1]]
    assert not any(name in metrics for name in startup for metrics in history[1:])


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "num_scores"),
    [
        ({"reward_failures": "drop"}, 0),
        ({"num_iterations": 2}, 1),
        ({"beta": 0.1, "steps_per_generation": 2}, 1),
        ({"top_entropy_quantile": 0.5, "reward_failures": "drop"}, 1),
        ({"top_entropy_quantile": 0.5, "steps_per_generation": 2}, 2),
    ],
    ids=["drop", "iterations", "reference and shares", "entropies", "entropies of shares"],
)
def test_what_is_compiled_ahead_is_what_steps_call(
    settings: dict[str, Any], num_scores: int, tmp_path: Path
) -> None:
    """A program that no step called would count as one more set of shapes."""
    trainer = GRPOTrainer(GRPOConfig(**{**SMALL, "steps": 1}, **settings, output_dir=tmp_path))
    trainer.fit()
    expected = {"generate": 1, "update": 1} | ({"score": num_scores} if num_scores else {})
    assert trainer.programs.compiler.num_shapes == expected


@pytest.mark.slow
def test_what_steps_call_first_is_compiled_while_weights_load(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, begun = GRPOTrainer._initial_state, list[int]()

    def spied(trainer: GRPOTrainer) -> TrainState:
        begun.append(len(trainer.programs.compiler._compiling))
        return load(trainer)

    monkeypatch.setattr(GRPOTrainer, "_initial_state", spied)
    trainer = GRPOTrainer(
        GRPOConfig(**{**SMALL, "steps": 1}, model=str(small_model), output_dir=tmp_path)
    )
    assert begun == [1]
    trainer.fit()
    assert trainer.programs.compiler.num_shapes == {"generate": 1, "update": 1}


@pytest.mark.slow
def test_a_step_in_fewer_slots_is_the_same(run: tuple[GRPOTrainer, Path], tmp_path: Path) -> None:
    cfg = GRPOConfig(**{**SMALL, "steps": 1}, max_num_seqs=8, output_dir=tmp_path)
    found, expected = GRPOTrainer(cfg).fit().history[0], lines(run[1])[0]
    for name in ("reward", "completions/mean_length", "entropy", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.slow
def test_a_rounded_cache_is_seen_in_the_importance_ratios(tmp_path: Path) -> None:
    cfg = GRPOConfig(**{**SMALL, "steps": 1}, kv_cache_dtype="int8", output_dir=tmp_path)
    metrics = GRPOTrainer(cfg).fit().history[0]
    assert 1e-4 < metrics["sampling/sampling_logp_difference/max"] < 1
    ratios = [metrics[f"sampling/importance_sampling_ratio/{x}"] for x in ("min", "mean", "max")]
    assert 0.3 < ratios[0] < 0.9999 < 1.0001 < ratios[2] < 3
    assert ratios[1] == pytest.approx(1, abs=0.02)


def test_stop_strings_end_completions() -> None:
    trainer = GRPOTrainer(GRPOConfig(**SMALL, stop_strings=("\n",)))
    problems = [prompt.text for prompt in trainer.heldout.prompts]
    endless = GRPOTrainer(GRPOConfig(**SMALL)).generate(problems)
    for text, full in zip(trainer.generate(problems), endless, strict=True):
        assert text == (full[: full.find("\n") + 1] if "\n" in full else full)
    assert sum("\n" in text for text in endless) > 4


def test_generate_returns_text(run: tuple[GRPOTrainer, Path]) -> None:
    trainer, _ = run
    texts = trainer.generate(["Tom has 3 apples and eats 1. How many are left?", "Hi"])
    assert len(texts) == 2
    shapes = trainer.programs.compiler.num_shapes["generate"]
    assert len(trainer.generate(["Hi"] * 5)) == 5
    assert trainer.programs.compiler.num_shapes["generate"] == shapes  # for up to eight
    assert all(isinstance(text, str) and "<|" not in text for text in texts)
    assert trainer.generate([]) == []
    with pytest.raises(UserError, match=r"has 10.* tokens, and max_prompt_length is 1024"):
        trainer.generate(["9" * 1050])


def test_evaluation_samples_and_counts(run: tuple[GRPOTrainer, Path]) -> None:
    trainer, _ = run
    evaluation = trainer.evaluate(temperature=1.0, num_samples=3)
    assert evaluation.solved.shape == (8, 3)
    assert evaluation.pass_at(1) <= evaluation.pass_at(3)


@pytest.mark.slow
def test_evaluations_before_and_after_are_recorded(tmp_path: Path) -> None:
    trainer = GRPOTrainer(GRPOConfig(**SMALL, output_dir=tmp_path))
    before = trainer.evaluate()
    trainer.fit()
    after = trainer.evaluate(temperature=1.0, num_samples=2)
    found = [row for row in rows(tmp_path) if "step_time" not in row]
    assert found == [{"step": 0, **before.metrics()}, {"step": 2, **after.metrics()}]


def test_a_reward_function_that_fails_ends_a_run_before_its_first_rollout(tmp_path: Path) -> None:
    def broken(completions: list[str], **columns: Any) -> list[float]:
        return [float(text.split()[7]) for text in completions]

    trainer = GRPOTrainer(GRPOConfig(**SMALL, output_dir=tmp_path), reward_funcs=broken)
    with pytest.raises(RewardFailureError, match="broken raised IndexError: list index out of"):
        trainer.fit()
    assert trainer.programs.compiler.num_shapes == {}
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_reward_function_logs_a_metric_and_a_column(tmp_path: Path) -> None:
    def judge(
        completions: list[str], trainer_state: Any, log_metric: Any, log_extra: Any, **columns: Any
    ) -> list[float]:
        assert trainer_state.max_steps == 2
        log_metric("judge/step", trainer_state.global_step)
        log_extra("words", [len(text.split()) for text in completions])
        return [float(len(text)) for text in completions]

    GRPOTrainer(GRPOConfig(**SMALL, output_dir=tmp_path), reward_funcs=judge).fit()
    assert [line["judge/step"] for line in lines(tmp_path)] == [0.0, 1.0]
    for row in pq.read_table(tmp_path / "completions" / "step_000002.parquet").to_pylist():
        assert row["words"] == len(row["completion"].split())


def test_a_metric_of_the_run_cannot_be_logged_by_a_function(tmp_path: Path) -> None:
    def judge(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
        log_metric("loss", 0.0)
        return [float(len(text)) for text in completions]

    trainer = GRPOTrainer(GRPOConfig(**SMALL, output_dir=tmp_path), reward_funcs=judge)
    with pytest.raises(RewardError, match="logs 'loss', which the run logs already"):
        trainer.fit()


def test_a_fitted_trainer_has_nothing_left_to_do(run: tuple[GRPOTrainer, Path]) -> None:
    assert run[0].state.step == 2
    with pytest.raises(UserError, match="has finished its 2 steps"):
        run[0].fit()
    assert not (run[1] / "previous-2").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mesh": "3,1,1"}, "needs 3 devices"),
        ({"dtype": "bfloat16"}, "the devices are CPUs"),
        ({"prompts_per_step": 6}, "cannot be split evenly"),
        (
            {"max_num_seqs": 12, "rollout_sharding": "legacy"},
            r"legacy must split 12 slots \(max_num_seqs\).*a multiple of 8",
        ),
        ({"stop_strings": ("<|im_end|>",)}, "contains the special token '<|im_end|>'"),
        ({"max_prompt_length": 8}, "tokens, and max_prompt_length is 8"),
        ({"reward_funcs": ("correct", "correct")}, "have the same name"),
        ({"reward_funcs": ("nice",)}, "no reward function named 'nice'"),
        ({"reward_weights": (1.0, 2.0)}, "1 reward functions and 2 reward_weights"),
        ({"data": "nowhere.jsonl"}, "'nowhere.jsonl' is neither a file"),
        ({"prompts_per_step": 96}, "has 88 problems to train on, and prompts_per_step is 96"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        GRPOTrainer(GRPOConfig(**{**SMALL, **fields}))


def test_prompts_that_leave_too_few_positions_are_refused(tmp_path: Path) -> None:
    """The model was trained on `max_position_embeddings` of them, here 2,048."""
    longest = max(map(len, GRPOTrainer(GRPOConfig(**SMALL)).prompts.data.tokens))
    fields = {**SMALL, "max_completion_length": 2048 - longest}
    trainer = GRPOTrainer(GRPOConfig(**fields))
    with pytest.raises(UserError, match=r"the prompt '99.* tokens and max_completion_length is"):
        trainer.generate(["9" * (longest + 1)])
    fields["max_completion_length"] += 1
    with pytest.raises(
        UserError,
        match=rf"longest prompt of .* has {longest} tokens .* the 2048 positions of the model "
        rf"\(max_position_embeddings\): lower max_completion_length, or keep prompts to "
        rf"{longest - 1} tokens",
    ):
        GRPOTrainer(GRPOConfig(**fields))
    fields["max_completion_length"] = 4096
    with pytest.raises(UserError, match=r"lower max_completion_length\.$"):
        GRPOTrainer(GRPOConfig(**fields))
    with pytest.raises(UserError, match="lower max_completion_length"):
        RunSpec.describe(GRPOConfig(**fields))


@pytest.mark.slow
def test_micro_batches_that_are_auto_are_of_a_number_from_then_on(tmp_path: Path) -> None:
    """That number is all of a device's completions, where these fit."""
    settings = {**SMALL, "num_generations": 4, "max_completion_length": 8, "steps": 1}
    cfg = GRPOConfig(**settings, micro_batch_size_per_device="auto", output_dir=tmp_path)
    trainer = GRPOTrainer(cfg)
    assert trainer.cfg.micro_batch_size_per_device == 4
    trainer.fit()
    assert json.loads((tmp_path / "config.json").read_text())["micro_batch_size_per_device"] == 4


def test_a_model_comes_with_its_tokenizer() -> None:
    with pytest.raises(UserError, match="pass both"):
        GRPOTrainer(GRPOConfig(**SMALL), model=from_pretrained("tiny_qwen2"))


def test_a_passed_model_is_copied_also_where_it_is_in_place_already() -> None:
    mesh = AutoMesh().build(jax.devices()[:1])
    config = Qwen2Config(
        vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2.init(config, jax.random.key(0))
    for array in jax.tree.leaves(shard_model(model, mesh)):
        array.delete()
    assert np.isfinite(np.asarray(model.embed_tokens)).all()
