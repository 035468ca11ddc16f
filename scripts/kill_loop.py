"""Kills a run again and again, and checks that it ends as if nothing had happened.

    python scripts/kill_loop.py --kills 100
    python scripts/kill_loop.py --kills 30 --processes 4
    python scripts/kill_loop.py --kills 60 --max-staleness 2
    python scripts/kill_loop.py --kills 20 --max-staleness 2 --processes 2 --rollout-devices 1

Each time, SIGKILL hits at a random moment: while the processes start, or within one of their first
steps. With several processes it hits one of them, all of them, or their launcher, in turn. Nothing
may be left alive `hang_timeout` later. Every start must resume from the newest complete checkpoint.
In the end the model must equal, byte for byte, that of a run which nobody disturbed, with the same
metrics and completions for every step, recorded once, and no temporary files left. A run that ends
before all kills are spent is compared, and begun anew.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

MOST_STEPS = 4
"""Steps that a process has begun, at most, when it is killed."""
OF_THE_MACHINE = ("time/", "throughput/", "memory/", "perf/", "compile/", "step_time")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    kills: int = 100
    """Number of times to kill the run."""
    steps: int = 100
    """Steps of the run, of which each kill leaves a few more done."""
    processes: int = 1
    """Processes of the run, on this machine, with a launcher if there are several."""
    hang_timeout: float = 120.0
    """Seconds after a kill in which everything must have ended."""
    model: str = "tiny_qwen2"
    """Model to train."""
    max_staleness: int = 0
    """Steps over which completions go on."""
    rollout_devices: int | None = None
    """Processes that sample while the others train, each with one device."""
    seed: int = 0
    """Seed of the moments."""


PROBLEMS = 64
"""Problems to train on: tokenizing more would take most of a start."""


VICTIMS = {1: ["the process"]}
"""Who is killed in turn, by the number of processes."""
OF_SEVERAL = ["one process", "all processes", "the launcher"]


class Run:
    """A run of a small model on a few problems that saves every step, in a folder."""

    def __init__(self, folder: Path, settings: Settings, steps: int | None = None):
        self.folder = folder
        self.log = folder.with_name(f"{folder.name}.log")
        problems = folder.with_name("problems.jsonl")
        rows = [{"question": f"What is {i} plus {i}?", "answer": 2 * i} for i in range(PROBLEMS)]
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = {
            "output-dir": folder, "data": problems, "steps": steps or settings.steps,
            "save-steps": 1, "prompts-per-step": 4, "num-generations": 2,
            "max-completion-length": 4, "learning-rate": 1e-3, "entropy-coef": 0.1,
            "log-completions-steps": 1, "eval-problems": 8, "model": settings.model,
            "hang-timeout": settings.hang_timeout, "start-timeout": settings.hang_timeout,
        }  # fmt: skip
        if settings.max_staleness:
            flags |= {
                "max-staleness": settings.max_staleness, "max-completion-length": 40,
                "max-num-seqs": 4, "importance-sampling-mode": "token_truncate",
            }  # fmt: skip
        if settings.rollout_devices is not None:
            flags["rollout-devices"] = settings.rollout_devices
        pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
        python = [sys.executable, "-m", "grpo_eqx.cli.main"]
        self.command = [*python, "train", *sum(pairs, ())]
        if settings.processes > 1:
            pod = ["--processes", str(settings.processes), "--devices-per-process", "1"]
            self.command = [*python, "launch", "local", *pod, "--", *self.command]
        self.mark = f"KILL_LOOP={secrets.token_hex(8)}"
        """What the environment of all its processes holds."""

    def start(self) -> subprocess.Popen[str]:
        """Starts the run, or continues it."""
        name, _, value = self.mark.partition("=")
        with self.log.open("w") as log:
            return subprocess.Popen(
                self.command, stdout=log, stderr=log, text=True, env={**os.environ, name: value}
            )

    def alive(self, mark: str = "") -> list[int]:
        """Returns the numbers of its processes, or of those whose environment has another mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if {self.mark.encode(), (mark or self.mark).encode()} <= set(variables):
                    found.append(int(folder.name))
        return sorted(found)

    def kill(self, victim: str, started: subprocess.Popen[str], chance: random.Random) -> None:
        """Kills a process of the run, all of them or the one that was started."""
        processes = [
            pid
            for index in range(8)
            for pid in self.alive(f"JAX_PROCESS_ID={index}")[:1]  # the first; others are its own
        ]
        if victim == "one process" and processes:
            doomed = [chance.choice(processes)]
        elif victim == "all processes" and processes:
            doomed = processes
        else:
            doomed = [started.pid]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def finish(self) -> str:
        """Lets the run end by itself; returns its output."""
        code, output = self.start().wait(), self.log.read_text()
        if code:
            raise SystemExit(f"the run failed:\n{output}")
        return output

    def newest(self) -> int:
        """Returns the step of the newest complete checkpoint, 0 without any."""
        names = [path.name for path in (self.folder / "checkpoints").glob("step_*")]
        return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)

    def metrics(self) -> list[dict[str, float]]:
        """Returns what is recorded of every step, except times."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [
            {name: x for name, x in json.loads(line).items() if not name.startswith(OF_THE_MACHINE)}
            for line in lines
        ]

    def completions(self) -> dict[str, bytes]:
        """Returns the tables of completions, as files."""
        return {path.name: path.read_bytes() for path in (self.folder / "completions").iterdir()}

    def step_seconds(self) -> float:
        """Returns the median time of a step."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]  # an evaluation has no time of a step
        return statistics.median(row["step_time"] for row in rows if "step_time" in row)

    def model(self) -> bytes:
        """Returns the trained weights, as a file."""
        return (self.folder / "model" / "model.safetensors").read_bytes()


def main(settings: Settings) -> None:
    """Kills a run again and again, and checks that it ends as if nothing had happened."""
    chance = random.Random(settings.seed)
    victims = VICTIMS.get(settings.processes, OF_SEVERAL)
    slowest, resumed, compared = dict.fromkeys(victims, 0.0), 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        whole = Run(Path(scratch) / "whole", settings)
        whole.finish()
        before = time.monotonic()
        Run(Path(scratch) / "warm", settings, 1).finish()  # from the cache of compiled programs
        start_seconds, step_seconds = time.monotonic() - before, whole.step_seconds()
        killed = Run(Path(scratch) / "killed", settings)
        for kill, victim in zip(range(settings.kills), itertools.cycle(victims), strict=False):
            if killed.newest() > settings.steps - MOST_STEPS:
                compare(killed, whole)
                compared += 1
                shutil.rmtree(killed.folder)
            newest = killed.newest()
            process = killed.start()
            if steps := chance.randrange(MOST_STEPS):
                wait_for(newest + steps, killed, process)
                time.sleep(chance.uniform(0, step_seconds))
            else:
                time.sleep(chance.uniform(0, start_seconds))
            before = time.monotonic()
            killed.kill(victim, process, chance)
            while killed.alive() or process.poll() is None:
                left = before + settings.hang_timeout - time.monotonic()
                check(left > 0, f"{killed.alive()} are left after {victim} was killed")
                time.sleep(0.05)
            slowest[victim] = max(slowest[victim], time.monotonic() - before)
            if found := re.search(r"resuming from .*step_(\d+)", killed.log.read_text()):
                resumed += 1
                check(int(found[1]) == newest, f"resumed from {found[1]}, not from {newest}")
            check(killed.newest() >= newest, "a complete checkpoint is gone")
            print(
                f"{kill + 1} of {settings.kills}: {victim} killed after step {killed.newest()}, "
                f"all gone {time.monotonic() - before:.1f} s later",
                flush=True,
            )
        compare(killed, whole)
    gone = [f"{seconds:.1f} s after {victim} was killed" for victim, seconds in slowest.items()]
    print(
        f"{settings.kills} kills, {resumed} resumed; {compared + 1} runs of {settings.steps} steps "
        f"on {settings.processes} processes ended with the same model to the last bit; nothing was "
        f"alive {', '.join(gone)}"
    )


def wait_for(step: int, run: Run, process: subprocess.Popen[str]) -> None:
    """Waits until a checkpoint is complete."""
    while run.newest() < step:
        check(process.poll() is None, "the run ended by itself")
        time.sleep(0.01)


def compare(killed: Run, whole: Run) -> None:
    """Lets the killed run end, and compares all that it leaves."""
    killed.finish()
    left = sorted(path.name for path in (killed.folder / "checkpoints").iterdir())
    check(killed.model() == whole.model(), "the models differ")
    check(killed.metrics() == whole.metrics(), "the metrics differ")
    check(killed.completions() == whole.completions(), "the completions differ")
    check(all(name[5:].isdecimal() for name in left), f"files are left: {left}")


def check(holds: bool, failure: str) -> None:
    """Ends the script where something does not hold."""
    if not holds:
        raise SystemExit(f"failed: {failure}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
