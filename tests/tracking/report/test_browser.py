"""The report as a browser shows it."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.tracking.diagnosis import Finding
from grpo_eqx.tracking.report import write_report

from .synthetic_run import write_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.slow
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip

MARKS = """
[...document.querySelectorAll("figure svg")].map(svg => {
  const view = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll(".data path, .data use")].filter(mark => {
    const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
    const painted = [style.stroke, style.fill].some(paint => paint !== "none");
    return painted && style.visibility === "visible" && Number(style.opacity) > 0
      && Math.max(box.width, box.height) > 2
      && box.left < view.right && box.right > view.left
      && box.top < view.bottom && box.bottom > view.top;
  });
  return [svg.querySelector("title").textContent, marks.length];
})
"""
"""The marks of each plot that show data and can be seen, by the plot's title."""

CONTRASTS = """
(() => {
  const channels = color => color.match(/[\\d.]+/g).map(Number);
  const luminance = color => {
    const [r, g, b] = channels(color).slice(0, 3).map(x => x / 255)
      .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor, parts = channels(color);
      if (parts.length === 3 || parts[3] === 1) return color;
    }
    throw new Error("nothing is behind " + element.outerHTML);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.textContent.trim() || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const text = element.closest("svg") ? style.fill : style.color;
    const [high, low] = [luminance(text), luminance(behind(element))].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), node.textContent.trim().slice(0, 40)]);
  }
  return found;
})()
"""
"""The contrast of each visible text with what is behind it (WCAG 2.1, 1.4.3)."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with all kinds of plots: a run, and two seeds of another; with findings and gaps."""
    folder = tmp_path_factory.mktemp("report")
    seeds = [write_run(folder / f"seed{seed}", steps=60, seed=seed) for seed in (0, 1)]
    name = "a-model-with-a-long-name-on-data-with-another-seed0-a1b2c3"
    other = write_run(folder / name, steps=40, learning_rate=1e-3)
    (other / "layout.json").write_text("{")

    text = "Completions of 5,000 tokens" + "!" * 200
    found = Finding("length_explosion", 3, text, "Lower max_completion_length.")
    output = folder / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[write_report.__module__], "diagnose", lambda *_, **__: [found])
        write_report([*seeds, other], output)
    return output


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs the browser extra")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[1280, 400])
def page(request: pytest.FixtureRequest, browser: Any, report: Path, scheme: str) -> Iterator[Any]:
    """The report, opened: `complaints` of it has errors, and requests for anything else."""
    page = browser.new_page(viewport={"width": request.param, "height": 900}, color_scheme=scheme)
    page.complaints = []
    address = report.as_uri()

    def only_itself(route: Any) -> None:
        if route.request.url == address:
            route.continue_()
            return
        page.complaints.append(route.request.url)
        route.abort()

    page.route("**/*", only_itself)
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.goto(address)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    yield page
    page.close()


def test_it_opens_in_silence_and_asks_for_nothing_else(page: Any) -> None:
    assert page.complaints == []


def test_every_plot_has_marks_in_view(page: Any) -> None:
    marks = page.evaluate(MARKS)
    assert len(marks) > 12
    assert [title for title, count in marks if count == 0] == []


def test_nothing_is_wider_than_the_page_but_what_scrolls_by_itself(page: Any) -> None:
    width, visible = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width == visible
    wide = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(x => x.scrollWidth > x.clientWidth)"
        ".every(x => getComputedStyle(x).overflowX === 'auto')"
    )
    assert wide


def test_all_text_stands_out_from_what_is_behind_it(page: Any, scheme: str) -> None:
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 300
    assert [text for contrast, text in contrasts if contrast < 4.5] == []
    (background,) = page.evaluate("[getComputedStyle(document.body).backgroundColor]")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_text_in_plots_can_be_read_on_a_phone(page: Any) -> None:
    sizes = page.evaluate(
        "[...document.querySelectorAll('figure svg')].flatMap(svg => {"
        "  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;"
        "  return [...svg.querySelectorAll('text')]"
        "    .map(text => scale * parseFloat(getComputedStyle(text).fontSize));"
        "})"
    )
    assert min(sizes) >= 10


def test_links_of_the_contents_lead_somewhere(page: Any) -> None:
    targets = page.evaluate("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert len(targets) > 6
    assert page.evaluate("ids => ids.filter(id => !document.getElementById(id))", targets) == []
