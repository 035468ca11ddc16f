"""The pictures of "How it works" are those that its script draws."""

from xml.etree import ElementTree

from .scripts import load_script


def test_the_pictures_are_those_of_the_script() -> None:
    script = load_script("how_it_works_pictures")
    page = script.PAGE.read_text()
    assert script.with_pictures(page) == page, "run python scripts/how_it_works_pictures.py"
    for figure in (script.step(), script.house()):
        assert "\n\n" not in figure  # Markdown would end it there
        ElementTree.fromstring(figure)
