"""Completions of prompts outside of training's steps, and evaluations made of them."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.data.acted import Acted
from grpo_eqx.data.batches import TokenizedPrompts, padded_length
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Group, Trajectory
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.evaluation.result import Evaluation
from grpo_eqx.evaluation.scoring import Grader
from grpo_eqx.generation import LocalSampler, PendingSamples, Sampler, Sampling
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.rollout.rollout import Rollout
from grpo_eqx.run.to_compile import evaluation_rows

_EVAL_STEP = 2**31 - 1  # where evaluations draw: no training step

Track = Callable[[Sequence[int]], Iterable[int]]
"""Function that iterates over batches and shows how far it is."""
_MOST_SAMPLES = 1_000_000


class Draws(NamedTuple):
    """How the completions of each problem are sampled."""

    temperature: float = 0.0
    """0 for greedy completions."""
    num_samples: int = 1

    @classmethod
    def checked(cls, temperature: float, num_samples: int) -> "Draws":
        """Raises `UserError` for a number of samples that cannot be."""
        if num_samples != int(num_samples) or not 1 <= num_samples <= _MOST_SAMPLES:
            raise UserError(
                f"num_samples is {num_samples!r}: use a whole number that is at least 1 and at "
                f"most {_MOST_SAMPLES:,}."
            )
        return cls(temperature, int(num_samples))


class Completed(NamedTuple):
    """Completions of a batch of prompts."""

    groups: list[Group]
    acted: Acted | None
    """Their dialogues, where completions act."""


def completed(
    sampler: Sampler,
    problems: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    draws: Draws,
    *,
    batch_size: int,
    max_prompt_length: int,
    first: int = 0,
    track: Track = iter,
) -> Iterator[Completed]:
    """Completes tokenized prompts in batches of one shape, and yields each batch.

    The sampler works on the next batch while the caller uses a batch. The draws of a prompt depend
    on its position alone.

    **Arguments:**

    - `sampler`: what completes them, with its weights.
    - `problems`, `tokens`: the prompts, and their tokens.
    - `draws`: how completions are drawn.
    - `batch_size`: prompts of a batch.
    - `max_prompt_length`: the tokens that a prompt may have.
    - `first`: the prompt to begin with, where a batch begins.
    - `track`: iterates over batches.
    """
    sampling, n = Sampling(temperature=draws.temperature), draws.num_samples
    width = padded_length(max(map(len, tokens)), max_prompt_length)

    def submit(start: int) -> PendingSamples:
        chosen = tokens[start : start + batch_size]
        num_missing = batch_size - len(chosen)
        padded = [*chosen, *[chosen[0]] * num_missing]
        trajectories = [
            Trajectory(ids, Address(_EVAL_STEP, start + row, sample))
            for row, ids in enumerate(padded)
            for sample in range(n)
        ]
        own = [*problems[start : start + batch_size], *[None] * num_missing]
        return sampler.submit(trajectories, sampling, problems=own, prompt_width=width)

    def batch(start: int, pending: PendingSamples) -> Completed:
        made = pending.result()
        number = min(batch_size, len(tokens) - start)  # the last batch was filled up
        return Completed(
            [made.trajectories[p * n : (p + 1) * n] for p in range(number)],
            None if made.acted is None else made.acted.of(range(number * n)),
        )

    ahead: tuple[int, PendingSamples] | None = None
    for start in track(range(first, len(tokens), batch_size)):
        pending = submit(start)
        if ahead is not None:
            yield batch(*ahead)
            ahead[1].release()
        ahead = start, pending
    if ahead is not None:
        yield batch(*ahead)
        ahead[1].release()


class Batch(NamedTuple):
    """Consecutive held-out problems that are completed and scored."""

    first: int
    """Position of the first problem."""
    rollout: Rollout
    evaluation: Evaluation


class Evaluator:
    """Solves held-out problems with a model, and counts the solved ones."""

    def __init__(
        self,
        sampler: LocalSampler,
        tokenizer: ChatTokenizer,
        problems: TokenizedPrompts,
        scorer: Grader,
        *,
        max_prompt_length: int,
        acting: Sampler | None = None,
    ):
        """**Arguments:**

        - `sampler`: completes prompts on the run's devices.
        - `tokenizer`, `problems`: the tokenizer and the held-out problems.
        - `scorer`: scores completions.
        - `max_prompt_length`: the tokens that a prompt may have.
        - `acting`: completes prompts in its place, where completions act.
        """
        self.sampler = sampler
        self._source: Sampler = acting or sampler
        self.tokenizer = tokenizer
        self.problems = problems
        self.scorer = scorer
        self.max_prompt_length = max_prompt_length

    def batch_size(self, draws: Draws) -> int:
        """Returns the number of problems that are completed at a time."""
        return evaluation_rows(len(self.problems), draws.num_samples, self.sampler.mesh.size)

    def check_layout(self, draws: Draws) -> None:
        """Raises `UserError` where the rollout sharding cannot lay such an evaluation out."""
        rows = self.batch_size(draws)
        try:
            self.sampler.layout(rows, draws.num_samples)
        except UserError as error:
            raise UserError(
                f"an evaluation of {rows} problems at a time cannot be laid out: {error}"
            ) from error

    def batches(
        self,
        model: CausalLM,
        version: int,
        draws: Draws,
        *,
        first: int = 0,
        track: Track = iter,
    ) -> Iterator[Batch]:
        """Yields scored batches of problems, one after the other.

        Raises `UserError` for problems without an answer to compare with.

        **Arguments:**

        - `model`, `version`: the weights, and their number.
        - `draws`: how completions are drawn.
        - `first`: the problem to begin with, where a batch begins.
        - `track`: iterates over the batches.
        """
        prompts = self.problems.prompts
        self.scorer.check_answers(prompts)
        self._source.set_weights(model, version)
        parts = completed(
            self._source, prompts, self.problems.tokens, draws, batch_size=self.batch_size(draws),
            max_prompt_length=self.max_prompt_length, first=first, track=track,
        )  # fmt: skip
        with self.scorer:
            for groups, acted in parts:
                chosen = prompts[first : first + len(groups)]
                rollout = Rollout(chosen, groups, self.tokenizer, acted=acted)
                yield Batch(first, rollout, self.scorer(rollout, draws.temperature))
                first += len(chosen)

    def evaluate(
        self,
        model: CausalLM,
        version: int,
        draws: Draws,
        *,
        on_progress: Callable[[str], None] = lambda done: None,
        interrupted: Callable[[], bool] = lambda: False,
        track: Track = iter,
    ) -> Evaluation | None:
        """Evaluates a model on all problems.

        **Arguments:**

        - `model`, `version`: the weights, and their number.
        - `draws`: how completions are drawn.
        - `on_progress`: called after each batch with how far the evaluation is.
        - `interrupted`: says, after each batch and on all processes alike, whether to give up.
        - `track`: iterates over the batches.

        **Returns:** the evaluation; `None` where it was given up.
        """
        parts = []
        for batch in self.batches(model, version, draws, track=track):
            parts.append(batch.evaluation)
            done = batch.first + len(batch.rollout.prompts)
            on_progress(f"{done} of {len(self.problems)} prompts")
            if done < len(self.problems) and interrupted():
                return None
        evaluation = functools.reduce(Evaluation.joined, parts)
        if evaluation.solved.any() or not self.scorer.highest > 0:
            return evaluation
        if is_main():
            print_clean(
                f"warning: the highest score of the evaluation is {self.scorer.highest:g}, and "
                f"only 1 counts as solved: pass an eval_func that returns 1 for what is.",
                file=sys.stderr,
            )
        return evaluation

    def metric_names(self, draws: Draws) -> list[str]:
        """Returns the names of the metrics of an evaluation."""
        shape, strict = (1, draws.num_samples), self.scorer.is_flexible
        solved = np.zeros(shape, bool)
        scores = {name: np.zeros(shape) for name in self.scorer.metric_names}
        voted = solved[:, 0] if self.scorer.reads_answers else None
        return list(
            Evaluation(
                solved, solved if strict else None, voted, scores, draws.temperature
            ).metrics()
        )
