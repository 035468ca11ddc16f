"""Values of single settings that no range describes.

As in `checks`, each check takes the settings that it reads, under their names in `GRPOConfig`, and
raises `UserError`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from grpo_eqx.common.errors import UserError
from grpo_eqx.settings.types import parse_duration, parse_steps, refuse_address

_LARGEST_WEIGHT = 1e9
"""Weight of rewards whose squares float32 sums."""


def check_times(stop_after: str | None, profile_steps: str | None) -> None:
    """Refuses durations and steps that cannot be read."""
    if stop_after is not None:
        parse_duration("stop_after", stop_after)
    if profile_steps is not None:
        parse_steps("profile_steps", profile_steps)


def check_run_name(run_name: str | None) -> None:
    """Refuses names that cannot be a folder's."""
    if run_name is not None and not re.fullmatch(r"[^/.\s][^/]*", run_name):
        raise UserError(
            f"run_name is {run_name!r}: give a name without slashes and without a dot at its start."
        )


def check_paths(
    model: str,
    data: str,
    eval_data: str | None,
    output_dir: str | Path | None,
    resume: str,
    chat_template: str | None,
) -> None:
    """Refuses empty paths, addresses, and variables, which the shell would have expanded."""
    paths: Mapping[str, str | Path | None] = {
        "model": model, "data": data, "eval_data": eval_data, "output_dir": output_dir,
        "resume": resume, "chat_template": chat_template,
    }  # fmt: skip
    for name, path in paths.items():
        if path == "":
            raise UserError(f"{name} is empty: give a name or path, or leave it out.")
    answers = []
    for name, path in paths.items():
        if variable := re.search(r"\$(\w+|\{\w+\})", str(path)):
            answers.append(
                f"{name} is {str(path)!r}, and variables such as {variable[0]} are not expanded in "
                f"settings: write the name itself."
            )
    if answers:
        raise UserError(" ".join(answers))
    for name in ("output_dir", "resume"):
        refuse_address(name, paths[name] or "")


def check_stop_strings(stop_strings: tuple[str, ...]) -> None:
    """Refuses empty strings, and those that a shell has left escaped."""
    if spelled := [x for x in stop_strings if re.fullmatch(r"(\\[nrt])+", x)]:
        raise UserError(
            f"stop_strings has {spelled[0]}, which is a backslash and a letter: in a shell, "
            f"write $'{spelled[0]}' for the character that it stands for."
        )
    if "" in stop_strings:
        raise UserError("stop_strings has an empty string, which would end every completion.")


def check_reward_weights(reward_weights: tuple[float, ...] | None) -> None:
    """Refuses weights whose sums of squares float32 does not hold."""
    if not all(abs(weight) <= _LARGEST_WEIGHT for weight in reward_weights or ()):
        raise UserError(
            f"reward_weights are {reward_weights}: they must be finite, and at most "
            f"{_LARGEST_WEIGHT:g} in size."
        )


VALUE_CHECKS = check_times, check_run_name, check_paths, check_stop_strings, check_reward_weights
