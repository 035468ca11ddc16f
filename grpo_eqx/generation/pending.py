"""Completions that are sampled later, in a thread, or in some of the processes of a run."""

import dataclasses
import io
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from grpo_eqx.data.trajectory import Trajectory, arrays_of, with_arrays
from grpo_eqx.distributed.exchange import bytes_from, raise_on_all_hosts
from grpo_eqx.generation.sampler import PendingSamples, Sampled, SamplingCounts


@dataclasses.dataclass
class Deferred(PendingSamples):
    """Completions that a function makes once they are needed."""

    make: Callable[[], Sampled]
    made: Sampled | None = None

    def result(self) -> Sampled:
        if self.made is None:
            self.made = self.make()
        return self.made


class Ahead(PendingSamples):
    """Completions that a thread waits for, so that sampling goes on while the caller does, too."""

    def __init__(self, pending: PendingSamples):
        self._pending = pending
        self._sampled = Future[Sampled]()
        # Not a pool's thread, for which Python's exit waits.
        self._thread = threading.Thread(target=self._run, daemon=True, name="sample_ahead")
        self._thread.start()

    def result(self) -> Sampled:
        return self._sampled.result()

    def wait(self) -> None:
        self._thread.join()

    def release(self) -> None:
        self._pending.release()

    def _run(self) -> None:
        try:
            self._sampled.set_result(self._pending.result())
        except BaseException as error:
            self._sampled.set_exception(error)


class Shared(PendingSamples):
    """Completions that some processes sample, and all get."""

    def __init__(
        self, pending: PendingSamples | None, trajectories: Sequence[Trajectory], process: int
    ):
        """**Arguments:**

        - `pending`: the completions, in processes that sample.
        - `trajectories`: the completions before that.
        - `process`: one of the processes that sample.
        """
        self._pending, self._trajectories, self._process = pending, trajectories, process
        self._sampled: Sampled | None = None

    def result(self) -> Sampled:
        if self._sampled is None:
            pending = self._pending
            made = raise_on_all_hosts(lambda: None if pending is None else pending.result())
            sent = bytes_from(self._process, b"" if made is None else _packed(made))
            self._sampled = _unpacked(sent, self._trajectories)
        return self._sampled

    def in_background(self) -> PendingSamples:
        pending = None if self._pending is None else self._pending.in_background()
        return Shared(pending, self._trajectories, self._process)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()


def _packed(sampled: Sampled) -> bytes:
    file = io.BytesIO()
    arrays: dict[str, Any] = arrays_of(sampled.trajectories)
    arrays["ended"] = np.array(sampled.ended, np.int32)
    arrays["counts"] = np.array(sampled.counts, np.float64)
    np.savez(file, **arrays)
    return file.getvalue()


def _unpacked(sent: bytes, trajectories: Sequence[Trajectory]) -> Sampled:
    with np.load(io.BytesIO(sent), allow_pickle=False) as arrays:
        steps, slots, cache_share, tokens = arrays["counts"].tolist()
        counts = SamplingCounts(int(steps), int(slots), cache_share, int(tokens))
        made = with_arrays(trajectories, arrays)
        return Sampled(made, counts, ended=arrays["ended"].tolist())
