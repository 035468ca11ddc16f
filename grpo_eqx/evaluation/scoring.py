"""Scores of an evaluation's completions, from functions with the signature of rewards."""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import numpy as np
from jaxtyping import Bool

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.evaluation.result import Evaluation
from grpo_eqx.generation import Completions
from grpo_eqx.rewards import RewardFunc, gsm8k
from grpo_eqx.rewards.make_rewards import make_eval_reward, named_funcs
from grpo_eqx.rewards.signatures import check_signatures
from grpo_eqx.rollout.experience import rewarded
from grpo_eqx.settings.config import GRPOConfig

HELDOUT = "held-out problem"
"""Name of an evaluation's problem in messages."""

EvalMetrics = Mapping[str, RewardFunc | str] | Sequence[RewardFunc | str]
"""Functions whose means an evaluation reports, or names of built-in ones; by name, or a list."""

_READERS = (
    (gsm8k.correct, gsm8k.answer_number),
    (gsm8k.correct_strict, gsm8k.marked_number),
)
"""Functions that compare answers, and how they read them from a completion."""


class Scorer:
    """Functions that score the completions of held-out problems.

    It owns what the functions run in, as a `RewardRunner` does: enter it as a context.
    """

    def __init__(self, cfg: GRPOConfig, eval_func: RewardFunc | str, metrics: EvalMetrics = ()):
        """**Arguments:** the settings, for the limits on functions; the function by which 1.0 means
        solved; functions whose means are reported besides.

        With `correct`, the strict form is scored too. Raises `UserError` for what is no function,
        and for names that cannot be those of metrics.
        """
        self._solved = make_eval_reward(cfg, eval_func)
        (self.func,) = self._solved.funcs.values()
        self.is_flexible = self.func is gsm8k.correct
        """Whether there is a stricter form of the function."""
        self._strict = make_eval_reward(cfg, gsm8k.correct_strict) if self.is_flexible else None
        self._read = next((read for func, read in _READERS if func is self.func), None)
        named = named_funcs(metrics, "eval_metrics")
        if wrong := [name for name in named if not re.fullmatch(r"[\w.-]+", name)]:
            raise UserError(
                f"eval_metrics has the name {wrong[0]!r}: use letters, digits, _, - and dots."
            )
        self._metrics = {name: make_eval_reward(cfg, func) for name, func in named.items()}
        self.highest = -math.inf
        """Highest value that the function of `solved` has returned in this evaluation."""

    def __enter__(self) -> "Scorer":
        self.highest = -math.inf
        return self

    def __exit__(self, *_: object) -> None:
        for runner in (self._solved, *self._metrics.values()):
            runner.close()

    @property
    def reads_answers(self) -> bool:
        """Whether completions give answers that can be compared, for majority votes."""
        return self._read is not None

    @property
    def funcs(self) -> dict[str, RewardFunc]:
        """The functions, by what they give: `eval_func`, or a name in `eval_metrics`."""
        found = {"eval_func": self.func}
        for name, runner in self._metrics.items():
            (found[f"{name} of eval_metrics"],) = runner.funcs.values()
        return found

    @property
    def metric_names(self) -> list[str]:
        """Names of the functions whose means are reported."""
        return list(self._metrics)

    def check_signatures(self, columns: Collection[str]) -> None:
        """Raises `UserError` for a function that the problems' columns do not suit."""
        if self.func is not gsm8k.correct:  # which says itself what it needs, when it is used
            check_signatures(self._solved.funcs, columns)
        for name, runner in self._metrics.items():
            check_signatures(dict.fromkeys([name], *runner.funcs.values()), columns)

    def check_answers(self, prompts: Sequence[Prompt]) -> None:
        """Raises `UserError` where the function of `solved` finds no answers to compare with."""
        if self._read is not None:
            gsm8k.check_answers(prompts, "eval_func", HELDOUT)

    def __call__(
        self, prompts: list[Prompt], completions: Completions, temperature: float
    ) -> Evaluation:
        """Scores the completions of problems, on all processes together.

        **Arguments:** the problems; their completions; the temperature that these were sampled at.
        """
        scores = rewarded(self._solved, prompts, completions).total
        self.highest = float(np.max(scores, initial=self.highest, where=~np.isnan(scores)))
        solved = scores == 1.0
        strict = None
        if self._strict is not None:
            strict = rewarded(self._strict, prompts, completions).total == 1.0
        return Evaluation(
            solved,
            strict,
            (
                self._majority(completions.tagged_texts(prompts), solved)
                if self._votes(solved)
                else None
            ),
            {
                name: rewarded(runner, prompts, completions).total
                for name, runner in self._metrics.items()
            },
            temperature,
        )

    def _votes(self, solved: Bool[np.ndarray, "P S"]) -> bool:
        """Returns whether there are several answers of each problem to compare."""
        return self.reads_answers and solved.shape[1] > 1

    def _majority(
        self, texts: Sequence[Sequence[str]], solved: Bool[np.ndarray, "P S"]
    ) -> Bool[np.ndarray, " P"]:
        """Returns whether the answer that most completions of a problem give is right.

        Completions without an answer have no vote. Of answers with equally many, the one that was
        drawn first counts (self-consistency, arXiv 2203.11171).
        """
        return np.array(
            [self._is_right(own, right) for own, right in zip(texts, solved, strict=True)], bool
        )

    def _is_right(self, texts: Sequence[str], solved: Bool[np.ndarray, " S"]) -> bool:
        assert self._read is not None
        answers = [self._read(text) for text in texts]
        votes = Counter[Fraction](answer for answer in answers if answer is not None)
        if not votes:
            return False
        chosen = votes.most_common(1)[0][0]  # of equals, the first that was counted
        return bool(solved[answers.index(chosen)])
