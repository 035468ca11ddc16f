"""Colors, sizes and axes that all plots share."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, MUTED, GRID = "#1b2330", "#566172", "#dfe4ea"
"""Colors of text, of less important text, and of the grid, on white."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b7609a", "#b8860b", "#6b7687")
"""Colors of lines that people with any color vision can tell apart (after Okabe and Ito)."""
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)))
"""Dashes of lines, so that lines differ in more than color."""
WIDTH, HEIGHT, TITLE_HEIGHT = 480.0, 294.0, 24.0
"""Size of a plot in points: half the width of a screen, or the whole width of a phone. Pages show
the title as text, and leave out its height."""
TEXT, SMALL_TEXT = 15.0, 14.0
_SETTINGS: Mapping[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": TEXT,
    "text.color": INK,
    "text.parse_math": False,  # names of runs may have dollar signs
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.labelsize": SMALL_TEXT,
    "axes.linewidth": 1.0,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": SMALL_TEXT,
    "ytick.labelsize": SMALL_TEXT,
    "xtick.major.size": 4,
    "ytick.major.size": 0,
    "legend.fontsize": SMALL_TEXT,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "grpo_eqx",  # the same plot is the same file
    "path.simplify": True,
}


@contextlib.contextmanager
def plotting() -> Iterator[None]:
    """Sets matplotlib's style while it is entered; make and save figures inside."""
    settings: Any = _SETTINGS
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A run's name may have letters that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        warnings.filterwarnings("ignore", "Matplotlib currently does not support .* natively")
        yield


def new_figure(width: float = WIDTH, height: float = HEIGHT) -> Figure:
    """Returns an empty figure of a size in points. Call it within `plotting`."""
    figure = Figure(figsize=(width / 72, height / 72))
    FigureCanvasAgg(figure)
    return figure


def new_axes(*, right: float = 8.0, below: float = 0.0) -> Axes:
    """Returns the axes of a new plot. Call it within `plotting`.

    All axes begin at the same place, so that plots below one another can be compared. `right` and
    `below` are the room, in points, to the right of the axes and below their labels.
    """
    figure = new_figure()
    left, bottom, top = 62.0, 44.0 + below, TITLE_HEIGHT + 28.0
    size = (WIDTH - left - right) / WIDTH, (HEIGHT - bottom - top) / HEIGHT
    return figure.add_axes((left / WIDTH, bottom / HEIGHT, *size))


def dress(axes: Axes, unit: str, *, share: bool = False) -> None:
    """Gives axes over steps their grid and labels; the unit stands above, where it is read.

    **Arguments:**

    - `axes`: the axes.
    - `unit`: the unit of the vertical axis.
    - `share`: whether its values are shares of 1, shown as percentages.
    """
    axes.set_title(unit, fontsize=SMALL_TEXT, color=MUTED, pad=8)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=2))
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        written = _percentage if share else _plain
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _plain(value: float) -> str:
    """Returns a number without an exponent, unless it is very small."""
    small = value != 0 and abs(value) < 1e-4
    return (f"{value:.2g}" if small else f"{value:,.10g}").replace("-", "\N{MINUS SIGN}")


def _percentage(value: float) -> str:
    return f"{_plain(round(100 * value, 10))}%"
