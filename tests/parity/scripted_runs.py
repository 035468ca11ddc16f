"""Runs here and in TRL in which the model writes scripted turns, and all else is as in any run."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.environments.rollout_func import FunctionSampler
from grpo_eqx.generation import LocalSampler
from grpo_eqx.generation.sampler import Sampled
from grpo_eqx.generation.session import Session
from grpo_eqx.generation.slots import SlotCounts
from grpo_eqx.generation.turn_programs import TurnPrograms
from grpo_eqx.generation.turns import MOST_STEPS, Readers, Report
from grpo_eqx.sharding.mesh import AutoMesh

Script = Callable[[str, int], Sequence[str]]
"""What the model writes: the turns, each without its end token, for the text of a prompt and the
number of the completion among those of its prompt."""
MOST_TOKENS = 400
"""Limit of a completion."""
END = "<|im_end|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run, to be made on both sides."""

    script: Script
    rows: Sequence[Mapping[str, Any]] | None = None
    """The data, of which every step has all; `None` where environments make the prompts."""
    group: int = 2
    """Completions of each prompt."""
    steps: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings that both sides have under one name."""
    passed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of both trainers."""
    noted: Mapping[str, Callable[[Any], Any]] | None = dataclasses.field(default_factory=dict)
    """What the reward function notes of each environment, by name. `None`: there is none."""

    @property
    def prompts(self) -> int:
        return 1 if self.rows is None else len(self.rows)

    @property
    def size(self) -> int:
        return self.prompts * self.group


class Completion(NamedTuple):
    """A completion as it is trained."""

    prompt: list[int]
    ids: list[int]
    is_learned: list[bool]
    """True on the tokens that the loss counts."""


class Run(NamedTuple):
    """Results of a run, of each of its steps."""

    completions: list[list[Completion]]
    """Sorted, as what follows."""
    notes: list[list[dict[str, Any]]]
    """What the reward function got: dialogues, and the rest of its arguments."""
    environments: list[set[int]]
    metrics: list[Mapping[str, float]]


class _Seen:
    """A reward function that notes what it gets, but for calls with a single completion that try
    it."""

    def __init__(self, case: Case):
        self._case = case
        self.notes: list[list[dict[str, Any]]] = []
        self.environments: list[set[int]] = []
        self.__name__ = "seen"

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        environments: list[Any] | None = None,
        **columns: Any,
    ) -> list[float]:
        names = {name for row in self._case.rows or () for name in row} - {"prompt"}
        rows = [
            {"prompt": prompt, "messages": messages, **{name: columns[name][i] for name in names}}
            for i, (prompt, messages) in enumerate(zip(prompts, completions, strict=True))
        ]
        for row, environment in zip(rows, environments or (), strict=False):
            row |= {name: value(environment) for name, value in (self._case.noted or {}).items()}
        if len(rows) == self._case.size:
            self.notes.append(sorted(rows, key=lambda row: json.dumps(row, sort_keys=True)))
            self.environments.append(set(map(id, environments or ())))
        bonus = columns.get("bonus", [0.0] * len(rows))
        return [len(own) / 4 + more for own, more in zip(completions, bonus, strict=True)]


class _Turns:
    """The turns of a completion, written one after the other."""

    def __init__(self, tokenizer: Any, turns: Sequence[str]):
        texts = [turn + END for turn in turns]
        self._left = tokenizer(texts, add_special_tokens=False)["input_ids"]

    def write(self, most: int) -> tuple[list[int], bool]:
        """Returns the next tokens, and whether the turn ends with them."""
        turn = self._left[0]
        now, self._left[0] = turn[:most], turn[most:]
        return now, not self._left[0]

    def go_on(self) -> None:
        """Begins the next turn."""
        del self._left[0]


class _ScriptedPrograms(TurnPrograms):
    """In place of the programs of a session on one device; the session itself is the real one."""

    def __init__(
        self, layout: Any, batch: tuple[int, int], turns_of: Callable[[list[int], int], _Turns]
    ):
        self.layout, self.batch = layout, batch  # type: ignore[misc]
        self.num_slots, self.is_refilled = batch[0] * batch[1], False
        self._turns_of = turns_of

    def to_compile(self, *_: Any) -> Any:
        return iter(())

    def begin(self, model: Any, prompt_ids: Any, prompt_mask: Any, *_: Any) -> Any:
        prompts = [
            ids[mask].tolist()
            for ids, mask in zip(np.asarray(prompt_ids), np.asarray(prompt_mask), strict=True)
        ]
        self._turns = [self._turns_of(ids, n) for ids in prompts for n in range(self.batch[1])]
        self._lengths = [0] * self.num_slots
        self._live = [True] * self.num_slots
        return None, None, None

    def read(self, model: Any, slots: None, readers: Readers) -> None:
        columns = readers.slots, readers.lengths[:, 0], readers.resumes[:, 0]
        for slot, length, resumes in zip(*(np.asarray(x).tolist() for x in columns), strict=True):
            if slot < self.num_slots:
                self._lengths[slot] += length
                self._live[slot] = resumes
                if resumes:
                    self._turns[slot].go_on()

    def decode(self, *_: Any) -> tuple[None, Report]:
        ids = np.zeros((self.num_slots, MOST_STEPS), np.int32)
        ended = [False] * self.num_slots
        for slot in np.flatnonzero(self._live).tolist():
            most = min(MOST_STEPS, MOST_TOKENS - self._lengths[slot])
            now, ended[slot] = self._turns[slot].write(most)
            ids[slot, : len(now)] = now
            self._lengths[slot] += len(now)
            self._live[slot] = not ended[slot] and self._lengths[slot] < MOST_TOKENS
        slots = (np.array(x).reshape(self.batch) for x in (self._live, self._lengths, ended))
        ids = ids.reshape(*self.batch, MOST_STEPS)
        logps = np.full(ids.shape, -1.0, np.float32)
        return None, Report(*slots, ids, logps, SlotCounts.of_nothing())


class _OneDevice(AutoMesh):
    def build(self, devices: Any = None) -> jax.sharding.Mesh:
        return super().build(jax.devices()[:1])


def run_ours(case: Case, model: Path, template: str, folder: Path) -> Run:
    """Runs our trainer, on a model with a chat template, in a folder."""
    tokenizer = ChatTokenizer.from_pretrained(model).tokenizer
    tokenizer.chat_template = template
    completions: list[list[Completion]] = []
    layout, seen = LocalSampler.layout, _Seen(case)

    def turns_of(ids: list[int], number: int) -> _Turns:
        return _Turns(tokenizer, case.script(tokenizer.decode(ids), number))

    def turns(sampler: LocalSampler, *batch: int) -> TurnPrograms:
        return _ScriptedPrograms(layout(sampler, *batch), batch, turns_of)  # type: ignore[arg-type]

    def noting(result: Callable[..., Sampled]) -> Callable[..., Sampled]:
        def noted(*arguments: Any) -> Sampled:
            sampled = result(*arguments)
            completions.append(
                sorted(
                    Completion(list(x.prompt_ids), x.ids.tolist(), x.written.tolist())
                    for x in sampled.trajectories
                )
            )
            return sampled

        return noted

    cfg = GRPOConfig(
        steps=case.steps, prompts_per_step=case.prompts, num_generations=case.group,
        max_completion_length=MOST_TOKENS, max_prompt_length=1500, output_dir=folder,
        eval_steps=None, eval_problems=1, **case.settings,
    )  # fmt: skip
    rows = None if case.rows is None else [dict(row) for row in case.rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSampler, "turns", turns)
        patch.setattr(Session, "result", noting(Session.result))
        patch.setattr(FunctionSampler, "_completed", noting(FunctionSampler._completed))
        GRPOTrainer(
            cfg, model=model, tokenizer=ChatTokenizer(tokenizer), train_data=rows, eval_data=rows,
            mesh=_OneDevice(), reward_funcs=None if case.noted is None else [seen], **case.passed,
        ).fit()  # fmt: skip
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    metrics = [line for line in lines if "loss" in line]
    return Run(completions, seen.notes, seen.environments, metrics)


def run_trl(case: Case, model: Path, template: str, folder: Path) -> Run:
    """Runs TRL's trainer on the same."""
    import datasets
    import trl
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    completions: list[list[Completion]] = []
    seen, writing = _Seen(case), dict[int, tuple[list[int], _Turns]]()
    args = trl.GRPOConfig(
        **case.settings, max_steps=case.steps, num_generations=case.group,
        per_device_train_batch_size=case.size, max_completion_length=MOST_TOKENS,
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], logging_steps=1,
        save_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip
    rows = case.rows and datasets.Dataset.from_list([dict(row) for row in case.rows])
    trainer = trl.GRPOTrainer(
        str(model), args=args, processing_class=tokenizer, train_dataset=rows,
        reward_funcs=None if case.noted is None else [seen], **case.passed,
    )  # fmt: skip
    generate = trainer._generate

    def single_turn(_: Any, prompts: list[list[int]], *__: Any, **___: Any) -> Any:
        if not writing:
            for n, ids in enumerate(prompts):
                turns = case.script(tokenizer.decode(ids), n % case.group)
                writing[n] = ids, _Turns(tokenizer, turns)
            numbers = list(writing)
        else:  # those that go on have their order, and what they wrote before
            left = iter(list(writing.items()))
            numbers = [next(n for n, (x, _) in left if ids[: len(x)] == x) for ids in prompts]
            for n in numbers:
                writing[n][1].go_on()
        written = [writing[n][1].write(MOST_TOKENS)[0] for n in numbers]
        for n, ids, new in zip(numbers, prompts, written, strict=True):
            writing[n] = [*ids, *new], writing[n][1]
        return written, None

    def noted(_: Any, prompts: list[Any]) -> Any:
        writing.clear()
        made = generate(prompts)
        completions.append(
            sorted(
                Completion(list(own), list(ids), list(map(bool, mask)))
                for own, ids, mask in zip(*made[:3], strict=True)
            )
        )
        return made

    trainer._generate_single_turn = MethodType(single_turn, trainer)
    trainer._generate = MethodType(noted, trainer)
    trainer.train()
    metrics = [line for line in trainer.state.log_history if "loss" in line]
    return Run(completions, seen.notes, seen.environments, metrics)
