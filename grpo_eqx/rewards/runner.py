"""Runner that calls reward functions, and weights and sums their rewards."""

import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from grpo_eqx.common.errors import RewardError, RewardFailureError, UserError, first_line
from grpo_eqx.common.process_state import StateGuard, warn
from grpo_eqx.data.acted import Acted
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.rewards.async_calls import AsyncCalls
from grpo_eqx.rewards.contract import Reading, read_rewards
from grpo_eqx.rewards.limits import RewardLimits, is_async, is_built_in, is_plain
from grpo_eqx.rewards.logged import Log, Logged, TrainerState
from grpo_eqx.rewards.outcomes import Failure, Outcome, Samples, outcomes_of, raised
from grpo_eqx.rewards.signatures import named_of_training
from grpo_eqx.rewards.workers import WorkerPool

RewardFunc = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""TRL's reward signature, `f(prompts, completions, **columns)`: lists in, one float per row out.

`columns` holds `completion_ids`, the tokens of each completion, and the problems' other columns, as
lists. A function of training that names them also gets TRL's `log_extra(column, values)`,
`log_metric(name, value)` and `trainer_state`. `None` in place of a float means that the function
does not apply to a completion. An `async def` function is awaited.
"""


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Rewards of `P` prompts with `G` completions each; NaN if a function does not apply."""

    names: tuple[str, ...]
    each: Float[np.ndarray, "funcs P G"]
    """Unweighted rewards of each function."""
    total: Float[np.ndarray, "P G"]
    """Weighted sum over the functions that apply; NaN if none does."""
    weights: tuple[float, ...]
    """Weight of each function."""
    failed: Bool[np.ndarray, "funcs P G"] | None = None
    """True where a function failed; the completion then has no rewards. `None`: failures are
    errors."""
    logged: Logged | None = None
    """Metrics and columns that functions have logged; `None` where none of them can log."""

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        each: Float[np.ndarray, "funcs P G"],
        weights: Sequence[float],
        failed: Bool[np.ndarray, "funcs P G"] | None = None,
    ) -> "Rewards":
        """Builds the rewards from each function's own, and adds their weighted sum.

        **Arguments:**

        - `names`, `each`, `weights`, `failed`: as the fields.
        """
        if failed is not None:
            each = np.where(failed.any(axis=0), np.nan, each)
        return cls(tuple(names), each, _weighted_sum(each, weights), tuple(weights), failed)

    @property
    def dropped(self) -> Bool[np.ndarray, "P G"]:
        """True for completions on which a function failed."""
        nowhere = np.zeros(self.total.shape, bool)
        return nowhere if self.failed is None else np.any(self.failed, axis=0, out=nowhere)

    def joined(self, other: "Rewards") -> "Rewards":
        """Returns these rewards, followed by the rewards of other prompts."""
        failed = None
        if self.failed is not None and other.failed is not None:
            failed = np.concatenate([self.failed, other.failed], axis=1)
        logged = None
        if self.logged is not None and other.logged is not None:
            logged = self.logged.joined(other.logged)
        return dataclasses.replace(
            self,
            each=np.concatenate([self.each, other.each], axis=1),
            total=np.concatenate([self.total, other.total]),
            failed=failed,
            logged=logged,
        )

    def without(self, name: str) -> "Rewards":
        """Returns the rewards as if the function with that name did not exist."""
        others = [i for i, own in enumerate(self.names) if own != name]
        weights = tuple(self.weights[i] for i in others)
        failed = None if self.failed is None else self.failed[others]
        names = tuple(self.names[i] for i in others)
        return Rewards.of(names, self.each[others], weights, failed)

    def of_prompts(self, indices: Int[np.ndarray, " Q"]) -> "Rewards":
        """Returns the rewards of the prompts at `indices`, in their order."""
        numbers = np.arange(self.total.size).reshape(self.total.shape)[indices].reshape(-1)
        return dataclasses.replace(
            self,
            each=self.each[:, indices],
            total=self.total[indices],
            failed=None if self.failed is None else self.failed[:, indices],
            logged=None if self.logged is None else self.logged.of(numbers.tolist()),
        )


class RewardRunner:
    """Runner that calls every reward function on a batch and combines their rewards.

    It owns the worker processes and the event loop of functions that need them. Close it, or enter
    it as a context, to end them. They start when they are first needed, also after a `close`.
    """

    def __init__(
        self,
        funcs: Mapping[str, RewardFunc],
        weights: Sequence[float] | None = None,
        penalty: str | None = None,
        limits: RewardLimits | None = None,
        max_steps: int | None = None,
    ):
        """**Arguments:**

        - `funcs`: the functions, by the names that they are logged under.
        - `weights`: their weights, by default 1 each.
        - `penalty`: the name of a function that applies only where another function does.
        - `limits`: the limits on the functions.
        - `max_steps`: the steps of the run whose completions are rewarded. Functions outside of
          workers can then log. `None`: there is no run, and none can.

        Raises `UserError` if the numbers of functions and weights differ, all weights are 0, or a
        limit cannot be enforced.
        """
        weights = (1.0,) * len(funcs) if weights is None else weights
        if not funcs or len(weights) != len(funcs):
            raise UserError(
                f"{len(funcs)} reward functions and {len(weights)} reward_weights: give at least "
                f"one function, and one weight for each."
            )
        self.funcs = dict(funcs)
        if not any(weights):
            raise UserError("all reward_weights are 0: give at least one function a weight.")
        self.weights = tuple(float(weight) for weight in weights)
        self.penalty = penalty
        self.limits = limits = RewardLimits() if limits is None else limits
        limits.check_enforceable(funcs)
        plain = {name: func for name, func in funcs.items() if is_plain(func)}
        self._in_workers = plain if limits.workers else {}
        self._workers = WorkerPool(self._in_workers, limits.workers)
        self._awaited = AsyncCalls(limits)
        self.max_steps = max_steps
        can_log = {x: f for x, f in funcs.items() if x not in self._in_workers}
        passed = {name: named_of_training(func) for name, func in can_log.items()}
        self._passed = {} if max_steps is None else passed
        self._guard = StateGuard()

    def with_penalty(self, name: str, func: RewardFunc) -> "RewardRunner":
        """Returns a runner with a penalty, of weight 1, on completions that have a reward."""
        funcs, weights = {**self.funcs, name: func}, (*self.weights, 1.0)
        return RewardRunner(funcs, weights, name, self.limits, self.max_steps)

    @property
    def can_log(self) -> bool:
        """Whether a function names an argument to log with."""
        return any(self._passed.values())

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers and the event loop."""
        self._workers.close()
        self._awaited.close()

    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[Sequence[int]]],
        tagged: Sequence[Sequence[str]] | None = None,
        acted: Acted | None = None,
        *,
        step: int = 0,
    ) -> Rewards:
        """Computes the rewards of `completions[p][g]`, the completions of `prompts[p]`.

        **Arguments:**

        - `prompts`, `completions`: the problems, and the texts of their completions.
        - `completion_ids`: the tokens of each completion.
        - `tagged`: texts with all tags of the layout, which built-in functions read in place of
          `completions`.
        - `acted`: dialogues of the completions, whose messages functions get in place of texts. No
          function applies to a lost one.
        - `step`: steps that the run has done.

        Raises `RewardError`, naming the function, if a function does not return a list with a
        number or `None` for each completion.

        A function fails on a completion if it raises, returns a number that is not finite, loses
        its process or runs out of time. This raises `RewardFailureError`, which names the function
        and the completion, with the function's own error as its cause. If `limits.failures` is
        `drop`, the completion has no rewards instead.
        """
        log = Log(TrainerState(step, self.max_steps or 0), self._passed)
        samples = Samples.of(prompts, completions, completion_ids, acted, log)
        of_built_in = samples
        if acted is None and tagged is not None and tagged is not completions:
            of_built_in = Samples.of(prompts, tagged, completion_ids)
        shape = len(self.funcs), len(prompts), len(completions[0])
        by_name = self._outcomes_but_lost(samples, of_built_in, () if acted is None else acted.lost)
        outcomes = [by_name[name] for name in self.funcs]
        failed = np.array([[isinstance(x, Failure) for x in own] for own in outcomes])
        each = np.array([[_number(x) for x in own] for own in outcomes])
        penalties = np.array([name == self.penalty for name in self.funcs])
        unrewarded = np.isnan(each[~penalties]).all(axis=0)
        each[np.ix_(penalties, unrewarded)] = np.nan
        logged = log.logged(len(samples)) if self.can_log else None
        return self.combined(each.reshape(shape), failed.reshape(shape), logged)

    def try_out(
        self,
        prompt: Prompt,
        completion: str,
        ids: Sequence[int],
        acted: Acted | None = None,
    ) -> None:
        """Calls every function once, on one completion; raises their errors.

        A broken function thus ends a run before its first rollout.

        **Arguments:**

        - `prompt`: the prompt.
        - `completion`, `ids`: text and tokens of the completion.
        - `acted`: its dialogue, where completions act.
        """
        try:
            self([prompt], [[completion]], [[list(ids)]], acted=acted)
        except RewardError as error:
            trial = "This was a trial call before the first rollout, with a made-up completion."
            raise type(error)(f"{error} {trial}") from error.__cause__

    def combined(
        self,
        each: Float[np.ndarray, "funcs P G"],
        failed: Bool[np.ndarray, "funcs P G"],
        logged: Logged | None = None,
    ) -> Rewards:
        """Combines the functions' rewards; with `drop`, completions with a failure have none."""
        dropped = failed if self.limits.failures == "drop" else None
        rewards = Rewards.of(tuple(self.funcs), each, self.weights, dropped)
        return dataclasses.replace(rewards, logged=logged)

    def check_failures(self, rewards: Rewards) -> None:
        """Raises `RewardFailureError` if a function failed on more completions than allowed."""
        if rewards.failed is None:
            return
        for name, failed in zip(rewards.names, rewards.failed, strict=True):
            if failed.mean() > self.limits.max_failed:
                raise RewardFailureError(
                    f"reward function {name} failed on {failed.sum()} of {failed.size} completions "
                    f"(the warning above has the first), and max_failed_rewards is "
                    f"{self.limits.max_failed}: fix the function, or raise it."
                )

    def _outcomes_but_lost(
        self, samples: Samples, of_built_in: Samples, lost: Sequence[bool]
    ) -> dict[str, list[Outcome]]:
        """Calls all functions for completions that are not lost; to lost ones, none applies."""
        if not any(lost):
            return self._outcomes(samples, of_built_in)
        kept = [i for i, is_lost in enumerate(lost) if not is_lost]
        nothing: list[Outcome] = [None] * len(lost)
        outcomes = {name: nothing.copy() for name in self.funcs}
        if kept:
            for name, own in self._outcomes(samples.chosen(kept), of_built_in.chosen(kept)).items():
                for i, outcome in zip(kept, own, strict=True):
                    outcomes[name][i] = outcome
        return outcomes

    def _outcomes(self, samples: Samples, of_built_in: Samples) -> dict[str, list[Outcome]]:
        """Calls all functions; async functions run beside the others."""
        awaited = [name for name, func in self.funcs.items() if is_async(func)]
        theirs = [x for x, func in self.funcs.items() if not is_built_in(func)]
        here = [x for x in theirs if x not in self._in_workers]
        with self._guarded(*here) if awaited else contextlib.nullcontext():
            started = {
                name: self._awaited.start(name, self.funcs[name], samples)  # type: ignore[arg-type]
                for name in awaited
            }
            outcomes = {}
            try:
                for name, func in self.funcs.items():
                    if name not in started:
                        own = of_built_in if is_built_in(func) else samples
                        outcomes[name] = self._called(name, own)
                        self._note_failures(name, outcomes[name], samples)
                for name, call in started.items():
                    outcomes[name] = call.wait()
                    self._note_failures(name, outcomes[name], samples)
                return outcomes
            finally:
                for call in started.values():
                    call.outcomes.cancel()

    def _called(self, name: str, samples: Samples) -> list[Outcome]:
        """Calls a function that is not async, in workers or here."""
        func, stop = self.funcs[name], self.limits.failures == "stop"
        if name in self._in_workers:
            with self._guarded(name, elsewhere=True):
                return self._workers.run(name, samples, self.limits, stop_at_failure=stop)
        if not is_plain(func):
            return _call(name, func, samples, stop_at_failure=stop, is_ours=True)

        def guarded(**arguments: Any) -> Any:
            with self._guarded(name):
                return func(**arguments)

        return _call(name, guarded, samples, stop_at_failure=stop)

    def _guarded(
        self, *names: str, elsewhere: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Restores the state of this process after calls of functions, here or in workers."""
        return self._guard.around(f"reward function {' or '.join(names)}", elsewhere=elsewhere)

    def _note_failures(self, name: str, outcomes: Sequence[Outcome], samples: Samples) -> None:
        """Raises the first failure as an error, or warns of it, according to the policy."""
        failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
        if not failed:
            return
        failure = outcomes[failed[0]]
        assert isinstance(failure, Failure)
        first = f"reward function {name} {failure.reason} for {samples.named(failed[0])}"
        if issubclass(type(failure.cause), TypeError) and "string indices" in failure.reason:
            first += (
                "; completions are texts where problems are, and messages only where these are "
                "conversations"
            )
        if self.limits.failures == "stop":
            raise RewardFailureError(
                f"{first}: fix it, or set reward_failures to drop to leave out the completions "
                f"that it fails on."
            ) from failure.cause
        warn(f"{first}; it failed on {len(failed)} completions, which are left out")


def _weighted_sum(
    each: Float[np.ndarray, "funcs P G"], weights: Sequence[float]
) -> Float[np.ndarray, "P G"]:
    """Sums the weighted rewards of the functions that apply; NaN if none does."""
    weighted = np.nansum(np.reshape(weights, (-1, 1, 1)) * each, axis=0)
    return np.where(np.isnan(each).all(axis=0), np.nan, weighted)


def func_name(func: Callable[..., Any]) -> str:
    """Returns the name that a function's rewards are logged under."""
    while isinstance(func, functools.partial):
        func = func.func
    return str(getattr(func, "__name__", type(func).__name__))


def _number(outcome: Outcome) -> float:
    return outcome if isinstance(outcome, float) else np.nan


def _call(
    name: str, func: RewardFunc, samples: Samples, *, stop_at_failure: bool, is_ours: bool = False
) -> list[Outcome]:
    """Scores a batch in this process, in one call.

    If the call raises, calls for single completions find out on which it fails, up to the first if
    the run then stops. Functions of this package raise `RewardError` for data that they cannot
    score.
    """
    together = _outcomes_of_call(name, func, samples)
    if not isinstance(together, Failure):
        return together
    cause = together.cause
    if stop_at_failure and is_ours and isinstance(cause, RewardError):
        raise RewardError(f"reward function {name}: {first_line(cause)}") from cause
    outcomes: list[Outcome] = []
    for i in range(len(samples)):
        alone = _outcomes_of_call(name, func, samples.one(i), first=i)
        outcomes += [alone] if isinstance(alone, Failure) else alone
        if stop_at_failure and isinstance(alone, Failure):
            break
    if stop_at_failure and not any(isinstance(outcome, Failure) for outcome in outcomes):
        raise RewardFailureError(
            f"reward function {name} {together.reason} for {len(samples)} completions together, "
            f"though for none of them alone."
        ) from together.cause
    return outcomes


def _outcomes_of_call(
    name: str, func: RewardFunc, samples: Samples, *, first: int = 0
) -> list[Outcome] | Failure:
    """Calls a function for completions, the first of which has number `first`.

    Returns a `Failure` for whatever the function raises, `sys.exit` included, except for Ctrl-C.
    """
    call = samples.call(name)
    reply: list[Reading] | str | Failure
    try:
        returned = func(**(samples.arguments() | call.arguments))
        reply = read_rewards(returned, len(samples), first=first)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reply = raised(error)
    call.end(failed=isinstance(reply, Failure))
    return reply if isinstance(reply, Failure) else outcomes_of(name, reply)
