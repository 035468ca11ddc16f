"""Figures as SVG within a page, with the page's colors and a description for screen readers."""

import io
import re
from collections.abc import Mapping
from xml.etree import ElementTree

from matplotlib.figure import Figure

from grpo_eqx.tracking.plots.lines import DATA
from grpo_eqx.tracking.plots.style import GRID, INK, MUTED, SERIES, TITLE_HEIGHT

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_VARIABLES: Mapping[str, str] = {
    INK: "--ink", MUTED: "--muted", GRID: "--grid",
    **{color: f"--series-{index}" for index, color in enumerate(SERIES)},
}  # fmt: skip
"""Variables of the page for the colors of plots."""
_FONT = re.compile(r"font: (?P<size>[\d.]+px)[^;\"]*")
_SIZE = r"font-size: \g<size>"
"""Text uses the page's font in the plot's size."""
_LONG_NUMBER = re.compile(r"\d+\.\d{2,}")


def inline_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """Returns a figure as an `svg` element, whose colors are variables of the page.

    The strip with its title is left out. Call it within `plotting`.

    **Arguments:**

    - `figure`: the figure.
    - `name`: a name that no other figure of the page has.
    - `title`, `description`: what it shows, in a few words and in sentences, for screen readers.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(file.getvalue())
    for element in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(element)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    root.attrib = {
        "viewBox": f"0 {TITLE_HEIGHT} {width:g} {height - TITLE_HEIGHT:g}", "role": "img",
        "aria-labelledby": f"{name}-title {name}-desc",
    }  # fmt: skip
    _name_ids(root, name)
    for tag, text in (("desc", description), ("title", title)):
        element = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(0, element)
    return ElementTree.tostring(root, encoding="unicode")


def _name_ids(root: ElementTree.Element, name: str) -> None:
    """Makes ids unique on a page, drops unused ids, and marks the elements that show data."""
    reference = f"{{{_XLINK}}}href"
    for element in root.iter():
        own = element.attrib.pop("id", "")
        if own.startswith(DATA):
            element.set("class", "data")
        elif element.tag.rpartition("}")[2] in ("clipPath", "path", "pattern") and own:
            element.set("id", f"{name}-{own}")
        if reference in element.attrib:
            element.set(reference, element.attrib[reference].replace("#", f"#{name}-"))
        for attribute in ("clip-path", "style"):
            if attribute in element.attrib:
                value = element.attrib[attribute].replace("url(#", f"url(#{name}-")
                element.set(attribute, _with_variables(_FONT.sub(_SIZE, value)))
        if "d" in element.attrib:
            element.set("d", _path(element.attrib["d"]))


def _path(path: str) -> str:
    """Returns the drawing commands of a path, its coordinates rounded to a tenth of a unit."""
    rounded = _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), path)
    return " ".join(rounded.split())


def _with_variables(style: str) -> str:
    for color, variable in _VARIABLES.items():
        style = style.replace(color, f"var({variable})")
    return style
