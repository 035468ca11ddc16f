"""The command `grpo-eqx eval`."""

import dataclasses
import functools
import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpo_eqx.cli.flags import ends_with_a_line
from grpo_eqx.cli.streams import standard_output
from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.launch.subcommand import Subcommand
from grpo_eqx.settings.config import GRPOConfig

if TYPE_CHECKING:
    import grpo_eqx.evaluation.result
    import grpo_eqx.evaluation.standalone

_SAY_EVERY_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval(Subcommand):
    """Evaluate a model on problems: how many it solves, and between which bounds.

    grpo-eqx eval --model MODEL [--data DATA] [--num-samples 8] [--output results.json]

    A greedy completion of each problem gives pass@1: the same, to the last digit, as in a run that
    scores by the same function. --num-samples adds sampled ones for pass@k and maj@k. If it is
    killed, the same command continues after the problems that are done. On several hosts, start it
    on all of them.
    """

    model: str
    """Model folder, hub name, adapter, or tiny_qwen2, the embedded model; or the folder of a run,
    for its final model or its newest checkpoint, or a checkpoint, such as
    RUN/checkpoints/step_100."""
    data: str | None = None
    """JSONL file with problems, hub name (its split test), or word_problems, the embedded ones.
    None: those that the run has held out, or the embedded ones."""
    num_samples: int | None = None
    """Completions of each problem to sample, for pass@k and maj@k, besides a greedy one. None: a
    greedy one alone."""
    temperature: float | None = None
    """Temperature of the sampled ones. None: 1."""
    eval_problems: int | None = None
    """Number of problems, from the first on. None: all of the data, of the embedded ones 512, of a
    run as many as it evaluates."""
    output: Path | None = None
    """File to write the results to, ending in .json; a line for each problem goes to a file .jsonl
    beside it. None: evals/MODEL-DATA-HASH.json, where the hash is that of the flags."""
    eval_func: str = "correct"
    """Built-in reward function by which 1 means solved: correct (with correct_strict reported
    beside it), correct_strict, format, tags."""
    eval_metrics: tuple[str, ...] = ()
    """Built-in reward functions to report the means of besides."""
    max_completion_length: int | None = None
    """Maximum completion length in tokens. None: that of the run, else as for train."""
    max_prompt_length: int | None = None
    """Maximum prompt length in tokens. None: that of the run, else 1024."""
    system_prompt: str | None = None
    """System message before each problem. None: that of the run, else left to the template."""
    chat_template: str | None = None
    """File with a chat template (Jinja), or none for problems without one. None: that of the run,
    else the tokenizer's own."""
    stop_strings: tuple[str, ...] | None = None
    """Strings that end a completion. None: those of the run, else none."""
    rollout_dtype: Literal["auto", "bfloat16", "int8"] | None = None
    """Dtype of the weights while sampling. None: that of the run, else auto."""
    mesh: str | None = None
    """Device mesh as dp,fsdp,tp. None: auto."""
    seed: int | None = None
    """Seed of sampling. None: that of the run, else 0."""

    def run(self, command: tuple[str, ...]) -> int:
        with ends_with_a_line(), standard_output():
            self._evaluate()
        return 0

    def _evaluate(self) -> None:
        from grpo_eqx.distributed.startup import is_main, join_processes
        from grpo_eqx.evaluation.standalone import Question, StandaloneEvaluation
        from grpo_eqx.tracking.stages import Stages, track_on_terminal
        from grpo_eqx.training.compilation import use_compilation_cache

        given = {name: getattr(self, name) for name in _SETTINGS}
        settings = {name: value for name, value in given.items() if value is not None}
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(Question)
            if field.name != "settings"
        }
        question = Question(**own, settings=settings)
        join_processes(GRPOConfig(**settings))
        use_compilation_cache()
        stages = Stages()
        output = self._default_output() if self.output is None else self.output
        evaluation = StandaloneEvaluation(question, output, stages.say)
        said = time.monotonic()

        def say_sometimes(done: str) -> None:
            nonlocal said
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                stages.say(done)

        track = functools.partial(track_on_terminal, description="completing prompts")
        results = evaluation.make(track, say_sometimes)
        if is_main():
            _print(results, f"{self.model} on {evaluation.problems.name}", self.eval_func)
            print_clean(
                f"the results are in {output}, and each problem in {output.with_suffix('.jsonl')}"
            )

    def _default_output(self) -> Path:
        """Returns a file of results, named after the flags."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:6]
        parts = [_last_part(x) for x in (self.model, self.data) if x is not None]
        return Path("evals") / f"{'-'.join([*parts, digest])}.json"


_SETTINGS = (
    "max_completion_length", "max_prompt_length", "system_prompt", "chat_template",
    "stop_strings", "rollout_dtype", "mesh", "seed",
)  # fmt: skip
"""Flags that are also settings of a run."""


def _last_part(name: str) -> str:
    """Returns the last part of a path or name, in characters that suit file names."""
    return re.sub(r"[^\w.-]+", "-", name.rstrip("/").rsplit("/", 1)[-1]).removesuffix(".jsonl")


def _print(
    evaluations: Sequence["grpo_eqx.evaluation.result.Evaluation"], title: str, eval_func: str
) -> None:
    from rich.table import Table

    from grpo_eqx.tracking.safe_console import safe_console

    num = f"{len(evaluations[0].solved):,} problems"
    table = Table(title=f"{title}, {num}, solved by {eval_func}", title_justify="left")
    table.add_column("completions")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    for evaluation in evaluations:
        for i, (name, estimate) in enumerate(evaluation.estimates().items()):
            shares = name not in evaluation.scores
            shown = [f"{100 * x:.1f} %" if shares else f"{x:.4g}" for x in estimate]
            how = evaluation.how.replace("_", " ") if i == 0 else ""
            table.add_row(how, name, shown[0], f"{shown[1]} to {shown[2]}")
        table.add_section()
    safe_console().print(table)
