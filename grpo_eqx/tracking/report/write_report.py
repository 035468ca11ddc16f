"""Writing of the report: all of its parts in one page."""

import dataclasses
import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from grpo_eqx.common.durable import write_whole
from grpo_eqx.common.errors import UserError, listed
from grpo_eqx.tracking.diagnosis import Finding, diagnose
from grpo_eqx.tracking.plots.style import plotting
from grpo_eqx.tracking.report.charts import Plot, draw_sections
from grpo_eqx.tracking.report.completions import Examples, choose_examples, shortened
from grpo_eqx.tracking.report.reading import Group, ReportedRun, grouped, read_runs
from grpo_eqx.tracking.report.settings import special_settings
from grpo_eqx.tracking.report.summary import facts_of, memory_facts

_SECTIONS: Mapping[str, tuple[str, str]] = {
    "learning": (
        "Learning",
        "Is it learning, and does that hold on problems it does not train on?",
    ),
    "length": ("Length and truncation", "Do completions end by themselves?"),
    "tools": ("Tools and environments", "Are they called, and at what cost?"),
    "policy": ("The policy", "Does it stay in the range where its updates can be trusted?"),
    "time": ("Step time", "Where does the time go?"),
    "memory": ("Memory", "How much of the devices is used, and what was planned?"),
}
"""Titles of the sections with plots, and the question that each answers."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """Part of the page that shows one run by itself."""

    run: ReportedRun
    group: Group
    findings: Sequence[Finding]
    examples: Examples

    @property
    def facts(self) -> list[Any]:
        return facts_of(self.run)


def write_report(paths: Sequence[Path], output: Path) -> list[Path]:
    """Writes the report on runs, and a picture of each of its plots.

    **Arguments:**

    - `paths`: the folders of the runs.
    - `output`: the file. The pictures go to a folder beside it, of the same name and `_plots`.

    **Returns:** the written files, the page first.

    Raises `UserError` for a path that is not a run folder, or an output that cannot be written.
    """
    if os.path.exists(output) and not os.path.isfile(output):  # a device would be replaced
        raise UserError(f"output {str(output)!r} is not a file: give one that can be replaced.")
    runs = read_runs(paths)
    pictures = output.with_name(f"{output.stem}_plots")
    try:
        pictures.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(output, error) from error
    groups = grouped(runs)
    with plotting():
        sections = draw_sections(groups)
    page = _page(groups, sections)
    files = {output: page.encode(errors="replace")}
    for plots in sections.values():
        files |= {pictures / f"{plot.name}.png": plot.png for plot in plots}
    try:
        for path, content in files.items():
            write_whole(path, content)
        for path in pictures.glob("*.png"):
            if path not in files:
                path.unlink()  # a picture of an earlier report
    except OSError as error:
        raise _unwritable(output, error) from error
    return list(files)


def _unwritable(output: Path, error: OSError) -> UserError:
    return UserError(
        f"output {str(output)!r} cannot be written ({error.strerror}): give a file in a folder "
        f"that exists."
    )


def _page(groups: Sequence[Group], sections: Mapping[str, Sequence[Plot]]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # completions are text of a model, and may be anything
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["shortened"] = shortened
    parts = [_part(run, group) for group in groups for run in group.runs]
    runs = [part.run for part in parts]
    return environment.get_template("report.html.jinja").render(
        title=listed([group.name for group in groups]),
        subjects=_subjects(runs),
        parts=parts,
        groups=groups,
        sections={name: (*_SECTIONS[name], sections[name]) for name in _SECTIONS},
        settings=special_settings([group.runs[0].settings for group in groups]),
        seeds=[group for group in groups if len(group.runs) > 1],
        memory=memory_facts(runs),
        unplanned=[run.name for run in runs if not run.plan],
        written=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def _subjects(runs: Sequence[ReportedRun]) -> list[str]:
    """Returns the models of the runs, with their training data."""
    pairs = [(run.settings.get("model"), run.settings.get("data")) for run in runs]
    return list(dict.fromkeys(f"{model} on {data}" for model, data in pairs if model and data))


def _part(run: ReportedRun, group: Group) -> _Part:
    gaps: list[str] = list(run.gaps)
    examples = choose_examples(run.run.completion_tables, gaps)
    # Rules read the settings too.
    if run.settings:
        recorded = run.run
        findings = diagnose(
            run.settings, recorded.steps, recorded.evaluations, num_devices=recorded.num_devices
        )
    else:
        findings = []
        gaps.append("Without its settings, the run is not diagnosed.")
    return _Part(dataclasses.replace(run, gaps=gaps), group, findings, examples)
