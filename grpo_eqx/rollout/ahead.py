"""Completions that are sampled while a step trains."""

import threading
from concurrent.futures import Future

from grpo_eqx.data.trajectory import Trajectory
from grpo_eqx.generation import PendingSamples, Sampled


class Whole(PendingSamples):
    """Completions that have ended before."""

    def __init__(self, trajectories: list[Trajectory]):
        self._trajectories = trajectories

    def result(self) -> Sampled:
        return Sampled(self._trajectories)


class Ahead(PendingSamples):
    """Completions that a thread of their own waits for, which has the sampler go on meanwhile."""

    def __init__(self, pending: PendingSamples):
        self._pending = pending
        self._sampled = Future[Sampled]()
        # Not a pool's thread, for which Python's exit waits.
        self._thread = threading.Thread(target=self._wait, daemon=True, name="sample_ahead")
        self._thread.start()

    def result(self) -> Sampled:
        return self._sampled.result()

    def release(self) -> None:
        self._pending.release()

    def join(self) -> None:
        """Waits until they have ended, or failed."""
        self._thread.join()

    def _wait(self) -> None:
        try:
            self._sampled.set_result(self._pending.result())
        except BaseException as error:
            self._sampled.set_exception(error)
