"""How batches are split over a mesh."""

import pytest
from jax.sharding import PartitionSpec

from grpo_eqx.common.errors import UserError
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.rules import (
    PARAMETER_RULES,
    batch_sharding,
    num_batch_shards,
    parameter_sharding,
)


def test_prompts_are_split_over_dp_and_fsdp_where_they_divide() -> None:
    mesh = parse_mesh("2,4,1").build()
    assert batch_sharding(mesh, 16, 3).spec == PartitionSpec(("dp", "fsdp"))
    assert num_batch_shards(mesh) == 8


def test_few_prompts_split_their_groups_over_fsdp() -> None:
    mesh = parse_mesh("2,4,1").build()
    assert batch_sharding(mesh, 2, 8).spec == PartitionSpec("dp", "fsdp")


@pytest.mark.parametrize(
    ("mesh", "fix"),
    [
        ("2,4,1", "prompts_per_step a multiple of 8, or of 2 with num_generations a multiple of 4"),
        ("1,8,1", "prompts_per_step or num_generations a multiple of 8"),
        ("8,1,1", "prompts_per_step a multiple of 8"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_what_would(mesh: str, fix: str) -> None:
    with pytest.raises(UserError, match=rf"make {fix}\.$"):
        batch_sharding(parse_mesh(mesh).build(), 6, 6)


def test_dimensions_that_do_not_divide_stay_whole() -> None:
    mesh = parse_mesh("1,4,2").build()
    sharding = parameter_sharding(mesh, ("layers", "mlp", "hidden"), (3, 10, 12))
    assert sharding.spec == PartitionSpec(None, "tp", "fsdp")
    odd = parameter_sharding(mesh, ("layers", "mlp", "hidden"), (3, 9, 13))
    assert odd.spec == PartitionSpec(None, None, None)


def test_dimensions_without_a_rule_are_refused() -> None:
    with pytest.raises(UserError, match="no dimension 'vocabulary': use vocab, heads"):
        parameter_sharding(parse_mesh("2,2,2").build(), ("vocabulary", "hidden"), (8, 8))


def test_heads_are_never_cut() -> None:
    mesh = parse_mesh("1,2,4").build()
    dims = ("layers", "heads", "hidden")
    for heads, spec in [(8, "tp"), (2, None), (14, None)]:
        found = parameter_sharding(mesh, dims, (3, heads * 16, 12), head_size=16)
        assert found.spec == PartitionSpec(None, spec, "fsdp")


def test_an_axis_is_taken_once_and_the_first_ones_that_divide_are() -> None:
    mesh = parse_mesh("1,2,4").build()
    rules = {**PARAMETER_RULES, "vocab": ("tp", "fsdp")}
    for vocab, spec in [(16, (("tp", "fsdp"), None)), (12, ("tp", "fsdp")), (3, (None, "fsdp"))]:
        found = parameter_sharding(mesh, ("vocab", "hidden"), (vocab, 12), rules)
        assert found.spec == PartitionSpec(*spec)
