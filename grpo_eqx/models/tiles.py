"""Sizes of the tiles that a long dimension is processed in."""


def even_tile(length: int, most: int) -> int:
    """Returns the size of about even tiles, as few as `most` allows; at least 1."""
    count = max(1, -(-length // most))
    return max(1, -(-length // count))
