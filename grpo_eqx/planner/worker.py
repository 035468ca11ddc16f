"""The process that compiles for the command `grpo-eqx plan`: a question in, lines of JSON out.

It is a process of its own because the compiler for TPUs writes freely to standard error, and
because JAX chooses its devices once per process.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax

from grpo_eqx.config import GRPOConfig
from grpo_eqx.errors import UserError
from grpo_eqx.planner.devices import find_target
from grpo_eqx.planner.planning import plan_run
from grpo_eqx.run_spec import RunSpec


def main() -> None:
    """Answers the question on standard input.

    Each line of output is an object: `say`, what is being worked on; `error`, a user's mistake; or
    `answer`.
    """
    # JAX cannot read back what it compiled for described TPUs, and plans have a cache of their own.
    jax.config.update("jax_enable_compilation_cache", False)
    # Anything else that is printed goes to standard error, not between the lines.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")

    try:
        write(answer=_answer(json.load(sys.stdin), lambda text: write(say=text)))
    except UserError as error:
        write(error=str(error))


def _answer(question: Mapping[str, Any], say: Any) -> Mapping[str, Any]:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in question["config"].items()
    }
    target = find_target(question["topology"])
    run = RunSpec.describe(GRPOConfig(**fields))
    help_if_not = question["help_if_not"]
    return plan_run(run, target, say, question["search"], help_if_not=help_if_not).to_json()


if __name__ == "__main__":
    main()
