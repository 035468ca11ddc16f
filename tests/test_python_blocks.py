"""The Python of the README, the guides and the how-tos runs as it is written, on small runs."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.settings.embedded import EMBEDDED_MODEL

from .fenced_blocks import ROOT, blocks

GUIDES = ROOT / "docs" / "guides"
OTHERWISE = {"porting.md"}
"""Pages that a test of their own runs."""
PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "docs" / "index.md",
                 *sorted(GUIDES.glob("*.md")), *sorted((ROOT / "docs" / "how_to").glob("*.md")))
    if path.name not in OTHERWISE and any(block.language == "python" for block in blocks(path))
]  # fmt: skip
SIZES: dict[str, Any] = {
    "prompts_per_step": 8, "num_generations": 2, "max_completion_length": 4, "eval_problems": 8,
}  # fmt: skip


FROM_HUB = {"agents.md": str(ROOT / "examples" / "tiny_agent")}
"""Models of pages in place of those of the hub, where the embedded one lacks something."""


def small(cfg: GRPOConfig, page: str) -> GRPOConfig:
    """The same run with a step or two of few and short completions, and nothing from the hub."""
    model = FROM_HUB.get(page, EMBEDDED_MODEL) if "/" in str(cfg.model) else cfg.model
    data = "word_problems" if "/" in str(cfg.data) else cfg.data
    steps = min(cfg.steps or 2, 2)
    every = None if cfg.eval_steps is None else 1
    return dataclasses.replace(cfg, model=model, data=data, steps=steps, eval_steps=every, **SIZES)


@pytest.fixture(autouse=True)
def _small_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = GRPOTrainer.__init__

    def of_small_run(self: GRPOTrainer, cfg: GRPOConfig | None = None, **objects: Any) -> None:
        init(self, small(cfg or GRPOConfig(), page.name), **objects)

    monkeypatch.setattr(GRPOTrainer, "__init__", of_small_run)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.chdir(tmp_path)


def at_hand(page: str) -> dict[str, Any]:
    """What a reader of a page has before its first block: names, and files in this folder."""
    if page == "data.md":
        Path("problems.csv").write_text("instruction,answer\n" + "What is 1 plus 1?,2\n" * 64)
    if page == "loss_backends.md":
        ids = jnp.zeros((2, 5), jnp.int32)
        mask = jnp.ones((2, 5), bool)
        return {
            "apply": lambda params, ids: params + jnp.zeros((*ids.shape, 7)),
            "params": jnp.arange(7.0), "ids": ids, "mask": mask,
            "advantages": jnp.asarray([1.0, -1.0]), "old_logps": jnp.full((2, 5), -2.0),
        }  # fmt: skip
    if page == "profiling.md":
        GRPOTrainer(GRPOConfig(profile_steps="2", output_dir="runs/profiled")).fit()
    if page == "sick_runs.md":
        GRPOTrainer(GRPOConfig(output_dir="runs/tiny_qwen2-word_problems-seed0")).fit()
    if page == "reliability.md":
        GRPOTrainer(GRPOConfig(output_dir="runs/earlier")).fit()
        return {"trainer": GRPOTrainer(GRPOConfig(output_dir="runs/later"))}
    return {}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_one_after_the_other(page: Path) -> None:
    names = {"__name__": "__main__", **at_hand(page.name)}
    for number, block in enumerate(blocks(page)):
        if block.language == "python" and block.mark is None:
            exec(compile(block.text, f"{page.name}, block {number}", "exec"), names)
