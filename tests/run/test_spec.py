"""What a plan reads of a run: architectures and lengths of prompts, without weights."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest

from grpo_eqx import GRPOConfig, UserError
from grpo_eqx.generation.cpu import CpuDecoding
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.models.pretrained import find_config, model_folder
from grpo_eqx.objective import Objective
from grpo_eqx.run.passed import Passed
from grpo_eqx.run.programs import make_programs
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.sharding import ExplicitMesh
from grpo_eqx.training.micro_batches import RowShape

PROBLEMS = str(Path(__file__).parents[1] / "problems.jsonl")


def test_a_qwen_by_its_name_needs_no_network() -> None:
    assert find_config("Qwen/Qwen2.5-72B-Instruct").num_hidden_layers == 80


def test_a_folder_needs_no_weights(tmp_path: Path) -> None:
    config = Qwen2Config.from_name("3B").to_json()
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = RunSpec.describe(GRPOConfig(model=str(tmp_path), max_prompt_length=300))
    assert run.model.hidden_size == 2048
    assert (run.prompts.train, run.prompts.heldout, run.prompts.known) == (300, 300, False)


@pytest.mark.parametrize("name", ["somebody/something", "somebody/Qwen2.5-3B-Instruct", "3B"])
def test_a_model_that_is_nowhere_is_one_line(name) -> None:
    """Somebody else's need not be what its name says."""
    with pytest.raises(UserError, match="could not be downloaded") as error:
        find_config(name)
    assert "\n" not in str(error.value)


def test_cpus_alone_decode_in_forms_of_their_own() -> None:
    mesh = ExplicitMesh(dp=1, fsdp=1, tp=1).build(jax.devices()[:1])
    run = RunSpec.describe(GRPOConfig(data=PROBLEMS))
    assert isinstance(make_programs(run, mesh).sampler.options.decoding_form, CpuDecoding)


def test_a_passed_loss_backend_takes_the_place_of_the_setting() -> None:
    mesh = ExplicitMesh(dp=1, fsdp=1, tp=1).build(jax.devices()[:1])
    run = RunSpec.describe(GRPOConfig(data=PROBLEMS))
    assert make_programs(run, mesh).updater.forward.backend == ChunkedLoss()
    passed = RunSpec.describe(GRPOConfig(data=PROBLEMS), Passed(loss_backend=ChunkedLoss(7)))
    assert make_programs(passed, mesh).updater.forward.backend == ChunkedLoss(7)


def test_a_config_that_is_none_is_one_line(tmp_path: Path) -> None:
    config = {**Qwen2Config.from_name("3B").to_json(), "intermediate_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="intermediate_size='wide' is not a whole number"):
        find_config(str(tmp_path))


def test_router_replay_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match="router_replay is on, and the model has no experts"):
        RunSpec.describe(GRPOConfig(data=PROBLEMS, router_replay=True))


def test_prompts_at_hand_are_as_long_as_they_are() -> None:
    run = RunSpec.describe(GRPOConfig(eval_problems=32))
    assert run.prompts.known
    assert run.prompts.train == 51
    assert run.prompts.num_heldout == 32


def test_problems_on_the_hub_are_as_long_as_the_settings_allow() -> None:
    run = RunSpec.describe(GRPOConfig(data="openai/gsm8k", max_prompt_length=200))
    assert (run.prompts.train, run.prompts.known) == (200, False)


def test_problems_that_are_missing_are_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match="is neither a file"):
        RunSpec.describe(GRPOConfig(data=str(tmp_path / "none.jsonl")))


def test_a_models_tokenizer_is_used_where_it_is(tmp_path) -> None:
    for path in model_folder("tiny_qwen2").iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert RunSpec.describe(GRPOConfig(model=str(tmp_path), data=PROBLEMS)).prompts.known


@pytest.mark.grid
@pytest.mark.parametrize("mesh_name", ["1,1,1", "1,4,2"])
def test_sizes_of_micro_batches_are_the_smallest_for_their_number(mesh_name: str) -> None:
    cfg = GRPOConfig(
        data=PROBLEMS, mesh=mesh_name, prompts_per_step=8, steps_per_generation=2,
        num_generations=6, max_completion_length=40, max_prompt_length=64, eval_problems=8,
    )  # fmt: skip
    run = RunSpec.describe(cfg)
    mesh = run.build_mesh(jax.devices()[: math.prod(map(int, mesh_name.split(",")))])

    def rows(size: int | None) -> RowShape:
        changed = run.changed(micro_batch_size_per_device=size)
        shape = make_programs(changed, mesh).update_rows
        # The size in effect stands for any size with the same rows.
        effective = run.changed(micro_batch_size_per_device=changed.micro_batch_size(mesh))
        assert make_programs(effective, mesh).update_rows == shape
        return shape

    most = 4 * 6 // (mesh.shape["dp"] * mesh.shape["fsdp"])
    sizes = run.micro_batch_sizes(mesh)
    assert sizes[0] == 1
    shapes = [rows(size) for size in sizes]
    numbers = [shape.most_micro_batches for shape in shapes]
    assert numbers == sorted(set(numbers), reverse=True)
    assert set(numbers) == {rows(size).most_micro_batches for size in range(1, most + 1)}
    for size, number in zip(sizes, numbers, strict=True):
        assert all(rows(smaller).most_micro_batches > number for smaller in range(1, size))


def objective_of(**settings: Any) -> Objective:
    run = RunSpec.describe(GRPOConfig(data=PROBLEMS, eval_problems=8, **settings))
    return make_programs(run, run.build_mesh(jax.devices()[:1])).updater.options.objective


def test_settings_reach_the_objective() -> None:
    cispo = {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.1}
    assert objective_of(**cispo, use_bias_correction_kl=False) == Objective(
        loss_type="cispo",
        epsilon_high=5.0,
        beta=0.1,
        use_bias_correction_kl=False,
        max_completion_length=48,
    )
    assert objective_of(epsilon=0.1) == dataclasses.replace(
        Objective(), epsilon=0.1, epsilon_high=0.1, max_completion_length=48
    )
