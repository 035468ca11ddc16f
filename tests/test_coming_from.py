"""The pages for people who come from other libraries: their tables, files and scripts."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import datasets
import pytest

from grpo_eqx import GRPOConfig, UserError
from grpo_eqx.settings.files import read_settings

from . import fenced_blocks
from .scripts import load_script

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "coming_from"


@pytest.fixture
def tables() -> ModuleType:
    return load_script("coming_from_tables")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page, but for those that are marked as not run."""
    found = fenced_blocks.blocks(PAGES / page)
    return [block.text for block in found if block.language == language and not block.mark]


def test_the_tables_are_those_of_the_script(tables: ModuleType) -> None:
    for peer in tables.PEERS:
        page = (PAGES / peer.page).read_text()
        assert tables.with_tables(page, peer) == page, "run python scripts/coming_from_tables.py"


def test_what_is_said_to_differ_is_a_setting(tables: ModuleType) -> None:
    for peer in tables.PEERS:
        names = {name.rpartition(".")[2] for name in peer.settings}
        assert peer.differs.keys() <= names & tables.OURS.keys()
        assert len(set(peer.settings)) == len(peer.settings)


def test_an_old_file_is_answered_in_every_setting(tmp_path: Path) -> None:
    old, new = blocks("seed_yaml.md", "yaml")
    (tmp_path / "old.yaml").write_text(old)
    with pytest.raises(UserError) as caught:
        read_settings(tmp_path / "old.yaml")
    assert "--help-all" not in str(caught.value)  # what an unknown setting is answered with
    ours = {*GRPOConfig.__dataclass_fields__, "rollout", "train"}  # and sections
    others = set(re.findall(r"^ *(\w+): ", old, re.M)) - ours
    assert others <= set(re.findall(r"(?:\w+\.)?(\w+) is an unknown setting: ", str(caught.value)))
    (tmp_path / "new.yaml").write_text(new)
    GRPOConfig(**read_settings(tmp_path / "new.yaml"))


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("page", ["trl.md", "tunix.md", "verl.md"])
def test_the_script_runs(
    page: str, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As written, but for a model that this machine has, and for one step."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {a} plus {a}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * a)},
        }
        for a in range(64)
    ]
    for name in ("train", "test"):
        datasets.Dataset.from_list(rows).to_parquet(f"{name}.parquet")
    (code,) = blocks(page, "python")
    code = re.sub(r'"Qwen/[^"]*"', repr(str(small_model)), code)
    code = re.sub(r"\bsteps=\d+", "steps=1", code)
    code = re.sub(r"max_completion_length=\d+", "max_completion_length=4", code)
    exec(code, {"__name__": "script"})


QUICK_STARTS = {
    "text": """
from datasets import load_dataset
from grpo_eqx import GRPOConfig, GRPOTrainer

dataset = load_dataset("json", data_files="tldr.jsonl", split="train")

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

training_args = GRPOConfig(output_dir="Qwen2-0.5B-GRPO")
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=reward_len,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
""",
    "conversation": """
from datasets import load_dataset
from grpo_eqx import GRPOTrainer

def accuracy_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(gold in content) for gold, content in zip(solution, contents)]

dataset = load_dataset("json", data_files="deepmath.jsonl", split="train")

trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
""",
}
"""The first example of TRL's documentation, in its earlier and its present form."""

ROWS = {
    "tldr.jsonl": '{{"prompt": "Summarize {i}: ", "completion": "{i}"}}',
    "deepmath.jsonl": (
        '{{"prompt": [{{"role": "user", "content": "What is {i}?"}}], "solution": "{i}"}}'
    ),
}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("kind", QUICK_STARTS)
def test_trls_quick_start_runs(kind: str, small_model: Path, tmp_path: Path) -> None:
    for name, row in ROWS.items():
        (tmp_path / name).write_text("".join(row.format(i=i) + "\n" for i in range(40)))
    short = (  # only the defaults are others than a user's
        "import grpo_eqx\n"
        "grpo_eqx.GRPOConfig.__init__.__kwdefaults__.update(steps=2, max_completion_length=8)\n"
        f"MODEL = {str(small_model)!r}\n"
    )
    script = tmp_path / "train.py"
    script.write_text(short + QUICK_STARTS[kind])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "36 problems, 4 held out" in done.stdout + done.stderr
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1
