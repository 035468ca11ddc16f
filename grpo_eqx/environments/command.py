"""Agents that are programs of their own, started by a command line."""

import asyncio
import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
from typing import Any
from urllib.parse import urlsplit

from grpo_eqx.common.errors import UserError, shown
from grpo_eqx.distributed.exits import last_act
from grpo_eqx.environments.harness_endpoint import HarnessEndpoint

_MOST_BYTES = 1 << 20
"""Bytes of a program's output that are kept, the last ones."""
_BETWEEN = 0.05
"""Seconds between two looks whether a program has ended."""
_TO_END = 2.0
"""Seconds in which the last output of a program arrives, once it has ended."""


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

        Raises `UserError` where the line cannot be read, or the program is not found.
        """
        try:
            self._words = shlex.split(line)
        except ValueError as error:
            raise UserError(f"harness is {shown(line)}: close its quotes ({error}).") from error
        if not self._words or shutil.which(self._words[0]) is None:
            why = (
                f"{shown(self._words[0])} is not found on the PATH"
                if self._words
                else "it is empty"
            )
            raise UserError(
                f"harness is {shown(line)}, and {why}: give a command line, as in "
                f"'python agent.py'."
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
                **_without_proxy(endpoint.base_url),
            },
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        printed, said = _Tail(), _Tail()
        talk = [
            asyncio.ensure_future(each)
            for each in (
                printed.read(process.stdout), said.read(process.stderr), _send(process.stdin, row)
            )
        ]  # fmt: skip
        end = functools.partial(_end_group, process.pid)
        try:
            with last_act(end):  # also where the trainer's process ends at once
                while process.returncode is None:  # its wait() may wait for what holds its streams
                    await asyncio.sleep(_BETWEEN)
        finally:
            end()
            if process.returncode is not None:
                await asyncio.wait(talk, timeout=_TO_END)
            for each in talk:
                each.cancel()
        if process.returncode != 0:
            text = said.text or printed.text
            raise CommandError(f"ended with exit code {process.returncode}{_quoted(text)}")
        return _reward_in(printed.text)


def _without_proxy(address: str) -> dict[str, str]:
    """Returns variables that have clients reach an address without a proxy."""
    names = "NO_PROXY", "no_proxy"
    known = [x for name in names for x in os.environ.get(name, "").split(",") if x]
    return dict.fromkeys(names, ",".join([*known, urlsplit(address).hostname or ""]))


def _end_group(number: int) -> None:
    """Kills a program, if it still runs, and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)


class _Tail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._kept = b""

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()

    async def read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(1 << 16):
            self._kept = (self._kept + part)[-_MOST_BYTES:]


async def _send(stream: asyncio.StreamWriter, row: dict[str, Any]) -> None:
    """Sends a row; a program may not read it."""
    with contextlib.suppress(ConnectionError):
        stream.write(json.dumps(row, default=str).encode())
        await stream.drain()
    stream.close()


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
