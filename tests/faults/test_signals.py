"""A run that is killed or asked to stop continues as if nothing had been."""

import random
import signal
import time
from pathlib import Path

import pytest

from grpo_eqx.checkpoint.saved import complete_steps
from grpo_eqx.common.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from grpo_eqx.distributed.startup import HEARTBEAT_SECONDS

from .conftest import Command, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.grid("signals")]


@pytest.mark.grid("kills")
def test_killed_at_random_moments_it_ends_as_the_unbroken_run(
    command: Command, unbroken: Command
) -> None:
    chance = random.Random(0)
    for step in (1, 3, 6):
        process = command.start()
        wait_for_step(command, process, step)
        time.sleep(chance.uniform(0, 0.3))  # anywhere in a step, or in the writing of one
        process.kill()
        process.communicate()
    assert "resuming from" in command.finish()
    assert command.rows() == unbroken.rows()
    assert command.model() == unbroken.model()
    left = {path.name for path in (command.folder / "checkpoints").iterdir()}
    assert left == {"step_7", "step_8"}
    steps = [command.samples(name)[::4] for name in sorted(command.tables())]
    prompts = [prompt for step in steps for prompt, _ in step]
    first, second = prompts[:40], prompts[40:]  # epochs
    assert len(set(first)) == len(first)
    assert len(set(second)) == len(second) == 24


@pytest.mark.grid
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_the_step_and_the_same_command_continues(
    command: Command, unbroken: Command, number: signal.Signals
) -> None:
    process = command.start()
    wait_for_step(command, process, 2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_PREEMPTED
    assert "stopping after this step, with a checkpoint" in output
    assert "Traceback" not in output
    done = len(command.rows())
    saved = command.folder / "checkpoints" / f"step_{done}"
    assert f"saved as {saved}: the same command continues from there" in output
    assert 2 <= done < 8
    assert f"after step {done} of 8" in command.finish()
    assert command.rows() == unbroken.rows()
    assert command.model() == unbroken.model()


def test_a_second_sigterm_does_not_stop_the_saving(command: Command) -> None:
    process = command.start()
    wait_for_step(command, process, 2)
    for _ in range(5):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)  # in the step, in its saving, or as the process leaves
    output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_PREEMPTED, output
    done = len(command.rows())
    assert complete_steps(command.folder / "checkpoints")[0] == done


@pytest.mark.grid
@pytest.mark.parametrize("fault", ["hang", "compute_in_c"])
def test_a_step_that_outlasts_the_deadline_is_left_to_the_last_checkpoint(
    small_model: Path, programs: Path, tmp_path: Path, fault: str
) -> None:
    flags = {"fault": fault, "preemption_deadline": 2}
    command = Command(small_model, programs, tmp_path / "run", **flags)
    process = command.start()
    wait_for_step(command, process, 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == EXIT_PREEMPTED, output
    assert "the step was not saved 2 s after SIGTERM: ending without another checkpoint" in output
    assert complete_steps(command.folder / "checkpoints") == [2, 1]


@pytest.mark.grid
@pytest.mark.parametrize("fault", ["hang", "compute_in_c"])
def test_a_second_interrupt_ends_it_at_once(
    small_model: Path, programs: Path, tmp_path: Path, fault: str
) -> None:
    command = Command(small_model, programs, tmp_path / "run", fault=fault)
    process = command.start()
    wait_for_step(command, process, 2)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    process.send_signal(signal.SIGINT)
    if fault == "hang":  # in C, Python's handler has to wait
        assert any("Ctrl-C again stops at once" in line for line in lines)
    else:
        time.sleep(0.5)  # two signals at once are one
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == EXIT_INTERRUPTED, output
    assert "stopping at once, without another checkpoint" in output
    assert 1 in complete_steps(command.folder / "checkpoints")  # of the second, the save may go on


@pytest.mark.grid
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_in_an_evaluation_it_ends_at_once_and_the_same_command_trains_nothing(
    small_model: Path, programs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    process = Command(small_model, programs, folder, fault="evaluate_for_ever", steps=2).start()
    assert process.stdout is not None
    while "evaluating" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == -number
    again = Command(small_model, programs, folder, fault="none", steps=2)
    output = again.finish()
    assert "step_2, after step 2 of 2\nnothing is left to train" in output
    assert not (folder / "previous-1").exists()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_a_host_that_is_gone_ends_the_other_within_the_heartbeat(
    small_model: Path, programs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = Command(small_model, programs, tmp_path / "run", steps=1000)
    hosts = command.start_hosts([], [], number=2)
    wait_for_step(command, hosts[0], 1)
    hosts[1].send_signal(number)
    killed = time.monotonic()
    output, _ = hosts[0].communicate(timeout=120)
    assert hosts[0].returncode != 0, output
    assert time.monotonic() - killed < HEARTBEAT_SECONDS + 5
    hosts[1].kill()
    hosts[1].communicate()


def test_if_one_of_two_hosts_is_asked_both_save_the_same_step(command: Command) -> None:
    hosts = command.start_hosts([], [], number=2)
    wait_for_step(command, hosts[0], 2)
    hosts[1].send_signal(signal.SIGTERM)
    outputs = [host.communicate(timeout=120)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [EXIT_PREEMPTED] * 2, outputs
    assert "process 1: SIGTERM: stopping after this step, with a checkpoint" in outputs[1]
    done = len(command.rows())
    assert f"stopped after step {done} of 8" in outputs[0]
    assert complete_steps(command.folder / "checkpoints")[0] == done


def test_it_stops_before_the_time_that_it_has(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    command = Command(small_model, programs, tmp_path / "run", stop_after="1s")
    output = command.finish(EXIT_PREEMPTED)
    assert "stop_after is 1s: there is no time for another step" in output
    assert "stopped after step 1 of 8" in output
    assert complete_steps(command.folder / "checkpoints") == [1]
