"""Figures that are part of a page, and can be seen: their colors contrast, and tell lines apart."""

import re
import warnings
from xml.etree import ElementTree

import numpy as np
import pytest

from grpo_eqx.tracking.plots.lines import Line, Scale, draw_lines
from grpo_eqx.tracking.plots.series import Course
from grpo_eqx.tracking.plots.stack import StepTimes, draw_step_times
from grpo_eqx.tracking.plots.style import SERIES, plotting
from grpo_eqx.tracking.plots.svg import inline_svg


@pytest.fixture
def svg() -> str:
    steps = np.arange(1.0, 11.0)
    with plotting():
        lines = [Line(label, i, Course(steps, steps * (i + 1))) for i, label in enumerate("ab")]
        figure = draw_lines(lines, Scale(unit="#0072b2 <$x$>"), 10.0)
        return inline_svg(figure, "name", "A title", "From 1 to 10 & more.")


def test_it_says_what_it_shows(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert [element.text for element in root][:2] == ["A title", "From 1 to 10 & more."]
    assert [element.get("id") for element in root][:2] == ["name-title", "name-desc"]
    assert root.attrib["aria-labelledby"] == "name-title name-desc"


def test_its_colors_are_those_of_the_page_and_its_text_is_as_given(svg: str) -> None:
    styles = " ".join(re.findall(r'style="([^"]*)"', svg))
    assert not re.search(r"#(?!name)[0-9a-f]{6}\b", styles.replace("#000000", ""))
    assert {"var(--series-0)", "var(--series-1)", "var(--ink)", "var(--muted)"} <= set(
        re.findall(r"var\(--[\w-]+\)", styles)
    )
    assert "#0072b2 &lt;$x$&gt;</text>" in svg


def test_its_references_are_to_its_own_elements(svg: str) -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert all(name.startswith("name-") for name in ids)
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= ids
    assert set(re.findall(r'href="#([^"]+)"', svg)) <= ids


def test_what_shows_data_is_marked(svg: str) -> None:
    assert svg.count('class="data"') == 4  # two lines of steps, and two of their means


def test_long_steps_are_cut_off_and_said_to_be() -> None:
    steps = np.arange(1.0, 21.0)
    rollout = np.ones(20)
    rollout[0] = 50.0
    with plotting():
        phases = {"rollout": rollout, "update": np.full(20, 2.0)}
        figure = draw_step_times(StepTimes(steps, phases, np.where(steps == 1, 49.0, 0.0)))
        (axes,) = figure.axes
        assert axes.get_ylim()[1] == pytest.approx(1.35 * 3)
        svg = inline_svg(figure, "name", "", "")
    assert "1 bar is cut off, at 52 s" in svg
    assert "update 2 s" in svg
    assert svg.count('class="data"') == 3  # the phases, and what was compilation


def test_more_phases_than_colors_are_all_drawn_and_named() -> None:
    steps = np.arange(1.0, 4.0)
    with plotting():
        phases = {f"phase {i}": np.ones(3) for i in range(len(SERIES) + 2)}
        svg = inline_svg(draw_step_times(StepTimes(steps, phases, np.zeros(3))), "name", "", "")
    assert svg.count('class="data"') == len(phases)
    assert all(f"{phase} 1 s" in svg for phase in phases)


def test_a_point_before_the_first_step_is_drawn_without_a_warning() -> None:
    with plotting(), warnings.catch_warnings():
        warnings.simplefilter("error")
        line = Line("a", 0, Course(np.zeros(1), np.ones(1)), points=True)
        (axes,) = draw_lines([line], Scale(unit="share"), 0.0).axes
    assert axes.get_xlim() == (-0.02, 1.02)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    high, low = sorted([luminance(first), luminance(second)], reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("color", SERIES)
def test_lines_stand_out_from_white(color: str) -> None:
    assert contrast(color, "#ffffff") >= 3  # WCAG 2.1, 1.4.11
