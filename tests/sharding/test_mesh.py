"""What each mesh means, and which ones are refused."""

from types import SimpleNamespace

import jax
import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.sharding import AutoMesh, ExplicitMesh, HostLocalMesh, parse_mesh


def hosts(*sizes: int) -> list[SimpleNamespace]:
    """Stand-ins for devices: `sizes[i]` of them on host `i`."""
    return [
        SimpleNamespace(process_index=host, id=10 * host + i)
        for host, size in enumerate(sizes)
        for i in range(size)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", (1, 8, 1)),
        ("host_local", (1, 8, 1)),
        ("1,-1,1", (1, 8, 1)),
        ("2,-1,1", (2, 4, 1)),
        ("2, 2, 2", (2, 2, 2)),
        ("dp:2,fsdp:-1,tp:1", (2, 4, 1)),
        ("fsdp:4,tp:2", (1, 4, 2)),
        ("tp:-1", (1, 1, 8)),
    ],
)
def test_names_and_sizes(text: str, expected: tuple[int, int, int]) -> None:
    mesh = parse_mesh(text).build()
    assert mesh.axis_names == ("dp", "fsdp", "tp")
    assert mesh.devices.shape == expected
    assert mesh.devices.reshape(-1).tolist() == jax.devices()


def test_host_local_keeps_fsdp_within_a_host() -> None:
    assert HostLocalMesh().shape(hosts(4, 4, 4, 4)) == (4, 4, 1)
    assert AutoMesh().shape(hosts(4, 4, 4, 4)) == (1, 16, 1)


def test_host_local_refuses_uneven_hosts() -> None:
    with pytest.raises(UserError, match=r"same number of devices.*\{0: 4, 1: 3\}"):
        HostLocalMesh().shape(hosts(4, 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3,1,1", "needs 3 devices, but 8 are available"),
        ("3,-1,1", "needs a multiple of 3 devices, but 8"),
        ("16,1,1", "needs 16 devices"),
        ("-1,-1,1", "except that one may be -1"),
        ("0,1,1", "positive"),
        ("2,4", "cannot be parsed"),
        ("pod", "cannot be parsed"),
        ("dp:2,dp:4", "cannot be parsed"),
        ("dp:two", "cannot be parsed"),
        ("", "cannot be parsed"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_mesh(text).build()


def test_one_device_is_spoken_of_in_the_singular() -> None:
    with pytest.raises(UserError, match="needs 2 devices, but 1 is available"):
        ExplicitMesh(dp=2).shape(hosts(1))
