"""What the rollout shardings mean on each mesh, and where they are refused."""

import pytest
from jax.sharding import PartitionSpec

from grpo_eqx.errors import UserError
from grpo_eqx.sharding import RolloutLayout, parse_mesh, parse_rollout_sharding


def layout(name: str, mesh: str, *batch: int) -> RolloutLayout:
    return parse_rollout_sharding(name).layout(parse_mesh(mesh).build(), *batch)


@pytest.mark.parametrize(
    ("name", "mesh", "batch", "prompts", "groups"),
    [
        ("legacy", "auto", (8, 4), ("dp", "fsdp", "tp"), ()),
        ("legacy", "2,2,2", (8, 4), ("dp", "fsdp", "tp"), ()),
        ("legacy", "2,2,2", (4, 4), ("dp", "fsdp"), ("tp",)),
        ("legacy", "2,2,2", (2, 4), ("dp",), ("fsdp", "tp")),
        ("legacy", "2,2,2", (1, 8), (), ("dp", "fsdp", "tp")),
        ("maxtext", "auto", (3, 2), ("dp",), ()),
        ("maxtext", "2,4,1", (4, 3), ("dp",), ()),
        ("maxtext", "2,4,1", (3, 4), (), ("dp",)),
        ("legacy", "auto", (8, 4, 16), ("dp", "fsdp", "tp"), ()),
        ("legacy", "auto", (2, 8, 16), ("dp",), ("fsdp", "tp")),  # a slot for each completion
        ("auto", "auto", (8, 4), ("dp", "fsdp", "tp"), ()),
        ("auto", "auto", (3, 2), ("dp",), ()),
    ],
)
def test_what_completions_are_split_over(
    name: str, mesh: str, batch: tuple[int, ...], prompts: tuple[str, ...], groups: tuple[str, ...]
) -> None:
    found = layout(name, mesh, *batch)
    assert (found.prompts, found.groups) == (prompts, groups)


@pytest.mark.parametrize(
    ("name", "mesh", "batch", "message"),
    [
        (
            "legacy",
            "auto",
            (3, 2),
            "legacy must split 3 prompts, with 2 completions each, evenly over 8 dev",
        ),
        (
            "maxtext",
            "2,4,1",
            (3, 3),
            "maxtext must split 3 prompts, with 3 completions each, evenly over 2 dev",
        ),
        (
            "auto",
            "2,4,1",
            (3, 3),
            "legacy must split 3 prompts.* The alternative fails too",
        ),
        (
            "legacy",
            "auto",
            (8, 4, 12),
            "legacy must split 12 slots .* and 8 prompts evenly over 8 devices",
        ),
        # More slots than completions, but odd.
        ("legacy", "auto", (2, 2, 5), "legacy must split 5 slots"),
        (
            "legacy",
            "auto",
            (4, 8, 16),
            "legacy must split 16 slots .* and 4 prompts evenly over 8 devices",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_reason(
    name: str, mesh: str, batch: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        layout(name, mesh, *batch)


def test_auto_says_what_it_chose_and_why() -> None:
    assert layout("auto", "auto", 8, 4).why.startswith("legacy: each of the 8 devices decodes")
    assert "(auto: this uses the least memory)" in layout("auto", "auto", 8, 4).why
    chosen = layout("auto", "auto", 3, 2).why
    assert chosen.startswith(
        "maxtext: each dp shard decodes its own completions, and the 8 fsdp dev"
    )
    assert "legacy must split 3 prompts, with 2 completions each, evenly over 8 devices" in chosen


def test_heads_and_weights_are_split_over_tp_where_the_batch_is_not() -> None:
    maxtext, legacy = (layout(name, "2,2,2", 8, 4) for name in ("maxtext", "legacy"))
    assert (maxtext.heads(2), maxtext.heads(3), legacy.heads(2)) == (("tp",), (), ())
    assert maxtext.parameter_rules["mlp"] == ("tp",)
    assert maxtext.parameter_rules["hidden"] == ("fsdp",)
    assert legacy.parameter_rules["mlp"] == ()
    assert legacy.parameter_rules["hidden"] == ("fsdp", "tp")


def test_logits_are_computed_by_vocabulary_and_drawn_from_by_slot() -> None:
    legacy, maxtext = (layout(name, "2,2,2", 8, 4) for name in ("legacy", "maxtext"))
    scored = PartitionSpec("dp", None, ("fsdp", "tp"))
    assert [x.spec for x in legacy.logits(64)] == [
        scored,
        PartitionSpec(("dp", "fsdp", "tp"), None),
    ]
    assert [x.spec for x in maxtext.logits(64)] == [scored]
    assert [x.spec for x in maxtext.logits(63)] == [PartitionSpec("dp", None)]
