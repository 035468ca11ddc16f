"""Deleting a VM."""

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., Any]
ADDRESS = ("--name", "my-vm", "--zone", "us-central2-b")
DELETE = [["delete", "my-vm", "--zone=us-central2-b", "--quiet"]]


def test_without_asking(launch: Launch, cloud: Any) -> None:
    done = launch("tpu-vm", "delete", *ADDRESS, "--yes")
    assert (done.code, done.out) == (0, "deleted my-vm in us-central2-b\n")
    assert cloud.calls() == DELETE


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("yes\n", 0), ("n\n", 1), ("\n", 1)])
def test_it_asks(
    launch: Launch, cloud: Any, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    done = launch("tpu-vm", "delete", *ADDRESS)
    assert done.code == code
    assert "Delete my-vm in us-central2-b" in done.out
    assert cloud.calls() == ([] if code else DELETE)


def test_with_nobody_to_ask_it_is_refused(
    launch: Launch, cloud: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    done = launch("tpu-vm", "delete", *ADDRESS)
    assert done.code == 2
    assert "pass --yes" in done.err
    assert cloud.calls() == []


def test_of_another_type_it_is_refused(launch: Launch, cloud: Any) -> None:
    done = launch("tpu-vm", "delete", *ADDRESS, "--type", "v4-8", "--yes")
    assert done.code == 2
    assert "--type is v4-8, but my-vm is a v4-16" in done.err
    assert DELETE[0] not in cloud.calls()
    assert launch("tpu-vm", "delete", *ADDRESS, "--type", "v4-16", "--yes").code == 0
    assert cloud.calls()[-1:] == DELETE


def test_a_failure_is_said(launch: Launch, cloud: Any) -> None:
    cloud.fail("delete", errors="ERROR: it is busy")
    done = launch("tpu-vm", "delete", *ADDRESS, "--yes")
    assert (done.code, done.out) == (1, "")
    assert "my-vm was not deleted:\n    ERROR: it is busy" in done.err
