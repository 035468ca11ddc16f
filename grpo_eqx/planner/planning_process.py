"""Makes a plan in a separate process, unless it is known already.

`ask` is the end that asks; `main` is the process that compiles: a question in, lines of JSON out.
It is a process of its own because the compiler for TPUs writes freely to standard error, and
because JAX chooses its devices once per process.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import jax

from grpo_eqx.common.choices import LOCAL, Searchable
from grpo_eqx.common.errors import PlanningError, UserError
from grpo_eqx.distributed.program_facts import code_fingerprint, installed_version
from grpo_eqx.models.pretrained import is_local, model_folder
from grpo_eqx.planner.devices import described_slice, find_target
from grpo_eqx.planner.make_plan import Say
from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.plan_cache import remembered
from grpo_eqx.planner.plan_run import plan_run
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.settings.config import GRPOConfig

_LIBRARIES = ("equinox", "jax", "jaxlib", "libtpu", "optax", "tokenizers", "transformers")
_FLAGS = ("JAX_", "LIBTPU_", "XLA_")
_LAST_LINES = 20
"""Number of the compiler's last lines that are shown where it fails."""


def ask(
    cfg: GRPOConfig,
    topology: str,
    say: Say,
    setting: Searchable | None = None,
    *,
    acts: bool = False,
    help_if_not: bool = True,
    evaluates: bool = True,
) -> Plan:
    """Returns the plan of a config for a TPU type, grid, or `local`.

    **Arguments:**

    - `say`: the progress callback.
    - `setting`: a setting, to find the largest value with which the run fits.
    - `acts`: whether completions have several turns.
    - `help_if_not`: whether to look for changes that help where the run does not fit.
    - `evaluates`: whether evaluations are planned too.

    A TPU's plan is read from disk if it was made before with the same code and inputs. Raises
    `UserError` for whatever cannot be planned, and, for a TPU, without libtpu.
    """
    fields = dataclasses.asdict(cfg)
    question = {
        "config": {name: str(x) if isinstance(x, Path) else x for name, x in fields.items()},
        "topology": topology,
        "search": setting,
        "acts": acts,
        "help_if_not": help_if_not,
        "evaluates": evaluates,
    }
    if topology == LOCAL:  # only the other process knows which devices these are
        return Plan.from_json(_compute(question, say))
    described_slice(topology)  # raises for an unknown one
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"planning for {topology} needs the TPU compiler, which is not installed: run "
            f'pip install "grpo_eqx[plan]".'
        )
    known = {**question, **_what_answers_depend_on(cfg)}
    return Plan.from_json(remembered(known, lambda: _compute(question, say)))


def _compute(question: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
    """Computes the answer in another process, which does not outlive the call."""
    environment = dict(os.environ)
    if question["topology"] != LOCAL:
        environment["JAX_PLATFORMS"] = "cpu"  # leaves the local devices alone
    command = [sys.executable, "-m", "grpo_eqx.planner.planning_process"]
    with (
        tempfile.TemporaryFile("w+") as noise,
        Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=noise, text=True, env=environment
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin:  # its last lines say why
                json.dump(question, process.stdin)
            for line in process.stdout:
                said = json.loads(line)
                if "error" in said:
                    raise UserError(said["error"])
                if "answer" in said:
                    return dict(said["answer"])
                say(said["say"])
            code = process.wait()
        finally:
            process.kill()
        noise.seek(0)
        last = noise.read().splitlines()[-_LAST_LINES:]
    raise PlanningError("\n  ".join([f"the planning process exited with code {code}:", *last]))


def _what_answers_depend_on(cfg: GRPOConfig) -> dict[str, Any]:
    inputs = [hashlib.sha256(path.read_bytes()).hexdigest() for path in _inputs(cfg)]
    return {
        "code": code_fingerprint(),
        "libraries": [installed_version(name) for name in _LIBRARIES],
        "flags": {name: x for name, x in os.environ.items() if name.startswith(_FLAGS)},
        "inputs": inputs,
    }


def _inputs(cfg: GRPOConfig) -> Iterator[Path]:
    """Yields the files that are read: a model's, except its weights, and problems."""
    if is_local(cfg.model):
        kinds = {".json", ".jinja", ".txt"}
        yield from sorted(p for p in model_folder(cfg.model).iterdir() if p.suffix in kinds)
    for name in (cfg.data, cfg.eval_data):
        if name is not None and os.path.isfile(name):
            yield Path(name)


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
    run = RunSpec.describe(GRPOConfig(**fields), acts=question["acts"])
    how = {name: question[name] for name in ("help_if_not", "evaluates")}
    return plan_run(run, target, say, question["search"], **how).to_json()


if __name__ == "__main__":
    main()
