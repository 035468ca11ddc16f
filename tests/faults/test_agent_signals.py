"""A run whose agents are at work ends at once at a second Ctrl-C, and leaves nothing behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from grpo_eqx.common.errors import EXIT_INTERRUPTED

pytestmark = pytest.mark.slow

AGENT = """
import os, sys, time
path = os.path.join(sys.argv[1], str(os.getpid()))
open(path + ".tmp", "w").write(os.environ["OPENAI_BASE_URL"])
os.rename(path + ".tmp", path)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_ctrl_c_ends_agents_and_closes_the_port(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (at_work := tmp_path / "at_work").mkdir()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "grpo_eqx", "train", "--model", str(small_model),
            "--harness", f"{sys.executable} {tmp_path / 'agent.py'} {at_work}",
            "--prompts-per-step", "8", "--num-generations", "4", "--output-dir", "run",
            "--eval-steps", "None",
        ],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while len(agents := [x for x in at_work.iterdir() if x.suffix != ".tmp"]) < 32:
        assert process.poll() is None, process.communicate()[0]
    address = urlsplit(agents[0].read_text())
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    for line in iter(process.stdout.readline, ""):
        if "Ctrl-C again" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((address.hostname or "", address.port or 0), timeout=5)
    left = [int(each.name) for each in agents if is_alive(int(each.name))]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
