"""Reward functions of all kinds of faults, in a module that worker processes can import."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any


def length(*, completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def faulty(*, completions: list[str], **columns: Any) -> list[float | None]:
    """Does what the completion says, or returns its length."""
    return [_obey(text) for text in completions]


def _obey(text: str) -> float | None:
    if text == "sleep":
        time.sleep(3600)
    if text == "ignore SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    if text == "keep the GIL":
        ctypes.PyDLL(None).sleep(3600)  # as a regex without end does
    if text == "write without waiting":
        os.set_blocking(1, False)
    if text == "segfault":
        ctypes.string_at(0)
    if text == "exit":
        os._exit(3)
    if text == "raise":
        raise ValueError("no such unit\nand more")
    if text in ("start a process", "start a session"):
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        subprocess.Popen(command, start_new_session=text == "start a session")
        time.sleep(3600)
    if text == "leave a fork that holds the pipe":
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(3)
    odd: dict[str, Any] = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "yes"}
    return odd.get(text, float(len(text)))


def wrong_number(*, completions: list[str], **columns: Any) -> list[float]:
    return [1.0, 2.0]


def no_list(*, completions: list[str], **columns: Any) -> Any:
    return 3.0


def process_id(*, completions: list[str], **columns: Any) -> list[float]:
    return [float(os.getpid())] * len(completions)


def sees_accelerators(*, completions: list[str], **columns: Any) -> list[float]:
    """0.0 where neither JAX nor this project is loaded, and JAX would find CPUs alone."""
    loaded = {"jax", "grpo_eqx"} & set(sys.modules)
    return [float(bool(loaded) or os.environ["JAX_PLATFORMS"] != "cpu")] * len(completions)


async def awaited(*, completions: list[str], **columns: Any) -> list[float | None]:
    """Does what the completions say, or returns their lengths."""
    return [await _obey_async(text) for text in completions]


async def _obey_async(text: str) -> float | None:
    if text == "hang":
        await asyncio.Event().wait()
    if text == "refuse":
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if asyncio.get_running_loop().is_closed():
                    raise
    if text == "cancelled":
        raise asyncio.CancelledError
    if text == "block":
        time.sleep(8)
    if text.startswith("wait"):
        await asyncio.sleep(0.5)
    if text == "system exit":
        sys.exit(3)
    return _obey(text)
