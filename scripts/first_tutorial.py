"""Does what the first tutorial says, in the current folder, with an installed grpo_eqx.

    python scripts/first_tutorial.py docs/tutorials/first_run.md [--once]

The folder must have `examples/gsm8k.py`. Python blocks run as they are, one after the other, in one
namespace, but for the one that needs torch. The first command that trains runs too; of the others,
which train again with other settings, the settings are checked. Runs are of few steps, evaluations
of few problems. With `--once`, Python blocks that train again or evaluate are left out. The first
error ends it.
"""

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

import grpo_eqx

STEPS = 2
SHORT = {"steps": STEPS, "eval_problems": 16}
NEEDS_TORCH = "AutoModelForCausalLM"
TRAINER = re.compile(r"\btrainer\b|GRPOTrainer")
TRAINS = re.compile(r"python examples/gsm8k\.py|grpo-eqx train")
LAST_STEP = "(1, 150)"
"""Steps whose completions the tutorial looks at; the second is the last of its run."""


def short_config(**settings: Any) -> grpo_eqx.GRPOConfig:
    """Makes a config of a short run."""
    return CONFIG(**{**settings, **SHORT})


CONFIG = grpo_eqx.GRPOConfig
OUTPUT = CONFIG().resolved().output_dir
FLAGS = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SHORT.items())


def run_command(line: str, *, trains: bool) -> None:
    """Runs a command of the page; without `trains`, it only checks and prints its settings."""
    print(f"$ {line}", flush=True)
    extra = f"{FLAGS} --output-dir {OUTPUT}" if trains else "--print-config"
    if "--print-config" not in line:
        line = TRAINS.sub(lambda match: f"{match[0]} {extra}", line)
    subprocess.run(["bash", "-ec", line], check=True, stdout=None if trains else subprocess.DEVNULL)


def main(page: Path, *, once: bool) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    grpo_eqx.GRPOConfig = short_config  # type: ignore[assignment, misc]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    commands = 0
    for language, text in blocks:
        if language == "console":
            for line in re.findall(r"^\$ (.*)", text, re.M):
                if TRAINS.search(line):
                    run_command(line, trains=commands == 0)
                    commands += 1
        elif language == "python" and NEEDS_TORCH not in text:
            if once and TRAINER.search(text):
                continue
            print(text, flush=True)
            shorter = text.replace(LAST_STEP, f"(1, {STEPS})")
            exec(compile(shorter, f"<{page.name}>", "exec"), namespace)
    assert commands > 1, f"{page} has no commands"
    assert once or "trainer" in namespace, f"{page} has no Python that trains"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--once", action="store_true")
    arguments = parser.parse_args()
    main(arguments.page, once=arguments.once)
