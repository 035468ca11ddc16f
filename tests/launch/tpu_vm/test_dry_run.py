"""A dry run executes nothing, and prints what would be executed."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
VM = ("--name", "my-vm", "--zone", "us-central2-b")
TYPE = ("--type", "v4-16")
HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "words",
    [
        ("create", "--name", "n", *TYPE, "--zones", "us-east5-b,us-central2-b", "--spot"),
        ("bootstrap", *VM, *TYPE, "--repo", "file:///it's a $repo", "--commit", HASH),
        ("sync-env", *VM, *TYPE, "--env-file", "ENV_FILE"),
        ("run", *VM, *TYPE, "--run-name", "r", "--", "echo", "HOSTILE"),
        ("run", *VM, *TYPE, "--run-name", "r", "--replace", "--", "echo"),
        ("logs", *VM, *TYPE, "--lines", "3"),
        ("logs", *VM, *TYPE, "--worker", "1", "--follow"),
        ("status", *VM, *TYPE, "--run-name", "r"),
        ("fetch", *VM, *TYPE, "--path", "/it's a $path", "--worker", "1"),
        ("stop", *VM, *TYPE),
        ("delete", *VM, "--project", "my-project", "--yes"),
        ("delete", *VM, *TYPE, "--yes"),
    ],
    ids=lambda words: words[0],
)
def test_pasted_into_a_shell_it_is_what_is_executed(
    launch: Launch,
    cloud: Any,
    env_file: Path,
    hostile: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    filled: list[str] = []
    for word in words:
        filled += hostile if word == "HOSTILE" else [str(env_file) if word == "ENV_FILE" else word]
    end = filled.index("--") if "--" in filled else len(filled)
    # Nothing happens on the workers, so that both times find the same.
    cloud.fail("--zone=us-east5-b", errors="no more capacity")
    cloud.set_up()
    cloud.plan["tries"] = 0
    cloud.save()

    dry = launch("tpu-vm", *filled[:end], "--dry-run", *filled[end:])
    assert (dry.code, dry.err) == (0, "")
    assert cloud.calls() == []

    subprocess.run(["bash", "-c", dry.out], capture_output=True, check=True)
    pasted = cloud.calls()
    cloud.forget()
    launch("tpu-vm", *filled)
    assert pasted
    # The workers' commands are executed at once, in any order.
    assert sorted(pasted) == sorted(cloud.calls())


def test_it_needs_no_gcloud(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch("tpu-vm", "status", *VM, *TYPE, "--dry-run").code == 0
