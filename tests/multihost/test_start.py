"""What a pod that is not as it should be ends with."""

import pytest

pytestmark = pytest.mark.slow
EXAMPLE = "../../examples/gsm8k.py"


def test_missing_hosts_are_named_in_all_that_are_there(pod) -> None:
    outcomes = pod.run(EXAMPLE, [1] * 4, "--start-timeout", 8, absent=[2])
    for outcome in outcomes.values():
        assert outcome.code == 1  # a host may only be late
        assert "error: 3 of 4 hosts present: waiting for process 2" in outcome.output


def test_hosts_that_were_told_different_things_are_named(pod) -> None:
    outcomes = pod.run(EXAMPLE, [1] * 2, own_arguments={1: ["--seed", "7"]})
    for outcome in outcomes.values():
        assert outcome.code == 2
        assert "error: the hosts disagree on seed: 0 on process 0" in outcome.output
        assert "7 on process 1" in outcome.output


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "here", "there"),
    [
        ("JAX_ENABLE_X64", "False", "True"),
        ("JAX_PLATFORMS", "cpu", "tpu"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "None", "float32"),
    ],
)
def test_hosts_whose_jax_would_compile_other_programs_are_told(
    pod, name: str, here: str, there: str
) -> None:
    for outcome in pod.run(EXAMPLE, [1] * 2, own_environment={1: {name: there}}).values():
        assert outcome.code == 2, outcome.output
        last = outcome.output.splitlines()[-1]
        assert last.startswith(f"error: the hosts disagree on {name}: {here} on process 0 (")
        assert f"), {there} on process 1 (" in last


def test_uneven_hosts_are_refused(pod) -> None:
    for outcome in pod.run(EXAMPLE, [2, 1]).values():
        assert outcome.code == 2
        assert "error: the hosts have different numbers of devices" in outcome.output
        assert "{0: 2, 1: 1}" in outcome.output


def test_too_few_processes_are_refused(pod) -> None:
    for outcome in pod.run(EXAMPLE, [1], "--require-processes", 4).values():
        assert outcome.code == 2
        assert "error: 1 process was started, but 4 are required" in outcome.output


def test_a_process_that_fails_ends_and_so_does_the_run(pod) -> None:
    outcomes = pod.run("failing_worker.py", [1] * 2)
    assert outcomes[1].code == 1
    assert "OSError: the disk is full" in outcomes[1].output
    assert outcomes[0].code != 0
