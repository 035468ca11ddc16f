"""Takes the picture of a report for the documentation.

python scripts/report_picture.py RUN [RUN ...]

Needs the browser extra, and Chromium. Writes docs/assets/report.png: the report's summary and its
first plots, light, in 160 colors, which a page of text and lines does not miss.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "report.png"
WIDTH, COLORS = 1180, 160
PARTS = "header, nav, #summary, #learning"
"""What is in the picture; the rest of the page is left out."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder, "report.html"), Path(folder, "report.png")
        command = [sys.executable, "-m", "grpo_eqx", "report", *sys.argv[1:]]
        subprocess.run([*command, "--output", str(page)], check=True)
        photograph(page, picture)
        with Image.open(picture) as image:
            image.convert("RGB").quantize(COLORS).save(PICTURE, optimize=True)
    print(f"wrote {PICTURE} ({PICTURE.stat().st_size / 1e3:.0f} kB)")


def photograph(page: Path, picture: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        tab = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.add_style_tag(content=f"main > :not({PARTS}), footer {{ display: none }}")
        tab.screenshot(path=picture, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
