"""Environments of the library verifiers, played by its own harnesses on an endpoint."""

import asyncio
import os
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import Any

from grpo_eqx.common.errors import UserError, shown
from grpo_eqx.environments.harness_endpoint import HarnessEndpoint

_DATA = "task"
"""Column with a task's data."""


class VerifiersHarness:
    """Plays the tasks of a verifiers environment, and returns its rewards.

    ```python
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}  # a chat, on this host
    config = vf.resolve_env_config({"taskset": {"id": "my_taskset"}, "agent": agent})
    harness = VerifiersHarness(vf.load_environment(config))
    trainer = GRPOTrainer(cfg, train_data=harness.rows(), harness=harness)
    ```

    Episodes run in a thread of their own, in which the tool servers that all tasks share stay up.
    """

    def __init__(self, env: Any):
        """**Arguments:**

        - `env`: the `Env`, as `verifiers.v1.load_environment` returns it.

        Raises `UserError` if it is none, or without verifiers 0.4.
        """
        self._vf = _verifiers()
        if not isinstance(env, self._vf.Env):
            raise UserError(
                f"{shown(env)} is not an environment of verifiers: give what "
                f"verifiers.v1.load_environment returns."
            )
        self._env = env

    def rows(self, number: int | None = None) -> list[dict[str, Any]]:
        """Returns rows of training data: `prompt`, a conversation, and `task`, which a run needs.

        **Arguments:**

        - `number`: the number of tasks, from the first on; by default, all.

        Raises `UserError` for all tasks of an infinite taskset, and for tasks that JSON changes.
        """
        taskset = self._env.taskset
        if number is None and not taskset.bounded:
            raise UserError("the taskset has no end: give rows() a number of tasks.")
        return [_row(task.data) for task in islice(taskset, number)]

    async def __call__(self, endpoint: HarnessEndpoint, row: Mapping[str, Any]) -> float | None:
        """Returns the reward of an episode; `None` if nothing has scored it.

        **Arguments:**

        - `endpoint`: where the model is.
        - `row`: one of `rows`.

        Raises `RuntimeError` if the episode fails.
        """
        loop = await asyncio.shield(asyncio.wrap_future(self._serving))
        episode = self._episode(endpoint, row)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(episode, loop))

    @cached_property
    def _serving(self) -> "Future[asyncio.AbstractEventLoop]":
        """The event loop in which episodes run, once what they share is up."""
        begun: Future[asyncio.AbstractEventLoop] = Future()

        async def serve() -> None:
            async with self._env.serving():
                # A server of requests keeps a client for each key that it has seen. Without a
                # shared one, each rollout has its own, which ends with it.
                self._env._interception = None
                begun.set_result(asyncio.get_running_loop())
                await asyncio.Event().wait()

        def run() -> None:
            try:
                asyncio.run(serve())
            except Exception as error:
                begun.set_exception(error)

        threading.Thread(target=run, daemon=True, name="verifiers").start()
        return begun

    async def _episode(self, endpoint: HarnessEndpoint, row: Mapping[str, Any]) -> float | None:
        # verifiers reads keys from the environment. Programs that it starts get no variables with
        # API_KEY in their names.
        variable = f"GRPO_EQX_API_KEY_{secrets.token_hex(8)}"
        client = self._vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
        context = self._vf.ModelContext(model=endpoint.model, client=client)
        os.environ[variable] = endpoint.api_key
        try:
            episode = await self._env.run_episode(self._task(row), context)
        finally:
            del os.environ[variable]
        return _reward(episode, client)

    def _task(self, row: Mapping[str, Any]) -> Any:
        """Returns a row's task, as verifiers' own server of environments rebuilds it."""
        kind = type(self._env.taskset).task_type()
        data = kind.data_type().model_validate_json(row[_DATA])
        return kind(data, self._env.taskset.config.task)


def _verifiers() -> Any:
    """Returns `verifiers.v1`; raises `UserError` without it."""
    try:
        found = version("verifiers")
        if found.startswith("0.4."):
            return import_module("verifiers.v1")
        reason = f"this is verifiers {found}"
    except ImportError as error:
        reason = str(error)
    raise UserError(
        f'verifiers 0.4 is needed ({reason}): install it with pip install "grpo_eqx[verifiers]".'
    )


def _row(data: Any) -> dict[str, Any]:
    """Returns the row of a task."""
    if type(data).model_validate_json(data.model_dump_json()) != data:
        raise UserError(
            f"task {data.idx} is not the same after it was written as JSON: let all fields of "
            f"{type(data).__name__} be values that pydantic writes and reads back."
        )
    # Without a prompt, the user opens the dialogue in the episode.
    asked = data.prompt_text or data.name or f"task {data.idx}"
    messages = [("system", data.system_prompt), ("user", asked)]
    prompt = [{"role": role, "content": text} for role, text in messages if text]
    return {"prompt": prompt, _DATA: data.model_dump_json()}


def _reward(episode: Any, client: Any) -> float | None:
    """Returns the reward of an episode.

    **Arguments:**

    - `episode`: the episode.
    - `client`: the client of the model that is trained.

    Raises `RuntimeError` for an episode that failed, and `UserError` unless the model that is
    trained played one part, once.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        last = errors[-1] if errors else None
        reason = "no reason given" if last is None else f"{last.type}: {last.message}"
        raise RuntimeError(f"an episode of {episode.env.id} failed ({reason})")
    played = [trace for trace in episode.traces if trace.agent.config.client == client]
    if len(played) != 1 or not played[0].agent.trainable:
        names = ", ".join(trace.agent.name for trace in played) or "nobody"
        raise UserError(
            f"the model that is trained plays more or less than one trained part of an episode of "
            f"{episode.env.id} ({names}): use an environment with one, and give all other agents "
            f"a model and a client of their own."
        )
    (trace,) = played
    scored = any(reward is not None for reward in trace.rewards.values())
    return float(trace.reward) if scored else None
