"""Nothing that tools start outlives the process of a run."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

LEAKS = textwrap.dedent("""\
    import subprocess, sys, threading, time
    from grpo_eqx.environments.calls import Call, Calls
    from grpo_eqx.environments.left_processes import LEFT

    def start():
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    def leaks():
        return start()

    def starts_and_ends():
        process = subprocess.Popen(["sleep", "1000"])
        process.kill()
        process.wait()
        return process.pid

    async def leaks_too():
        return start()

    def starts_one_that_starts_one():
        shell = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=-1)
        return [shell.pid, int(shell.stdout.readline())]

    started = []

    def hangs():
        started.append(start())
        threading.Event().wait()

    subprocess.Popen(["sleep", "2"])  # not a tool's
    with LEFT.recording():
        made = start()

    calls = Calls(timeout=3.0)
    funcs = leaks, starts_and_ends, leaks_too, starts_one_that_starts_one, hangs
    print(made, [x.result for x in calls.together([Call(x, {}) for x in funcs]).result()], started)
    calls.close()
""")


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="Linux lists threads' children")
def test_processes_that_tools_leave_are_killed_at_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAKS], capture_output=True, text=True, timeout=120, check=True
    )
    numbers = list(map(int, re.findall(r"\d+", done.stdout)))
    assert len(numbers) == 7
    assert not any(map(_runs, numbers))
    said = re.search(r"left processes running, which were killed: (.*)\. End them", done.stderr)
    assert said is not None
    killed = {int(x) for x in re.findall(r"\((\d+)\)", said[1])}
    made, leaked, _, leaked_too, shell, _, of_hanging = numbers
    assert killed == {made, leaked, leaked_too, shell, of_hanging}


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
