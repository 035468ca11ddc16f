"""What the rollout shardings mean on each mesh, and where they are refused."""

import re
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from grpo_eqx.common.errors import UserError
from grpo_eqx.sharding import (
    RolloutLayout,
    RolloutSharding,
    parse_mesh,
    parse_rollout_sharding,
)
from grpo_eqx.sharding.rollout_sharding import lay_out
from grpo_eqx.sharding.rules import parameter_sharding


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
        ("replicated", "2,2,2", (4, 4), ("dp", "fsdp"), ("tp",)),
        ("tensor:4", "auto", (2, 2), ("dp", "fsdp", "tp"), ()),
        ("tensor:4", "auto", (1, 2), ("dp",), ("fsdp", "tp")),
        ("tensor:8", "auto", (3, 1), ("dp", "fsdp", "tp"), ()),
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
            "tensor:2",
            "auto",
            (3, 3),
            "tensor:2 must split 3 prompts, with 3 completions each, evenly over 4 groups of dev",
        ),
        ("tensor:3", "auto", (8, 8), "tensor:3 needs groups of 3 devices, but 8 are available"),
        ("tensor:1", "auto", (8, 8), "groups of one are replicated"),
        ("tensor", "auto", (8, 8), "or tensor:N with the number of devices"),
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


def test_heads_and_weights_are_split_over_tp_where_the_batch_is_not() -> None:
    maxtext, legacy = (layout(name, "2,2,2", 8, 4) for name in ("maxtext", "legacy"))
    assert (maxtext.heads(2), maxtext.heads(3), legacy.heads(2)) == (("tp",), (), ())
    (of_maxtext,), (of_legacy,) = maxtext.parameter_rules, legacy.parameter_rules
    assert (of_maxtext["mlp"], of_maxtext["hidden"]) == (("tp",), ("fsdp",))
    assert (of_legacy["mlp"], of_legacy["hidden"]) == ((), ("fsdp", "tp"))


@pytest.mark.parametrize("mesh", ["auto", "2,2,2", "1,4,2", "2,4,1"])
def test_groups_are_neighbors_and_devices_keep_their_order(mesh: str) -> None:
    """So one program can hold arrays in both meshes."""
    of_training, groups = parse_mesh(mesh).build(), layout("tensor:4", mesh, 8, 8)
    assert groups.mesh.devices.reshape(-1).tolist() == of_training.devices.reshape(-1).tolist()
    assert groups.sharing is not None
    shape = groups.mesh.shape
    assert [shape[axis] for axis in groups.sharing] == [2, 2]
    assert shape["dp"] * shape["fsdp"] * shape["tp"] == 2
    whole = groups.sharding(groups.prompts).devices_indices_map((2,))
    first = [device.id for device, (index,) in whole.items() if index.start in (0, None)]
    assert sorted(first) == [device.id for device in of_training.devices.reshape(-1)[:4]]


def test_heads_of_keys_are_where_the_heads_are_that_read_them() -> None:
    """What does not divide by the whole group is split over the first of its axes."""
    shared = layout("tensor:8", "auto", 8, 8)
    assert shared.sharing == ("fsdp_1", "fsdp_2", "fsdp_3")
    assert shared.heads(16) == shared.sharing
    assert shared.heads(28) == shared.heads(4) == ("fsdp_1", "fsdp_2")
    assert shared.heads(2) == ("fsdp_1",)
    assert shared.queries(2, 8) == ("fsdp_2", "fsdp_3")
    assert shared.queries(2, 7) == ()


def test_weights_are_cut_before_they_are_gathered() -> None:
    """First a device keeps its part of the heads, of its part of the hidden size."""
    cut, shared = layout("tensor:2", "1,4,2", 8, 8).parameter_rules
    assert (cut["mlp"], cut["hidden"]) == (("tp_1", "tp"), ("fsdp",))
    assert (shared["mlp"], shared["hidden"]) == (("tp_1",), ())
    *_, whole = layout("replicated", "1,4,2", 8, 8).parameter_rules
    assert set(whole.values()) == {()}


def test_devices_along_tp_may_share_the_weights() -> None:
    """A layout that someone writes can so keep the mesh of training."""
    mesh = parse_mesh("1,4,2").build()
    own = RolloutLayout(mesh, ("dp", "fsdp"), (), "heads over tp", sharing=("tp",))
    specs = [
        parameter_sharding(mesh, ("mlp", "hidden"), (8, 8), rules).spec
        for rules in own.parameter_rules
    ]
    assert specs == [PartitionSpec("tp", "fsdp"), PartitionSpec("tp", None)]


def test_logits_are_computed_by_vocabulary_and_drawn_from_by_slot() -> None:
    def specs(name: str, *shape: int) -> list[PartitionSpec]:
        return [x.spec for x in layout(name, "2,2,2", 8, 4).logits(shape)]

    by_vocabulary = PartitionSpec("dp", None, ("tp", "fsdp"))
    drawn = PartitionSpec(("dp", "fsdp", "tp"), None)
    assert specs("legacy", 8, 4, 64) == [by_vocabulary, drawn]
    assert specs("maxtext", 8, 4, 64) == [by_vocabulary]
    assert specs("maxtext", 8, 4, 63) == [PartitionSpec("dp", None)]
    in_groups = PartitionSpec(("dp", "fsdp", "tp"), None, ("tp_1",))
    assert specs("tensor:2", 8, 4, 64) == [in_groups, PartitionSpec(drawn[0], ("tp_1",))]
    by_prompt = PartitionSpec(("dp", "fsdp", "tp", "tp_1"), None)
    assert specs("tensor:2", 8, 3, 64) == [in_groups, by_prompt]
    assert specs("tensor:2", 4, 3, 64) == [in_groups]


class Own(RolloutSharding):
    """A strategy of a user's."""

    prompts: Any
    groups: Any = ()
    sharing: Any = None

    def layout(self, mesh, num_prompts, num_generations, num_slots=None):
        return RolloutLayout(mesh, self.prompts, self.groups, "own", self.sharing)


@pytest.mark.parametrize(
    ("strategy", "batch", "message"),
    [
        (Own("fsdp"), (8, 4), "prompts='fsdp': return a tuple of mesh axes"),
        (Own(("data",)), (8, 4), "prompts=('data',): its mesh has dp, fsdp, tp"),
        (Own((), (), ("data",)), (8, 4), "sharing=('data',): its mesh has dp, fsdp, tp"),
        (Own(("dp", "fsdp"), ("fsdp",)), (8, 4), "the axis 'fsdp' twice"),
        (Own(("tp",), (), ("tp",)), (8, 4), "the axis 'tp' twice"),
        (Own(("dp", "fsdp")), (6, 4), "over dp, fsdp, 4 parts, and the number of prompts is 6"),
        (
            Own(("dp",), ("fsdp",)),
            (8, 3),
            "number of completions of a prompt is 3: use other axes, or a multiple of 2",
        ),
        (Own(("dp",), ("fsdp",)), (8, 4, 16), "leave groups empty then"),
        (Own(("dp",), ("fsdp",)), (8, 1), "each prompt has one, as in greedy evaluations"),
        (
            Own(("dp", "fsdp")),
            (8, 4, 6),
            "over dp, fsdp, 4 parts, and the number of slots (max",
        ),
    ],
)
def test_a_layout_of_ones_own_is_checked(
    strategy: Own, batch: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        lay_out(strategy, parse_mesh("2,2,2").build(), *batch)


def test_layouts_that_fit_are_taken() -> None:
    mesh = parse_mesh("2,2,2").build()
    for strategy, batch in (
        (Own(("dp",), ("fsdp",)), (8, 4)),
        (Own(("dp", "fsdp")), (4, 4, 16)),  # a slot for each completion
        (Own(("dp",), (), ("tp",)), (2, 1)),
    ):
        assert lay_out(strategy, mesh, *batch).prompts == strategy.prompts


class OnAnotherMesh(RolloutSharding):
    """Takes a mesh for its own."""

    mesh: Any

    def layout(self, mesh, num_prompts, num_generations, num_slots=None):
        return RolloutLayout(self.mesh, (), (), "on another mesh")


def test_a_layout_has_the_devices_and_axes_of_training() -> None:
    mesh = parse_mesh("2,2,2").build()
    fewer = parse_mesh("2,2,1").build(jax.devices()[:4])
    others = jax.make_mesh((2, 4), ("replica", "model"), (jax.sharding.AxisType.Auto,) * 2)
    for other in (fewer, others):
        with pytest.raises(UserError, match="returned another mesh"):
            lay_out(OnAnotherMesh(other), mesh, 8, 4)
