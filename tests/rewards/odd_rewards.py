"""What reward functions may return, in a module that worker processes can import."""

from collections import UserList, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np


class Tensor:
    """Stands for the tensors of libraries that are not there: torch's, on another device."""

    def __init__(self, value: Any, dtype: str = "torch.bfloat16"):
        self.value, self.dtype = value, dtype

    def __array__(self, *_: Any) -> np.ndarray:
        raise TypeError("can't convert it to numpy")

    def tolist(self) -> Any:
        return self.value

    def __iter__(self) -> Iterator["Tensor"]:
        return (Tensor(each, self.dtype) for each in self.value)

    def __repr__(self) -> str:
        return f"tensor({self.value})"


class Raises:
    """Raises an error whenever it is asked for anything."""

    def __init__(self, error: type[BaseException] = RuntimeError):
        self.error = error

    def __float__(self) -> float:
        raise self.error("float")

    def __repr__(self) -> str:
        raise self.error("repr")


class Endless(list[float]):
    """A list that never ends."""

    def __iter__(self) -> Iterator[float]:
        while True:
            yield 1.0


class NoLength(UserList[float]):
    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Iterator[float]:
        raise RuntimeError("no entries")


class Lying(list[float]):
    """A list that does not say how long it is."""

    def __len__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


class RaisesOfItself:
    """An array whose dtype and class raise an error."""

    def __init__(self, error: type[BaseException] = RuntimeError):
        self.error = error

    def __array__(self, *_: Any) -> np.ndarray:
        raise self.error("array")

    @property
    def dtype(self) -> Any:
        raise self.error("dtype")

    @property
    def __class__(self) -> Any:
        raise self.error("class")


class FloatLike:
    def __float__(self) -> float:
        return 0.25


class Index:
    def __index__(self) -> int:
        return 3


class Masked:
    """Shows a terminal's own commands."""

    def __repr__(self) -> str:
        return "\x1b[2J\x07"


async def judge() -> list[float]:
    raise NotImplementedError


ACCEPTED: dict[str, tuple[Callable[[], Any], float | None]] = {
    "a float": (lambda: [0.5], 0.5),
    "an integer": (lambda: [2], 2.0),
    "a bool": (lambda: [True], 1.0),
    "None": (lambda: [None], None),
    "a tuple": (lambda: (0.5,), 0.5),
    "a deque": (lambda: deque([0.5]), 0.5),
    "a range": (lambda: range(3, 4), 3.0),
    "a Decimal": (lambda: [Decimal("0.5")], 0.5),
    "a Fraction": (lambda: [Fraction(1, 2)], 0.5),
    "an object with __float__": (lambda: [FloatLike()], 0.25),
    "an object with __index__": (lambda: [Index()], 3.0),
    "a list whose length lies": (lambda: Lying([0.5]), 0.5),
    "an array": (lambda: np.array([0.5]), 0.5),
    "an array of float16": (lambda: np.array([0.5], np.float16), 0.5),
    "an array of bools": (lambda: np.array([True]), 1.0),
    "an array of objects": (lambda: np.array([None], object), None),
    "a masked array": (lambda: np.ma.array([0.5], mask=[True]), None),
    "NumPy's scalar": (lambda: [np.float32(0.5)], 0.5),
    "NumPy's bool": (lambda: [np.True_], 1.0),
    "an array without dimensions": (lambda: [np.array(0.5)], 0.5),
    "a tensor": (lambda: Tensor([0.5]), 0.5),
    "a list of tensors": (lambda: [Tensor(0.5)], 0.5),
    "a tensor of int8": (lambda: Tensor([1], "torch.int8"), 1.0),
}
"""What is a reward, and which."""

FAILED: dict[str, tuple[Callable[[], Any], str]] = {
    "NaN": (lambda: [float("nan")], "returned nan"),
    "infinity": (lambda: [float("-inf")], "returned -inf"),
    "an array's NaN": (lambda: np.array([np.nan]), "returned nan"),
    "a tensor's infinity": (lambda: [Tensor(float("inf"))], "returned tensor(inf)"),
    "an object that exits": (lambda: [Raises(SystemExit)], "raised SystemExit: float"),
    "an object that ends generators": (lambda: [Raises(GeneratorExit)], "raised GeneratorExit: "),
    "an array that exits": (lambda: [RaisesOfItself(SystemExit)], "raised SystemExit: dtype"),
    "an array that exits for a list": (lambda: RaisesOfItself(SystemExit), "raised SystemExit: "),
    "a Decimal beyond floats": (lambda: [Decimal("1e999")], "returned Decimal('1E+999')"),
}
"""What is no finite float, and the reason of the failure."""

BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "an integer beyond floats": (
        lambda: [10**400],
        "returned an integer of 1,329 bits for completion 0: return a float",
    ),
    "an integer beyond str()": (
        lambda: [10**5000],
        "returned an integer of 16,610 bits for completion 0: return a float",
    ),
    "a signaling Decimal": (lambda: [Decimal("sNaN")], "returned Decimal('sNaN') for completion"),
    "a Fraction beyond floats": (lambda: [Fraction(10) ** 400], "returned Fraction(1000"),
    "a text": (lambda: ["1.0"], "returned '1.0' for completion"),
    "bytes": (lambda: [b"1"], "returned b'1' for completion"),
    "a bytearray": (lambda: [bytearray(b"1")], "returned bytearray(b'1') for completion"),
    "NumPy's text": (lambda: [np.str_("1")], "returned np.str_('1') for completion"),
    "an array of texts": (lambda: np.array(["1"]), "returned np.str_('1') for completion"),
    "a text for a list": (lambda: "1", "returned '1' for 1 completion"),
    "bytes for a list": (lambda: b"1", "returned b'1' for 1 completion"),
    "a bytearray for a list": (lambda: bytearray(b"1"), "returned bytearray(b'1') for 1 "),
    "a memoryview": (lambda: memoryview(b"1"), "returned <memory at"),
    "a number": (lambda: 1.0, "returned 1.0 for 1 completion"),
    "nothing": (lambda: None, "returned None for 1 completion"),
    "a generator": (lambda: (x for x in [1.0]), "returned <generator object"),
    "a dict": (lambda: {0: 1.0}, "returned {0: 1.0} for 1 completion"),
    "a set": (lambda: {1.0}, "returned {1.0} for 1 completion"),
    "an array without dimensions for a list": (lambda: np.array(1.0), "returned array(1.)"),
    "a tensor without dimensions": (lambda: Tensor(1.0), "returned tensor(1.0)"),
    "no entries": (list, "returned 0 values for 1 completion"),
    "no entries, as its length denies": (lambda: Lying([]), "returned 0 values for 1 completion"),
    "too many, as its length denies": (lambda: Lying([1.0] * 3), "returned 2 values for 1 "),
    "an array that raises": (lambda: [RaisesOfItself()], "returned <"),
    "too many": (lambda: [1.0] * 3, "returned 3 values for 1 completion"),
    "a nested list": (lambda: [[1.0]], "returned [1.0] for completion"),
    "an array of two dimensions": (lambda: np.array([[1.0]]), "returned [1.0] for completion"),
    "a nested tensor": (lambda: [Tensor([1.0])], "returned tensor([1.0]) for completion"),
    "a complex number": (lambda: [1j], "returned 1j for completion"),
    "NumPy's complex number": (lambda: [np.complex64(1)], "returned np.complex64(1+0j)"),
    "a complex array": (lambda: np.array([1 + 0j]), "returned np.complex128(1+0j)"),
    "a complex tensor": (lambda: [Tensor(1.0, "torch.complex64")], "returned tensor(1.0)"),
    "an array of dates": (lambda: np.array(["2020-01-01"], "M8[ns]"), "returned np.datetime64"),
    "an object": (lambda: [Masked()], r"returned \x1b[2J\x07 for completion"),
    "an object that raises": (lambda: [Raises()], "returned <Raises instance at"),
    "an endless list": (Endless, "returned 2 values for 1 completion"),
    "a list that raises": (NoLength, "which cannot be read (RuntimeError: no "),
    "a class": (lambda: [float], "returned <class 'float'> for completion"),
    "a coroutine": (judge, "returned a coroutine: write it as async def"),
    "a coroutine in a list": (lambda: [judge()], "returned a coroutine for completion"),
    "a long list": (lambda: [list(range(10**6))], "returned [0, 1, 2, 3, 4, 5, ...] for"),
    "a long text": (lambda: ["x" * 10**6], "returned 'xxx"),
}
"""What is no list of rewards, and how the message goes on."""


def returns(kind: str, *, completions: list[str], **columns: Any) -> Any:
    """Returns what a kind stands for, as the rewards of one completion."""
    make, _ = {**ACCEPTED, **FAILED, **BROKEN}[kind]
    return make()


async def returns_later(kind: str, *, completions: list[str], **columns: Any) -> Any:
    """Does the same, and is awaited."""
    return returns(kind, completions=completions)
