"""The command `grpo-eqx plan`."""

import abc
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_eqx.cli.flags import ConfigFlags
from grpo_eqx.common.choices import LOCAL, Searchable
from grpo_eqx.common.clean_text import clean, print_clean
from grpo_eqx.common.errors import EXIT_DOES_NOT_FIT, UserError
from grpo_eqx.launch.subcommand import Subcommand
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.files import to_yaml
from grpo_eqx.settings.types import PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from grpo_eqx.planner.plan import Plan as PlanOfRun

_AT_A_TIME = 4
"""Most plans that are made at a time, because each takes gigabytes of memory."""
_STDOUT = Path("-")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlanFlags(Subcommand, abc.ABC):
    """Flags of planning itself, which come first in the command's help."""

    topology: str = LOCAL
    """Devices to plan for: a TPU type (v6e-8, v6e-16, v5e-16, v5p-8, v4-16, ...) or grid of chips
    (v6e:4x4), which need not be attached, or the devices of this machine (local)."""
    compare: tuple[str, ...] | None = None
    """Topologies, layouts or sizes of micro-batches to plan side by side: --compare v6e-8 v6e-16,
    or replicated tensor:4, or 8+8 (devices that train and that sample), or 2 4 8. Plans that fit
    come first, the cheapest first, or without a price the fastest."""
    search: Searchable | None = None
    """Find the largest value of this setting for which the run fits."""
    expected_completion_length: PositiveInt | None = None
    """Tokens of a completion, on average, that times and costs are for. None:
    max_completion_length, as if none ended earlier."""
    expected_turns: PositiveInt = 1
    """Turns of a completion, on average. Above 1, as in runs whose completions call tools, the plan
    is of the programs that sample turns."""
    expected_observation_length: PositiveInt | None = None
    """Tokens that the model reads between two turns, on average, such as the answers of tools. They
    count among the tokens of a completion. Needs expected_turns above 1."""
    expected_longest_completion: PositiveInt | None = None
    """Tokens of a step's longest completion, on average, for which a step waits without
    max_staleness. None: between expected_completion_length and max_completion_length."""
    price_per_device_hour: PositiveFloat | None = None
    """Price of a TPU chip or GPU for an hour. Plans then have the cost of 1,000 steps."""
    json: Path | None = None
    """File to write the plan to as JSON, with sizes in bytes per device. -: standard output, in
    place of the report."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(ConfigFlags, _PlanFlags):
    """Predict whether a run fits its devices, and what it will do on them, without having them.

    grpo-eqx plan --topology v6e-16 [flags of train]

    Compiles the programs of the run for the devices, and reports the memory that each takes, what
    it sends between devices, and between which bounds the time of a step is. Takes minutes for
    large models; for a TPU, a second if asked the same before, for any expected length and price.
    Exits with 0 if the run fits, on any of several topologies, and with 3 if not.
    """

    def run(self, command: tuple[str, ...]) -> int:
        import jax

        from grpo_eqx.distributed.program_facts import check_xla_flags

        cfg = self.settings()
        if self.print_config:
            print_clean(to_yaml(cfg), end="")
            return 0
        check_xla_flags()
        # This machine's devices are left to the process that compiles, or to a run beside it.
        jax.config.update("jax_platforms", "cpu")
        file = None if self.json == _STDOUT else self.json
        if file is not None and (os.path.isdir(file) or not os.path.isdir(file.parent)):
            raise UserError(f"json is {file}: it must be a file in an existing folder.")
        if self.compare is not None and self.search is not None:
            raise UserError("compare and search exclude each other: give one of them.")
        plans, refused = self._plans(cfg)
        if not plans:
            raise next(iter(refused.values()))
        fields = {name: plan.to_json() for name, plan in plans.items()}
        alone = self.compare is None
        text = json.dumps(fields[self.topology] if alone else fields, indent=2)
        if self.json == _STDOUT:
            print_clean(text)
            for name, refusal in refused.items():
                print_clean(f"{name}: {refusal}", file=sys.stderr)
        else:
            self._show(plans, refused, cfg)
        if file is not None:
            try:
                file.write_text(text + "\n")
            except OSError as error:
                raise UserError(f"json is {file}, which cannot be written: {error}.") from error
        return 0 if any(plan.fits for plan in plans.values()) else EXIT_DOES_NOT_FIT

    def _plans(self, cfg: GRPOConfig) -> "tuple[dict[str, PlanOfRun], dict[str, UserError]]":
        """Returns the plans by name, and the errors of plans that cannot be made."""
        from grpo_eqx.planner.comparison import Variant, variants
        from grpo_eqx.planner.plan import Asked
        from grpo_eqx.planner.planning_process import ask

        numbers = Asked(
            self.expected_completion_length, self.expected_turns, self.expected_observation_length,
            self.price_per_device_hour, self.expected_longest_completion,
        )  # fmt: skip
        numbers.check_turns()
        if self.search != "max_completion_length":
            longest = cfg.resolved().max_completion_length
            assert longest is not None  # resolved
            numbers.check_lengths(longest)
        plans: dict[str, PlanOfRun] = {}
        refused: dict[str, UserError] = {}
        alone = self.compare is None
        asked = {self.topology: Variant(self.topology, {})}
        if self.compare is not None:
            asked = variants(self.compare, self.topology)
        with _progress() as say, ThreadPoolExecutor(min(_AT_A_TIME, os.cpu_count() or 1)) as pool:

            def plan_of(each: Variant) -> "PlanOfRun":
                changed = dataclasses.replace(cfg, **each.changes)
                return ask(
                    changed, each.topology, say, self.search,
                    acts=self.expected_turns > 1, help_if_not=alone, evaluates=alone,
                )  # fmt: skip

            # Each plan runs in its own process, whose compiler hardly uses a second core.
            planned = {name: pool.submit(plan_of, each) for name, each in asked.items()}
            for name, plan in planned.items():
                try:
                    asked[name].check(name, plan.result())
                    plans[name] = plan.result().for_asked(numbers)
                except UserError as error:
                    refused[name] = error
        return plans, refused

    def _show(
        self,
        plans: "Mapping[str, PlanOfRun]",
        refused: Mapping[str, UserError],
        cfg: GRPOConfig,
    ) -> None:
        """Prints a plan, or a table of several plans."""
        from grpo_eqx.planner.comparison import auto_sizes, comparison
        from grpo_eqx.planner.report import print_plan, wide_console

        console = wide_console()
        if self.compare is None:
            print_plan(plans[self.topology], console)
            return
        console.print(comparison(plans))
        if cfg.micro_batch_size_per_device == "auto" and (sizes := auto_sizes(plans)):
            console.print(sizes, highlight=False)
        for name, refusal in refused.items():
            console.print(f"{name}: {refusal}", highlight=False)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows progress on standard error: one live line on a terminal, else a line per message."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from grpo_eqx.tracking.safe_console import safe_console

    console = safe_console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(text, highlight=False, soft_wrap=True)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting")
        yield lambda text: progress.reset(task, description=clean(text))
