"""Sizes of the tiles that a long dimension is processed in."""


def even_tile(length: int, most: int, multiple: int = 1) -> int:
    """Returns the size of about even tiles, as few as `most` allows.

    It is a multiple of `multiple`, and above `most` only where that is less than one multiple.
    """
    most = max(multiple, most // multiple * multiple)
    count = max(1, -(-length // most))
    even = max(1, -(-length // count))
    return -(-even // multiple) * multiple
