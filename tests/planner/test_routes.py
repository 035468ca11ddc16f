"""Which devices a collective joins, and over which links."""

from types import SimpleNamespace

import pytest

from grpo_eqx.planner.routes import Groups, Route, route_finder
from grpo_eqx.tracking.device_links import wraps


@pytest.mark.parametrize(
    ("attributes", "first"),
    [
        ("replica_groups={{0,2},{1,3}}, dimensions={0}", (0, 2)),
        ("replica_groups={}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={1}", (0, 1, 2, 3)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", (0, 1, 4, 5)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", (0, 2)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", (0, 2, 4, 6)),
        ("source_target_pairs={{3,1},{1,3}}", (3, 1)),
    ],
)
def test_the_first_group(attributes, first) -> None:
    assert Groups.of(attributes, 8).first == first


def grid(*sizes: int):
    """Devices of a TPU slice."""
    places = [()]
    for size in sizes:
        places = [(*place, i) for place in places for i in range(size)]
    return [SimpleNamespace(platform="tpu", coords=place) for place in places]


@pytest.mark.parametrize(
    ("sizes", "group", "links", "hops"),
    [
        ((2, 4), (0, 1, 2, 3), 1, 3),  # a line
        ((2, 4), (0, 4), 1, 1),  # neighbors
        ((2, 4), (0, 2), 1, 2),  # past another
        ((2, 4), range(8), 2, 1 + 3),  # two links at a corner
        ((4, 4), range(16), 2, 3 + 3),
        ((16, 16), range(16), 2, 15),  # a ring
        ((16, 16), range(256), 4, 15 + 15),
        ((16, 16), range(8), 1, 7),  # half of a ring
        ((4, 4, 4), range(64), 6, 3 + 3 + 3),
        ((2, 2, 4), range(16), 3, 1 + 1 + 3),
    ],
)
def test_links_of_the_device_that_has_the_fewest_and_hops_to_the_farthest(
    sizes, group, links, hops
) -> None:
    assert route_finder(grid(*sizes))(list(group)) == (Route("ici", links), hops)


def test_only_full_axes_and_whole_cubes_wrap() -> None:
    assert [wraps((8, 16, 1), axis) for axis in range(2)] == [False, True]
    assert all(wraps((4, 4, 8), axis) for axis in range(3))
    assert not any(wraps((2, 4, 4), axis) for axis in range(3))


def test_gpus_of_a_node_have_links_of_their_own() -> None:
    gpus = [SimpleNamespace(platform="gpu", slice_index=i // 8) for i in range(16)]
    find = route_finder(gpus)
    assert find([0, 3]) == (Route("nvlink"), 0)
    assert find([0, 8]) == (Route("network"), 0)
