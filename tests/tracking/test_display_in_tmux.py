"""The live display in a real terminal: nothing wraps, stays behind or is lost."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]

_PATIENCE_S = 60.0
_ENVIRONMENT = {**os.environ, "COLUMNS": "200", "LINES": "50"}
"""Variables that shells export and do not always keep up to date."""
RUN = """
import os, signal, sys, time
from grpo_eqx.tracking.phases import PHASES, Phase
from grpo_eqx.tracking.training_display import TrainingDisplay

def metrics(step):
    return {
        "reward": float("nan") if step == 3 else step / 10, "completions/mean_length": 19.2,
        "completions/clipped_ratio": 0.125, "entropy": 0.4, "kl": 0.002, "step_time": 1.0,
        "compile/num_programs": 0.0, "compile/seconds": 0.0,
        "perf/tokens_per_second/rollout": 5312.0,
    }

def wait_for(name):
    print(f"ready for {name}")
    while not os.path.exists(name):
        time.sleep(0.05)

print("before")
with TrainingDisplay(10) as display:
    display.note("a note of several words, " * 8)
    for step in range(1, 7):
        display.step(step, metrics(step))
    print("a warning", file=sys.stderr)
    os.write(2, b"a line past Python\\n")
    with PHASES.lasting(Phase("compiling update", before=41.0)):
        wait_for("look")
        wait_for("narrow")
        wait_for("wide")
    if sys.argv[1] == "error":
        raise SystemExit("it failed")
    display.step(10, metrics(10))
print("after")
"""


class Terminal:
    """A terminal of tmux's, in which the run above goes on."""

    def __init__(self, folder: Path, width: int, how: str):
        self._folder, self._name = folder, f"grpo_eqx-{folder.name}"
        (folder / "run.py").write_text(RUN)
        command = shlex.join([sys.executable, "run.py", how])
        keep = "echo ended with $?; cat"  # or the terminal would close
        self.tmux("new-session", "-d", "-x", str(width), "-y", "24", "-c", str(folder),
                  f"{command}; {keep}")  # fmt: skip

    def tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._name, "-f", "/dev/null", *arguments],
            capture_output=True, text=True, check=True, env=_ENVIRONMENT,
        )  # fmt: skip
        return done.stdout

    def lines(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Returns what the terminal shows, once it meets a condition."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            lines = self.tmux("capture-pane", "-p").rstrip().splitlines()
            if condition(lines) or time.monotonic() > end:
                return lines
            time.sleep(0.05)

    def go_on(self, name: str) -> None:
        (self._folder / name).touch()

    @property
    def shows_the_cursor(self) -> bool:
        return self.tmux("display-message", "-p", "#{cursor_flag}").strip() == "1"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[[int, str], Terminal]]:
    opened = []

    def open_(width: int, how: str) -> Terminal:
        opened.append(Terminal(tmp_path, width, how))
        return opened[-1]

    yield open_
    for each in opened:
        each.tmux("kill-server")


def has(text: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(text in line for line in lines)


def display(lines: list[str]) -> list[str]:
    """The lines of the display, and those below."""
    start = next(i for i, line in enumerate(lines) if line.startswith("step "))
    assert lines[start - 1] == ""
    return lines[start:]


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_wraps_or_stays_behind(
    terminal: Callable[[int, str], Terminal], width: int
) -> None:
    pane = terminal(width, "end")
    lines = pane.lines(has("ready for look"))
    assert lines[0] == "before"
    note = " ".join(lines[1 : lines.index("a warning")])
    assert note.split() == 8 * ["a", "note", "of", "several", "words,"]  # none in two parts
    assert lines.count("a warning") == lines.count("a line past Python") == 1
    bar, reward, completions, machine, phase = display(lines)
    assert bar.startswith("step 6 of 10  ━━━")
    assert bar.endswith("─  4 s left")
    assert len(bar) == len(reward) == width - 1
    assert reward.startswith("reward 0.600")
    assert reward.endswith("0.100 to 0.600")
    assert re.split(r"  +", completions) == [
        "length 19.2", "truncated 12.5%", "entropy 0.400", "KL 0.002",
    ]  # fmt: skip
    assert machine.startswith("step time 1.00 s")
    assert phase.startswith("compiling update, ")
    assert phase.endswith("; took 41 s before")
    assert not pane.shows_the_cursor

    for name, columns in (("look", 60), ("narrow", 120)):
        pane.tmux("resize-window", "-x", str(columns), "-y", "24")
        pane.go_on(name)
        following = {"look": "narrow", "narrow": "wide"}[name]
        # Redrawn for the new width, and nothing left of the old.
        lines = pane.lines(
            lambda lines, f=following, c=columns: (
                has(f"ready for {f}")(lines) and len(display(lines)[0]) == c - 1
            )
        )
        assert len(display(lines)) == 5
        assert sum("━" in line for line in lines) == 1
    pane.go_on("wide")
    lines = pane.lines(has("ended with 0"))
    assert display(lines)[0].endswith("━  done")
    assert display(lines)[-2:] == ["after", "ended with 0"]
    assert pane.shows_the_cursor


def test_an_error_comes_below_the_last_lines(terminal: Callable[[int, str], Terminal]) -> None:
    pane = terminal(80, "error")
    for name in ("look", "narrow", "wide"):
        pane.go_on(name)
    lines = display(pane.lines(has("ended with 1")))
    assert lines[0].startswith("step 6 of 10")
    assert [line for line in lines[4:] if line] == ["it failed", "ended with 1"]
    assert pane.shows_the_cursor


def test_ctrl_c_leaves_the_cursor(terminal: Callable[[int, str], Terminal]) -> None:
    pane = terminal(80, "end")
    pane.lines(has("ready for look"))
    pane.tmux("send-keys", "C-c")
    lines = pane.lines(has("KeyboardInterrupt"))
    assert display(lines)[0].startswith("step 6 of 10")
    assert pane.shows_the_cursor
