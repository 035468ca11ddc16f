"""Completions that agents make, which speak to the model over HTTP."""

import contextlib
import copy
import dataclasses
import functools
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import jax
import numpy as np

from grpo_eqx.common.clean_text import is_name
from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.common.plain_data import brief
from grpo_eqx.common.process_state import warn
from grpo_eqx.data.acted import Acted, ToolCounts
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.distributed.exchange import from_main, raise_on_all_hosts
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.environments.calls import (
    MOST_THREADS,
    Call,
    Calls,
    Outcome,
    StillRunsError,
    awaited,
    interruptible,
)
from grpo_eqx.environments.chat_format import ChatFormats
from grpo_eqx.environments.command import Command, CommandError
from grpo_eqx.environments.endpoint.app import Endpoint
from grpo_eqx.environments.endpoint.exchange import Exchange, follow
from grpo_eqx.environments.endpoint.recorder import Recorder, RecordOptions
from grpo_eqx.environments.endpoint.requests import Wanted
from grpo_eqx.environments.endpoint.server import listening, served
from grpo_eqx.environments.harness_endpoint import HarnessEndpoint
from grpo_eqx.generation.local_sampler import LocalSampler
from grpo_eqx.generation.open_session import OpenSession
from grpo_eqx.generation.pending import Deferred
from grpo_eqx.generation.sampler import PendingSamples, Responder, Sampled, Sampler, Until
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.rewards.contract import read_rewards, reason_of
from grpo_eqx.rewards.runner import func_name
from grpo_eqx.settings.config import GRPOConfig

MOST_PROGRAMS = 64
"""Programs that run at a time by default."""
_BLOCKED = 30.0
"""Seconds after which an event loop counts as blocked."""
REWARD = "harness_reward"
"""Column in which reward functions get what the harness returned."""


Harness = Callable[[HarnessEndpoint, dict[str, Any]], Awaitable[float | None] | float | None]
"""Function `run(endpoint, row)` that lets an agent work on a problem once.

It gets the endpoint and the row of the data, with its `prompt`, and returns the reward, or `None`
where reward functions give it. A plain function runs in a thread, an `async` one in an event loop.
"""


class HarnessSampler(Sampler):
    """Sampler whose completions agents make, with the help of the sampler on the run's devices.

    The first process runs the agents and the endpoint; all of them draw tokens. Enter it as a
    context: leaving it ends what still runs.
    """

    def __init__(
        self,
        harness: Harness | str,
        sampler: LocalSampler,
        tokenizer: ChatTokenizer,
        cfg: GRPOConfig,
        open_shape: tuple[int, int],
    ):
        """**Arguments:**

        - `harness`: the function, or the command line of a program.
        - `sampler`: draws the tokens.
        - `tokenizer`: the tokenizer.
        - `cfg`: the resolved settings.
        - `open_shape`: slots that answer agents, and limit on the tokens of a request.

        Raises `UserError` for a program that is not found, and where agents cannot be answered.
        """
        self._sampler, self._cfg = sampler, cfg
        # Only the first process needs the program and the port.
        self._run: Any = raise_on_all_hosts(lambda: self._checked(harness) if is_main() else None)
        most = MOST_PROGRAMS if isinstance(harness, str) else MOST_THREADS
        self._calls = Calls(cfg.harness_timeout, most=cfg.harness_concurrency or most)
        self._chat = ChatFormats(tokenizer)
        self._version = 0
        self._has_noted = self._has_noted_blocking = self._has_warned = False
        self._open_shape, self._depth = open_shape, 0
        self._interruptible = contextlib.ExitStack()

    def _checked(self, harness: Harness | str) -> Harness:
        """Returns the function; raises `UserError` if it cannot be called, or answered."""
        if (host := self._cfg.harness_host) in ("0.0.0.0", "::"):
            raise UserError(
                f"harness_host is {host}: give the address by which agents reach this machine."
            )
        self._listening().close()
        return Command(harness) if isinstance(harness, str) else harness

    def _listening(self) -> socket.socket:
        return listening(self._cfg.harness_host, self._cfg.harness_port, "harness_port")

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
        assert problems is not None, "agents work on them"
        assert responder is None, "agents make whole completions"
        return Deferred(lambda: self._completed(trajectories, problems, sampling))

    def __enter__(self) -> "HarnessSampler":
        self._depth += 1
        self._interruptible.enter_context(interruptible())
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            with self._interruptible:
                self._calls.close()

    def _completed(
        self,
        trajectories: Sequence[Trajectory],
        problems: Sequence[Prompt | None],
        sampling: Sampling | None,
    ) -> Sampled:
        """Has agents work in the first process, and draws tokens for them in all."""
        group = len(trajectories) // len(problems)
        real = [problem for problem in problems if problem is not None]
        is_training = sampling is None
        sampling = sampling or self._sampler.options.sampling
        session = self._sampler.open_session(*self._open_shape)
        recorders = [
            Recorder(each, self._record_options(sampling))
            for each in trajectories[: len(real) * group]
        ]
        rows = [
            copy.deepcopy({"prompt": problem.content, **problem.columns})
            for problem in real
            for _ in range(group)
        ]
        listener = raise_on_all_hosts(lambda: self._listening() if is_main() else None)
        if listener is not None:
            work = self._called(session, listener, recorders, rows, is_training=is_training)
        else:
            follow(session, sampling)
            work = list
        ended = raise_on_all_hosts(work)
        if jax.process_count() > 1:
            ended = [_Ended.from_json(x) for x in from_main([x.to_json() for x in ended])]
        return self._sampled(trajectories, problems, ended, session)

    def _called(
        self,
        session: OpenSession,
        listener: socket.socket,
        recorders: Sequence[Recorder],
        rows: Sequence[dict[str, Any]],
        *,
        is_training: bool,
    ) -> Callable[[], "list[_Ended]"]:
        """Runs the harness for each row; returns a function that returns how the runs ended, or
        raises an error.
        """
        clients = {secrets.token_urlsafe(24): recorder for recorder in recorders}
        exchange, name = Exchange(session), str(self._cfg.model)
        server = Endpoint(exchange, self._chat, name, clients.get)
        with served(server, listener) as address:

            async def run(key: str, row: dict[str, Any]) -> Any:
                endpoint = HarnessEndpoint(f"{address}/v1", key, name)
                try:
                    return await awaited(functools.partial(self._run, endpoint, row))
                finally:
                    clients.pop(key).close()  # what it has left running gets no answers any more

            running = self._calls.together(
                [
                    Call(run, {"key": key, "row": row})
                    for key, row in zip([*clients], rows, strict=True)
                ]
            )
            running.add_done_callback(lambda _: exchange.wake())
            try:
                exchange.run(lambda: running.done() or self._note_blocking())
            except BaseException:
                self._calls.close()  # first, as the process may have few seconds left
                raise

        def result() -> list[_Ended]:
            outcomes = self._calls.result(running)
            made = [
                _Ended.of(recorder, outcome, self._version)
                for recorder, outcome in zip(recorders, outcomes, strict=True)
            ]
            self._check(made, is_training=is_training)
            return made

        return result

    def _note_blocking(self) -> bool:
        """Warns once of a harness that blocks its event loop; returns `False`."""
        if not self._has_noted_blocking and self._calls.seconds_blocked() > _BLOCKED:
            self._has_noted_blocking = True
            warn(
                f"the harness is async, and has blocked its event loop for {_BLOCKED:.0f} s, so "
                f"that runs wait for each other: await an async client, or make it a plain "
                f"function, which runs in a thread"
            )
        return False

    def _check(self, ended: Sequence["_Ended"], *, is_training: bool) -> None:
        """Warns of the first run that failed; raises `RunError` where failures stop the run."""
        failures = [each.failure for each in ended if each.failure is not None]
        if not failures:
            return
        said = f"harness {failures[0]}"
        if len(failures) == len(ended) and is_training:
            raise RunError(f"{said}, and so did all {len(ended)} runs of this step: fix it.")
        if self._cfg.tool_failures == "stop":
            raise RunError(
                f"{said}: fix it, or leave tool_failures unset, to leave its completion out."
            )
        if not self._has_warned:
            self._has_warned = True
            warn(f"{said}: its completion is left out; tools/num_lost counts them")

    def _sampled(
        self,
        trajectories: Sequence[Trajectory],
        problems: Sequence[Prompt | None],
        ended: Sequence["_Ended"],
        session: OpenSession,
    ) -> Sampled:
        """Returns completions as training takes them, and as reward functions see them."""
        eos = np.array(self._chat.tokenizer.eos_ids[:1], np.int32)
        group = len(trajectories) // len(problems)
        # Others fill the batch up.
        whole = [*ended, *[_Ended()] * (len(trajectories) - len(ended))]
        made = [
            begun.completed(eos) if each.trajectory is None else each.trajectory
            for begun, each in zip(trajectories, whole, strict=True)
        ]
        contents = [x.content if x else "" for x in problems for _ in range(group)]
        texts = self._chat.tokenizer.decode_completions([each.ids.tolist() for each in made])
        messages = [
            each.messages or [{"role": "assistant", "content": text}]
            for text, each in zip(texts, whole, strict=True)
        ]
        acted = Acted(
            contents, messages, [None] * len(made), [each.counts for each in whole],
            columns={REWARD: [each.reward for each in whole]},
        )  # fmt: skip
        return Sampled(made, session.counts, acted=acted)

    def _record_options(self, sampling: Sampling) -> RecordOptions:
        cfg = self._cfg
        assert cfg.max_completion_length is not None  # resolved
        return RecordOptions(
            self._chat, sampling, cfg.max_prompt_length, cfg.max_completion_length,
            cfg.fork_threshold_tokens, functools.partial(self._note_sampling, sampling),
        )  # fmt: skip

    def _note_sampling(self, sampling: Sampling, wanted: Wanted) -> None:
        """Warns once of an agent that asks for other draws than those of training."""
        if self._has_noted or wanted.sampling in (Sampling(), sampling):
            return
        self._has_noted = True
        warn(
            "an agent asks for a temperature, top_p or min_p of its own: training draws with those "
            "of the run"
        )


class HarnessReward:
    """Reward function of the harness's own reward."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(
        self, harness_reward: Sequence[float | None], **columns: Any
    ) -> list[float | None]:
        return list(harness_reward)


def harness_name(harness: Harness | str) -> str:
    """Returns the name under which the rewards of a harness are logged."""
    if isinstance(harness, str):
        return "harness"
    name = func_name(harness)
    return name if is_name(name) else "harness"


@dataclasses.dataclass(frozen=True)
class _Ended:
    """A run of the harness that has ended."""

    trajectory: Trajectory | None = None
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reward: float | None = None
    counts: ToolCounts = ToolCounts(0)  # noqa: RUF009
    failure: str | None = None
    """Why it has failed, as the continuation of a sentence about it."""

    @classmethod
    def of(cls, recorder: Recorder, outcome: Outcome, version: int) -> "_Ended":
        failure, reward = None, None
        if outcome.error is not None:
            failure = _failure_of(outcome.error)
        else:
            reading = read_rewards([outcome.result], 1)
            if isinstance(reading, str) or isinstance(reading[0], str):
                failure = f"returned {brief(outcome.result)}, which is not a number"
            else:
                reward = reading[0]
        trajectory = recorder.trajectory(version)
        if failure is None and trajectory is None:
            failure = "ended without an answer of the model"
        counts = ToolCounts(
            0, lost=int(failure is not None), seconds=outcome.seconds, **recorder.counts._asdict()
        )
        return cls(trajectory, recorder.messages, reward, counts, failure)

    def to_json(self) -> list[Any]:
        """Returns all of it as JSON data."""
        return [
            None if self.trajectory is None else _lists_of(self.trajectory),
            self.messages, self.reward, self.counts, self.failure,
        ]  # fmt: skip

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> "_Ended":
        trajectory, messages, reward, counts, failure = data
        made = None if trajectory is None else _trajectory_of(trajectory)
        return cls(made, messages, reward, ToolCounts(*counts), failure)


def _lists_of(each: Trajectory) -> list[Any]:
    """Returns a trajectory as JSON data."""
    arrays = each.ids, each.written, each.sampler_logps, each.versions
    return [
        list(map(int, each.prompt_ids)), each.address, *(x.tolist() for x in arrays),
        each.finish_reason, [_lists_of(fork) for fork in each.forks],
    ]  # fmt: skip


def _trajectory_of(data: Sequence[Any]) -> Trajectory:
    """Returns a trajectory from `_lists_of`."""
    prompt_ids, address, ids, written, logps, versions, reason, forks = data
    return Trajectory(
        prompt_ids, Address(*address), np.array(ids, np.int32), np.array(written, bool),
        np.array(logps, np.float32), np.array(versions, np.int32), reason,
        forks=[_trajectory_of(each) for each in forks],
    )  # fmt: skip


def _failure_of(error: BaseException) -> str:
    """Describes why a run failed, as the continuation of a sentence about it."""
    if isinstance(error, CommandError):
        return str(error)
    if isinstance(error, StillRunsError):
        return f"ran out of time: it {error} (harness_timeout)"
    return reason_of(error)
