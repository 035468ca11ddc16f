"""Several processes: lines, exit codes, and nothing left behind."""

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.launch import guardian
from grpo_eqx.launch.processes import Process, run_together

from ..processes import processes

FOREVER = "trap '' TERM; while :; do sleep 1000 & wait; done"
"""A shell that does not end by itself, nor when it is asked to."""


def together(*scripts: str) -> int:
    return run_together(
        [Process(str(i), ["bash", "-c", text], os.environ) for i, text in enumerate(scripts)]
    ).code


def gone(pid_file: Path) -> bool:
    """Whether the process of that number ends, if it has not."""
    try:
        process = os.pidfd_open(int(pid_file.read_text()))
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 10)[0])
    finally:
        os.close(process)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_eqx.launch.processes._GRACE_SECONDS", 0.5)
    monkeypatch.setattr("grpo_eqx.launch.processes._KILL_SECONDS", 0.1)


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def test_lines_come_whole_with_the_name_of_their_process(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert together("echo a; echo b >&2; printf 'no end'", "printf 'x\\ry\\n\\377\\n'") == 0
    out, err = capsysbinary.readouterr()
    lines = out.split(b"\n")
    assert [line for line in lines if line.startswith(b"[0]")] == [b"[0] a", b"[0] no end"]
    assert err == b"[0] b\n"
    assert [line for line in lines if line.startswith(b"[1]")] == [b"[1] x\ry", b"[1] \xff"]
    assert out.endswith(b"\n")


def test_what_collectives_print_is_left_out_however_its_pieces_come(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rest = "peer ranks. Expected number of connected peer ranks is : 3"
    whole = f"[Gloo] Rank 0 is connected to 3 {rest}"
    pieces = f"[Gloo] Rank [Gloo] Rank 13 is connected to 3 {rest}", f" is connected to 3 {rest}"
    own = "step 1[Gloo] Rank 0", "13"
    script = "; ".join(f"echo '{line}'" for line in (whole, *pieces, *own))
    assert together(script) == 0
    assert capsys.readouterr().out == "[0] step 1[Gloo] Rank 0\n[0] 13\n"


def test_much_output_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert together("seq 100000") == 0
    assert len(capsys.readouterr().out.splitlines()) == 100_000


def test_the_first_failure_ends_all_and_its_code_is_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ready, pid = fifo(tmp_path / "ready"), tmp_path / "pid"
    waits = f"sleep 1000 & echo $! >{pid}; echo up >{ready}; wait"
    assert together(waits, f"read line <{ready}; exit 7") == 7
    assert gone(pid)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "process 1 ended with exit code 7; ending the others"
    assert last == "process 1 ended with exit code 7 first, and the others were ended"


def test_what_a_signal_ended_has_128_and_its_number() -> None:
    assert together("kill -SEGV $$") == 128 + signal.SIGSEGV


def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    ready, pid = fifo(tmp_path / "ready"), tmp_path / "pid"
    stubborn = f"trap '' TERM; echo $$ >{pid}; echo up >{ready}; {FOREVER}"
    assert together(stubborn, f"read line <{ready}; exit 3") == 3
    assert gone(pid)


def test_what_a_process_left_behind_is_ended_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert together(f"sleep 1000 & echo $! >{pid}") == 0
    assert gone(pid)


def test_a_daemon_that_keeps_the_pipe_open_does_not_hold_the_launcher(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    daemon = f"setsid bash -c 'echo $$ >{pid}; exec sleep 1000' & while ! [ -s {pid} ]; do :; done"
    try:
        assert together(f"{daemon}; echo done") == 0
        assert capsys.readouterr().out == "[0] done\n"
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_a_signal_to_the_launcher_ends_all_and_it_says_so(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    before = signal.getsignal(signal.SIGTERM)
    script = f"sleep 1000 & echo $! >{pid}; kill -{name} {os.getpid()}; wait"
    assert together(script) == 128 + signal.Signals[f"SIG{name}"]
    assert gone(pid)
    assert "asked to end" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_does_not_wait_for_the_grace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("grpo_eqx.launch.processes._GRACE_SECONDS", 1000.0)
    monkeypatch.setattr("grpo_eqx.launch.processes._SAME_SECONDS", 0.0)
    pid = tmp_path / "pid"
    # It asks for the end, and for it again when it is asked to end.
    script = f"echo $$ >{pid}; trap 'kill -TERM {os.getpid()}' TERM; kill -TERM {os.getpid()}; {{ "
    assert together(script + "while :; do sleep 1000 & wait; done; }") == 128 + signal.SIGTERM
    assert gone(pid)


def test_signals_at_once_are_one() -> None:
    """As `timeout` sends them: the processes still have time to save."""
    ask = f"kill -TERM {os.getpid()}"
    assert together(f"trap 'sleep 0.3; exit 0' TERM; {ask}; {ask}; while :; do :; done") == 0


@pytest.mark.parametrize("program", ["no-such-program", "/dev/null"])
def test_a_program_that_cannot_start_is_one_line(program: str) -> None:
    with pytest.raises(UserError, match=f"cannot start '{program}'"):
        run_together([Process("0", [program], os.environ)])


def test_when_a_later_one_cannot_start_the_others_are_ended(tmp_path: Path) -> None:
    good = Process("0", ["sleep", "1000"], os.environ)
    with pytest.raises(UserError):
        run_together([good, Process("1", ["no-such-program"], os.environ)])
    children = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-x", "sleep"], capture_output=True, check=False
    )
    assert children.stdout == b""


def test_too_long_a_command_is_said() -> None:
    arguments, environment = ["echo", "x" * 2**21], os.environ | {"LONG": "x" * 2**21}
    for long in (Process("0", arguments, os.environ), Process("0", ["true"], environment)):
        with pytest.raises(UserError, match=r"too long\): shorten its arguments and environment"):
            run_together([long])


def test_more_processes_than_the_machine_can_hold_are_refused() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = [Process(str(index), ["sleep", "1000"], os.environ) for index in range(40)]
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 20, hard))
    try:
        with pytest.raises(
            UserError, match=r"cannot start process \d+ \(Too many open files\): start"
        ):
            run_together(many)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    children = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-x", "sleep"], capture_output=True, check=False
    )
    assert children.stdout == b""


LAUNCHER = """
import os, signal, sys; from grpo_eqx.launch.processes import Process, run_together
signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # ignored in the background of a script
sys.exit(run_together([Process(x, ["bash", "-c", x], os.environ) for x in sys.argv[1:]]).code)
"""
"""A launcher that runs shell scripts, to be killed."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def launcher(*scripts: str, **streams: Any) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", LAUNCHER, *scripts]
    return subprocess.Popen(arguments, env=ENVIRONMENT, start_new_session=True, **streams)


@pytest.mark.parametrize("name", ["KILL", "QUIT", "SEGV"])
def test_when_the_launcher_is_killed_nothing_is_left(name: str, tmp_path: Path) -> None:
    up = [fifo(tmp_path / f"up{i}") for i in range(2)]
    pids = [tmp_path / f"{i}" for i in range(4)]
    scripts = [
        f"{FOREVER} & echo $! >{pids[i]}; echo $$ >{pids[2 + i]}; echo up >{up[i]}; {FOREVER}"
        for i in range(2)
    ]
    with launcher(*scripts, stderr=subprocess.DEVNULL) as killed:
        for each in up:
            each.read_text()
        (watching,) = [
            p.pid for p in processes() if p.parent == killed.pid and p.pid == p.session
            and "guardian" in Path(f"/proc/{p.pid}/cmdline").read_text()
        ]  # fmt: skip
        (last := tmp_path / "guardian").write_text(str(watching))
        os.kill(killed.pid, signal.Signals[f"SIG{name}"])
        assert killed.wait() == -signal.Signals[f"SIG{name}"]
    assert all(gone(pid) for pid in [*pids, last])


def test_a_launcher_that_is_killed_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    """The first process kills it as soon as it can, before the others have started."""
    name = f"kill_while_starting_{os.getpid()}"
    first = 'kill -9 "$PPID"; trap "" TERM; exec sleep 1000'
    with launcher(first, *[f": {name}; {FOREVER}"] * 5) as killed:
        assert killed.wait() == -signal.SIGKILL
    for process in processes():
        with contextlib.suppress(OSError):
            if name.encode() in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                (pid := tmp_path / str(process.pid)).write_text(str(process.pid))
                assert gone(pid)


def test_a_command_whose_launcher_was_killed_before_it_was_guarded_never_starts() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        script = [sys.executable, "-I", "-S", guardian.__file__, str(theirs.fileno())]
        command = [*script, "echo", "started"]
        held = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
    ours.close()
    assert held.communicate()[0] == b""


def test_when_the_terminal_closes_all_are_ended(tmp_path: Path) -> None:
    pid, up = tmp_path / "pid", fifo(tmp_path / "up")
    script = f"echo $$ >{pid}; echo up >{up}; while echo much; do sleep 0.1; done; sleep 1000"
    primary, secondary = os.openpty()
    with launcher(script, stdin=secondary, stdout=secondary, stderr=secondary) as hung_up:
        os.close(secondary)
        up.read_text()
        os.close(primary)
        assert hung_up.wait(timeout=60) == 128 + signal.SIGPIPE
    assert gone(pid)


def test_a_full_disk_under_the_output_ends_all(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = launcher("echo a; sleep 1000", stdout=full, stderr=subprocess.PIPE)
        _, err = done.communicate(timeout=60)
    assert done.returncode == 1
    assert b"stdout cannot be written (No space left on device); ending all" in err


def test_when_nobody_reads_on_all_are_ended() -> None:
    done = subprocess.run(
        f"{sys.executable} -c '{LAUNCHER}' yes | head -n 1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 128 + signal.SIGPIPE
    assert (done.stdout, done.stderr) == (b"[yes] y\n", b"")
