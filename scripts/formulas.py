"""Turns the documentation's LaTeX formulas into MathML, a hook of MkDocs.

Browsers render MathML by themselves: no script and no font is fetched for it.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
"""A formula as `pymdownx.arithmatex` leaves it, in text or in a paragraph of its own."""


def on_page_content(content: str, **_: Any) -> str:
    """Returns a page with each of its formulas as MathML."""
    return FORMULA.sub(lambda found: _mathml(found[2], in_text=found[1] == "span"), content)


def _mathml(latex: str, in_text: bool) -> str:
    formula = convert(html.unescape(latex), display="inline" if in_text else "block")
    return formula if in_text else f'<div class="formula">{formula}</div>'
