"""Counts the FLOPs of matrix products in the forms that XLA's compilers give them."""

import json
import math
import re
from collections.abc import Sequence

import numpy as np

from grpo_eqx.planner.hlo import Array, Instruction

PRODUCTS = {"dot", "convolution", "custom-call"}
"""Operations that may be products."""

_DIMS = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_BATCH_GROUPS = re.compile(r"batch_group_count=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_COST = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_BATCHES = re.compile(r'"lhs_batch_dimensions":\[([^\]]*)\]')
_MATRIX_PRODUCTS = ("gemm", "matmul")


def product_flops(each: Instruction, operands: Sequence[Array]) -> float:
    """Returns the FLOPs of an instruction: 2 for each multiply-add of a product, else 0.

    **Arguments:**

    - `each`: the instruction.
    - `operands`: the arrays of its operands.
    """
    if each.operation == "dot":
        return _dot(each, operands)
    if each.operation == "convolution":
        return _convolution(each, operands)
    if each.operation == "custom-call":
        return _custom_call(each, operands)
    return 0.0


def is_attention(each: Instruction, operands: Sequence[Array]) -> bool:
    """Returns whether an instruction is an attention kernel, which skips what no query sees."""
    if each.operation != "custom-call":
        return False
    target = _TARGET.search(each.line)
    name = target[1].lower() if target else ""
    return "fmha" in name or (
        name == "tpu_custom_call" and any(len(x.sizes) == 5 for x in operands)
    )


def _dot(each: Instruction, operands: Sequence[Array]) -> float:
    match = _DIMS.search(each.attributes)
    dims = [int(x) for x in match[1].split(",") if x] if match else []
    contracted = math.prod(operands[0].sizes[dim] for dim in dims)
    return 2.0 * each.arrays[0].size * contracted


def _convolution(each: Instruction, operands: Sequence[Array]) -> float:
    """Counts a convolution, which on TPUs is also the form of any product.

    A product's batch is then a spatial dimension, whose window meets one position of each result.
    """
    labels = _LABELS.search(each.attributes)
    assert labels is not None
    of_left, of_right, of_result = labels.groups()
    left, right, result = operands[0].sizes, operands[1].sizes, each.arrays[0].sizes
    spatial = sorted(label for label in of_left if label.isdigit())
    window = _window(each.attributes, len(spatial))
    pairs = math.prod(
        _valid_pairs(
            left[of_left.index(x)], right[of_right.index(x)], result[of_result.index(x)], *window[i]
        )
        for i, x in enumerate(spatial)
    )
    features = right[of_right.index("i")] * right[of_right.index("o")]
    groups = _BATCH_GROUPS.search(each.attributes)
    batch = left[of_left.index("b")] / (int(groups[1]) if groups else 1)
    return 2.0 * batch * features * pairs


def _window(attributes: str, number: int) -> list[tuple[int, int, int, int]]:
    """Returns stride, low padding, and dilations of left and right, of each spatial dimension."""
    match = _WINDOW.search(attributes)
    fields = dict(field.split("=") for field in match[1].split()) if match else {}

    def values(name: str, default: str) -> list[str]:
        return fields[name].split("x") if name in fields else [default] * number

    return [
        (int(stride), int(pad.split("_")[0]), int(of_left), int(of_right))
        for stride, pad, of_left, of_right in zip(
            values("stride", "1"),
            values("pad", "0_0"),
            values("lhs_dilate", "1"),
            values("rhs_dilate", "1"),
            strict=True,
        )
    ]


def _valid_pairs(
    left: int, window: int, result: int, stride: int, pad: int, of_left: int, of_right: int
) -> int:
    """Counts the pairs of a result's and a window's position that meet an element, no padding."""
    end = (left - 1) * of_left + 1
    starts = np.arange(result) * stride - pad
    return sum(
        int(((at >= 0) & (at < end) & (at % of_left == 0)).sum())
        for at in (starts + position * of_right for position in range(window))
    )


def _custom_call(each: Instruction, operands: Sequence[Array]) -> float:
    target = _TARGET.search(each.line)
    name = target[1].lower() if target else ""
    if estimate := _COST.search(each.line):
        return float(estimate[1])
    if "fmha" in name:
        return _attention(each, operands)
    if name == "tpu_custom_call":
        return _kernel(each, operands)
    if any(word in name for word in _MATRIX_PRODUCTS):
        return _matrix_product(each, operands)
    return 0.0


def _matrix_product(each: Instruction, operands: Sequence[Array]) -> float:
    """Counts a product of a library from its sizes alone, however its operands are transposed.

    Of `b` products of m x k and k x n, the three arrays have b^3 (m k n)^2 elements in all.
    """
    left, right, result = operands[0], operands[1], each.arrays[0]
    match = _BATCHES.search(each.line)
    if match is not None:
        dims = [int(x) for x in json.loads(f"[{match[1]}]")]
        batch = math.prod(left.sizes[dim] for dim in dims)
    else:
        batch = math.prod(result.sizes[:-2]) if len(right.sizes) > 2 else 1
    return 2.0 * math.sqrt(float(left.size) * right.size * result.size / max(batch, 1))


def _attention(each: Instruction, operands: Sequence[Array]) -> float:
    """Counts cuDNN's attention, all keys for every query: two products, backward five."""
    queries, keys = operands[0], operands[1]
    products = 5 if "backward" in each.line.lower() else 2
    length = keys.size // max(1, math.prod(keys.sizes[:1]) * keys.sizes[-1])
    heads = min(keys.sizes[1:-1]) if len(keys.sizes) > 3 else 1
    return 2.0 * products * queries.size * length / heads


def _kernel(each: Instruction, operands: Sequence[Array]) -> float:
    """Counts this project's kernels for TPUs: attention's and the loss'.

    Attention's take queries `[R, K, r, T, D]` and keys `[R, K, S, D]`; its kernels compute two
    products for the softmax, three for the gradient of queries and four for those of keys and
    values. The loss' takes hidden states `[n, H]` and a head `[V, H]`.
    """
    queries = [x for x in operands if len(x.sizes) == 5]
    keys = [x for x in operands if len(x.sizes) == 4]
    if queries and keys:
        gradients = [len(x.sizes) for x in each.arrays]
        products = 2 if len(queries) == 1 else 3 if 5 in gradients else 4
        return 2.0 * products * queries[0].size * keys[0].sizes[-2]
    matrices = [x for x in operands if len(x.sizes) == 2 and x.dtype != "s32"]
    if len(matrices) >= 2 and matrices[0].sizes[1] == matrices[1].sizes[1]:
        return 2.0 * matrices[0].size * matrices[1].sizes[0]
    return 0.0
