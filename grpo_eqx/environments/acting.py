"""A sampler whose completions call tools and act in environments."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from grpo_eqx.common.errors import RunError, UserError, class_name, first_line
from grpo_eqx.common.plain_data import brief
from grpo_eqx.common.process_state import warn
from grpo_eqx.data.acted import Acted, ToolCounts
from grpo_eqx.data.batches import padded_length
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ENVIRONMENT, ChatTokenizer
from grpo_eqx.data.trajectory import Trajectory
from grpo_eqx.distributed.exchange import gather_bytes, own_share, raise_on_all_hosts
from grpo_eqx.environments.calls import Outcome
from grpo_eqx.environments.chat_format import ChatFormat
from grpo_eqx.environments.dialogues import Dialogue, Dialogues, ToolLimits
from grpo_eqx.environments.pool import EnvironmentKind, Environments
from grpo_eqx.generation.sampler import PendingSamples, Responder, Sampled, Sampler
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.settings.config import GRPOConfig


class ActingSampler(Sampler):
    """Sampler of dialogues: another one completes turns, and tools and environments answer.

    Enter it as a context, as often as you like: leaving the first one closes all environments.
    """

    def __init__(
        self,
        sampler: Sampler,
        environments: Environments,
        tokenizer: ChatTokenizer,
        limits: ToolLimits,
        *,
        max_prompt_length: int,
        max_completion_length: int,
    ):
        """**Arguments:**

        - `sampler`: completes turns.
        - `environments`: the tools and environments.
        - `tokenizer`: the tokenizer, which reads and writes turns.
        - `limits`: limits on dialogues.
        - `max_prompt_length`, `max_completion_length`: limits on tokens.

        Raises `UserError` for a chat template in which the dialogues cannot be written.
        """
        self._sampler, self._limits, self._environments = sampler, limits, environments
        self._tokenizer, self._max_prompt_length = tokenizer, max_prompt_length
        self._max_completion_length = max_completion_length
        self._chat = ChatFormat(tokenizer, has_tools=any(environments.schemas.values()))
        self._last: PendingSamples | None = None
        self._depth = 0

    def set_weights(self, model: CausalLM, version: int) -> None:
        self._sampler.set_weights(model, version)

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        sampling: Sampling | None = None,
        *,
        problems: Sequence[Prompt | None] | None = None,
        prompt_width: int | None = None,
        responder: Responder | None = None,
    ) -> PendingSamples:
        assert problems is not None, "environments are reset for problems"
        assert responder is None, "tools and environments respond"
        if self._last is not None:
            self._last.result()  # two batches would hold two caches
        groups = itertools.groupby(range(len(trajectories)), lambda n: trajectories[n].address[:2])
        of_prompts = [list(numbers) for _, numbers in groups]
        share = range(len(of_prompts))[own_share(len(of_prompts))]
        mine = {n: problems[p] for p in share for n in of_prompts[p]}
        own = {n: problem for n, problem in mine.items() if problem is not None}
        begun, prompts = raise_on_all_hosts(lambda: self._begun(own))
        changed = _everyones(prompts)
        trajectories = [
            dataclasses.replace(each, prompt_ids=changed.get(n, each.prompt_ids))
            for n, each in enumerate(trajectories)
        ]
        trajectories = [
            each
            for group in of_prompts
            for each in with_one_prompt([trajectories[n] for n in group])
        ]
        self._check_room(trajectories)
        for n, dialogue in begun.items():
            dialogue.num_read = len(trajectories[n])
        longest = max(len(each.prompt_ids) for each in trajectories)
        if prompt_width is not None and longest > prompt_width:
            prompt_width = padded_length(longest, self._max_prompt_length)
        dialogues = Dialogues(
            begun, mine.keys() - own.keys(), self._chat, self._environments.calls, self._limits,
            jax.process_count(),
        )  # fmt: skip
        pending = self._sampler.submit(
            trajectories, sampling, prompt_width=prompt_width, responder=dialogues
        )
        self._last = _PendingDialogues(pending, dialogues, self._chat, self._environments)
        return self._last

    def __enter__(self) -> "ActingSampler":
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._last = None
            self._environments.close()

    def trial(self, problem: Prompt) -> Any:
        """Returns an environment that was reset for a problem, or `None`; raises what it raises."""
        (dialogue,) = self._begun({0: problem})[0].values()
        return dialogue.environment

    def _begun(
        self, problems: Mapping[int, Prompt]
    ) -> tuple[dict[int, Dialogue], dict[int, list[int]]]:
        """Resets an environment for each completion.

        **Returns:** the dialogues, and the prompts that environments have changed.
        """
        kinds = {n: self._environments.kind_of(each.columns) for n, each in problems.items()}
        with_kind = {n: kind for n, kind in kinds.items() if kind is not None}
        dialogues = {n: self._dialogue(kind) for n, kind in kinds.items()}
        rows = {n: _row(problems[n], self._environments.is_named) for n in with_kind}
        calls = [
            kind.reset_call(dialogues[n].environment, rows[n]) for n, kind in with_kind.items()
        ]
        outcomes = self._environments.calls.together(calls).result() if calls else []
        prompts = {}
        for (n, kind), outcome in zip(with_kind.items(), outcomes, strict=True):
            changed = self._reset(kind, dialogues[n], problems[n], outcome)
            if changed is not None:
                prompts[n] = changed
        ids = self._tokenized(list(prompts.values()))
        return dialogues, dict(zip(prompts, ids, strict=True))

    def _dialogue(self, kind: EnvironmentKind | None) -> Dialogue:
        if kind is None:
            return Dialogue({tool.name: tool for tool in self._environments.tools})
        environment = kind.take()
        if kind.takes_turns:
            environment.total_reward = 0.0
        tools = {tool.name: tool for tool in kind.tools_of(environment)}
        return Dialogue(tools, environment, takes_turns=kind.takes_turns)

    def _reset(
        self, kind: EnvironmentKind, dialogue: Dialogue, problem: Prompt, outcome: Outcome
    ) -> Prompt | None:
        """Returns the prompt with what `reset` returned, if anything.

        An environment that fails is lost, unless failures stop the run.
        """
        if outcome.error is None:
            return with_observation(problem, outcome.result, kind.cls.__name__)
        said = (
            f"reset of environment {kind.cls.__name__} raised {class_name(outcome.error)} "
            f"({first_line(outcome.error)})"
        )
        if self._limits.failures == "stop":
            raise RunError(
                f"{said}: fix it, or set tool_failures to answer, which leaves the completion out."
            ) from outcome.error
        warn(f"{said}: its completion is left out")
        dialogue.is_lost = True
        dialogue.num_failures += 1
        return None

    def _check_room(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises `RunError` for completions that begin with too many tokens."""
        longest = max(map(len, trajectories))
        if longest >= self._max_completion_length:
            raise RunError(
                f"reset returned different prompts for completions of one problem, and {longest} "
                f"tokens after the first difference count as the completion's, of which "
                f"max_completion_length is {self._max_completion_length}: raise it, or return the "
                f"same prompt for the same row."
            )

    def _tokenized(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        ids = self._tokenizer.encode_prompts(prompts) if prompts else []
        longest = max(map(len, ids), default=0)
        if longest > self._max_prompt_length:
            raise RunError(
                f"a prompt with what reset returned has {longest} tokens, and max_prompt_length is "
                f"{self._max_prompt_length}: raise it, or return less."
            )
        return ids


def make_acting(
    sampler: Sampler, environments: Environments, tokenizer: ChatTokenizer, cfg: GRPOConfig
) -> ActingSampler | None:
    """Returns the sampler of a run whose completions act; `None` where they do not.

    Raises `UserError` for settings that would do nothing, and for tools in a run that cannot have
    them.
    """
    limits = ToolLimits.of(cfg)
    if environments:
        if cfg.router_replay:
            raise UserError(
                "router_replay is set, and tools or environments are passed, whose answers have no "
                "recorded experts: leave it off."
            )
        assert cfg.max_completion_length is not None  # resolved
        return ActingSampler(
            sampler, environments, tokenizer, limits,
            max_prompt_length=cfg.max_prompt_length,
            max_completion_length=cfg.max_completion_length,
        )  # fmt: skip
    if limits != ToolLimits():
        names = (
            "max_tool_calling_iterations", "tool_timeout", "max_tool_response_length",
            "tool_response_truncate_side", "tool_failures",
        )  # fmt: skip
        defaults = GRPOConfig()
        name = next(n for n in names if getattr(cfg, n) != getattr(defaults, n))
        raise UserError(
            f"{name} is {getattr(cfg, name)}, and no tools or environments are passed: it would do "
            f"nothing; pass tools or environment_factory to GRPOTrainer, or leave it unset."
        )
    return None


def with_observation(problem: Prompt, observed: Any, name: str) -> Prompt:
    """Returns a prompt with what `reset` returned.

    **Arguments:**

    - `problem`: the prompt.
    - `observed`: a text, or a list of content blocks, which are appended to the last message, as in
      TRL; messages, which replace the prompt; or `None`.
    - `name`: name of the environment's class.

    Raises `RunError` for anything else, and for a prompt that stays empty.
    """
    if observed is None and problem.content:
        return problem
    if isinstance(observed, list) and observed and all(isinstance(x, Mapping) for x in observed):
        if all(isinstance(x.get("content"), str) and "role" in x for x in observed):
            return dataclasses.replace(problem, content=observed)
        if all(x.get("type") == "text" and isinstance(x.get("text"), str) for x in observed):
            observed = "".join(x["text"] for x in observed)
    if not isinstance(observed, str):
        raise RunError(
            f"reset of environment {name} returned {brief(observed)}: return a text, which is "
            f"appended to the prompt, messages, which replace it, or, where data have a prompt, "
            f"None."
        )
    if isinstance(problem.content, str):
        return dataclasses.replace(problem, content=problem.content + observed)
    *before, last = problem.content
    return dataclasses.replace(
        problem, content=[*before, {**last, "content": last["content"] + observed}]
    )


def with_one_prompt(group: Sequence[Trajectory]) -> list[Trajectory]:
    """Returns completions of one problem with the tokens that their prompts begin with as prompt.

    Where environments have made different prompts of it, what is left of each begins the
    completion, as tokens that the model did not write.
    """
    first, last = (pick(list(each.prompt_ids) for each in group) for pick in (min, max))
    if first == last:
        return list(group)
    # What the first and the last in order have in common, all have. A completion needs an input.
    number = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    number = max(1, number)
    return [
        dataclasses.replace(each, prompt_ids=each.prompt_ids[:number]).extended(
            each.prompt_ids[number:]
        )
        for each in group
    ]


def _row(problem: Prompt, is_named: bool) -> dict[str, Any]:
    """Returns what `reset` gets: all columns, but for the one that names an environment."""
    columns = {k: x for k, x in problem.columns.items() if not (is_named and k == ENVIRONMENT)}
    return {"prompt": problem.content, **columns}


def _everyones(own: Mapping[int, Any]) -> dict[int, Any]:
    """Returns what all processes have, by number."""
    parts = [json.loads(part) for part in gather_bytes(json.dumps(own).encode())]
    return {int(number): each for part in parts for number, each in part.items()}


class _PendingDialogues(PendingSamples):
    """Dialogues of a batch."""

    def __init__(
        self,
        pending: PendingSamples,
        dialogues: Dialogues,
        chat: ChatFormat,
        environments: Environments,
    ):
        self._pending, self._dialogues, self._chat = pending, dialogues, chat
        self._environments = environments
        self._result: Sampled | None = None

    def result(self) -> Sampled:
        if self._result is None:
            self._result = self._finished()
        return self._result

    def release(self) -> None:
        for dialogue in self._dialogues.dialogues.values():
            if dialogue.environment is not None:
                self._environments.give_back(dialogue.environment, is_lost=dialogue.is_lost)

    def _finished(self) -> Sampled:
        sampled = self._pending.result()
        number, own = len(sampled.trajectories), self._dialogues.dialogues
        made = _everyones(raise_on_all_hosts(lambda: self._read(sampled.trajectories)))
        counts = ToolCounts(*map(sum, zip(*(x for _, x in made.values()), strict=True)))
        messages = [made[n][0] if n in made else [] for n in range(number)]
        environments = [own[n].environment if n in own else None for n in range(number)]
        lost = [n in made and ToolCounts(*made[n][1]).lost > 0 for n in range(number)]
        return sampled._replace(acted=Acted(messages, environments, lost, counts))

    def _read(self, trajectories: Sequence[Trajectory]) -> dict[int, Any]:
        """Returns the messages and the counts of this process's dialogues."""
        for number, dialogue in self._dialogues.dialogues.items():
            dialogue.finish(trajectories[number], self._chat)
        return {n: (each.messages, each.counts) for n, each in self._dialogues.dialogues.items()}
