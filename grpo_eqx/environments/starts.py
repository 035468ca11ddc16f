"""Starts of completions: environments are made and reset, and change prompts."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.common.plain_data import brief
from grpo_eqx.common.process_state import warn
from grpo_eqx.data.prompts import Conversation, Prompt
from grpo_eqx.data.records import is_message, last_of_user
from grpo_eqx.data.tokenizer import ENVIRONMENT, ChatTokenizer
from grpo_eqx.data.trajectory import Trajectory
from grpo_eqx.environments.calls import Outcome, failure_of
from grpo_eqx.environments.dialogues import Dialogue, is_ids
from grpo_eqx.environments.pool import EnvironmentKind, Environments
from grpo_eqx.rewards.contract import joined_blocks


class Start(NamedTuple):
    """A completion that is about to begin."""

    dialogue: Dialogue
    content: str | Conversation
    """Content of its prompt, with what its environment added."""
    ids: list[int] | None = None
    """Tokens of the prompt; `None` where it is the problem's."""


def started(
    environments: Environments,
    groups: Sequence[Sequence[int]],
    problems: Mapping[int, Prompt],
    tokenizer: ChatTokenizer,
    *,
    max_prompt_length: int,
    fix: str | None = None,
) -> dict[int, Start]:
    """Starts completions, each in an environment of its own if the run has any.

    Where an environment cannot be made or reset, it is lost: its completion has the prompt of
    another one of its problem.

    **Arguments:**

    - `environments`: tools and environments.
    - `groups`: numbers of the completions of each problem.
    - `problems`: the problem of each completion, by its number.
    - `tokenizer`: tokenizes prompts.
    - `max_prompt_length`: limit of their tokens.
    - `fix`: what to do about a failure, which then stops the run; by default none does.

    Raises `RunError` for a failure that does, and `UserError` for what `reset` must not return, and
    for a prompt that is too long.
    """
    kinds = {n: environments.kind_of(each.columns) for n, each in problems.items()}
    with_kind = {n: kind for n, kind in kinds.items() if kind is not None}
    made = dict(zip(with_kind, environments.take(list(with_kind.values())), strict=True))
    alive = {n: outcome.result for n, outcome in made.items() if outcome.error is None}
    calls = [
        with_kind[n].reset_call(each, _row(problems[n], environments.is_named))
        for n, each in alive.items()
    ]
    reset = environments.calls.result(environments.calls.together(calls))
    outcomes = {**made, **dict(zip(alive, reset, strict=True))}
    _check_failures([(with_kind[n], outcome) for n, outcome in outcomes.items()], fix)
    changed, ids = dict[int, Prompt](), dict[int, list[int]]()
    for n, outcome in outcomes.items():
        if outcome.error is None and is_ids(outcome.result, len(tokenizer.tokenizer)):
            ids[n] = [int(x) for x in outcome.result]
            changed[n] = dataclasses.replace(
                problems[n], content=tokenizer.tokenizer.decode(ids[n])
            )
        elif outcome.error is None:
            name = with_kind[n].cls.__name__
            changed[n] = with_observation(problems[n], outcome.result, name)
    texts = {n: prompt for n, prompt in changed.items() if n not in ids}
    if texts:
        ids |= zip(texts, tokenizer.encode_prompts(list(texts.values())), strict=True)
    for n, each in ids.items():
        if len(each) > max_prompt_length:
            raise UserError(
                f"reset of environment {with_kind[n].cls.__name__} made a prompt of {len(each)} "
                f"tokens, and max_prompt_length is {max_prompt_length}: raise it, or return less."
            )
    starts = {}
    for group in groups:
        first = next((n for n in group if n in changed), None)
        for n in group:
            like = n if n in changed else first
            content = problems[n].content if like is None else changed[like].content
            dialogue = _dialogue(environments, kinds[n], alive.get(n))
            dialogue.is_lost = n in outcomes and n not in changed
            starts[n] = Start(dialogue, content, None if like is None else ids[like])
    return starts


def _check_failures(outcomes: Sequence[tuple[EnvironmentKind, Outcome]], fix: str | None) -> None:
    """Warns of the first environment that could not be made or reset.

    Raises `RunError` where that stops the run.
    """
    for kind, outcome in outcomes:
        if outcome.error is not None:
            said = f"reset of environment {kind.cls.__name__} {failure_of(outcome.error)}"
            if fix is not None:
                raise RunError(f"{said}: {fix}.") from outcome.error
            warn(f"{said}: its completion is left out; tools/num_lost counts them")
            return


def _dialogue(
    environments: Environments, kind: EnvironmentKind | None, environment: Any
) -> Dialogue:
    if kind is None:
        return Dialogue({tool.name: tool for tool in environments.tools})
    if environment is None:  # it could not be made
        return Dialogue(takes_turns=kind.takes_turns)
    if kind.takes_turns:
        environment.total_reward = 0.0
    return Dialogue(kind.tools_of(environment), environment, takes_turns=kind.takes_turns)


def _row(problem: Prompt, is_named: bool) -> dict[str, Any]:
    """Returns what `reset` gets, as copies: all columns, but for that which names environments."""
    columns = {k: x for k, x in problem.columns.items() if not (is_named and k == ENVIRONMENT)}
    return copy.deepcopy({"prompt": problem.content, **columns})


def with_observation(problem: Prompt, observed: Any, name: str) -> Prompt:
    """Returns a prompt with what `reset` returned.

    **Arguments:**

    - `problem`: the prompt.
    - `observed`: a text, or a list of content blocks, which are appended to the last message, as in
      TRL, and are one where there is none; messages, which replace the prompt; or `None`.
    - `name`: name of the environment's class.

    Raises `UserError` for anything else, and for a prompt that stays empty.
    """
    if observed is None and problem.content:
        return problem
    if isinstance(observed, list) and observed and all(map(is_message, observed)):
        last_of_user(f"reset of environment {name}", observed)
        return dataclasses.replace(problem, content=observed)
    observed = joined_blocks(observed)
    if not isinstance(observed, str):
        raise UserError(
            f"reset of environment {name} returned {brief(observed)}: return a text, which is "
            f"appended to the prompt, messages or tokens, which replace it, or, where data have a "
            f"prompt, None."
        )
    if not problem.content:
        return dataclasses.replace(problem, content=[{"role": "user", "content": observed}])
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
