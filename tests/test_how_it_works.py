"""The pictures of "How it works" are those that its script draws."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "how_it_works_pictures.py"


def test_the_pictures_are_those_of_the_script() -> None:
    spec = importlib.util.spec_from_file_location("how_it_works_pictures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    assert script.with_pictures(page) == page, "run python scripts/how_it_works_pictures.py"
    for figure in (script.step(), script.house()):
        assert "\n\n" not in figure  # Markdown would end it there
        ElementTree.fromstring(figure)
