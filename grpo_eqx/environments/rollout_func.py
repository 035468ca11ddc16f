"""Completions that a function of the user's makes, by TRL's contract of `rollout_func`."""

import copy
import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_eqx.common.errors import RunError, UserError, first_line
from grpo_eqx.common.plain_data import brief
from grpo_eqx.data.acted import Acted, ToolCounts
from grpo_eqx.data.batches import padded_length
from grpo_eqx.data.prompts import Conversation, Prompt
from grpo_eqx.data.records import is_message
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.distributed.exchange import from_main, raise_on_all_hosts
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.environments.dialogues import is_ids
from grpo_eqx.environments.function_results import OF_TOKENS, read_completions
from grpo_eqx.environments.starts import with_one_prompt
from grpo_eqx.generation.pending import Deferred
from grpo_eqx.generation.sampler import PendingSamples, Responder, Sampled, Sampler, Until
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.rewards.contract import reason_of
from grpo_eqx.rewards.logged import TrainerState
from grpo_eqx.settings.config import GRPOConfig

RolloutFunc = Callable[[list[Any], "RolloutTrainer"], Mapping[str, Any]]
"""TRL's `rollout_func(prompts, trainer)`.

It gets the prompt of each completion of a step, so each prompt `trainer.num_generations` times, one
after the other. It returns a dict with an entry for each of them: `prompt_ids`, `completion_ids`,
`logprobs`, and, where the model did not write all tokens, `env_mask`, which is 1 on those that it
wrote. Reward functions get what else it returns.
"""

_OF_OTHERS, _CALLS, _LAST = 1 << 20, 1 << 10, (1 << 31) - 1
"""In addresses of draws: first row of prompts besides those of a step, rows for each prompt of a
step, and the row from which those that fill a batch up are counted down."""


class RolloutTrainer:
    """The trainer, as a `rollout_func` sees it, by TRL's names."""

    def __init__(self, sampler: "FunctionSampler", num_generations: int, step: int):
        self._sampler = sampler
        self.num_generations = num_generations
        """Completions of each prompt."""
        self.args = sampler.cfg
        """Settings of the run."""
        self.processing_class = sampler.tokenizer.tokenizer
        """Tokenizer of transformers."""
        self.state = TrainerState(step, sampler.cfg.steps)

    def generate(
        self, prompts: Sequence[Any], completions: Sequence[Sequence[int]] | None = None
    ) -> list[dict[str, Any]]:
        """Completes each prompt once, with the weights and the sampling of the step.

        **Arguments:**

        - `prompts`: a list of conversations or texts, as problems have them, or lists of tokens.
          Give many at once: they are decoded together.
        - `completions`: tokens with which each completion begins, such as earlier turns; by default
          none.

        **Returns:** a dict for each prompt: `prompt_ids`, `completion_ids`, `logprobs`, and `text`,
        without special tokens. The last three are of what the model wrote now. It has its end
        token, unless it was cut off at `max_completion_length` tokens of all turns.

        Raises `UserError` for what is no prompt, and outside the function's call or its thread.
        """
        return self._sampler.generate(prompts, completions)


class FunctionSampler(Sampler):
    """Sampler whose completions a function of the user's makes, with the help of another sampler.

    The first process calls the function; the others help it to generate.
    """

    def __init__(
        self, func: RolloutFunc, sampler: Sampler, tokenizer: ChatTokenizer, cfg: GRPOConfig
    ):
        """**Arguments:**

        - `func`: the function.
        - `sampler`: generates for it.
        - `tokenizer`: the tokenizer.
        - `cfg`: the resolved settings.
        """
        self.func, self.tokenizer, self.cfg = func, tokenizer, cfg
        self._sampler, self._version = sampler, 0
        assert cfg.max_completion_length is not None  # resolved
        self._max_completion_length = cfg.max_completion_length
        self._sampling: Sampling | None = None
        self._batch = self._group = 0
        self._first, self._rows = Address(0, 0, 0), iter(range(0))
        self._thread: int | None = None
        """Thread in which the function runs."""
        self._error: Exception | None = None
        """Error of generating, which all processes raise alike."""

    def set_weights(self, model: CausalLM, version: int) -> None:
        self._version = version
        self._sampler.set_weights(model, version)

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        sampling: Sampling | None = None,
        *,
        problems: Sequence[Prompt | None] | None = None,
        prompt_width: int | None = None,
        responder: Responder | None = None,
        until: Until | None = None,
    ) -> PendingSamples:
        assert problems is not None, "the function gets their prompts"
        assert responder is None, "the function makes whole completions"
        return Deferred(lambda: self._completed(trajectories, problems, sampling))

    def __enter__(self) -> "FunctionSampler":
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(
        self, prompts: Sequence[Any], completions: Sequence[Sequence[int]] | None = None
    ) -> list[dict[str, Any]]:
        """Completes prompts for the function: see `RolloutTrainer.generate`."""
        if self._thread != threading.get_ident():
            raise UserError(
                "trainer.generate is called outside rollout_func, or in another thread: call it in "
                "the function itself, with many prompts at once."
            )
        if not isinstance(prompts, list | tuple):
            raise UserError(f"trainer.generate gets {brief(prompts)}: give a list of prompts.")
        begun = [[]] * len(prompts) if completions is None else list(completions)
        if len(begun) != len(prompts):
            raise UserError(
                f"trainer.generate gets {len(prompts)} prompts and {len(begun)} completions: give "
                f"it one completion for each prompt, or none."
            )
        turns = [
            _Turn(self._ids_of(prompt), self._begin_of(ids))
            for prompt, ids in zip(prompts, begun, strict=True)
        ]
        if not turns:
            return []
        self._tell(turns)
        try:
            return self._generated(turns)
        except Exception as error:
            self._error = error
            raise

    def _completed(
        self,
        trajectories: Sequence[Trajectory],
        problems: Sequence[Prompt | None],
        sampling: Sampling | None,
    ) -> Sampled:
        """Calls the function in the first process, and serves it in the others."""
        group, first = len(trajectories) // len(problems), trajectories[0].address
        real = [problem for problem in problems if problem is not None]
        self._sampling, self._batch, self._group = sampling, len(trajectories), group
        self._first, self._rows = first, _rows(first.prompt, len(problems))
        # Copies, which the function may change.
        prompts = [copy.deepcopy(problem.content) for problem in real for _ in range(group)]
        work = self._called(prompts) if is_main() else self._served()
        made = raise_on_all_hosts(work)
        if jax.process_count() > 1:
            made = from_main(made)
        own = self._trajectories(made, trajectories[: len(prompts)])
        rest = trajectories[len(own) :]  # fill the batch up
        own += [each.completed(np.array(self.tokenizer.eos_ids[:1], np.int32)) for each in rest]
        return Sampled(own, acted=_acted(own, problems, made, self.tokenizer))

    def _called(self, prompts: list[Any]) -> Callable[[], dict[str, list[Any]]]:
        """Calls the function; returns what returns its completions, or raises its error."""
        self._thread, self._error = threading.get_ident(), None
        made, failure = dict[str, list[Any]](), None
        try:
            returned = self.func(prompts, RolloutTrainer(self, self._group, self._version))
            made = read_completions(
                returned, len(prompts), self.cfg.max_prompt_length, len(self.tokenizer.tokenizer)
            )
            _check_sendable(made)
        except (UserError, RunError, jax.errors.JaxRuntimeError) as error:
            failure = error
        except Exception as error:
            failure = RunError(f"rollout_func {reason_of(error)}: fix it.")
            failure.__cause__ = error
        finally:
            self._thread = None
        if self._error is not None:
            raise self._error
        self._tell(None)

        def result() -> dict[str, list[Any]]:
            if failure is not None:
                raise failure
            return made

        return result

    def _served(self) -> Callable[[], dict[str, list[Any]]]:
        """Generates with the first process until its function has ended."""
        while (turns := from_main(None)) is not None:
            self._generated([_Turn(*each) for each in turns])
        return dict

    def _tell(self, turns: Sequence["_Turn"] | None) -> None:
        """Tells the other processes what to generate; `None`: the function has ended."""
        if jax.process_count() > 1:
            from_main(turns)

    def _ids_of(self, prompt: Any) -> list[int]:
        if is_ids(prompt, len(self.tokenizer.tokenizer)):
            ids = [int(x) for x in prompt]
        elif isinstance(prompt, str) or (
            isinstance(prompt, Sequence) and prompt and all(map(is_message, prompt))
        ):
            (ids,) = self.tokenizer.encode_prompts([Prompt(prompt, {})])
        else:
            raise UserError(
                f"trainer.generate gets the prompt {brief(prompt)}: give texts, conversations or "
                f"lists of tokens."
            )
        if len(ids) > self.cfg.max_prompt_length:
            raise UserError(
                f"trainer.generate gets a prompt of {len(ids):,} tokens, and max_prompt_length is "
                f"{self.cfg.max_prompt_length:,}: raise it, or shorten the prompt. Earlier turns "
                f"belong in its argument completions."
            )
        return ids

    def _begin_of(self, completion: Sequence[int]) -> list[int]:
        if len(completion) and not is_ids(completion, len(self.tokenizer.tokenizer)):
            raise UserError(
                f"trainer.generate gets the completion {brief(completion)}: give a list of tokens."
            )
        return [int(x) for x in completion]

    def _generated(self, turns: Sequence["_Turn"]) -> list[dict[str, Any]]:
        """Completes prompts, as many at a time as a step has completions.

        Prompts that are given once for each completion of a group are read once, as without the
        function, and what is drawn first is the same.
        """
        size = self._group if _in_groups(turns, self._group) else 1
        most, limit = self.cfg.max_prompt_length, self._max_completion_length
        width = padded_length(max(len(turn.prompt_ids) for turn in turns), most)
        made: list[Trajectory] = []
        for start in range(0, len(turns), self._batch):
            part = list(turns[start : start + self._batch])
            rows = list(itertools.islice(self._rows, len(part) // size))
            # Programs are compiled for one number of completions.
            missing = self._batch // size - len(rows)
            part += part[:size] * missing
            rows += range(_LAST - missing + 1, _LAST + 1)
            addresses = [
                self._first._replace(prompt=row, sample=sample)
                for row in rows
                for sample in range(size)
            ]
            # One without room draws a token as well, which is dropped.
            begun = [
                Trajectory(turn.prompt_ids, address).extended(turn.completion_ids[: limit - 1])
                for turn, address in zip(part, addresses, strict=True)
            ]
            pending = self._sampler.submit(
                begun, self._sampling, prompt_width=width, responder=_Silent()
            )
            made += pending.result().trajectories
        return [self._described(*each) for each in zip(turns, made, strict=False)]

    def _trajectories(
        self, made: Mapping[str, list[Any]], begun: Sequence[Trajectory]
    ) -> list[Trajectory]:
        """Returns completions as trajectories, those of one problem with one prompt.

        Raises `UserError` where their prompts differ too much.
        """
        own = [
            dataclasses.replace(each, prompt_ids=ids)
            for each, ids in zip(begun, made["prompt_ids"], strict=True)
        ]
        by_prompt = itertools.groupby(own, lambda each: each.address[:2])
        own = [each for _, group in by_prompt for each in with_one_prompt(list(group))]
        columns = zip(own, *(made[name] for name in OF_TOKENS[1:]), strict=True)
        return [self._extended(*each) for each in columns]

    def _extended(
        self, each: Trajectory, ids: list[int], logps: list[float], mask: list[int]
    ) -> Trajectory:
        """Returns a trajectory with the tokens that fit, some of which the model wrote."""
        room = self._max_completion_length - len(each)
        if room < 1:
            raise UserError(
                f"rollout_func returned different prompt_ids for one prompt, and the {len(each)} "
                f"tokens after the first difference count as the completion's, of which "
                f"max_completion_length is {self._max_completion_length}: raise it, or return the "
                f"same prompt_ids."
            )
        ends = len(ids) <= room and self._is_end(ids)
        for written, part in itertools.groupby(range(min(len(ids), room)), lambda n: mask[n]):
            places = list(part)
            drawn = np.array([logps[n] for n in places]) if written else None
            each = each.extended([ids[n] for n in places], drawn, version=self._version)
        return dataclasses.replace(each, finish_reason="stop" if ends else "length")

    def _is_end(self, ids: list[int]) -> bool:
        """Returns whether a completion ends with an end token, or with a stop string."""
        decode = self.tokenizer.tokenizer.decode
        text, before = decode(ids), len(decode(ids[:-1]))
        # A token may have more text than the stop string that it completes.
        ends = (text.rfind(each) + len(each) for each in self.cfg.stop_strings if each in text)
        return ids[-1] in self.tokenizer.eos_ids or any(end > before for end in ends)

    def _described(self, turn: "_Turn", made: Trajectory) -> dict[str, Any]:
        start = len(turn.completion_ids)
        written = made.ids[start:].tolist()
        return {
            "prompt_ids": turn.prompt_ids,
            "completion_ids": written,
            "logprobs": made.sampler_logps[start:].tolist(),
            "text": self.tokenizer.tokenizer.decode(written, skip_special_tokens=True),
        }


class _Turn(NamedTuple):
    """A prompt with its completion so far."""

    prompt_ids: list[int]
    completion_ids: list[int]


def _rows(first: int, count: int) -> Iterator[int]:
    """Yields the numbers of prompts in addresses of draws: those of the step's own, then others."""
    yield from range(first, first + count)
    yield from itertools.count(_OF_OTHERS + first * _CALLS)


def _in_groups(turns: Sequence[_Turn], size: int) -> bool:
    """Returns whether each prompt is given `size` times, one after the other."""
    prompts = [turn.prompt_ids for turn in turns]
    groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    return all(group == [group[0]] * size for group in groups)


class _Silent(Responder):
    """Ends each completion with its first turn."""

    def __init__(self) -> None:
        self._ended: list[int] = []

    def take(self, number: int, trajectory: Trajectory) -> None:
        self._ended.append(number)

    def replies(self, wait: bool) -> Sequence[tuple[int, Sequence[int] | None]]:
        ended, self._ended = self._ended, []
        return [(number, None) for number in ended]


def _check_sendable(made: Mapping[str, list[Any]]) -> None:
    """Raises `UserError` for completions that other processes, if there are any, cannot get."""
    if jax.process_count() == 1:
        return
    for name, values in made.items():
        try:
            json.dumps(values)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"rollout_func returned {name} with what other processes cannot get "
                f"({first_line(error)}): return numbers, texts, and lists of them."
            ) from error


def _acted(
    own: Sequence[Trajectory],
    problems: Sequence[Prompt | None],
    made: Mapping[str, list[Any]],
    tokenizer: ChatTokenizer,
) -> Acted:
    """Returns completions as reward functions see them, with the columns that they get besides."""
    group = len(own) // len(problems)
    texts = tokenizer.decode_completions([each.ids.tolist() for each in own])
    contents = [problem.content if problem else "" for problem in problems for _ in range(group)]
    return Acted(
        contents,
        [_answer(text, content) for text, content in zip(texts, contents, strict=True)],
        [None] * len(own),
        [ToolCounts(0)] * len(own),
        columns={
            name: [*values, *[None] * (len(own) - len(values))]
            for name, values in made.items()
            if name not in OF_TOKENS
        },
    )


def _answer(text: str, content: str | Conversation) -> str | Conversation:
    return text if isinstance(content, str) else [{"role": "assistant", "content": text}]
