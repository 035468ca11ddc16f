"""The commands of the README, the guides and the how-tos run as they are written, on small runs."""

import re
from pathlib import Path

import pytest

from .fenced_blocks import ROOT, Command, blocks, commands
from .tutorials.page import shell

DOCS = ROOT / "docs"
PAGES = [
    path
    for path in (
        ROOT / "README.md", DOCS / "index.md", *sorted(DOCS.glob("guides/*.md")),
        *sorted(DOCS.glob("how_to/*.md")), *sorted(DOCS.glob("coming_from/*.md")),
    )
    if any(block.language == "console" for block in blocks(path))
]  # fmt: skip
DEFAULT = "grpo-eqx train --output-dir runs/tiny_qwen2-word_problems-seed0"
EARLIER = "grpo-eqx train --steps 42 --save-steps 20 --save-total-limit 9 --log-completions-steps 1"
BEFORE = {
    "completions.md": [f"{DEFAULT} --steps 30 --log-completions-steps 1"],
    "debugging_nan.md": [f"{EARLIER} --output-dir runs/mine"],
    "evaluation.md": [f"{EARLIER} --output-dir runs/my-run"],
    "lora.md": [f"{EARLIER} --output-dir runs/mine --lora-rank 2"],
    "offline_and_proxies.md": [f"cp {ROOT}/tests/problems.jsonl gsm8k_train.jsonl",
                               f"cp {ROOT}/tests/problems.jsonl gsm8k_test.jsonl"],
    "reliability.md": [f"{EARLIER} --output-dir runs/earlier"],
    "report.md": [f"{DEFAULT} --steps 2", "grpo-eqx train --steps 2 --output-dir runs/other"],
    "reproducibility.md": [f"{EARLIER} --output-dir runs/mine", "touch runs/mine/hub_commits.json"],
    "serving.md": [f"{EARLIER} --output-dir runs/mine",
                   f"{EARLIER} --output-dir runs/adapter --lora-rank 2"],
    "sick_runs.md": [f"{DEFAULT} --steps 2", f"{EARLIER} --output-dir runs/sick"],
}  # fmt: skip
"""What a reader of a page did before its first command, in small."""
SMALL = {
    r"pip install -e \S+( && |.*$)": "",  # as the tests' environment was made
    r"Qwen/Qwen[\w.-]+(@\w+)?": "tiny_qwen2",
    r"openai/gsm8k(@\w+)?(:\w+)?": "word_problems",
    r"/shared/": "shared/",
    r"(--expected-completion-length) \d+": r"\1 4",
    r"(--expected-longest-completion) \d+": r"\1 8",
    r"(--expected-turns|--expected-observation-length) \d+": r"\1 2",
    r"(--processes|--devices-per-process) \d+": r"\1 2",
}
SIZES = {
    "prompts-per-step": 16, "num-generations": 2, "max-prompt-length": 96,
    "max-completion-length": 8, "eval-problems": 8,
}  # fmt: skip
_TRAINS = re.compile(r"(examples/\w+\.py|grpo-eqx (?:train|plan|compile))\b")
_FOR_TPUS = re.compile(r"grpo-eqx plan .*--topology v\d", re.DOTALL)


PAGES_WITH_PLANS = [
    page
    for page in PAGES
    if any(b.mark is None and b.language == "console" and _FOR_TPUS.search(b.text)
           for b in blocks(page))
]  # fmt: skip


def small(text: str, steps: int | None = None) -> str:
    """The same command or file with few and short completions, and nothing from the hub."""
    for pattern, instead in SMALL.items():
        text = re.sub(pattern, instead, text)
    if _TRAINS.search(text) is None:
        return text
    sizes = SIZES if steps is None else {**SIZES, "steps": steps}
    flags = " ".join(f"--{name} {size}" for name, size in sizes.items())
    for name in sizes:
        text = re.sub(rf" --{name} \d\d+", "", text)  # those of one digit are small
    return _TRAINS.sub(rf"\1 {flags}", text)


def as_run(command: Command) -> str:
    """A command in small, of which the page may show that it fails."""
    if command.shown and command.shown[0].startswith("error: "):
        return f"! {command.line} || exit 1"
    if command.line.startswith("grpo-eqx check"):
        return f"{command.line} || [ $? = 1 ]"  # completions so short are sick
    goes_on = "--resume" in command.line  # to the steps of the run before
    return small(command.line, None if goes_on else 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reader's checkout, as far as the commands use it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def runs(page: Path, folder: Path, *, for_tpus: bool) -> None:
    """Writes a page's files, and runs its commands without a mark, each of which must succeed."""
    unmarked = [block for block in blocks(page) if block.mark is None]
    for block in unmarked:
        if block.file is not None:
            (folder / block.file).write_text(small(block.text))
    found = [c for block in unmarked if block.language == "console" for c in commands(block)]
    lines = [as_run(c) for c in found if (_FOR_TPUS.search(c.line) is not None) == for_tpus]
    before = [] if for_tpus else [small(line) for line in BEFORE.get(page.name, [])]
    done = shell(["set -evo pipefail", *before, *lines], folder)
    assert done.returncode == 0, done.stdout


@pytest.mark.grid
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page.name in BEFORE else pytest.mark.slow)
        for page in PAGES
    ],
    ids=lambda page: page.stem,
)
def test_commands_succeed_one_after_the_other(page: Path, folder: Path) -> None:
    runs(page, folder, for_tpus=False)


@pytest.mark.long
@pytest.mark.topology
@pytest.mark.parametrize("page", PAGES_WITH_PLANS, ids=lambda page: page.stem)
def test_plans_for_described_tpus_succeed(page: Path, folder: Path) -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    runs(page, folder, for_tpus=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_not_run_says_why(page: Path) -> None:
    marks = [block.mark for block in blocks(page) if block.language == "console" and block.mark]
    assert all(mark.startswith(("needs ", "not run: ", "run by ")) for mark in marks)
