"""Creating a VM where there is room."""

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., Any]
ZONES = "us-east5-b,europe-west4-a,us-central2-b"
ARGUMENTS = ("tpu-vm", "create", "--name", "my-vm", "--type", "v6e-16", "--zones", ZONES)
STOCK_OUT = 'ERROR: There is no more capacity in the zone "us-east5-b"; you can try in another zone'
QUOTA = "ERROR: Quota limit 'TPUV6EPerProjectPerZone' has been exceeded. Limit: 0 in zone."


def zones(cloud: Any) -> list[str]:
    return [call[2].removeprefix("--zone=") for call in cloud.calls()]


def test_the_first_zone_is_asked_first(launch: Launch, cloud: Any) -> None:
    done = launch(*ARGUMENTS)
    assert (done.code, done.out) == (0, "created my-vm (v6e-16, 4 workers) in us-east5-b\n")
    assert cloud.calls() == [
        [
            "create", "my-vm", "--zone=us-east5-b", "--quiet", "--accelerator-type=v6e-16",
            "--version=v2-alpha-tpuv6e",
        ]
    ]  # fmt: skip


def test_a_zone_without_room_leads_to_the_next(launch: Launch, cloud: Any) -> None:
    cloud.fail("--zone=us-east5-b", errors=STOCK_OUT)
    cloud.fail("--zone=europe-west4-a", errors=QUOTA)
    done = launch(*ARGUMENTS)
    assert (done.code, done.out) == (0, "created my-vm (v6e-16, 4 workers) in us-central2-b\n")
    assert zones(cloud) == ZONES.split(",")


def test_any_other_failure_ends_the_search(launch: Launch, cloud: Any) -> None:
    cloud.fail("--zone=us-east5-b", errors="ERROR: PERMISSION_DENIED: no access", code=3)
    done = launch(*ARGUMENTS)
    assert (done.code, done.out) == (1, "")
    assert "my-vm was not created in us-east5-b" in done.err
    assert "PERMISSION_DENIED: no access" in done.err
    assert zones(cloud) == ["us-east5-b"]


def test_when_no_zone_has_room_every_zone_is_named(launch: Launch, cloud: Any) -> None:
    cloud.fail("create", errors=STOCK_OUT)
    done = launch(*ARGUMENTS)
    assert (done.code, done.out) == (1, "")
    assert "no zone has capacity for my-vm" in done.err
    assert all(f"  {zone}:\n" in done.err for zone in ZONES.split(","))


def test_flags_reach_gcloud(launch: Launch, cloud: Any) -> None:
    launch(
        "tpu-vm", "create", "--name", "n", "--type", "v5e-8", "--zones", "us-west4-a", "--spot",
        "--version", "v2-other", "--project", "my-project",
    )  # fmt: skip
    (call,) = cloud.calls()
    assert {
        "--spot", "--accelerator-type=v5litepod-8", "--version=v2-other", "--project=my-project",
    } < set(call)  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "value", "error"),
    [
        ("--name", "My_VM", "--name is 'My_VM'"),
        ("--name", "a; rm -rf /", "--name is"),
        ("--name", "--worker", "--name is"),
        ("--name", "a" * 64, "--name is"),
        ("--name", "a\n", "--name is"),
        ("--zones", "", "--zone is ''"),
        ("--zones", "us-east5-b,,", "--zone is ''"),
        ("--zones", "us-east5-b,$(id)", "--zone is '$(id)'"),
        ("--type", "v6e-12", "v6e-16"),
        ("--project", "x y", "--project is"),
        ("--version", "--flag", "--version is"),
    ],
)
def test_names_that_cannot_be_are_refused_before_anything_is_asked(
    launch: Launch, cloud: Any, flag: str, value: str, error: str
) -> None:
    done = launch(*ARGUMENTS, f"{flag}={value}")
    assert (done.code, done.out) == (2, "")
    assert error in done.err
    assert len(done.err.splitlines()) == 1
    assert cloud.calls() == []


def test_zones_must_be_given(launch: Launch, cloud: Any) -> None:
    assert launch("tpu-vm", "create", "--name", "n", "--type", "v6e-16").code == 2
    assert cloud.calls() == []


def test_without_gcloud_it_says_what_to_install(
    launch: Launch, cloud: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(cloud.folder))
    done = launch(*ARGUMENTS)
    assert done.code == 2
    assert "install the Google Cloud CLI" in done.err.splitlines()[-1]
