"""Draws the pictures of "How it works" into their page.

python scripts/how_it_works_pictures.py

They are SVG within the page, in the color of its text, so that they are legible on any background.
"""

import html
import re
import textwrap
from pathlib import Path
from typing import Literal

from generated_part import with_part

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "guides" / "how_it_works.md"
ARCHITECTURE = DOCS / "project" / "architecture.md"
WIDTH = 400  # of a narrow phone's column, where it is drawn about one to one
LINE = 16
Where = Literal["devices", "host"]


class Drawing:
    """SVG elements, in units of a pixel on a narrow screen."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def title(self, x: float, y: float, text: str) -> None:
        style = 'font-weight="bold" font-size="14"'
        self.elements.append(f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(text)}</text>')

    def code(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        style = f'font-size="12" font-family="monospace" text-anchor="{anchor}"'
        self.elements.append(f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, where: Where) -> None:
        """Draws a box: filled on the devices, dashed on the host."""
        style = 'fill-opacity="0.1"' if where == "devices" else 'fill="none" stroke-dasharray="5 3"'
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" {style} '
            f'stroke="currentColor"/>'
        )

    def lines(self, x: float, y: float, width: float, where: Where, *lines: str) -> float:
        """Draws a box with a title and lines of arrays and shapes; returns where it ends."""
        height = LINE * len(lines) + 12
        self.box(x, y, width, height, where)
        self.title(x + 8, y + LINE + 1, lines[0])
        for i, line in enumerate(lines[1:], 2):
            names, _, shape = line.partition(" | ")
            self.code(x + 8, y + LINE * i + 1, names)
            self.code(x + width - 8, y + LINE * i + 1, shape, "end")
        return y + height

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draws a line through points, with a head at its end."""
        (x0, y0), (x, y) = points[-2:]
        back, aside = (7 if x > x0 else 0), (4 if x > x0 else 0)
        rise, spread = (0, 0) if back else (7 if y > y0 else -7, 4)
        head = (x - back - spread, y - aside - rise), (x - back + spread, y + aside - rise), (x, y)
        for tag, corners, style in (
            ("polyline", points, 'fill="none" stroke="currentColor"'),
            ("polygon", head, 'stroke="none"'),
        ):
            path = " ".join(f"{a:g},{b:g}" for a, b in corners)
            self.elements.append(f'<{tag} points="{path}" {style}/>')

    def figure(self, height: float, label: str, caption: str) -> str:
        """Returns the drawing as a figure, in HTML without empty lines."""
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            f'aria-label="{html.escape(label)}" fill="currentColor" '
            f'style="width: 100%; max-width: 26rem; font-family: sans-serif">'
        )
        lines = [
            '<figure style="width: 100%">',
            svg,
            *self.elements,
            "</svg>",
            f"<figcaption>{caption}</figcaption>",
            "</figure>",
        ]
        return "\n".join(lines)


def step() -> str:
    """Draws the data of a step, with the shapes of its arrays."""
    draw, left = Drawing(), 28
    y = draw.lines(left, 4, 368, "host", "prompts", "prompt_ids | [P][Tp]")
    draw.arrow((left + 90, y), (left + 90, y + 20))
    generate = y + 20
    y = draw.lines(
        left, generate, 368, "devices", "generate",
        "ids, sampler_logps | [P, G, Tc]",
    )  # fmt: skip
    draw.arrow((left + 90, y), (left + 90, y + 20))
    y = draw.lines(
        left, y + 20, 368, "host", "trajectories",
        "ids, written, sampler_logps, versions | [P][G][T]",
    )  # fmt: skip
    draw.arrow((left + 70, y), (left + 70, y + 20))
    draw.arrow((left + 270, y), (left + 270, y + 20))
    y += 20
    rewarded = draw.lines(left, y, 178, "host", "rewards", "each | [F, P, G]", "total | [P, G]")
    packed = draw.lines(
        left + 190, y, 178, "host", "rows",
        "ids | [M, R, W]",
        "targets | [M, R, S]",
    )  # fmt: skip
    draw.arrow((left + 70, rewarded), (left + 70, rewarded + 20))
    draw.arrow((left + 270, packed), (left + 270, packed + 20))
    y = rewarded + 20
    advantages = draw.lines(
        left, y, 178, "host", "advantages", "advantages | [P, G]", "in rows | [M, R, C]"
    )
    y = draw.lines(
        left + 190, y, 178, "devices", "score, where needed",
        "old_logps, ref_logps,", "entropies | [M, R, S]",
    )  # fmt: skip
    draw.arrow((left + 70, advantages), (left + 70, advantages + 20))
    draw.arrow((left + 270, y), (left + 270, y + 20))
    update = y + 20
    y = draw.lines(
        left, update, 368, "devices", "update, for each micro-batch",
        "tokens | [R, W]",
        "hidden states that are scored | [R, S, H]",
        "logps, entropies | [R, C, Tc]",
        "loss, and gradients | as parameters",
    )  # fmt: skip
    loop = (8.0, update + 20), (8.0, generate + 20)
    draw.arrow((left, update + 20), *loop, (left, generate + 20))
    draw.arrow((left + 90, y), (left + 90, y + 20))
    y = draw.lines(left, y + 20, 368, "host", "metrics", "reward, loss, grad_norm, ... | []")
    return draw.figure(
        y + 4,
        "A step: prompts, generate, trajectories, rewards and advantages beside rows and score, "
        "update, metrics; the updated model generates the next step's completions.",
        "Filled: on the devices. Dashed: on the host. <code>P</code> prompts with <code>G</code> "
        "completions each, of <code>Tp</code> and <code>T</code> tokens, <code>Tc</code> at most; "
        "<code>F</code> reward functions; <code>M</code> micro-batches of <code>R</code> rows of "
        "<code>W</code> tokens, of which <code>S</code> are scored, with places for <code>C</code> "
        "completions; hidden size <code>H</code>. The line on the left is the updated model.",
    )


def house() -> str:
    """Draws the package's layers, from the table of the page on the architecture."""
    page = ARCHITECTURE.read_text(encoding="utf-8")
    rows = page.partition("| path | role |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    draw, y = Drawing(), 4.0
    for row in rows:
        parts = re.findall(r"`([^`]+)`", row.split("|")[1])
        lines = textwrap.wrap(", ".join(parts), 50, break_on_hyphens=False)
        height = LINE * len(lines) + 12
        draw.box(4, y, WIDTH - 34, height, "devices")
        for i, line in enumerate(lines):
            draw.code(12, y + LINE * (i + 1) + 1, line)
        y += height + 8
    draw.arrow((WIDTH - 18, y - 8), (WIDTH - 18, 4))
    middle = f"{WIDTH - 5} {y / 2:g}"
    draw.elements.append(
        f'<text transform="translate({middle}) rotate(-90)" font-size="12" '
        f'text-anchor="middle">imports from</text>'
    )
    return draw.figure(
        y,
        "The package's layers, from shapes and errors to the command line.",
        "Each row may import from itself and from the rows above it: what all need is at the "
        "top, and the command line at the bottom.",
    )


def with_pictures(page: str) -> str:
    """Returns the page with its pictures between their marks."""
    for name, picture in (("a step", step()), ("the house", house())):
        page = with_part(page, name, "how_it_works_pictures", picture)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_pictures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
