"""Results of a `rollout_func`, checked."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from grpo_eqx.common.errors import UserError, did_you_mean, listed
from grpo_eqx.common.plain_data import brief
from grpo_eqx.environments.dialogues import is_ids
from grpo_eqx.rewards.logged import OF_TRAINING
from grpo_eqx.rewards.outcomes import ENVIRONMENTS

_NEEDED = "prompt_ids", "completion_ids", "logprobs"
_MASK = "env_mask"
OF_TOKENS = (*_NEEDED, _MASK)
"""Entries that hold tokens; reward functions get the others."""
_TAKEN = frozenset({"prompts", "completions", ENVIRONMENTS, *OF_TRAINING})
_ROUNDING = 1e-3
"""Log-prob up to which other engines may round."""
_CONVERT: Mapping[str, Callable[[Any], Any]] = {
    "prompt_ids": int, "completion_ids": int, "logprobs": lambda x: min(float(x), 0.0), _MASK: int,
}  # fmt: skip


def read_completions(
    returned: Any, count: int, max_prompt_length: int, vocab_size: int
) -> dict[str, list[Any]]:
    """Checks what a function returned; returns plain lists with an entry for each completion.

    **Arguments:**

    - `returned`: what it returned.
    - `count`: number of completions.
    - `max_prompt_length`: limit on the tokens of a prompt.
    - `vocab_size`: number of the tokenizer's ids.

    Raises `UserError` for what breaks the contract.
    """
    if not isinstance(returned, Mapping):
        raise _broken(f"{brief(returned)}: return a dict with {listed(_NEEDED)}")
    if missing := [name for name in _NEEDED if name not in returned]:
        guess = did_you_mean(missing[0], map(str, returned))
        raise _broken(f"a dict without {listed(missing)}{guess}: add them, a list each")
    made: dict[str, list[Any]] = {}
    for name, values in returned.items():
        if not isinstance(name, str) or name in _TAKEN:
            raise _broken(f"{brief(name)}, and reward functions get their own: give another name")
        if not isinstance(values, list | tuple | np.ndarray):
            if name in OF_TOKENS:
                raise _broken(f"{name} {brief(values)}: give a list with an entry per completion")
            values = [values] * count  # as in TRL
        if len(values) != count:
            raise _broken(f"{len(values)} {name} for {count} prompts: give one for each")
        made[name] = [_plain(each) for each in values]
    for n, ids in enumerate(made["completion_ids"]):
        if not is_ids(ids, vocab_size):
            raise _broken(f"completion_ids[{n}] {brief(ids)}: give at least one token's id")
    made.setdefault(_MASK, [[1] * len(ids) for ids in made["completion_ids"]])
    for n in range(count):
        own = {name: made[name][n] for name in OF_TOKENS}
        _check_completion(n, own, max_prompt_length, vocab_size)
        for name, convert in _CONVERT.items():
            made[name][n] = [convert(x) for x in own[name]]
    return made


def _check_completion(
    n: int, own: Mapping[str, Any], max_prompt_length: int, vocab_size: int
) -> None:
    prompt = own["prompt_ids"]
    if not is_ids(prompt, vocab_size):
        raise _broken(f"prompt_ids[{n}] {brief(prompt)}: give at least one token's id")
    if len(prompt) > max_prompt_length:
        raise _broken(
            f"{len(prompt)} tokens in prompt_ids[{n}], and max_prompt_length is "
            f"{max_prompt_length}: raise it, or shorten the prompt"
        )
    length = len(own["completion_ids"])
    for name in ("logprobs", _MASK):
        if not isinstance(own[name], list) or len(own[name]) != length:
            raise _broken(f"no entry of {name}[{n}] for each of its {length} tokens: give a list")
    for value, written in zip(own["logprobs"], own[_MASK], strict=True):
        if written not in (0, 1):
            raise _broken(
                f"{brief(written)} in {_MASK}[{n}]: give 1 for what the model wrote, or 0"
            )
        if written and not (
            isinstance(value, numbers.Real) and math.isfinite(value) and value <= _ROUNDING
        ):
            raise _broken(f"{brief(value)} in logprobs[{n}]: give log-probs, which are at most 0")


def _broken(what: str) -> UserError:
    return UserError(f"rollout_func returned {what}.")


def _plain(value: Any) -> Any:
    """Returns arrays as lists of Python's numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
