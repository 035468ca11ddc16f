"""The part of a page that a script writes is replaced, and nothing else."""

import pytest

from .scripts import load_script

BEGIN, END = "<!-- rates: scripts/rates.py writes what follows -->", "<!-- end of rates -->"


def with_rates(page: str) -> str:
    return load_script("generated_part").with_part(page, "rates", "rates", "new")


def test_what_is_around_it_stays() -> None:
    page = f"before\n{BEGIN}\n\nold\n\n{END}\nafter"
    assert with_rates(page) == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter"


@pytest.mark.parametrize(
    ("page", "missing"), [(f"before\n{END}", BEGIN), (f"{BEGIN}\nold", END), ("", BEGIN)]
)
def test_a_page_without_a_mark_is_refused(page: str, missing: str) -> None:
    with pytest.raises(ValueError, match=f"lacks the mark {missing}"):
        with_rates(page)
