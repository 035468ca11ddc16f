"""The documentation's site, built and opened in a browser."""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.slow
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
PAGES = (
    "", "tutorials/first_run/", "guides/planning/", "guides/recipes/", "guides/settings/",
    "how_to/serving/", "how_to/reproducibility/", "api/trainer/", "api/objective/",
)  # fmt: skip
FOUND_AT = {
    "epsilon_high": "guides/settings/",
    "host_local": "guides/meshes/",
    "plan": "guides/planning/",
    "resume": "guides/reliability/",
    "lora_rank": "guides/lora/",
}
"""Words to search for, and a page that has to be among those found."""


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the site is served."""
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True,
    )  # fmt: skip
    handler = functools.partial(SilentHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs the browser extra")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


def test_pages_fit_their_window_and_ask_no_other_host(browser: Any, address: str) -> None:
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: request.url.startswith(address) or complaints.append(request.url),
    )
    for path in PAGES:
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(address + path)
        assert page.evaluate("document.documentElement.scrollWidth") == 1280, path
        page.set_viewport_size({"width": 400, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == 400, path
        assert page.locator(".arithmatex").count() == 0, path
        broken = "[...document.images].filter(x => x.complete && !x.naturalWidth).map(x => x.src)"
        assert page.evaluate(broken) == [], path
    assert complaints == []
    page.close()


def test_text_stands_out_in_both_schemes(browser: Any, address: str) -> None:
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(address)
        text, behind = page.evaluate(
            "[document.querySelector('article p'), document.body]"
            ".map((x, i) => getComputedStyle(x)[i ? 'backgroundColor' : 'color'])"
            ".map(color => color.match(/[\\d.]+/g).slice(0, 3).reduce((sum, x) => sum + +x, 0))"
        )
        assert (text < behind) == (scheme == "light")
        assert abs(text - behind) > 300, scheme
        page.close()


def test_search_finds_what_people_look_for(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    for words, expected in FOUND_AT.items():
        page.goto(f"{address}?q={words}")
        link = f'.md-search-result__item a[href*="/{expected}"]'
        page.wait_for_selector(link, state="attached", timeout=20_000)
    page.close()


def test_the_copy_button_copies_the_command_only(browser: Any, address: str) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(address)
    page.locator(
        ".language-console .md-clipboard, .language-console .md-code__button"
    ).first.click()
    copied = page.wait_for_function("navigator.clipboard.readText()").json_value()
    assert copied.strip() == "pip install -e . && python examples/gsm8k.py --mesh auto"
    context.close()


def test_formulas_are_drawn(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}api/objective/")
    heights = page.eval_on_selector_all(
        "math[display=block]", "all => all.map(each => each.getBoundingClientRect().height)"
    )
    assert len(heights) >= 3
    assert min(heights) > 10
    page.close()


def test_signatures_link_their_types(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}api/trainer/")
    links = page.eval_on_selector_all(
        ".doc-signature a", "all => all.map(a => [a.textContent, new URL(a.href).pathname])"
    )
    assert ["LossBackend", "/api/loss_backends/"] in links
    page.close()
