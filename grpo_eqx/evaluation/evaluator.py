"""Completions of prompts outside of training's steps, and evaluations made of them."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.data.batches import TokenizedPrompts, pad_prompts, padded_length
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.evaluation.result import Evaluation
from grpo_eqx.evaluation.scoring import Scorer
from grpo_eqx.generation import Completions, Prompts, Sampling
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.run.programs import evaluation_rows
from grpo_eqx.training.lowering import lower_generate, shapes_of
from grpo_eqx.training.programs import Programs

_EVAL_STEP = 2**31 - 1  # where evaluations draw: no training step

Track = Callable[[Sequence[int]], Iterable[int]]
"""Function that iterates over batches and shows how far it is."""
_MOST_SAMPLES = 1_000_000


class Draws(NamedTuple):
    """Draws of the completions of each problem."""

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


def completed(
    programs: Programs,
    model: CausalLM,
    tokens: Sequence[Sequence[int]],
    tokenizer: ChatTokenizer,
    draws: Draws,
    *,
    max_prompt_length: int,
    first: int = 0,
    track: Track = iter,
) -> Iterator[Completions]:
    """Completes tokenized prompts in batches of one shape, and yields those of each batch.

    **Arguments:** the programs, the model, the prompts, the tokenizer, how completions are drawn;
    the tokens that a prompt may have; the prompt to begin with, where a batch begins; iterates over
    batches. The draws of a prompt depend on its position alone.

    The devices work on a batch while the caller does with the one before.
    """
    sampling = Sampling(temperature=draws.temperature)
    rows = evaluation_rows(len(tokens), draws.num_samples, programs.mesh.size)
    width = padded_length(max(map(len, tokens)), max_prompt_length)
    # An update writes the shardings of its results in other words, with which a call would compile
    # the same program again after training, unknown to the cache and to grpo-eqx compile.
    shapes = shapes_of(model, programs.mesh)
    lower_generate(programs, shapes, rows, draws.num_samples, width, sampling).compile()
    ahead = None
    for start in track(range(first, len(tokens), rows)):
        chosen = tokens[start : start + rows]
        padded = [*chosen, *[chosen[0]] * (rows - len(chosen))]
        rollout, _ = programs.generate(
            model, Prompts(*pad_prompts(padded, tokenizer.pad_id, width)), _EVAL_STEP,
            num_generations=draws.num_samples, first_row=start, sampling=sampling,
        )  # fmt: skip
        if ahead is not None:
            yield Completions.of(ahead, tokenizer)
        ahead = rollout
    if ahead is not None:
        last = np.arange(len(chosen))  # the last batch was filled up
        yield Completions.of(ahead, tokenizer).of_prompts(last)


class Batch(NamedTuple):
    """Consecutive held-out problems that are completed and scored."""

    first: int
    """Position of the first problem."""
    prompts: list[Prompt]
    completions: Completions
    evaluation: Evaluation


class Evaluator:
    """Solves held-out problems with a model, and counts the solved ones."""

    def __init__(
        self,
        programs: Programs,
        tokenizer: ChatTokenizer,
        problems: TokenizedPrompts,
        scorer: Scorer,
        *,
        max_prompt_length: int,
    ):
        self.programs = programs
        self.tokenizer = tokenizer
        self.problems = problems
        self.scorer = scorer
        self.max_prompt_length = max_prompt_length

    def batch_size(self, draws: Draws) -> int:
        """Returns the number of problems that are completed at a time."""
        return evaluation_rows(len(self.problems), draws.num_samples, self.programs.mesh.size)

    def check_layout(self, draws: Draws) -> None:
        """Raises `UserError` where the rollout sharding cannot lay such an evaluation out."""
        rows = self.batch_size(draws)
        try:
            self.programs.rollout_layout(rows, draws.num_samples)
        except UserError as error:
            raise UserError(
                f"an evaluation of {rows} problems at a time cannot be laid out: {error}"
            ) from error

    def batches(
        self, model: CausalLM, draws: Draws, *, first: int = 0, track: Track = iter
    ) -> Iterator[Batch]:
        """Yields scored batches of problems, one after the other.

        **Arguments:** the model; how completions are drawn; the problem to begin with, where a
        batch begins; iterates over the batches. Raises `UserError` for problems without an answer
        to compare with.
        """
        prompts = self.problems.prompts
        self.scorer.check_answers(prompts)
        parts = completed(
            self.programs, model, self.problems.tokens, self.tokenizer, draws,
            max_prompt_length=self.max_prompt_length, first=first, track=track,
        )  # fmt: skip
        with self.scorer:
            for completions in parts:
                chosen = prompts[first : first + len(completions.ids)]
                scores = self.scorer(chosen, completions, draws.temperature)
                yield Batch(first, chosen, completions, scores)
                first += len(chosen)

    def evaluate(
        self,
        model: CausalLM,
        draws: Draws,
        *,
        on_progress: Callable[[str], None] = lambda done: None,
        interrupted: Callable[[], bool] = lambda: False,
        track: Track = iter,
    ) -> Evaluation | None:
        """Evaluates a model on all problems.

        **Arguments:** the model; how completions are drawn; called after each batch with how far it
        is; says, after each batch and on all processes alike, whether to give up; iterates over the
        batches.

        **Returns:** the evaluation; `None` where it was given up.
        """
        parts = []
        for batch in self.batches(model, draws, track=track):
            parts.append(batch.evaluation)
            done = batch.first + len(batch.prompts)
            on_progress(f"{done} of {len(self.problems)} prompts")
            if done < len(self.problems) and interrupted():
                return None
        evaluation = functools.reduce(Evaluation.joined, parts)
        if evaluation.solved.any() or not self.scorer.highest > 0:
            return evaluation
        if is_main():
            print_clean(
                f"warning: eval_func returned at most {self.scorer.highest:g}, and only 1 counts "
                f"as solved.",
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
