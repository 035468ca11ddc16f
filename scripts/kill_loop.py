"""Kills a run again and again, and checks that it ends as if nothing had happened.

    python scripts/kill_loop.py --kills 100

Each time, SIGKILL hits at a random moment: while the process starts, or within one of its first
steps. Every start must resume from the newest complete checkpoint. In the end the model must equal,
byte for byte, that of a run which nobody disturbed, with the same metrics and completions for every
step, recorded once, and no temporary files left. A run that ends before all kills are spent is
compared, and begun anew.
"""

import dataclasses
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro
from rich.progress import track

MOST_STEPS = 4
"""Steps that a process has begun, at most, when it is killed."""
OF_THE_MACHINE = ("time/", "throughput/", "memory/", "perf/", "compile/", "step_time")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    kills: int = 100
    """Number of times to kill the run."""
    steps: int = 100
    """Steps of the run, of which each kill leaves a few more done."""
    seed: int = 0
    """Seed of the moments."""


PROBLEMS = 64
"""Problems to train on: tokenizing more would take most of a start."""


class Run:
    """A run of the embedded model on a few problems that saves every step, in a folder."""

    def __init__(self, folder: Path, steps: int):
        self.folder = folder
        problems = folder.with_name("problems.jsonl")
        rows = [{"question": f"What is {i} plus {i}?", "answer": 2 * i} for i in range(PROBLEMS)]
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = {
            "output-dir": folder, "data": problems, "steps": steps, "save-steps": 1,
            "prompts-per-step": 4, "num-generations": 2, "max-completion-length": 4,
            "learning-rate": 1e-3, "entropy-coef": 0.1, "log-completions-steps": 1,
            "eval-problems": 8,
        }  # fmt: skip
        pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
        self.command = [sys.executable, "-m", "grpo_eqx.cli.main", "train", *sum(pairs, ())]

    def start(self) -> subprocess.Popen[str]:
        """Starts the run, or continues it."""
        return subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(self) -> str:
        """Lets the run end by itself; returns its output."""
        process = self.start()
        output, _ = process.communicate()
        if process.returncode:
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
        return statistics.median(json.loads(line)["step_time"] for line in lines)

    def model(self) -> bytes:
        """Returns the trained weights, as a file."""
        return (self.folder / "model" / "model.safetensors").read_bytes()


def main(settings: Settings) -> None:
    """Kills a run again and again, and checks that it ends as if nothing had happened."""
    chance = random.Random(settings.seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Run(Path(scratch) / "whole", settings.steps)
        whole.finish()
        before = time.monotonic()
        Run(Path(scratch) / "warm", 1).finish()  # from the cache of compiled programs
        start_seconds, step_seconds = time.monotonic() - before, whole.step_seconds()
        killed, resumed, compared = Run(Path(scratch) / "killed", settings.steps), 0, 0
        for _ in track(range(settings.kills), "killing"):
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
            process.kill()
            output, _ = process.communicate()
            if found := re.search(r"resuming from .*step_(\d+)", output):
                resumed += 1
                check(int(found[1]) == newest, f"resumed from {found[1]}, not from {newest}")
            check(killed.newest() >= newest, "a complete checkpoint is gone")
        compare(killed, whole)
    print(
        f"{settings.kills} kills, {resumed} resumed; {compared + 1} runs of {settings.steps} steps "
        f"ended with the same model to the last bit"
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
