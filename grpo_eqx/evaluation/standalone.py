"""Evaluation of a model, a folder, a run or a checkpoint, without a trainer."""

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from grpo_eqx.checkpoint.checksums import checksums
from grpo_eqx.common.errors import UserError
from grpo_eqx.data.load import first_problems, load_data, load_problems
from grpo_eqx.data.run_inputs import Inputs, load_heldout
from grpo_eqx.distributed.exchange import assert_same_on_all_hosts, from_main, raise_on_all_hosts
from grpo_eqx.distributed.program_facts import code_fingerprint
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.evaluation.evaluator import Batch, Draws, Evaluator, Track
from grpo_eqx.evaluation.result import Evaluation
from grpo_eqx.evaluation.results_file import ResultsFile, saved_time
from grpo_eqx.evaluation.scoring import Grader
from grpo_eqx.evaluation.subject import Subject
from grpo_eqx.models.interface import CausalLM, parameter_name
from grpo_eqx.models.pretrained import model_folder
from grpo_eqx.models.registry import read_config
from grpo_eqx.run.programs import make_programs
from grpo_eqx.run.prompt_lengths import PromptLengths
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.embedded import EMBEDDED_DATA
from grpo_eqx.sharding.mesh import check_hosts, parse_mesh

_EMBEDDED_PROBLEMS = 512
_OF_RESULTS = (
    "system_prompt", "chat_template", "chat_template_kwargs", "max_prompt_length",
    "max_completion_length", "stop_strings", "dtype", "rollout_dtype", "kv_cache_dtype",
    "max_num_seqs", "mesh", "seed",
)  # fmt: skip
_PACKAGES = ("grpo_eqx", "jax", "jaxlib", "equinox", "transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """Model and problems of an evaluation, and the sampling and scoring of completions."""

    model: str
    data: str | None = None
    """Name of the data; `None` for the held-out problems of the model's run, or embedded
    problems."""
    eval_problems: int | None = None
    """Number of problems; `None` for all of `data`, as many as the run's, or 512 embedded ones."""
    num_samples: int | None = None
    """Sampled completions of each problem, besides a greedy completion; `None` for none."""
    temperature: float | None = None
    """Temperature of sampled completions; `None` for 1."""
    eval_func: str = "correct"
    eval_metrics: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings in place of the settings of the model's run."""

    def check(self) -> None:
        """Raises `UserError` for an invalid model, data or number of problems."""
        given = {name: getattr(self, name) for name in ("model", "data", "eval_problems")}
        GRPOConfig(**{name: value for name, value in given.items() if value is not None})

    @property
    def draws(self) -> list[Draws]:
        """Draws of completions, as in training: greedy, then sampled."""
        if self.num_samples is None:
            if self.temperature is not None:
                raise UserError(
                    f"temperature is {self.temperature:g} without num_samples: it would do "
                    f"nothing, as greedy completions have none; give num_samples."
                )
            return [Draws()]
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature <= 0:
            raise UserError(
                f"temperature is {temperature:g}: it must be above 0; a greedy completion is made "
                f"in any case."
            )
        return [Draws(), Draws.checked(temperature, self.num_samples)]


class StandaloneEvaluation:
    """A model on the devices, and the problems to evaluate it on."""

    def __init__(self, question: Question, output: Path, say: Callable[[str], None]):
        """**Arguments:**

        - `question`: what to evaluate.
        - `output`: the file of results, which may have a part of this evaluation's results.
        - `say`: shows the user a line on what begins.

        Raises `UserError`, in all processes, if anything is missing or does not fit.
        """
        self.draws = question.draws
        question.check()
        subject = raise_on_all_hosts(lambda: Subject.find(question.model))
        subject.check_single_turn()
        self.cfg = cfg = GRPOConfig(**{**subject.settings, **question.settings}).resolved()
        scorer = Grader(cfg, question.eval_func, question.eval_metrics)
        mesh = parse_mesh(cfg.mesh).build()
        check_hosts(mesh)
        self.output = output
        moment = from_main(_moment(output, subject).isoformat())
        inputs = raise_on_all_hosts(
            lambda: _inputs(question, subject, cfg, datetime.fromisoformat(moment))
        )
        for note in inputs.notes():
            say(note)
        self.problems, tokenizer = inputs.heldout, inputs.tokenizer
        scorer.check_answers(self.problems.prompts)
        scorer.check_signatures(self.problems.prompts[0].columns)
        if jax.process_count() > 1:
            assert_same_on_all_hosts(inputs.fingerprints())
        config = raise_on_all_hosts(lambda: read_config(model_folder(cfg.model) / "config.json"))
        inputs.check_belong_to(config, cfg)
        lengths = PromptLengths.of(self.problems, self.problems, cfg.max_prompt_length)
        run = RunSpec(cfg, config, lengths)
        programs = make_programs(run, mesh, tokenizer, lambda name: say(f"compiling {name}"))
        say(f"loading the model onto {mesh.size} device{'s' if mesh.size > 1 else ''}")
        self.model = raise_on_all_hosts(lambda: subject.load(run, programs.updater))
        self.evaluator = Evaluator(
            programs.sampler,
            tokenizer,
            self.problems,
            scorer,
            max_prompt_length=cfg.max_prompt_length,
        )
        self.settings = _settings(question, cfg, self.draws, inputs, mesh, self.model)

    def make(self, track: Track, on_progress: Callable[[str], None]) -> list[Evaluation]:
        """Makes the rest of the evaluation, and writes its results.

        **Arguments:**

        - `track`: iterates over batches, and shows the progress.
        - `on_progress`: called after each batch with the progress, in words.

        **Returns:** the evaluations, on process 0.

        Raises `UserError` if the file has results of other settings.
        """
        plan = [(draws, self.evaluator.batch_size(draws)) for draws in self.draws]
        total = len(self.problems)
        # Process 0 writes. A failure there ends all processes.
        file = raise_on_all_hosts(
            lambda: ResultsFile(self.output, self.settings) if is_main() else None
        )
        with contextlib.ExitStack() as stack:
            raise_on_all_hosts(lambda: None if file is None else stack.enter_context(file))
            done = from_main(
                raise_on_all_hosts(lambda: [] if file is None else file.resume(plan, total))
            )
            for (draws, _), first in zip(plan, done, strict=True):
                if first == total:
                    continue
                parts = self.evaluator.batches(self.model, 0, draws, first=first, track=track)
                for batch in parts:
                    raise_on_all_hosts(functools.partial(_add, file, batch))
                    now = batch.first + len(batch.rollout.prompts)
                    on_progress(f"{batch.evaluation.how}: {now:,} of {total:,} problems")
            return raise_on_all_hosts(lambda: [] if file is None else file.finish(self.draws))


def _add(file: ResultsFile | None, batch: Batch) -> None:
    if file is not None:
        file.add(batch)


def _moment(output: Path, subject: Subject) -> datetime:
    """Returns the time in the prompts: from saved results, from the model's run, or now."""
    of_run = None if subject.facts is None else subject.facts.time
    time = saved_time(output) or of_run
    return datetime.now() if time is None else datetime.fromisoformat(time)


def _inputs(question: Question, subject: Subject, cfg: GRPOConfig, moment: datetime) -> Inputs:
    """Reads the tokenizer and the problems."""
    name, most = question.data, question.eval_problems
    own = name is None and subject.of_run
    if own:
        source = load_data(cfg.data, cfg.eval_data, cfg.eval_problems)[1]
        source = first_problems(source, cfg.eval_problems)
    else:
        few = _EMBEDDED_PROBLEMS if name in (None, EMBEDDED_DATA) else None
        source = load_problems(name or EMBEDDED_DATA, few if most is None else most)
    tokenizer, heldout = load_heldout(cfg, source, moment)
    subject.check_tokenizer(tokenizer.fingerprint())
    if own:
        subject.check_problems(heldout.fingerprint())
        if most is not None and most < len(source):
            tokenizer, heldout = load_heldout(cfg, first_problems(source, most), moment)
    return Inputs(tokenizer, heldout, heldout)


def _settings(
    question: Question,
    cfg: GRPOConfig,
    draws: list[Draws],
    inputs: Inputs,
    mesh: jax.sharding.Mesh,
    model: CausalLM,
) -> dict[str, Any]:
    """Returns all that decides the results, for the file of results."""
    arrays = {parameter_name(path): x for path, x in jax.tree.leaves_with_path(model)}
    sums = json.dumps(checksums(arrays), sort_keys=True)
    return {
        "model": question.model,
        "weights": hashlib.sha256(sums.encode()).hexdigest()[:12],
        "tokenizer": inputs.tokenizer.fingerprint(),
        "data": inputs.heldout.name,
        "problems": inputs.heldout.fingerprint(),
        "num_problems": len(inputs.heldout),
        "time": inputs.tokenizer.template.time,
        "draws": [each._asdict() for each in draws],
        "eval_func": question.eval_func,
        "eval_metrics": list(question.eval_metrics),
        **{name: getattr(cfg, name) for name in _OF_RESULTS},
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "versions": {name: version(name) for name in _PACKAGES}
        | {"the code of grpo_eqx": code_fingerprint()},
    }
