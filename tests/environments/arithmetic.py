"""Tools of arithmetic: one plain, one async."""

import asyncio


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: A number.
        b: Another.
    """
    return a * b


async def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: A number.
        b: Another.
    """
    await asyncio.sleep(0)
    return a + b
