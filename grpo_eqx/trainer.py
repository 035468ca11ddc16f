"""`GRPOTrainer`: Group Relative Policy Optimization (arXiv 2402.03300) as a host loop."""

import contextlib
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from grpo_eqx.checkpoint.checkpoints import Checkpoints, Resumable
from grpo_eqx.checkpoint.preemption import StopRequest
from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.common.choices import LOCAL, Searchable
from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError, near
from grpo_eqx.data.acted import Acted, ToolCounts, as_text
from grpo_eqx.data.batches import PromptBatches
from grpo_eqx.data.load import Data
from grpo_eqx.data.prompts import Seeds
from grpo_eqx.data.records import GivenPrompt
from grpo_eqx.data.run_inputs import encode_prompts, hub_commits
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.distributed.exchange import from_main, raise_on_all_hosts
from grpo_eqx.distributed.lost_hosts import explains_lost_hosts
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.distributed.watchdog import Watchdog
from grpo_eqx.environments.acting import ActingSampler
from grpo_eqx.environments.harness import Harness, HarnessReward, harness_name
from grpo_eqx.environments.make_acting import make_acting
from grpo_eqx.environments.pool import Environments, Factory
from grpo_eqx.environments.rollout_func import RolloutFunc
from grpo_eqx.evaluation.evaluator import Draws, Evaluator, completed
from grpo_eqx.evaluation.in_training import TrainingEvaluations
from grpo_eqx.evaluation.result import Evaluation
from grpo_eqx.evaluation.scoring import EvalMetrics, Grader
from grpo_eqx.loop.callback_calls import check_callbacks
from grpo_eqx.loop.callbacks import Callback, RunView
from grpo_eqx.loop.fit_result import FitResult
from grpo_eqx.loop.learner import Learner
from grpo_eqx.loop.metric_names import check_best_metric
from grpo_eqx.loop.resumption import (
    ResumeSource,
    find_resumable,
    notes_on,
    resuming_from,
    will_train,
)
from grpo_eqx.loop.start import check_same_code, folder_lock, join_run
from grpo_eqx.loop.step_metrics import StepMetrics
from grpo_eqx.loop.training_events import TrainingEvents
from grpo_eqx.loss_backends import LossBackend
from grpo_eqx.models.hub import upload
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.pretrained import save_pretrained
from grpo_eqx.objective import compute_advantages
from grpo_eqx.planner import Plan
from grpo_eqx.planner.devices import find_target
from grpo_eqx.planner.out_of_memory import explains_out_of_memory
from grpo_eqx.planner.plan_run import plan_run
from grpo_eqx.planner.search import fitting
from grpo_eqx.rewards import RewardFunc, gsm8k
from grpo_eqx.rewards.make_rewards import RewardFuncs, make_rewards
from grpo_eqx.rewards.runner import func_name
from grpo_eqx.rewards.signatures import check_signatures
from grpo_eqx.rollout.collector import RolloutCollector, SamplingInterrupted
from grpo_eqx.rollout.rollout import Rollout
from grpo_eqx.run.initial_state import initial_state, state_shapes, untrained_state
from grpo_eqx.run.passed import Passed, as_config, check_trackers, note_on_replaced, one_of
from grpo_eqx.run.programs import make_programs
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.run.to_compile import evaluation_rows, in_order_of_use, sampling_programs
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.embedded import EMBEDDED_DATA, EMBEDDED_MODEL
from grpo_eqx.sharding import Mesh, RolloutSharding
from grpo_eqx.sharding.arrays import fetch
from grpo_eqx.sharding.layout_report import LayoutReport
from grpo_eqx.tracking.compile_phases import CompilePhases, CompileTimes
from grpo_eqx.tracking.completions_table import completion_columns, token_columns
from grpo_eqx.tracking.final_model import write_final_model, write_model
from grpo_eqx.tracking.memory import MemoryGauge
from grpo_eqx.tracking.metrics import StepClock
from grpo_eqx.tracking.run_folder import PASSED, RunFolder
from grpo_eqx.tracking.run_record import RunRecord
from grpo_eqx.tracking.stages import Stages, track_on_terminal
from grpo_eqx.tracking.step_profiler import StepProfiler, phase
from grpo_eqx.tracking.trackers import Tracker
from grpo_eqx.training.compilation import CompilationCounter, use_compilation_cache
from grpo_eqx.training.optimizer import learning_rate
from grpo_eqx.training.reference import mixed, sync_is_due
from grpo_eqx.training.state import TrainState
from grpo_eqx.training.update_guard import count_skipped

_TRACK = functools.partial(track_on_terminal, description="completing prompts")
_FEWEST_PROMPTS = 8
"""Prompts for which `generate` compiles programs at least."""


def _say(text: str) -> None:
    """Prints progress on long work."""
    if is_main():
        print_clean(near(text), file=sys.stderr)


def _say_here(text: str) -> None:
    """Prints what happens to this process."""
    where = "" if is_main() else f"process {jax.process_index()}: "
    print_clean(where + near(text), file=sys.stderr)


def _note_on_ids(count: int, vocab_size: int) -> str | None:
    """Returns a note on ids of the model for which its tokenizer has no token, or `None`."""
    if not count:
        return None
    return (
        f"note: the tokenizer has no token for {count:,} of the model's {vocab_size:,} ids, which "
        f"can be drawn; completions/num_ids_without_token counts them."
    )


class GRPOTrainer:
    """Trains a language model on problems with rewards.

    ```python
    trainer = GRPOTrainer(GRPOConfig(steps=100))
    trainer.fit()
    ```

    Whatever the config names can be passed as an object instead.
    """

    def __init__(
        self,
        cfg: GRPOConfig | None = None,
        *,
        model: CausalLM | str | Path | None = None,
        tokenizer: ChatTokenizer | Any | None = None,
        reward_funcs: RewardFuncs | None = None,
        train_data: Data | None = None,
        eval_data: Data | None = None,
        eval_func: RewardFunc | str = gsm8k.correct,
        eval_metrics: EvalMetrics = (),
        optimizer: optax.GradientTransformation | None = None,
        mesh: Mesh | None = None,
        rollout_sharding: RolloutSharding | None = None,
        loss_backend: LossBackend | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Factory | Mapping[str, Factory] | None = None,
        rollout_func: RolloutFunc | None = None,
        harness: Harness | str | None = None,
        trackers: Sequence[Tracker] = (),
        callbacks: Sequence[Callback] = (),
        args: GRPOConfig | None = None,
        train_dataset: Data | None = None,
        eval_dataset: Data | None = None,
        processing_class: ChatTokenizer | Any | None = None,
    ):
        """**Arguments:**

        - `cfg`: the settings; by default the embedded model on the embedded problems.
        - `model`, `tokenizer`: in place of `cfg.model`; a folder or hub name, or a model with its
          tokenizer, one of transformers or a `ChatTokenizer` (with its own system prompt).
        - `reward_funcs`: callables with TRL's reward signature, or names of built-in ones; one, a
          list, or a dict with the names that they are logged under.
        - `train_data`, `eval_data`: a `datasets.Dataset`, a list of dicts, a path, a hub name or a
          `PromptSource`, in place of `cfg.data` and `cfg.eval_data`.
        - `eval_func`: scores an evaluation's completions; 1.0 means solved. One that it fails on,
          where failures do not stop the run, is not solved. By default `get_reward` of environments
          that have it.
        - `eval_metrics`: functions with the same signature, by name or as a list, whose means an
          evaluation reports besides.
        - `optimizer`: any optax transformation, complete with learning rate and clipping.
        - `mesh`, `rollout_sharding`, `loss_backend`: strategy objects.
        - `tools`: functions, plain or async, that the model can call; it knows them by their type
          hints and docstrings.
        - `environment_factory`: a class of environments, of which each completion has an instance:
          its public methods are tools, or it is an `Environment`. Or several by name, of which each
          problem names one in a column `environment`. Without data, `reset(seed=...)` makes the
          prompt of each problem.
        - `rollout_func`: makes the completions of a step in place of the trainer, which generates
          for it: see `grpo_eqx.environments.RolloutFunc`.
        - `harness`: a function `run(endpoint, row)` that has an agent make a completion, over HTTP,
          and returns its reward: see `grpo_eqx.environments.Harness`. Or a command line, in place
          of `cfg.harness`.
        - `trackers`: destinations of metrics besides the run folder.
        - `callbacks`: objects that are told of the run's events, and may end it.
        - `args`, `train_dataset`, `eval_dataset`, `processing_class`: TRL's names of `cfg`,
          `train_data`, `eval_data` and `tokenizer`.

        Raises `UserError` for whatever cannot work, before anything is trained, and `RunError`
        where hosts of the run do not join. Turns JAX's cache of compiled programs on
        (`grpo_eqx.training.compilation`).
        """
        self._stages = Stages()
        check_trackers(trackers)
        check_callbacks(callbacks)
        cfg = one_of(args=args, cfg=cfg)
        train_data = one_of(train_dataset=train_dataset, train_data=train_data)
        eval_data = one_of(eval_dataset=eval_dataset, eval_data=eval_data)
        given = as_config(cfg, model, train_data, eval_data, harness)
        join_run(given, callbacks)  # before a user's class may touch devices
        self._environments = Environments(
            tools, environment_factory, given.tool_timeout, given.tool_workers
        )
        if self._environments.make_prompts and given.data == EMBEDDED_DATA and train_data is None:
            self._environments.check_rewarded(reward_funcs)
            train_data = Seeds()
        own_harness = given.harness if harness is None else harness
        passed = Passed(
            model=None if isinstance(model, str | Path) else model,
            tokenizer=one_of(processing_class=processing_class, tokenizer=tokenizer),
            train_data=train_data,
            eval_data=eval_data,
            optimizer=optimizer,
            mesh=mesh,
            rollout_sharding=rollout_sharding,
            loss_backend=loss_backend,
            tools=self._environments.schemas,
            rollout_func=rollout_func,
            harness=None if isinstance(harness, str) else harness,
            changes_prompts=bool(self._environments.kinds)
            or rollout_func is not None
            or own_harness is not None,
        )
        self._watchdog = Watchdog(given.hang_timeout)
        cache = use_compilation_cache()
        architecture = None if passed.model is None else passed.model.config.to_json()
        self._notes: tuple[str | None, ...] = (
            given.note_on_defaults(architecture),
            given.without_effect(),
            note_on_replaced(
                given,
                reward_funcs=reward_funcs,
                optimizer=optimizer,
                mesh=mesh,
                rollout_sharding=rollout_sharding,
                loss_backend=loss_backend,
                harness=passed.harness,
            ),
        )
        self.cfg = cfg = given.resolved(architecture).with_absolute_paths()
        self._lock = folder_lock(cfg)
        own_rewards = dict(self._environments.own_rewards)
        if own_harness is not None:
            own_rewards[harness_name(own_harness)] = HarnessReward(harness_name(own_harness))
        self.rewards = raise_on_all_hosts(lambda: make_rewards(self.cfg, reward_funcs, own_rewards))
        if eval_func is gsm8k.correct:
            eval_func = self._environments.own_score or eval_func
            eval_func = (
                eval_func if own_harness is None else HarnessReward(harness_name(own_harness))
            )
        games = self._environments.game_rewards
        scorer = raise_on_all_hosts(lambda: Grader(self.cfg, eval_func, eval_metrics, games))
        self._code = self._environments.code  # of what acts in completions
        if rollout_func is not None:
            self._code = {**self._code, func_name(rollout_func): rollout_func}
        if passed.harness is not None:
            self._code = {**self._code, harness_name(passed.harness): passed.harness}
        check_same_code({**self.rewards.funcs, **scorer.funcs, **self._code})
        replaced = passed.described()
        replaced |= self._environments.described()
        if rollout_func is not None:
            replaced["rollout_func"] = func_name(rollout_func)
        if passed.harness is not None:
            replaced["harness"] = harness_name(passed.harness)
        if reward_funcs is not None or own_rewards:
            replaced["reward_funcs"] = ", ".join(self.rewards.funcs)
        self._passed = {setting: f"{kind}{PASSED}" for setting, kind in replaced.items()}
        if isinstance(train_data, Seeds):
            self._passed["data"] = "prompts of the environment"
        self._load_inputs(passed, scorer)
        self._load_model(scorer, cache)
        self.trackers = trackers
        self.callbacks = callbacks
        self._record: RunRecord | None = None
        self._early_evaluations: list[tuple[int, Mapping[str, float]]] = []
        self._starts_up = True

    def _load_inputs(self, passed: Passed, scorer: Grader) -> None:
        """Reads the tokenizer and the problems, and checks that they suit what scores them."""
        with self._stages.lasting("loading the tokenizer and the problems"):
            self._run, inputs = RunSpec.load(self.cfg, passed)
        self.cfg = cfg = self._run.cfg
        self.tokenizer, data, self.heldout = inputs
        self._fingerprints = inputs.fingerprints()
        self._notes += tuple(inputs.notes())
        self.prompts = PromptBatches(
            data,
            batch_size=cfg.prompts_per_step,
            seed=cfg.seed,
        )
        self._check_problems(scorer)

    def _load_model(self, scorer: Grader, cache: str | None) -> None:
        """Builds the mesh and the programs, and loads the model onto the devices.

        **Arguments:**

        - `scorer`: scores evaluations.
        - `cache`: the folder of compiled programs.
        """
        passed, self.mesh = self._run.passed, self._run.build_mesh()
        rollout_mesh = self._run.rollout_mesh()
        meshes = [self.mesh] if rollout_mesh is None else [self.mesh, rollout_mesh]
        devices = [device for mesh in meshes for device in mesh.devices.flat]
        self._run = fitting(self._run, devices, self._stages.say)
        self.cfg = cfg = self._run.cfg
        # The course of a passed optimizer's learning rate is not known.
        rate = None if passed.optimizer is not None else functools.partial(learning_rate, cfg)
        compiling = CompilePhases(self._stages, CompileTimes(cache, cfg.model, self.mesh))
        self.programs = make_programs(
            self._run, self.mesh, self.tokenizer, compiling.begin,
            rollout_mesh=rollout_mesh,
        )  # fmt: skip
        self.sampler = self.programs.sampler
        self._learner = Learner(
            self.programs.scorer, self.programs.updater, self.programs.rollout_rows,
            self.programs.update_rows, cfg, self._run.passes,
        )  # fmt: skip
        self._acting = make_acting(
            self.sampler, self._environments, self.tokenizer, cfg, passed.rollout_func,
            passed.harness or cfg.harness, self._run.open_shape,
        )  # fmt: skip
        self._step_metrics = StepMetrics(
            cfg, self.sampler, self._learner, self.programs.compiler.num_shapes, rate
        )
        self._evaluator = Evaluator(
            self.sampler, self.tokenizer, self.heldout, scorer,
            max_prompt_length=cfg.max_prompt_length, acting=self._acting,
        )  # fmt: skip
        self._evaluations = TrainingEvaluations(cfg, self._evaluator)
        vocab_size = self._run.model.vocab_size
        without_token = self.tokenizer.ids_without_token(vocab_size)
        self._notes += (_note_on_ids(len(without_token), vocab_size),)
        check_best_metric(
            cfg, self.rewards, self.programs.updater.options.objective, self._run.passes,
            self._run.model, self.evaluation_names, without_token,
        )  # fmt: skip
        is_loaded = passed.model is None and cfg.model != EMBEDDED_MODEL
        if is_loaded and not passed.changes_prompts and will_train(cfg, self._facts(cfg)):
            # While the weights load. Only what the first step waits for: a trainer may never be
            # fitted.
            self.programs.compiler.start(
                sampling_programs(self._run, self.programs, self._prompt_widths()[0])
            )
        on_devices = f"{self.mesh.size} device{'s' if self.mesh.size > 1 else ''}"
        loading = self._stages.lasting(f"loading the model onto {on_devices}")
        with self._stages.silent_after_errors(), loading:
            self.state = self._initial_state()
        self._base_model = self._run.base_model
        self._run = self._run.without_passed_model()
        self.rollouts = RolloutCollector(
            self._acting or self.sampler, self.prompts, self.tokenizer, self.rewards, cfg,
            self.mesh, without_token, acts=self._acting is not None,
        )  # fmt: skip

    def _check_problems(self, scorer: Grader) -> None:
        """Raises `UserError` where the problems lack what the reward functions need of them."""
        problems, funcs = self.prompts.data.prompts, self.rewards.funcs
        built_in = (gsm8k.correct, gsm8k.correct_strict)
        if any(func in built_in for func in funcs.values()):
            gsm8k.check_answers(problems)
            scorer.check_answers(self.heldout.prompts)
        for each in (problems[0], self.heldout.prompts[0]):
            self._environments.check_columns(each.columns)
        acts, workers = bool(self._environments.kinds), self.cfg.reward_workers
        # What a function adds to the columns is not known before it is called.
        if not self._run.makes_completions:
            check_signatures(
                funcs, problems[0].columns, environments=acts, workers=workers, in_training=True
            )
            scorer.check_signatures(self.heldout.prompts[0].columns, environments=acts)

    @explains_lost_hosts
    @explains_out_of_memory
    def fit(self, resume_from_checkpoint: str | Path | bool | None = None) -> FitResult:
        """Trains for the remaining of `cfg.steps` steps, and writes the run folder.

        **Arguments:**

        - `resume_from_checkpoint`: a run folder or checkpoint to resume from, in place of
          `cfg.resume`. As in TRL, `True` means the newest checkpoint in the folder of the run,
          which must have one, and `False` means none.

        Raises `UserError` where the checkpoint is of another run, or cannot be read; the trainer
        can be used as before. Raises `RunError` where another host of the run is gone.
        """
        cfg = self.cfg
        if self.state.step >= cfg.steps:
            raise UserError(
                f"this trainer has finished its {cfg.steps} steps: create a new one, with more "
                f"steps, to continue."
            )
        with StopRequest(cfg.preemption_deadline, _say_here) as stop, self._watchdog, self._lock:
            checkpoints = self._checkpoints(stop, resume_from_checkpoint)
            again = self.state.step > 0 and resume_from_checkpoint is None  # in this process
            found = (
                None if again
                else find_resumable(checkpoints, resume_from_checkpoint, self._saved_shapes)
            )  # fmt: skip
            continued = again or (found is not None and found.folder == checkpoints.folder)
            folder = RunFolder(checkpoints.folder.parent)
            raise_on_all_hosts(lambda: folder.check_start(continued=continued))
            with self.rewards, self._acting or contextlib.nullcontext():
                if (self.state.step if found is None else found.steps[0]) < cfg.steps:
                    tried = "environment and rewards" if self._environments.kinds else "rewards"
                    with self._stages.lasting(f"trying {tried} on one completion"):
                        raise_on_all_hosts(self._try_rewards)
                elsewhere = isinstance(resume_from_checkpoint, str | Path)
                recorded = checkpoints.cfg if elsewhere else cfg  # which says where it began
                if found is not None:  # last, so that a refusal leaves everything as it was
                    self._restore(checkpoints, found)
                    for note in notes_on(found, self._passed, continued=continued):
                        _say(note)
                self._record = record = RunRecord(
                    recorded, self.layout(), self.trackers, passed=self._passed,
                    only_history=not is_main(), step=self.state.step, continued=continued,
                )  # fmt: skip
                profiler = StepProfiler(
                    cfg.profile_steps if is_main() else None, record.folder.profile, record.note,
                    of_memory=cfg.profile_memory,
                )  # fmt: skip
                with record, checkpoints, self.programs.compiler, profiler, self.rollouts:
                    stopped = self._train(record, checkpoints, profiler)
            write_final_model(self._save_model, record.folder.model)
        seconds = sum((metrics["step_time"] for metrics in record.history), 0.0)
        path = Path(near(str(record.folder.path)))
        return FitResult(path, record.history, seconds, record.evaluations, stopped)

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> FitResult:
        """Trains: `fit` by TRL's name."""
        return self.fit(resume_from_checkpoint)

    def _train(
        self, record: RunRecord, checkpoints: Checkpoints, profiler: StepProfiler
    ) -> str | None:
        """Makes the remaining steps; returns which callback ended them before, and why."""
        cfg = self.cfg
        first = self.describe(), self.tokenizer.describe_ends(), str(record.layout)
        for text in (*first, *self._notes, self._evaluation_note()):
            if text is not None:
                record.note(text)
        for step, metrics in self._early_evaluations:
            record.evaluation(step, metrics)
        view = RunView(
            cfg=cfg,
            tokenizer=self.tokenizer,
            generate=self.generate,
            evaluate=self.evaluate,
            save_pretrained=self.save_pretrained,
            evaluation_names=self.evaluation_names,
            num_callbacks=len(self.callbacks),
        )
        events = TrainingEvents(
            view, lambda: self.state, self.callbacks, self._evaluations, record, checkpoints,
            self._stages, self._watchdog.progress,
        )  # fmt: skip
        if not events.ends:
            widths = self._prompt_widths(self.state.next_batch)
            self.programs.compiler.start(in_order_of_use(self._run, self.programs, widths))
        events.begin()
        clock, compiled = StepClock(self._note_progress), CompilationCounter()
        memory = MemoryGauge(jax.local_devices())
        began = self._stages.seconds
        while not events.ends:
            clock.skip(profiler.begin(self.state.step + 1))
            try:
                kept, made = self.rollouts.next(
                    self.state, clock, lambda rollout: self._learner.begin(self.state, rollout),
                    checkpoints.is_asked_to_stop if cfg.samples_ahead
                    else checkpoints.are_interrupted,
                )  # fmt: skip
            except SamplingInterrupted:
                self.state = dataclasses.replace(self.state, carried=self.rollouts.carried())
                checkpoints.save_and_stop(self.state)
            assert kept.rewards is not None
            advantages = compute_advantages(
                kept.rewards.total,
                kept.rewards.each,
                kept.rewards.weights,
                estimator=cfg.advantage_estimator,
                scale_rewards=cfg.scale_rewards or "none",
                aggregation=cfg.multi_objective_aggregation,
            )
            updates = self._update(kept, advantages)
            self._count_step(made)
            # Before the update's end, so that devices need not wait for the host; but a checkpoint
            # and an evaluation would have to wait for the rollout.
            is_evaluated = self._evaluations.are_due(self.state.step)
            saves = checkpoints.are_due(self.state.step, is_evaluated=is_evaluated)
            memory.meet()  # here, as processes have just met, and the next rollout takes long
            if not (saves or is_evaluated):
                self.rollouts.start(self.state)
            metrics = self._metrics(kept, made, updates, clock, checkpoints)
            metrics |= compiled.metrics() | memory.metrics()
            if self._starts_up:
                metrics |= self._startup(began)
            metrics |= self.rollouts.logged(made, metrics)
            clock.next_step()
            metrics |= events.step_ended(metrics)
            record.step(self.state.step, metrics)
            if record.wants_completions(self.state.step):
                record.completions(
                    completion_columns(
                        self.state.step, kept.shown_prompts, kept.shown_texts, kept.groups,
                        kept.rewards, advantages, kept.acted,
                    ),
                    token_columns(kept.groups, self.tokenizer),
                )  # fmt: skip
            clock.skip(profiler.end())
            if is_evaluated or checkpoints.saves or events.ends:
                self.rollouts.settle(stops=checkpoints.stops)
                self.state = dataclasses.replace(self.state, carried=self.rollouts.carried())
            # Last, so that a checkpoint's step has all of its records.
            clock.skip(events.evaluate_and_save(metrics))
            compiled = CompilationCounter()
        return events.ended()

    @explains_lost_hosts
    @explains_out_of_memory
    def evaluate(self, *, temperature: float = 0.0, num_samples: int = 1) -> Evaluation:
        """Solves up to `cfg.eval_problems` held-out problems: by default greedy pass@1.

        The run records it: `fit` those before it, in metrics.jsonl and all trackers.

        **Arguments:**

        - `temperature`: sampling temperature, 0 for greedy.
        - `num_samples`: completions of each problem, for `Evaluation.pass_at`.

        The draws are the same at every call.
        """
        draws = Draws.checked(float(temperature), num_samples)
        self.rollouts.settle()
        step = self.state.step
        when = f"after {step:,} step{'s' if step > 1 else ''}" if step else "before training"
        doing = f"evaluating on {len(self.heldout):,} problems {when}"
        acting = self._acting or contextlib.nullcontext()
        with self._stages.lasting(doing), self._watchdog, acting:
            evaluation = self._evaluator.evaluate(
                self.state.model, step, draws,
                on_progress=self._watchdog.progress,
                track=_TRACK,
            )  # fmt: skip
        assert evaluation is not None  # nothing interrupts it
        if self._record is None:
            self._early_evaluations.append((step, evaluation.metrics()))
        else:
            self._record.evaluation(step, evaluation.metrics())
        return evaluation

    @property
    def evaluation_names(self) -> list[str]:
        """Names of the metrics of the evaluations that `eval_steps` plans; empty without it."""
        return self._evaluations.metric_names

    @explains_lost_hosts
    @explains_out_of_memory
    def generate(self, prompts: Iterable[GivenPrompt], *, temperature: float = 0.0) -> list[str]:
        """Completes each prompt once, by default greedily.

        **Arguments:**

        - `prompts`: texts, conversations, rows as data have them, or `Prompt` objects. A text is
          what the problems of the run are: a question, which the chat template renders, or a text
          that the model continues as it is.
        - `temperature`: sampling temperature, 0 for greedy.

        Raises `UserError` for a prompt that has more than `max_prompt_length` tokens.
        """
        problems, tokens = encode_prompts(
            prompts, self.cfg, self.tokenizer, self.state.model.config,
            like=self.prompts.data.prompts[0], needs_prompt=not self._environments.kinds,
        )  # fmt: skip
        if not tokens:
            return []
        self.rollouts.settle()
        for problem in problems:
            self._environments.check_columns(problem.columns, "give rows, as in [{'seed': 7}]")
        with self._watchdog, self._acting or contextlib.nullcontext():
            sampler = self._acting or self.sampler
            sampler.set_weights(self.state.model, self.state.step)
            parts = completed(
                sampler, problems, tokens, Draws(float(temperature)),
                # Few sizes, as each compiles programs of its own.
                batch_size=evaluation_rows(
                    max(_FEWEST_PROMPTS, 1 << (len(tokens) - 1).bit_length()), 1,
                    self.sampler.mesh.size,
                ),
                max_prompt_length=self.cfg.max_prompt_length, track=_TRACK,
            )  # fmt: skip
            ids, texts = list[list[int]](), list[str]()
            for groups, acted in parts:
                ids += [group[0].ids.tolist() for group in groups]
                texts += [] if acted is None else map(as_text, acted.messages)
            return texts or self.tokenizer.decode_completions(ids)

    def plan(self, topology: str = LOCAL, search: Searchable | None = None) -> Plan:
        """Plans whether this run fits a described TPU slice, or the devices at hand.

        **Arguments:**

        - `topology`: a TPU type (`v6e-16`) or grid (`v6e:4x4`), for which the `plan` extra brings
          the compiler, or `local`.
        - `search`: a setting, to look for the largest value with which the run fits.

        Compiles the run's programs, with the objects that were passed for its settings, and
        micro-batches of the size that `auto` found for the devices at hand. Raises `UserError`
        where the mesh, the batches or the model do not fit the devices.
        """
        # Each process plans on its own and may stop at a different time.
        alone = jax.process_count() == 1
        return plan_run(self._run, find_target(topology), _say, search, help_if_not=alone)

    def save_pretrained(self, path: str | Path) -> None:
        """Writes model and tokenizer as a folder that Hugging Face transformers loads.

        Raises `UserError` where the path cannot be a folder, or cannot be written.
        """
        write_model(self._save_model, path)

    def _save_model(self, folder: Path) -> None:
        """Writes model and tokenizer; raises `OSError` where the folder cannot be written."""
        model = self.state.model
        # A model that was passed has no name by which an adapter could find it again.
        model = model.merged() if self._base_model is None else model
        save_pretrained(model, folder, base=self._base_model)
        if is_main():
            self.tokenizer.save_pretrained(folder)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Writes the model: `save_pretrained`, by default to `model/` in the run's folder.

        Raises `UserError` where there is no run yet, and no folder is given.
        """
        assert self.cfg.output_dir is not None  # resolved
        run = RunFolder(self.cfg.output_dir)
        if output_dir is None and self._record is None:
            raise UserError("nothing is trained yet: name a folder, as in save_model('untrained').")
        self.save_pretrained(run.model if output_dir is None else output_dir)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, revision: str | None = None
    ) -> str:
        """Uploads model and tokenizer to the Hugging Face hub, with the token of `HF_TOKEN`.

        **Arguments:**

        - `repo_id`: `owner/name`, or a name without owner for your own account.
        - `private`: whether a new repository is private.
        - `revision`: the branch; by default `main`.

        **Returns:** the address of the commit. Raises `RunError` where the hub refuses, and
        `UserError` for a name that it does not allow.
        """
        with tempfile.TemporaryDirectory() as scratch:
            self.save_pretrained(scratch)

            def uploaded() -> str:
                if not is_main():
                    return ""
                return upload(Path(scratch), repo_id, private=private, revision=revision)

            return from_main(raise_on_all_hosts(uploaded))

    def layout(self) -> LayoutReport:
        """Reports how the run is laid out on its devices."""
        state = self.state
        rollout = self.sampler.layout(*self._run.sampled_shape)
        return LayoutReport.of(self.mesh, rollout, state.model, state.opt_state, state.reference)

    def describe(self) -> str:
        """Describes the model and the data in one line."""
        model, data = self.state.model, self.prompts.data
        size = sum(x.size for x in jax.tree.leaves(model))
        trained = sum(x.size for x in jax.tree.leaves(eqx.filter(model, model.trainable)))
        of_them = "" if trained == size else f", {trained:,} of them trained"
        return (
            f"{self.cfg.model} ({size:,} parameters{of_them}) on {data.name}: "
            f"{len(data):,} problems"
            + (f" ({data.num_dropped:,} overlong ones dropped)" if data.num_dropped else "")
            + f", {len(self.heldout):,} held out"
        )

    @property
    def can_evaluate(self) -> bool:
        """Whether the held-out problems have what `eval_func` compares with, as far as known."""
        return self._evaluation_note() is None

    def _evaluation_note(self) -> str | None:
        """Returns a note if the held-out problems need another `eval_func` than the default."""
        try:
            self._evaluator.scorer.check_answers(self.heldout.prompts)
        except UserError as error:
            return f"note: evaluate() cannot score the held-out problems: {error}"
        return None

    def _checkpoints(self, stop: StopRequest, source: ResumeSource) -> Checkpoints:
        """Makes the checkpoints of the run, to resume from a source in place of `cfg.resume`."""
        cfg = resuming_from(self.cfg, source)
        processes = {device.process_index for device in self.mesh.devices.flat}
        return Checkpoints(
            cfg, self._facts(cfg), stop, _say, self._stages.started,
            processes if len(processes) < jax.process_count() else None,
        )  # fmt: skip

    def _facts(self, cfg: GRPOConfig) -> RunFacts:
        return RunFacts.of(
            cfg, self._fingerprints, hub_commits(cfg), self.rewards.funcs,
            self.tokenizer.template.time, self._code,
        )  # fmt: skip

    def _saved_shapes(self) -> TrainState:
        """Returns the shapes of what a checkpoint of the run holds."""
        return state_shapes(self._run, self.programs.updater).saved()

    def _restore(self, checkpoints: Checkpoints, found: Resumable) -> None:
        """Replaces the state by that of a checkpoint."""
        before = self.state
        # Two states may not fit the devices. A state and the parameters do: an update has as many
        # gradients.
        for array in jax.tree.leaves(
            eqx.filter((before.opt_state, before.reference), eqx.is_array)
        ):
            array.delete()
        try:
            self.state = checkpoints.restore(found, self._saved_shapes()).with_frozen(before.model)
            self.sampler.set_weights(self.state.model, self.state.step)  # frees the former ones
        except BaseException:
            new = untrained_state(self._run, self.programs.updater, before.model)
            self.state = dataclasses.replace(
                before, opt_state=new.opt_state, reference=new.reference
            )
            if before.step > 0:
                _say("warning: all but the model was freed to read a checkpoint, and starts anew")
            raise
        self._watchdog.progress("reading the checkpoint")

    def _prompt_widths(self, next_batch: int = 0) -> list[int]:
        """Returns the widths of prompts, first that of the next batch.

        Where environments decide, it is that of the prompt that was tried.
        """
        if isinstance(self._acting, ActingSampler) and self._acting.width_of_trial is not None:
            return [self._acting.width_of_trial]
        if self.cfg.max_staleness:
            return [self.prompts.widths[-1]]
        width = self.prompts.width(self.prompts.indices(next_batch))
        return sorted(self.prompts.widths, key=lambda x: x != width)

    def _try_rewards(self) -> None:
        """Calls the reward functions once, on a completion of the first problem."""
        text = "The answer is 42."
        ids = self.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
        problem = self.prompts.data.prompts[0]
        if self._acting is None:
            self.rewards.try_out(problem, text, ids)
            return
        if not isinstance(self._acting, ActingSampler):
            return  # what they get is not known before the function is called, or the agent
        with self._acting.trial(problem) as start:
            messages = [{"role": "assistant", "content": text}]
            acted = Acted([start.content], [messages], [start.dialogue.environment], [ToolCounts()])
            self.rewards.try_out(problem, text, ids, acted)

    @explains_out_of_memory
    def _initial_state(self) -> TrainState:
        return initial_state(self._run, self.programs.updater)

    @phase("update")
    def _update(
        self, kept: Rollout, advantages: Float[np.ndarray, "P G"]
    ) -> list[dict[str, Array]]:
        """Makes all updates of a step, and keeps the state after each: the next frees its arrays.

        **Returns:** the metrics of each update, which the devices may still be computing.
        """
        metrics = []
        for state, update_metrics in self._learner.learn(self.state, kept, advantages):
            self.state = state
            metrics.append(update_metrics)
        return metrics

    def _count_step(self, made: Rollout) -> None:
        """Counts a step as done, and moves the reference where that is due.

        **Arguments:**

        - `made`: everything that was sampled for the step.
        """
        state = self.state
        self.state = dataclasses.replace(
            state,
            step=state.step + 1,
            next_batch=state.next_batch + self.rollouts.num_batches(made),
            num_tokens=state.num_tokens + made.num_tokens,
            carried=self.rollouts.carried(),
        )
        self._sync_reference()

    def _sync_reference(self) -> None:
        """Moves the reference model towards the policy, where that is due after this step."""
        state, alpha = self.state, self.cfg.ref_model_mixup_alpha
        if state.reference is None or alpha is None or not sync_is_due(self.cfg, state.step):
            return
        reference = mixed(state.reference, state.model, jnp.float32(alpha), self.mesh)
        self.state = dataclasses.replace(state, reference=reference)

    @phase("update")
    def _metrics(
        self,
        kept: Rollout,
        made: Rollout,
        updates: list[dict[str, Array]],
        clock: StepClock,
        checkpoints: Checkpoints,
    ) -> dict[str, float]:
        """Waits for a step's updates; returns the metrics of the step."""
        fetched = fetch(updates)
        clock.lap("update")
        before, most = self.state.skipped_in_a_row, self.cfg.max_skipped_updates
        skipped, in_a_row = count_skipped(fetched, before, most, checkpoints.describe_last)
        self.state = dataclasses.replace(self.state, skipped_in_a_row=in_a_row)
        return {
            **self.rollouts.metrics(kept, made),
            **self._step_metrics.after(self.state, kept, made, fetched, skipped, clock),
        }

    def _startup(self, first_rollout_s: float) -> dict[str, float]:
        """Says how long the start took, now that it is over, and returns it as metrics."""
        self._starts_up = False
        self._stages.say(
            f"the first update is done; the first rollout began after {first_rollout_s:.0f} s"
        )
        return {
            "time/startup/first_rollout_s": first_rollout_s,
            "time/startup/first_update_s": self._stages.seconds,
        }

    def _note_progress(self, lap: str) -> None:
        self._watchdog.progress(f"the {lap} of step {self.state.step}")
