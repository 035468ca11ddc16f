"""The part of a page that a script writes, between two marks."""


def with_part(page: str, name: str, script: str, text: str) -> str:
    """Returns the page with a text between the marks of one of its parts.

    **Arguments:** the page; the part's name, and that of the script that writes it, without `.py`,
    both of which are in the marks; the text.

    Raises `ValueError` where the page lacks a mark.
    """
    begin = f"<!-- {name}: scripts/{script}.py writes what follows -->"
    end = f"<!-- end of {name} -->"
    head, found, rest = page.partition(begin)
    _, ended, tail = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the page lacks the mark {end if found else begin}")
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"
