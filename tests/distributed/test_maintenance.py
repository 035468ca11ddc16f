"""A machine that will be stopped says so to its metadata server, here a stand-in."""

import queue

import pytest

from grpo_eqx.distributed.maintenance import MaintenanceWatch

from .test_tpu_metadata import metadata_server

QUIET = {"preempted": "FALSE", "maintenance-event": "NONE"}


@pytest.mark.parametrize(
    ("change", "notice"),
    [
        ({"preempted": "TRUE"}, "this machine is being preempted"),
        (
            {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"},
            "this machine's host will be maintained",
        ),
    ],
)
def test_what_is_announced_is_told_once(change: dict[str, str], notice: str) -> None:
    told: queue.Queue[str] = queue.Queue()
    attributes = dict(QUIET)
    with (
        metadata_server(attributes) as environment,
        MaintenanceWatch(told.put, environment, poll_seconds=0.01),
    ):
        attributes.update({"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"})  # goes unnoticed
        attributes.update(change)
        assert told.get(timeout=10) == notice
    assert told.empty()


def test_elsewhere_nobody_is_asked() -> None:
    with MaintenanceWatch(lambda notice: pytest.fail(notice), {"TPU_SKIP_MDS_QUERY": "1"}):
        pass
