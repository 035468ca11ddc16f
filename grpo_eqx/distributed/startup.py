"""Joins several processes into one run."""

import dataclasses
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from types import TracebackType

import jax

from grpo_eqx.common.errors import RunError, UserError, first_line
from grpo_eqx.common.tracebacks import Hook
from grpo_eqx.distributed.callers import taken_port
from grpo_eqx.distributed.cluster import Cluster, find_cluster
from grpo_eqx.distributed.exchange import assert_same_on_all_hosts, brief
from grpo_eqx.distributed.exits import exit_at_once
from grpo_eqx.distributed.missing_hosts import meet
from grpo_eqx.distributed.program_facts import check_xla_flags, code_fingerprint, program_facts
from grpo_eqx.settings.config import GRPOConfig

REQUIRE_PROCESSES = "GRPO_EQX_REQUIRE_PROCESSES"
"""Environment variable for the number of processes that a launcher starts."""
START_TIMEOUT = "GRPO_EQX_START_TIMEOUT"
"""Environment variable for the seconds that a launcher's processes may take to start."""
_START_SECONDS = 30.0
_SEND_SECONDS = 24 * 3600
_LEAVE_SECONDS = 10.0
"""Seconds that a failed process waits for the others to end too."""
HEARTBEAT_SECONDS = 30
"""Seconds of silence from one process after which the others end too."""


def initialize(
    facts: Mapping[str, str] | None = None,
    *,
    require_processes: int | None = None,
    timeout: float | None = None,
) -> None:
    """Joins this process with the others of its run, if its launcher declares any.

    Call it before any device is touched. A later call only repeats the checks.

    **Arguments:**

    - `facts`: facts that must be equal in all processes, besides the facts that decide what JAX
      compiles.
    - `require_processes`: the required number of processes, by default the variable
      `GRPO_EQX_REQUIRE_PROCESSES`, or else the declared number.
    - `timeout`: seconds to wait for the other processes, by default the variable
      `GRPO_EQX_START_TIMEOUT`, or else 30.

    Raises, in every process present, `RunError` if processes are missing, and `UserError` if facts
    differ, or hosts have different numbers of devices. Without usable devices, raises one of these,
    too.
    """
    facts = {name: brief(value) for name, value in {**program_facts(), **(facts or {})}.items()}
    required, by = require_processes, "require_processes"
    if required is None and REQUIRE_PROCESSES in os.environ:
        required, by = int(_number_of(REQUIRE_PROCESSES)), REQUIRE_PROCESSES
    if timeout is None:
        timeout = _number_of(START_TIMEOUT) if START_TIMEOUT in os.environ else _START_SECONDS
    if jax.distributed.is_initialized():
        _check_number(jax.process_count(), required, by)
        check_even(Counter(device.process_index for device in jax.devices()))
        assert_same_on_all_hosts(facts)
        return
    cluster = find_cluster()
    _check_number(1 if cluster is None else cluster.num_processes, required, by)
    if cluster is None:
        return
    meet(cluster, facts, timeout)
    _join(cluster, timeout)
    sys.excepthook = _ends_the_run(sys.excepthook)
    check_devices()
    check_even(Counter(device.process_index for device in jax.devices()))


def join_processes(cfg: GRPOConfig) -> None:
    """Joins this process with the others of its run, if any, before devices are touched.

    Raises `RunError` if processes are missing. Raises `UserError` if the processes differ in
    settings, in code, or in anything else that changes what JAX compiles. Either is raised in every
    process that is present, and one of them if there are no usable devices.
    """
    check_xla_flags()
    facts = {
        **{field.name: repr(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)},
        "the code of grpo_eqx": code_fingerprint(),
    }
    if cfg.rollout_devices is not None and not jax.distributed.is_initialized():
        prepare_to_send()
    initialize(facts, require_processes=cfg.require_processes, timeout=cfg.start_timeout)
    check_devices()  # for a single process


def _join(cluster: Cluster, timeout: float) -> None:
    # JAX's handler of SIGTERM would take the signal from the run's handler, and do nothing.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            local_device_ids=cluster.local_device_ids,
            # Otherwise, JAX looks for a scheduler, and under Slurm uses one device of each host.
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout) + 1,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except RuntimeError as error:
        if "Failed to start RPC server" in str(error):
            raise taken_port(cluster.coordinator.rpartition(":")[2], "it was taken") from error
        if "must be called before" not in str(error):
            raise
        raise UserError(
            f"this process can no longer join the others ({error}): create the GRPOTrainer before "
            f"any array, or call grpo_eqx.distributed.initialize() first."
        ) from error


def prepare_to_send() -> None:
    """Lets devices send arrays to those of other processes: CPUs by sockets, others by links."""
    cluster = find_cluster()
    if cluster is not None:
        address = _own_address(cluster.coordinator)
        jax.config.update("jax_cross_host_transfer_socket_address", address)
        # One side may be busy for long; the watchdog ends runs that hang.
        jax.config.update("jax_cross_host_transfer_timeout_seconds", _SEND_SECONDS)


def _own_address(coordinator: str) -> str:
    """Returns `host:port` by which other processes can reach this one, with a port that is free."""
    host, _, port = coordinator.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((own, 0))
        free = probe.getsockname()[1]
    return f"[{own}]:{free}" if family == socket.AF_INET6 else f"{own}:{free}"


def check_devices() -> None:
    """Raises an error, with the fix, if JAX finds no devices.

    The error is a `UserError` if JAX_PLATFORMS asks for missing devices, and a `RunError` if
    another process uses the devices, or they fail.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        chosen = jax.config.jax_platforms  # type: ignore[attr-defined]
        said = f" ({first_line(error)})" if str(error) else ""
        if not chosen or "in use" in str(error):
            raise RunError(
                f"JAX cannot use its devices{said}: end other processes that use them; "
                f"grpo-eqx doctor says more."
            ) from error
        raise UserError(
            f"JAX cannot use its devices with JAX_PLATFORMS={chosen}{said}: unset JAX_PLATFORMS, "
            f"or install what grpo-eqx doctor names."
        ) from error


def leave_soon(code: int) -> None:
    """Ends this process within seconds, although JAX waits for the other processes at its exit."""
    if jax.distributed.is_initialized():
        timer = threading.Timer(_LEAVE_SECONDS, exit_at_once, (code,))
        timer.daemon = True
        timer.start()


def _ends_the_run(earlier: Hook) -> Hook:
    """Returns an excepthook that calls the earlier one, and then ends this process and its run."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        earlier(kind, error, trace)
        leave_soon(1)

    return hook


def is_main() -> bool:
    """Returns whether this process writes and prints for the run."""
    return jax.process_index() == 0


def check_even(num_devices: Mapping[int, int]) -> None:
    """Raises `UserError` if processes have different numbers of devices."""
    if len(set(num_devices.values())) > 1:
        raise UserError(
            f"the hosts have different numbers of devices, by process: "
            f"{dict(sorted(num_devices.items()))}. Give every host the same number, or leave out "
            f"the one that differs."
        )


def _number_of(variable: str) -> float:
    text = os.environ[variable]
    if not text.isdecimal():
        raise UserError(f"{variable} is {text!r}: it must be a number.")
    return float(text)


def _check_number(found: int, required: int | None, by: str) -> None:
    if required is not None and found != required:
        raise UserError(
            f"{found} {'process was' if found == 1 else 'processes were'} started, but "
            f"{required} are required by {by}: start the same command on every host."
        )
