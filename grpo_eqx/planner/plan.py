"""The plan of a run, its verdict and its JSON form."""

import dataclasses
import functools
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpo_eqx.common.choices import LOCAL
from grpo_eqx.common.errors import UserError
from grpo_eqx.planner.compiled_program import CompiledProgram
from grpo_eqx.planner.step_time import ProgramTime, Rates, StepTime, program_time
from grpo_eqx.planner.trips import Expected, Trips
from grpo_eqx.run.to_compile import EVALUATE, SAMPLING
from grpo_eqx.sharding.layout_report import readable_bytes
from grpo_eqx.tracking.device_links import link_rates
from grpo_eqx.tracking.device_peaks import DevicePeaks
from grpo_eqx.training.micro_batches import RowShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedProgram:
    """One of the programs of a run, on the devices of the plan."""

    compiled: CompiledProgram
    elsewhere_bytes: int
    """Bytes resident on each device while it runs, besides its arguments."""
    runs: int
    """Times that a step runs it; 0 for evaluations."""
    trips: Trips | None
    """Facts about its loops; `None` for evaluations."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes that a device holds while it runs."""
        return self.compiled.peak_bytes + self.elsewhere_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns its figures; `peak_bytes` includes `elsewhere_bytes`."""
        return {
            **self.compiled.to_json(),
            "peak_bytes": self.peak_bytes,
            "elsewhere_bytes": self.elsewhere_bytes,
            "runs": self.runs,
            "trips": None if self.trips is None else self.trips.to_json(),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "PlannedProgram":
        """Inverts `to_json`."""
        compiled = dict(fields)
        own = {name: compiled.pop(name) for name in ("elsewhere_bytes", "runs", "trips")}
        compiled["peak_bytes"] -= own["elsewhere_bytes"]
        trips = own["trips"]
        return cls(
            compiled=CompiledProgram.from_json(compiled),
            elsewhere_bytes=own["elsewhere_bytes"],
            runs=own["runs"],
            trips=None if trips is None else Trips.from_json(trips),
        )

    def time(self, expected: Expected, rates: Rates) -> ProgramTime | None:
        """Returns its time in a step; `None` where it has no part in one, or no known time.

        **Arguments:**

        - `expected`: what completions are like, on average.
        - `rates`: the rates of a device.
        """
        if self.trips is None or not self.compiled.levels:
            return None
        return program_time(self.compiled.levels, self.trips, self.runs, expected, rates)


def is_evaluation(program: str) -> bool:
    """Returns whether a program is of evaluations."""
    return program.split()[0] == EVALUATE


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of a search for the largest value of a setting."""

    setting: str
    largest: int | None
    """The largest value that fits; `None` where the smallest does not."""
    tried: Mapping[int, bool]
    """The values that were compiled, and whether each fits."""
    most: int
    """The largest value that could be tried."""

    def __str__(self) -> str:
        if self.largest is None:
            return f"No {self.setting} fits, not even the smallest, {min(self.tried)}."
        last = ", the upper limit of the search" if self.largest == self.most else ""
        return f"The largest {self.setting} that fits is {self.largest}{last}."


@dataclasses.dataclass(frozen=True)
class Change:
    """Settings that make a run fit that does not fit as it is."""

    settings: Mapping[str, Any]
    """New values of settings; `topology` for other devices."""
    plan: "Plan"
    """Plan of the run with these settings."""

    @property
    def flags(self) -> str:
        """Command-line flags for these settings."""
        return " ".join(
            f"--{name.replace('_', '-')} {value}" for name, value in self.settings.items()
        )


class Asked(NamedTuple):
    """Numbers that times and costs are for, and memory does not depend on."""

    expected_completion_length: int | None = None
    """Tokens of a completion, on average; `None`: `max_completion_length`."""
    expected_turns: int = 1
    expected_observation_length: int | None = None
    """Tokens that the model reads between two turns."""
    price_per_device_hour: float | None = None
    expected_longest_completion: int | None = None
    """Tokens of a step's longest completion, on average; `None`: between the mean and
    `max_completion_length`."""

    def expected(self, longest: int) -> Expected:
        """Returns what completions of up to `longest` tokens are like, on average."""
        length = self.expected_completion_length or longest
        return Expected(
            length, self.expected_turns, self.expected_observation_length or 0,
            self.expected_longest_completion,
        )  # fmt: skip

    def check_turns(self) -> None:
        """Raises `UserError` for turns without what is read between them, and the reverse."""
        turns, read = self.expected_turns, self.expected_observation_length
        if turns == 1 and read is not None:
            raise UserError(
                f"expected_observation_length is {read}, and expected_turns is 1: set "
                f"expected_turns above 1, as nothing is read after the last turn."
            )
        if turns > 1 and read is None:
            raise UserError(
                f"expected_turns is {turns}: set expected_observation_length, the tokens that the "
                f"model reads between two turns."
            )

    def check_lengths(self, longest: int) -> None:
        """Raises `UserError` for means that completions of up to `longest` tokens cannot have."""
        length, expected = self.expected_completion_length, self.expected(longest)
        if length is not None and not 1 <= length <= longest:
            raise UserError(
                f"expected_completion_length is {length}: it must be from 1 to "
                f"max_completion_length, which is {longest}."
            )
        greatest = self.expected_longest_completion
        if greatest is not None and not expected.length <= greatest <= longest:
            raise UserError(
                f"expected_longest_completion is {greatest}: it must be from "
                f"expected_completion_length, which is {expected.length}, to "
                f"max_completion_length, which is {longest}."
            )
        if expected.drawn < expected.turns:
            raise UserError(
                f"expected_turns is {expected.turns} and expected_observation_length is "
                f"{expected.observation_length}, which leaves no token for each turn in "
                f"completions of {expected.length}: lower one of them."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Prediction of whether a run fits its devices, and what it will do. Bytes are per device."""

    topology: str
    """A TPU type or grid, or `local`."""
    device_kind: str
    num_devices: int
    """Devices that train or sample."""
    num_hosts: int
    model: str
    mesh: Mapping[str, int]
    """Sizes of `dp`, `fsdp` and `tp`."""
    rollout_sharding: str
    """Name of the strategy, and the reason for it."""
    rollout_devices: int
    """Devices that sample and do not train; 0 where all do both."""
    settings: Mapping[str, Any]
    """Settings of the run that its memory depends on most."""
    micro_batch_size: int
    """Completions of full length that a device processes at a time in an update."""
    rows: RowShape
    """Shape of an update's rows."""
    prompt_length: int
    """Tokens of the longest prompt."""
    prompt_length_known: bool
    """Whether that length is the problems' own; else it is the longest that the settings allow."""
    hbm_bytes: int
    """Bytes that programs can use."""
    resident: Mapping[str, int]
    """Bytes resident throughout, by name: `parameters`, `optimizer_state`, `reference_model`; on
    devices that only sample, `sent_weights`."""
    programs: Mapping[str, PlannedProgram]
    """Programs of a training step, in order: `generate`, or `prefill`, `slots`, `decode`, `extend`
    and `admit` where completions have several turns, `score` (the model, before its updates),
    `score_reference`, `update`; and those that begin with `evaluate`, which training can do
    without."""
    peaks: DevicePeaks | None
    """Peak rates of a device, measured for local CPUs; `None` where they are unknown."""
    asked: Asked = dataclasses.field(default_factory=Asked)
    """Numbers that its times and costs are for."""
    found: Found | None = None
    """Result of a search, where one was asked for; the plan is then made with it."""
    change: Change | None = None
    """Change that makes the run fit, where it does not and one is found."""

    def __str__(self) -> str:
        """Returns the plan as `grpo-eqx plan` prints it."""
        from grpo_eqx.planner.report import WIDTH, print_plan
        from grpo_eqx.tracking.safe_console import safe_console

        text = io.StringIO()
        print_plan(self, safe_console(file=text, width=WIDTH))
        return text.getvalue().rstrip("\n")

    @property
    def training(self) -> Mapping[str, PlannedProgram]:
        """The programs of a training step."""
        return {name: x for name, x in self.programs.items() if not is_evaluation(name)}

    @property
    def peak_bytes(self) -> int:
        """Most bytes that a device holds in training."""
        return max(program.peak_bytes for program in self.training.values())

    @property
    def too_large(self) -> tuple[str, ...]:
        """Programs that the devices cannot execute, `evaluate` included."""
        return tuple(
            name
            for name, program in self.programs.items()
            if not program.compiled.accepted or program.peak_bytes > self.hbm_bytes
        )

    @property
    def fits(self) -> bool:
        """Whether every program of a training step fits the devices."""
        return all(map(is_evaluation, self.too_large))

    @property
    def expected(self) -> Expected:
        """Completions, on average, that times are for."""
        return self.asked.expected(self.settings["max_completion_length"])

    @functools.cached_property
    def step_time(self) -> StepTime | None:
        """Time of a step; `None` where a rate is unknown, or a program is refused."""
        if self.peaks is None:
            return None
        rates = Rates(self.peaks, link_rates(self.device_kind))
        times = {
            name: each.time(self.expected, rates)
            for name, each in self.training.items()
            if each.runs > 0
        }
        known = {name: each for name, each in times.items() if each is not None}
        if len(known) < len(times):
            return None
        known = {name: each for name, each in known.items() if each.parts}  # the others never run
        price = self.asked.price_per_device_hour
        ahead = self.rollout_devices > 0 and self.settings["max_staleness"] > 0
        return StepTime(
            known,
            None if price is None else price * self.num_devices / 3600,
            frozenset(SAMPLING) if ahead else frozenset(),
        )

    def for_asked(self, asked: Asked) -> "Plan":
        """Returns the plan with times and cost for other lengths, turns and prices.

        Raises `UserError` for lengths that no completion has.
        """
        asked.check_lengths(self.settings["max_completion_length"])
        change = self.change
        if change is not None:
            change = dataclasses.replace(change, plan=change.plan.for_asked(asked))
        return dataclasses.replace(self, asked=asked, change=change)

    @property
    def verdict(self) -> str:
        """Verdict in one sentence, and another for a change or a search."""
        peaks = {
            name: program.peak_bytes
            for name, program in self.training.items()
            if self.fits or name in self.too_large
        }
        largest = max(peaks, key=lambda name: peaks[name])
        need, usable = readable_bytes(peaks[largest]), readable_bytes(self.hbm_bytes)
        on = "the local devices" if self.topology == LOCAL else self.topology
        if self.fits:
            said = (
                f"The run fits {on}: memory peaks at {need} of {usable} per device, in {largest}."
            )
        else:
            said = (
                f"The run does not fit {on}: {largest} needs {need} per device, but only "
                f"{usable} is usable."
            )
        if self.change is not None:
            eased = readable_bytes(self.change.plan.peak_bytes)
            said += f" It fits with {self.change.flags}, at {eased} per device."
        elif self.found is None and not self.fits:
            said += (
                " No setting that was tried makes it fit: use more devices, or shorter prompts or "
                "completions."
            )
        if self.fits and self.too_large:
            said += " Evaluation does not fit: lower max_num_seqs or max_prompt_length."
        return said if self.found is None else f"{said} {self.found}"

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain JSON."""
        names = {field.name for field in dataclasses.fields(self)} - {"found", "change", "asked"}
        found, change = self.found, self.change
        links = link_rates(self.device_kind)
        return {
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "verdict": self.verdict,
            **{name: getattr(self, name) for name in sorted(names)},
            **self.asked._asdict(),
            "rows": dataclasses.asdict(self.rows),
            "programs": {name: program.to_json() for name, program in self.programs.items()},
            "peaks": None if self.peaks is None else self.peaks._asdict(),
            "links": None if links is None else links._asdict(),
            "step_time": None if self.step_time is None else self.step_time.to_json(),
            "search": None if found is None else found.setting,
            "largest": None if found is None else found.largest,
            "most": None if found is None else found.most,
            "tried": None if found is None else [list(each) for each in found.tried.items()],
            "change": None
            if change is None
            else {"settings": dict(change.settings), "plan": change.plan.to_json()},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Plan":
        """Inverts `to_json`."""
        own: dict[str, Any] = {
            field.name: fields.get(field.name) for field in dataclasses.fields(cls)
        }
        own["asked"] = Asked(*(fields[name] for name in Asked._fields))
        own["rows"] = RowShape(**fields["rows"])
        own["peaks"] = None if fields["peaks"] is None else DevicePeaks(**fields["peaks"])
        own["programs"] = {
            name: PlannedProgram.from_json(each) for name, each in fields["programs"].items()
        }
        if fields["search"] is not None:
            tried = {value: fits for value, fits in fields["tried"]}
            own["found"] = Found(fields["search"], fields["largest"], tried, fields["most"])
        if (change := fields["change"]) is not None:
            own["change"] = Change(change["settings"], cls.from_json(change["plan"]))
        return cls(**own)
