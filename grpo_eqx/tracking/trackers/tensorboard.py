"""TensorBoard's event files."""

import itertools
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_eqx.tracking.trackers.base import CompletionsTable, Tracker

_MOST_SHOWN = 8
"""Most completions in a step's text, all of its first prompt."""


class TensorBoardTracker(Tracker):
    """Tracker that writes TensorBoard's event files; `tensorboardX` is imported only here.

    The calling thread writes every event at once. A separate thread, as in tensorboardX's own
    writer, could not report a full disk.
    """

    def __init__(self, folder: Path, step: int):
        """**Arguments:**

        - `folder`: the folder for the files.
        - `step`: the step after which the run goes on; 0 for a new run. TensorBoard drops the
          later steps that earlier files have.
        """
        from tensorboardX import summary
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import RecordWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._text: Any = summary.text
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._writer = RecordWriter(str((folder / name).absolute()))
        self._write(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(session_log=start, step=step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        scalar = self._summaries.Summary.Value
        values = [scalar(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def completions(self, step: int, table: CompletionsTable) -> None:
        self._write(step=step, summary=self._text("completions", "\n\n".join(_blocks(table))))

    def finish(self) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _blocks(table: CompletionsTable) -> Iterator[str]:
    """Yields the first prompt of a table and its completions, as Markdown code blocks."""
    prompts = table["prompt"]
    of_prompt = itertools.takewhile(lambda i: prompts[i] == prompts[0], range(len(prompts)))
    yield _as_code(prompts[0])
    for i in itertools.islice(of_prompt, _MOST_SHOWN):
        yield f"**reward {table['reward'][i]:g}**, {table['length'][i]} tokens"
        yield _as_code(table["completion"][i])


def _as_code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
