"""What a config refuses, converts and fills in."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx import GRPOConfig, UserError
from grpo_eqx.settings.embedded import EMBEDDED_FOLDER


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(GRPOConfig):
    """A config with fields of its own."""

    penalty: float = 0.5
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    steps: int = 7


def of_any_type(**fields: Any) -> GRPOConfig:
    """Makes a config of values of any type: in tests, types of arguments are checked before."""
    cfg = GRPOConfig()
    for name, value in fields.items():
        object.__setattr__(cfg, name, value)
    cfg.__post_init__()
    return cfg


def test_defaults_depend_on_the_model() -> None:
    embedded = GRPOConfig(seed=3).resolved()
    assert embedded.output_dir == "runs/tiny_qwen2-word_problems-seed3"
    real = GRPOConfig(model="Qwen/Qwen2.5-3B-Instruct", data="openai/gsm8k").resolved()
    assert real.output_dir == "runs/Qwen2.5-3B-Instruct-gsm8k-seed0"
    assert (real.learning_rate, real.max_completion_length) == (1e-6, 512)
    assert embedded.learning_rate > real.learning_rate


@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rate": 3e-4},
        {"beta": 0.1},
        {"data": "a/p.jsonl"},
        {"data": "openai/gsm8k:train[:10]"},
        {"model": "./folder/tiny_qwen2"},
    ],
)
def test_runs_that_differ_have_folders_of_their_own(fields: dict[str, Any]) -> None:
    default = GRPOConfig().resolved().output_dir
    own = GRPOConfig(**fields).resolved().output_dir
    assert own != default
    assert own == GRPOConfig(**fields, steps=3, save_steps=1).resolved().output_dir
    same = {"epsilon": 0.2, "learning_rate": 1e-4, "mesh": "1,1,1"}  # the defaults, spelled out
    assert GRPOConfig(**same).resolved().output_dir == default


def test_a_run_can_be_named() -> None:
    assert GRPOConfig(run_name="mine").resolved().output_dir == "runs/mine"
    assert GRPOConfig(run_name="mine", output_dir="x").resolved().output_dir == "x"
    for name in ("", ".", "..", "a/b", " "):
        with pytest.raises(UserError, match="give a name without slashes"):
            GRPOConfig(run_name=name)


def test_the_wandb_project_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "arithmetic")
    assert GRPOConfig(wandb="offline").resolved().wandb_project == "arithmetic"
    monkeypatch.delenv("WANDB_PROJECT")
    assert GRPOConfig(wandb="offline").resolved().wandb_project == "grpo_eqx"


def test_a_tracker_is_named_and_weights_and_biases_may_have_a_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def wandb(**settings: Any) -> tuple[str | None, str | None]:
        cfg = GRPOConfig(**settings).resolved()
        assert cfg == GRPOConfig(**dataclasses.asdict(cfg))  # as a run's config.json has it
        return cfg.wandb, cfg.wandb_project

    assert wandb() == wandb(report_to=("tensorboard",)) == ("disabled", None)
    assert wandb(report_to=("wandb",), wandb_project="mine") == ("online", "mine")
    assert wandb(report_to=("wandb", "tensorboard"), wandb="offline")[0] == "offline"
    assert wandb(wandb="offline")[0] == "offline"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb(report_to=("wandb",))[0] == "offline"
    assert wandb(report_to=("wandb",), wandb="online")[0] == "online"
    assert wandb()[0] == "disabled"
    assert of_any_type(report_to="wandb").report_to == ("wandb",)  # as TRL's scripts have it
    for none in ("none", ["none"], ("none",)):
        assert of_any_type(report_to=none).report_to == ()


def test_given_values_are_kept() -> None:
    cfg = GRPOConfig(learning_rate=3e-5, epsilon=0.1, output_dir=Path("x")).resolved()
    assert (cfg.learning_rate, cfg.epsilon_high, cfg.output_dir) == (3e-5, 0.1, "x")
    assert cfg.resolved() == cfg


@pytest.mark.parametrize(
    ("changes", "embedded"),
    [
        ({}, True),
        ({"torch_dtype": "float32"}, True),  # as a run writes its model
        ({"dtype": "float32", "rope_parameters": {"rope_theta": 10000.0}}, True),  # transformers 5
        ({"num_hidden_layers": 5}, False),
        ({"vocab_size": 151936}, False),
        ({"model_type": "llama"}, False),
        ({"hidden_size": None}, False),
        (None, False),
    ],
)
def test_defaults_follow_what_a_model_is_and_not_its_name(
    tmp_path: Path, changes: dict[str, Any] | None, embedded: bool
) -> None:
    """A run's model, an export, an adapter and a copy keep the shape in `config.json`."""
    fields = json.loads((EMBEDDED_FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        "{" if changes is None else json.dumps({**fields, **changes})
    )
    expected = (1e-4, 48) if embedded else (1e-6, 512)
    cfg = GRPOConfig(model=str(tmp_path))
    filled = cfg.resolved()
    assert (filled.learning_rate, filled.max_completion_length) == expected
    assert GRPOConfig(model=str(tmp_path), lora_rank=8).resolved().learning_rate == (
        1e-3 if embedded else 1e-5
    )
    which = "one of the shape of" if embedded else "another than"
    assert cfg.note_on_defaults() == (
        f"note: by default, learning_rate is {'0.0001' if embedded else '1e-06'} and "
        f"max_completion_length is {expected[1]}: the model is {which} tiny_qwen2"
    )


def test_defaults_of_a_model_that_is_passed_are_its_own() -> None:
    """The setting is then the embedded model's name, as it is left out."""
    fields = json.loads((EMBEDDED_FOLDER / "config.json").read_text())
    other = {**fields, "hidden_size": 2048}
    assert GRPOConfig().resolved(fields).learning_rate == 1e-4
    assert GRPOConfig().resolved(other).learning_rate == 1e-6
    assert GRPOConfig().resolved(other).output_dir == GRPOConfig().resolved().output_dir
    assert "max_completion_length is 512" in str(GRPOConfig().note_on_defaults(other))


def test_defaults_that_are_given_or_of_the_embedded_model_are_not_said(tmp_path: Path) -> None:
    assert GRPOConfig().note_on_defaults() is None
    given = GRPOConfig(model=str(tmp_path), learning_rate=1e-5, max_completion_length=9)
    assert given.note_on_defaults() is None
    half = GRPOConfig(model="Qwen/Qwen2.5-3B", learning_rate=1e-5).note_on_defaults()
    assert half == (
        "note: by default, max_completion_length is 512: the model is another than tiny_qwen2"
    )


def test_only_what_has_a_part_in_the_combination_is_filled_in() -> None:
    default = GRPOConfig().resolved()
    assert (default.epsilon, default.epsilon_high, default.scale_rewards) == (0.2, 0.2, "group")
    for name in (
        "kl_estimator", "use_bias_correction_kl", "ref_model_sync_steps", "sapo_temperature_pos",
        "importance_sampling_clip_max", "max_generation_batches", "wandb_project",
    ):  # fmt: skip
        assert getattr(default, name) is None, name
    sapo = GRPOConfig(loss_type="sapo", beta=0.1, advantage_estimator="rloo").resolved()
    assert (sapo.epsilon, sapo.sapo_temperature_neg, sapo.scale_rewards) == (None, 1.05, None)
    assert (sapo.kl_estimator, sapo.use_bias_correction_kl) == ("k3", True)
    assert GRPOConfig(reward_failures="drop").resolved().max_failed_rewards == 0.1
    masked = GRPOConfig(importance_sampling_mode="token_mask", importance_sampling_clip_min=0.5)
    assert masked.resolved().importance_sampling_clip_max is None
    rounded = GRPOConfig(rollout_dtype="int8", importance_sampling_clip_max=2.0).resolved()
    assert rounded.importance_sampling_mode == "token_truncate"
    assert rounded.importance_sampling_clip_max == 2.0
    assert GRPOConfig(rollout_dtype="int8").resolved().importance_sampling_clip_max == 3.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "sapo", "epsilon_high": 0.28}, "epsilon_high is 0.28 with loss_type sapo"),
        ({"loss_type": "sapo", "epsilon": 0.2}, "epsilon is 0.2 with loss_type sapo"),
        ({"loss_type": "cispo"}, "cispo and epsilon_high is not set"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "the cap on the ratio itself"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.2}, "does not clip ratios"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 4.0}, "does not clip ratios"),
        (
            {
                "loss_type": "cispo",
                "epsilon_high": 5.0,
                "importance_sampling_level": "sequence_token",
            },
            "carry no gradient",
        ),
        ({"sapo_temperature_pos": 1.0}, "sapo_temperature_pos is 1.0 with loss_type dapo"),
        ({"delta": 1.1}, "delta is 1.1 and epsilon_high is 0.2"),
        ({"dual_clip": 1.25, "epsilon_high": 0.3}, "dual_clip is 1.25 and epsilon_high is 0.3"),
        ({"delta": 3.0, "dual_clip": 4.0}, "only the smaller would have an effect"),
        ({"num_generations": 10**9}, "is 16,000,000,000 completions, and at most 100,000,000"),
        ({"kl_estimator": "k3"}, "kl_estimator is k3 with beta = 0: it would do nothing"),
        ({"kl_clamp": 10.0}, "kl_clamp is 10.0 with beta = 0"),
        ({"use_bias_correction_kl": True}, "with beta = 0"),
        ({"sync_ref_model": True}, "sync_ref_model is True with beta = 0"),
        ({"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False}, "has mean zero"),
        ({"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": True}, "is unbiased"),
        (
            {"dynamic_sampling": True, "advantage_estimator": "reinforce"},
            "also learns from groups with equal rewards",
        ),
        ({"max_failed_rewards": 0.2}, "max_failed_rewards is 0.2 while reward_failures is stop"),
        (
            {"reward_timeout": 5.0, "reward_batch_timeout": 5.0},
            "reward_batch_timeout is 5.0, which ends every call before",
        ),
        ({"beta": 0.1, "ref_model_sync_steps": 4}, "while sync_ref_model is off"),
        ({"beta": 0.1, "ref_model_mixup_alpha": 0.5}, "while sync_ref_model is off"),
        ({"beta": 0.1, "sync_ref_model": True, "steps": 64}, "never move in time"),
        ({"advantage_estimator": "rloo", "scale_rewards": "batch"}, "which is not scaled"),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            "scale_rewards is none with multi_objective_aggregation",
        ),
        (
            {
                "multi_objective_aggregation": "normalize_then_sum",
                "advantage_estimator": "reinforce",
            },
            "it is defined only for grpo",
        ),
        ({"max_generation_batches": 3}, "while dynamic_sampling is off"),
        ({"max_generation_batches": 1, "dynamic_sampling": True}, "use 2 or more"),
        ({"importance_sampling_clip_max": 2.0}, "without importance_sampling_mode"),
        (
            {"importance_sampling_mode": "token_mask", "importance_sampling_clip_max": 0.5},
            "must be finite and above 1",
        ),
        (
            {"importance_sampling_mode": "token_mask", "importance_sampling_clip_min": 0.0},
            "must be between 0 and 1",
        ),
        ({"off_policy_mask_threshold": float("inf")}, "off_policy_mask_threshold is inf"),
        ({"advantage_estimator": "reinforce", "scale_rewards": "group"}, "which is not scaled"),
        ({"wandb_project": "mine"}, "while wandb is disabled"),
        ({"num_completions_to_print": 3}, "without log_completions"),
        ({"log_completions": True, "log_completions_steps": 0}, "set it to 1 or more"),
    ],
)
def test_a_knob_that_would_do_nothing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GRPOConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_cache_dtype": "int16"}, "kv_cache_dtype is 'int16': use auto, float32, bfloat16"),
        # As close to tensor:2 as to tensor:4: no guess.
        ({"rollout_sharding": "tensor:3"}, "tensor:16, legacy or maxtext; pass an object"),
        ({"remat": "some"}, "remat is 'some': use "),
        ({"loss_type": None}, "loss_type is None: use grpo, "),
        (
            {"scale_rewards": True},
            "scale_rewards is True: use group, batch, none or None; TRL's True is group",
        ),
        ({"seed": 1.5}, "seed is 1.5: use a whole number"),
        ({"warmup_steps": 0.1}, "warmup_steps is 0.1: .* set warmup_ratio"),
        ({"reward_funcs": len}, r"reward_funcs is .*; pass functions to GRPOTrainer"),
    ],
)
def test_what_is_none_of_the_choices_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        of_any_type(**fields)


def test_values_as_files_have_them_are_converted() -> None:
    cfg = of_any_type(learning_rate="1e-6", reward_funcs=["format", "correct"], steps=8.0)
    assert (cfg.learning_rate, cfg.reward_funcs, cfg.steps) == (1e-6, ("format", "correct"), 8)


def test_epochs_become_steps_once_the_problems_are_counted() -> None:
    cfg = GRPOConfig(num_train_epochs=1.5, prompts_per_step=16).for_problems(100)
    assert (cfg.steps, cfg.num_train_epochs) == (10, None)  # 150 prompts
    assert GRPOConfig(steps=7).for_problems(100).steps == 7


def test_a_warm_up_can_be_a_share_of_all_updates() -> None:
    assert GRPOConfig(steps=15, warmup_ratio=0.1, num_iterations=2).num_warmup_updates == 3
    assert GRPOConfig(warmup_steps=5).num_warmup_updates == 5


def test_clip_ranges_without_effect_as_yet_are_named_not_refused() -> None:
    """They come into play with the first second update, and belong to a recipe."""
    assert GRPOConfig().without_effect() is None
    assert GRPOConfig().resolved().without_effect() is None
    sequence = GRPOConfig(epsilon=0.1, importance_sampling_level="sequence")
    assert "epsilon, importance_sampling_level have no effect" in str(sequence.without_effect())
    sapo = GRPOConfig(loss_type="sapo", sapo_temperature_pos=2.0)
    assert "sapo_temperature_pos has no effect" in str(sapo.without_effect())
    assert GRPOConfig(epsilon=0.1, num_iterations=2).without_effect() is None
    assert GRPOConfig(epsilon=0.1, steps_per_generation=2).without_effect() is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generations": 1}, "num_generations is 1: it must be at least 2"),
        ({"prompts_per_step": 0}, "prompts_per_step is 0: it must be at least 1"),
        ({"max_completion_length": 0}, "max_completion_length is 0"),
        ({"micro_batch_size_per_device": 0}, "micro_batch_size_per_device is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"temperature": 0.0}, "training samples"),
        ({"learning_rate": -1e-4}, "learning_rate is -0.0001"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"epsilon": 1.5}, "epsilon is 1.5"),
        ({"epsilon_high": 0.0}, "epsilon_high is 0.0"),
        ({"warmup_steps": 200}, r"warmup_steps \(200\) exceeds the run's 150 updates"),
        ({"temperature": float("nan")}, "training samples"),
        ({"adam_beta2": 1.0}, "adam_beta2 is 1.0"),
        ({"reward_weights": (float("inf"),)}, "must be finite"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, r"seed is 4294967296: it must be .* below 2\^32"),
        ({"seed": 2**70}, f"seed is {2**70}: it must be at least 0 and below"),
        ({"beta": -0.1}, "beta is -0.1"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile is 0.0"),
        ({"overlong_buffer": 1.0}, "overlong_buffer is 1.0"),
        ({"top_k": 0}, "top_k is 0: it must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"steps": 5, "num_train_epochs": 2.0}, "steps is 5 and num_train_epochs is 2: set one"),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_steps is 5 and warmup_ratio is 0.1"),
        ({"num_train_epochs": 0.0}, "num_train_epochs is 0.0: it must be above 0"),
        ({"steps_per_generation": 3}, r"prompts_per_step \(16\) cannot be split evenly"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GRPOConfig(**fields)


def test_a_subclass_may_have_fields_of_its_own() -> None:
    plain = Own().resolved()
    assert (plain.penalty, plain.table, plain.steps) == (0.5, {}, 7)
    assert plain.output_dir == GRPOConfig().resolved().output_dir
    cfg = Own(penalty="2", table={"a": 1}, steps=1).resolved()
    assert (cfg.penalty, cfg.table) == (2.0, {"a": 1})
    assert cfg.output_dir not in (plain.output_dir, Own(penalty=3.0).resolved().output_dir)
    with pytest.raises(UserError, match="penalty is 'x': use a number"):
        Own(penalty="x")


@pytest.mark.parametrize("name", ["steps", "max_completion_length", "lora_rank"])
def test_whole_numbers_of_hundreds_of_digits_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name} is 1000"):
        GRPOConfig(**{name: 10**400})


def test_paths_in_the_home_folder_are_one_however_they_are_spelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a run continues where it began."""
    monkeypatch.setenv("HOME", "/home/u")
    for given in ("~/a/m", "~/a/m/", "~//a//m", "~/./a/m/."):
        cfg = GRPOConfig(model=given, data=given, output_dir=given).resolved()
        assert (cfg.model, cfg.data, cfg.output_dir) == ("/home/u/a/m",) * 3
    monkeypatch.delenv("HOME")
    assert GRPOConfig(model="~no-such-user/m/").resolved().model == "~no-such-user/m"
