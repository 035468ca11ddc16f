"""Scores of an evaluation's completions, from functions with the signature of rewards."""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

import numpy as np
from jaxtyping import Bool

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.evaluation.result import Evaluation
from grpo_eqx.rewards import RewardFunc, gsm8k
from grpo_eqx.rewards.make_rewards import make_eval_reward, named_funcs
from grpo_eqx.rewards.signatures import check_signatures
from grpo_eqx.rollout.rollout import Rollout, rewarded
from grpo_eqx.settings.config import GRPOConfig

HELDOUT = "held-out problem"
"""Name of an evaluation's problem in messages."""

EvalMetrics = Mapping[str, RewardFunc | str] | Sequence[RewardFunc | str]
"""Functions, or names of built-in functions, whose means are reported; a list, or by name."""

_READERS = (
    (gsm8k.correct, gsm8k.answer_number),
    (gsm8k.correct_strict, gsm8k.marked_number),
)
"""Functions that compare answers, with the functions that read an answer."""


class Grader:
    """Functions that score the completions of held-out problems.

    Like a `RewardRunner`, it owns worker processes: enter it as a context.
    """

    def __init__(
        self,
        cfg: GRPOConfig,
        eval_func: RewardFunc | str,
        metrics: EvalMetrics = (),
        own: Mapping[str, RewardFunc] = MappingProxyType({}),
    ):
        """**Arguments:**

        - `cfg`: the settings, for the limits on functions.
        - `eval_func`: the function that returns 1.0 for solved problems. With `correct`, the strict
          form is scored, too.
        - `metrics`: more functions, whose means are reported.
        - `own`: such functions of environments, unless `metrics` have the name.

        Raises `UserError` for anything that is not a function, and for invalid names of metrics.
        """
        self._solved = make_eval_reward(cfg, eval_func)
        (self.func,) = self._solved.funcs.values()
        self.is_flexible = self.func is gsm8k.correct
        """Whether the function has a strict form."""
        self._strict = make_eval_reward(cfg, gsm8k.correct_strict) if self.is_flexible else None
        self._read = next((read for func, read in _READERS if func is self.func), None)
        named = {**own, **named_funcs(metrics, "eval_metrics")}
        if wrong := [name for name in named if not re.fullmatch(r"[\w.-]+", name)]:
            raise UserError(
                f"eval_metrics has the name {wrong[0]!r}: use letters, digits, _, - and dots."
            )
        self._metrics = {name: make_eval_reward(cfg, func) for name, func in named.items()}
        self.highest = -math.inf
        """Highest value of `eval_func` in this evaluation."""

    def __enter__(self) -> "Grader":
        self.highest = -math.inf
        return self

    def __exit__(self, *_: object) -> None:
        for runner in (self._solved, *self._metrics.values()):
            runner.close()

    @property
    def reads_answers(self) -> bool:
        """Whether completions have answers that can be compared, for majority votes."""
        return self._read is not None

    @property
    def funcs(self) -> dict[str, RewardFunc]:
        """The functions by their roles: `eval_func`, or a name in `eval_metrics`."""
        found = {"eval_func": self.func}
        for name, runner in self._metrics.items():
            (found[f"{name} of eval_metrics"],) = runner.funcs.values()
        return found

    @property
    def metric_names(self) -> list[str]:
        """Names of the functions whose means are reported."""
        return list(self._metrics)

    def check_signatures(self, columns: Collection[str], *, environments: bool = False) -> None:
        """Raises `UserError` for a function that cannot be called with the problems' columns.

        **Arguments:**

        - `columns`: the columns.
        - `environments`: whether completions have environments.
        """
        workers = self._solved.limits.workers
        funcs = dict[str, RewardFunc]()
        for name, runner in self._metrics.items():
            (funcs[name],) = runner.funcs.values()
        if self.func is not gsm8k.correct:  # checks its columns when it is used
            funcs = {**self._solved.funcs, **funcs}
        check_signatures(funcs, columns, environments=environments, workers=workers)

    def check_answers(self, prompts: Sequence[Prompt]) -> None:
        """Raises `UserError` for problems without the answers that `eval_func` compares with."""
        if self._read is not None:
            gsm8k.check_answers(prompts, "eval_func", HELDOUT)

    def __call__(self, rollout: Rollout, temperature: float) -> Evaluation:
        """Scores the completions of problems, in all processes together.

        **Arguments:**

        - `rollout`: problems and completions.
        - `temperature`: the temperature of sampling.
        """
        scores = rewarded(self._solved, rollout).total
        self.highest = float(np.max(scores, initial=self.highest, where=~np.isnan(scores)))
        solved = scores == 1.0
        strict = None
        if self._strict is not None:
            strict = rewarded(self._strict, rollout).total == 1.0
        return Evaluation(
            solved,
            strict,
            self._majority(rollout.tagged_texts, solved) if self._votes(solved) else None,
            {name: rewarded(runner, rollout).total for name, runner in self._metrics.items()},
            temperature,
        )

    def _votes(self, solved: Bool[np.ndarray, "P S"]) -> bool:
        """Returns whether each problem has several answers to compare."""
        return self.reads_answers and solved.shape[1] > 1

    def _majority(
        self, texts: Sequence[Sequence[str]], solved: Bool[np.ndarray, "P S"]
    ) -> Bool[np.ndarray, " P"]:
        """Returns whether the most frequent answer to each problem is correct.

        Completions without an answer have no vote. Of equally frequent answers, the answer that was
        sampled first counts (self-consistency, arXiv 2203.11171).
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
        chosen = votes.most_common(1)[0][0]  # ties go to the first answer
        return bool(solved[answers.index(chosen)])
