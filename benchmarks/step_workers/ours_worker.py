"""Times GRPO steps of grpo_eqx, for step.py: python ours_worker.py WORK."""

import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from work import EOS_ID, LEARNING_RATE, Stopwatch, Work, reward, work_of_command

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.common.random_keys import make_key
from grpo_eqx.data.prompts import Prompt, PromptSource
from grpo_eqx.models.cost import rollout_flops, update_flops
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.tracking import Tracker
from grpo_eqx.tracking.device_peaks import device_peaks


@dataclasses.dataclass(frozen=True)
class Texts(PromptSource):
    texts: list[str]
    name: str = "random text"

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(self.texts[index], {}, plain=True)


class Watch(Tracker):
    def __init__(self, work: Work, config: Qwen2Config) -> None:
        self.config = config
        self.stopwatch = Stopwatch(work)
        self.parts: list[dict[str, float]] = []

    def log(self, step: int, metrics: Any) -> None:
        self.stopwatch.step_ends()
        self.stopwatch.lengths.append(metrics["completions/mean_length"])
        self.parts.append({k: v for k, v in metrics.items() if k.startswith(("time/", "perf/"))})

    def finish(self) -> None:
        parts = self.parts[self.stopwatch.work.warmup_steps :]
        means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        peaks = device_peaks(jax.devices()[0].device_kind)
        self.stopwatch.report(
            parts=means, peaks=peaks and peaks._asdict(), flops=self.model_flops()
        )

    def model_flops(self) -> dict[str, float]:
        """FLOPs of a step's parts, if all completions had the mean length: nothing recomputed."""
        work, lengths = self.stopwatch.work, self.stopwatch.lengths
        prompts = np.full(work.prompts, work.prompt_length)
        mean = statistics.fmean(lengths[work.warmup_steps :])
        lengths_of = self.config, prompts, np.full((work.prompts, work.group), mean)
        return {"rollout": rollout_flops(*lengths_of), "update": update_flops(*lengths_of)}


def main(work: Work, folder: Path) -> None:
    model = Qwen2.init(Qwen2Config(**work.model_config()), make_key(0))
    model = eqx.tree_at(lambda m: m.embed_tokens, model, model.embed_tokens.at[EOS_ID].set(0.0))
    data = Texts(work.texts())
    takes_all = work.micro_batch == work.prompts * work.group
    cfg = GRPOConfig(
        steps=work.warmup_steps + work.steps,
        prompts_per_step=work.prompts,
        num_generations=work.group,
        max_prompt_length=work.prompt_length,
        max_completion_length=work.completion_length,
        micro_batch_size_per_device=None if takes_all else work.micro_batch,
        learning_rate=LEARNING_RATE,
        log_completions_steps=0,
        output_dir=folder / "run",
    )
    GRPOTrainer(
        cfg,
        model=model,
        tokenizer=work.tokenizer(),
        reward_funcs=[reward],
        train_data=data,
        eval_data=data,
        trackers=[Watch(work, model.config)],
    ).fit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(work_of_command(), Path(folder))
