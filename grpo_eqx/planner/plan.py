"""The plan of a run, its verdict and its JSON form."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_eqx.choices import LOCAL
from grpo_eqx.planner.compiled_program import CompiledProgram
from grpo_eqx.planner.step_time import Floor
from grpo_eqx.run_programs import EVALUATE
from grpo_eqx.sharding.layout_report import readable_bytes
from grpo_eqx.training.row_shape import RowShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedProgram:
    """One of the programs of a run, on the devices of the plan."""

    compiled: CompiledProgram
    elsewhere_bytes: int
    """Bytes resident on each device while it runs, besides its arguments."""
    floor: Floor | None
    """Least work of one step; `None` for evaluations."""

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
            "floor": None if self.floor is None else self.floor._asdict(),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "PlannedProgram":
        """Inverts `to_json`."""
        compiled = dict(fields)
        floor, elsewhere = compiled.pop("floor"), compiled.pop("elsewhere_bytes")
        compiled["peak_bytes"] -= elsewhere
        return cls(
            compiled=CompiledProgram.from_json(compiled),
            elsewhere_bytes=elsewhere,
            floor=None if floor is None else Floor(**floor),
        )


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Prediction of whether a run fits its devices, and what it will do. Bytes are per device."""

    topology: str
    """A TPU type or grid, or `local`."""
    device_kind: str
    num_devices: int
    num_hosts: int
    model: str
    mesh: Mapping[str, int]
    """Sizes of `dp`, `fsdp` and `tp`."""
    rollout_sharding: str
    """Name of the strategy, and the reason for it."""
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
    """Bytes resident throughout, by name: `parameters`, `optimizer_state`, `reference_model`."""
    programs: Mapping[str, PlannedProgram]
    """Programs of a training step, in order: `generate`, `score` (the model, before its updates),
    `score_reference`, `update`; and `evaluate`, which training can do without."""
    found: Found | None = None
    """Result of a search, where one was asked for; the plan is then made with it."""
    change: Change | None = None
    """Change that makes the run fit, where it does not and one is found."""

    @property
    def training(self) -> Mapping[str, PlannedProgram]:
        """The programs of a training step."""
        return {name: program for name, program in self.programs.items() if name != EVALUATE}

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
        return not set(self.too_large) - {EVALUATE}

    @property
    def floor_seconds(self) -> float | None:
        """Least seconds of a step, one program after the other; `None` where a peak is unknown."""
        floors = [each.floor for each in self.programs.values() if each.floor is not None]
        seconds = [floor.seconds for floor in floors if floor.seconds is not None]
        return sum(seconds) if len(seconds) == len(floors) else None

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
        if self.fits and EVALUATE in self.too_large:
            said += " Evaluation does not fit: lower max_num_seqs or max_prompt_length."
        return said if self.found is None else f"{said} {self.found}"

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain JSON."""
        names = {field.name for field in dataclasses.fields(self)} - {"found", "change"}
        found, change = self.found, self.change
        return {
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "verdict": self.verdict,
            **{name: getattr(self, name) for name in sorted(names)},
            "rows": dataclasses.asdict(self.rows),
            "programs": {name: program.to_json() for name, program in self.programs.items()},
            "floor_seconds": self.floor_seconds,
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
        own["rows"] = RowShape(**fields["rows"])
        own["programs"] = {
            name: PlannedProgram.from_json(each) for name, each in fields["programs"].items()
        }
        if fields["search"] is not None:
            tried = {value: fits for value, fits in fields["tried"]}
            own["found"] = Found(fields["search"], fields["largest"], tried, fields["most"])
        if (change := fields["change"]) is not None:
            own["change"] = Change(change["settings"], cls.from_json(change["plan"]))
        return cls(**own)
