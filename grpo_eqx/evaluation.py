"""Completions of prompts outside of training's steps, and the result of an evaluation."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool

from grpo_eqx.data.batches import pad_prompts, padded_length
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.errors import UserError
from grpo_eqx.generation import Completions, Prompts, Sampling
from grpo_eqx.models.base import CausalLM
from grpo_eqx.run_programs import evaluation_rows
from grpo_eqx.tracking.progress import track_on_terminal
from grpo_eqx.training.lowering import lower_generate, shapes_of
from grpo_eqx.training.programs import Programs

_EVAL_STEP = 2**31 - 1  # where evaluations draw: no training step


def complete(
    programs: Programs,
    model: CausalLM,
    tokens: Sequence[Sequence[int]],
    tokenizer: ChatTokenizer,
    *,
    max_prompt_length: int,
    temperature: float,
    num_samples: int,
    on_progress: Callable[[str], None],
) -> Completions:
    """Samples `num_samples` completions of each tokenized prompt, in batches of one shape.

    **Arguments:** the programs, the model, the prompts, the tokenizer; the tokens that a prompt may
    have; 0 for greedy completions; called after each batch with how far it is.
    """
    sampling = Sampling(temperature=temperature)
    rows, parts = evaluation_rows(len(tokens), num_samples, programs.mesh.size), []
    width = padded_length(max(map(len, tokens)), max_prompt_length)
    # An update writes the shardings of its results in other words, with which a call would compile
    # the same program again after training, unknown to the cache and to grpo-eqx compile.
    shapes = shapes_of(model, programs.mesh)
    lower_generate(programs, shapes, rows, num_samples, width, sampling).compile()
    for start in track_on_terminal(range(0, len(tokens), rows), "completing prompts"):
        chosen = tokens[start : start + rows]
        padded = [*chosen, *[chosen[0]] * (rows - len(chosen))]
        rollout, _ = programs.generate(
            model, Prompts(*pad_prompts(padded, tokenizer.pad_id, width)), _EVAL_STEP,
            num_generations=num_samples, first_row=start, sampling=sampling,
        )  # fmt: skip
        parts.append(Completions.of(rollout, tokenizer))
        on_progress(f"{start + len(chosen)} of {len(tokens)} prompts")
    # The last batch was filled up.
    return functools.reduce(Completions.joined, parts).of_prompts(np.arange(len(tokens)))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Correctness of `S` completions for each of `N` held-out problems."""

    solved: Bool[np.ndarray, "N S"]

    def __str__(self) -> str:
        problems, samples = self.solved.shape
        each = f", {samples} completions each" if samples > 1 else ""
        best = f"; pass@{samples} {self.pass_at(samples):.1%}" if samples > 1 else ""
        return f"{self.accuracy:.1%} correct on {problems:,} problems{each}{best}"

    def metrics(self, temperature: float) -> dict[str, float]:
        """Returns the figures under the names that they are recorded by.

        **Arguments:** the temperature that the completions were sampled at, 0 for greedy.
        """
        how = f"temperature_{temperature:g}" if temperature else "greedy"
        problems, samples = self.solved.shape
        passes = {f"eval/{how}/pass@{k}": self.pass_at(k) for k in {1, samples}}
        return {**passes, "eval/num_problems": float(problems)}

    @property
    def accuracy(self) -> float:
        """Fraction of completions that are correct: pass@1."""
        return float(self.solved.mean())

    def __getitem__(self, name: str) -> None:
        raise UserError(f"an evaluation has no {name!r}: it has accuracy and pass_at(k).")

    def pass_at(self, k: int) -> float:
        """Estimates pass@k without bias (arXiv 2107.03374, eq. 1).

        pass@k is the probability that at least one of `k` completions is correct.
        """
        num_samples = self.solved.shape[1]
        if k != int(k) or not 1 <= k <= num_samples:
            raise UserError(f"pass@{k} needs 1 <= k <= {num_samples}, the samples per problem.")
        wrong = num_samples - self.solved.sum(axis=1)
        # C(wrong, k) / C(samples, k), as a product of k ratios
        draws = np.arange(k)
        missed = np.prod(np.maximum(wrong[:, None] - draws, 0) / (num_samples - draws), axis=1)
        return float(1 - missed.mean())
