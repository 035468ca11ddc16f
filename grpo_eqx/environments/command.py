"""Agents that are programs of their own, started by a command line."""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
from typing import Any

from grpo_eqx.common.errors import UserError, shown
from grpo_eqx.environments.harness_endpoint import HarnessEndpoint

_MOST_BYTES = 1 << 20
"""Bytes of a program's output that are kept, the last ones."""


class CommandError(Exception):
    """A program has failed. The text continues a sentence about it."""


class Command:
    """Harness that starts a program for each run.

    The program finds the endpoint in `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, and
    the row as JSON on standard input. If the last line that it prints is a number, that is the
    reward.
    """

    def __init__(self, line: str):
        """**Arguments:**

        - `line`: the command line, as in `python agent.py --fast`; no shell reads it.

        Raises `UserError` where the line cannot be read, or there is no such program.
        """
        try:
            self._words = shlex.split(line)
        except ValueError as error:
            raise UserError(f"harness is {shown(line)}: close its quotes ({error}).") from error
        if not self._words or shutil.which(self._words[0]) is None:
            name = shown(self._words[0]) if self._words else "an empty text"
            raise UserError(
                f"harness is {shown(line)}, and {name} is no program on the PATH: give a command "
                f"line, as in 'python agent.py'."
            )

    async def __call__(self, endpoint: HarnessEndpoint, row: dict[str, Any]) -> float | None:
        """Runs the program; raises `CommandError` where it fails."""
        process = await asyncio.create_subprocess_exec(
            *self._words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "OPENAI_BASE_URL": endpoint.base_url,
                "OPENAI_API_KEY": endpoint.api_key,
                "OPENAI_MODEL": endpoint.model,
            },
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            printed, said, _ = await asyncio.gather(
                _last_of(process.stdout), _last_of(process.stderr), _send(process.stdin, row)
            )
            code = await process.wait()
        finally:
            # Also what it has started, and where the run ends or its time is up.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if code != 0:
            raise CommandError(f"ended with exit code {code}{_quoted(said or printed)}")
        return _reward_in(printed)


async def _send(stream: asyncio.StreamWriter, row: dict[str, Any]) -> None:
    """Sends a row; a program may not read it."""
    with contextlib.suppress(ConnectionError):
        stream.write(json.dumps(row, default=str).encode())
        await stream.drain()
    stream.close()


async def _last_of(stream: asyncio.StreamReader) -> str:
    """Reads a stream to its end, and returns its last bytes as text."""
    kept = b""
    while part := await stream.read(1 << 16):
        kept = (kept + part)[-_MOST_BYTES:]
    return kept.decode(errors="replace").strip()


def _quoted(text: str) -> str:
    """Returns the last line of a text, as the end of a sentence; nothing for an empty text."""
    last = text.rpartition("\n")[2].strip()
    return f", and said {shown(last)}" if last else ""


def _reward_in(printed: str) -> float | None:
    """Returns the number in the last line, if there is one."""
    try:
        reward = json.loads(printed.rpartition("\n")[2])
    except ValueError:
        return None
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    return float(reward) if is_number else None
