"""The arithmetic of the fp16 format, bit for bit what the RTL computes.

Three rules. Every function takes and returns arrays of any shape and is exact or rounds once, to nearest even. The dot
products keep subnormals; the multiplications of the cell update take them as zero and flush them to zero. tanh and
the sigmoids are computed in integers from one table and two slopes, so their bits depend on no mathematical library.
"""

from decimal import Decimal, localcontext
from enum import IntEnum
from typing import NamedTuple

import numpy as np

CELL_LIMIT = np.float32(65504)  # the largest float16: a saturated cell state still rounds to a finite value

_SMALLEST_NORMAL = np.float32(2.0**-126)
# Half a unit (of 24 bits) below the smallest normal: from here on a magnitude rounds up to it.
_FLUSH_BELOW = 2.0**-126 - 2.0**-151


class Activation(IntEnum):
    """Functions of the activation lanes; the values are the encoding in programs and in hardware."""

    IDENTITY = 0
    SIGMOID = 1
    TANH = 2
    RELU = 3
    HARD_SIGMOID_FIFTH = 4
    """min(max(x / 5 + 1/2, 0), 1)"""
    HARD_SIGMOID_SIXTH = 5
    """min(max(x / 6 + 1/2, 0), 1)"""


def multiply_fp16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the exact product as float32 of `a` and `b` : float16, or float32 that holds float16 values."""
    return np.multiply(a, b, dtype=np.float32)


def add_fp32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the binary32 sum of `a` and `b` : float32, rounded to nearest even, with subnormals."""
    return np.add(a, b, dtype=np.float32)


def lane_multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the float32 product of `a` and `b` : float32, without subnormals.

    Subnormal operands count as zero. The product is rounded to 24 bits, to nearest even, as if exponents had no lower
    end; if its magnitude is then below 2^-126 it becomes zero. Zeros keep their sign.
    """
    # 24 x 24 bits and twice the exponent range fit float64: the product is exact and the cast rounds once.
    with np.errstate(invalid="ignore"):
        product = np.multiply(_flush(a), _flush(b), dtype=np.float64)
    with np.errstate(over="ignore", under="ignore"):
        rounded = product.astype(np.float32)
    return np.where(np.abs(product) < _FLUSH_BELOW, np.copysign(np.float32(0), rounded), rounded)


def lane_add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return `add_fp32` of `a` and `b` in which infinities that cancel give the one positive NaN of the RTL."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = add_fp32(a, b)
    return np.where(np.isnan(total), np.float32(np.nan), total)


def _flush(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, dtype=np.float32)
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def saturate_cell(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `c` : float32 limited to +-CELL_LIMIT, and a boolean mask of the elements that were beyond it.

    NaN is beyond it and becomes the limit of its sign.
    """
    c = np.asarray(c, dtype=np.float32)
    beyond = ~(np.abs(c) <= CELL_LIMIT)
    return np.where(beyond, np.copysign(CELL_LIMIT, c), c), beyond


def round_fp16(x: np.ndarray) -> np.ndarray:
    """Return `x` : float32 as float16, rounded to nearest even, with subnormals; saturated as `saturate_cell` does.

    So all operands of a matrix product are finite, and so are its sums.
    """
    with np.errstate(under="ignore"):
        return saturate_cell(x)[0].astype(np.float16)


# tanh on [0, 8) is cut into 256 segments of 1/32. The argument has 22 fraction bits, of which the segment takes none but
# the upper five; with d the 17 others and h the upper 10 of those, and all numbers unsigned integers,
#     tanh * 2^23 = c0 + ((c1 - (c2 * h >> 9)) * d >> 16).
# A coefficient's bits are the fewest that keep the error below 2^-20. A hard sigmoid takes the same way without a table.
ARGUMENT_FRACTION_BITS = 22
RESULT_FRACTION_BITS = 23
OFFSET_BITS = 17
SQUARE_OFFSET_BITS = 10
SQUARE_SHIFT = 9
SLOPE_SHIFT = 16
COEFFICIENT_BITS = (23, 18, 10)

TANH_ERROR_BOUND = 2.0**-20
SIGMOID_ERROR_BOUND = 2.0**-21
HARD_SIGMOID_ERROR_BOUND = 2.0**-21

_SEGMENTS = 256
_ONE = 1 << RESULT_FRACTION_BITS
_ARGUMENT_SCALE = np.float32(1 << ARGUMENT_FRACTION_BITS)
# Chebyshev's nodes of a segment; in the first one zero is a node, so that tanh(0) is 0 and sigmoid(0) is 1/2.
_NODES = (8780, 65536, 122292)
_FIRST_NODES = (0, 70000, 123000)


def _tanh_coefficients() -> np.ndarray:
    """Return int64[257, 3], c0, c1 and c2 of each segment and, last, of the saturated argument.

    The fit interpolates at three nodes; c2 is rounded first, and c1 and c0 then take up what its rounding left. Decimal
    arithmetic rounds correctly, so the table is the same on every machine.
    """
    slope_scale = 1 << (SLOPE_SHIFT - ARGUMENT_FRACTION_BITS + RESULT_FRACTION_BITS)
    square_scale = slope_scale >> (ARGUMENT_FRACTION_BITS - OFFSET_BITS + SQUARE_OFFSET_BITS - SQUARE_SHIFT)
    rows = []
    with localcontext(prec=40):
        for segment in range(_SEGMENTS):
            offsets = [Decimal(node) / (1 << ARGUMENT_FRACTION_BITS) for node in (_NODES if segment else _FIRST_NODES)]
            powers = [(2 * (Decimal(segment) / 32 + offset)).exp() for offset in offsets]
            values = [(power - 1) / (power + 1) for power in powers]
            slopes = [(values[i + 1] - values[i]) / (offsets[i + 1] - offsets[i]) for i in (0, 1)]
            c2 = round((slopes[0] - slopes[1]) / (offsets[2] - offsets[0]) * square_scale)
            values = [value + offset * offset * c2 / square_scale for value, offset in zip(values, offsets, strict=True)]
            c1 = round((values[2] - values[0]) / (offsets[2] - offsets[0]) * slope_scale)
            values = [value - offset * c1 / slope_scale for value, offset in zip(values, offsets, strict=True)]
            # The added half makes up for the bits that the two shifts drop.
            c0 = round((values[0] + 2 * values[1] + values[2]) / 4 * _ONE + Decimal("0.5")) if segment else 0
            rows.append((c0, c1, c2))
    return np.array([*rows, (_ONE, 0, 0)], dtype=np.int64)


TANH_COEFFICIENTS = _tanh_coefficients()


class Ramp(NamedTuple):
    """What replaces the table for a hard sigmoid: c0 = `start` * segment >> RAMP_SHIFT, c1 = `slope` and c2 = 0.

    From segment `end` on the result is 1.
    """

    start: int
    slope: int
    end: int


RAMP_SHIFT = 4


def _ramp(divisor: int) -> Ramp:
    """Return the ramp from 0 to 1 at divisor / 2: with 23 fraction bits for the argument's 22 it rises by 4 / divisor.

    The slope is cut, not rounded, so that nothing before the end reaches 1.
    """
    return Ramp(
        start=round((4 << OFFSET_BITS + RAMP_SHIFT) / divisor),
        slope=(4 << SLOPE_SHIFT) // divisor,
        end=divisor * 32 // 2,
    )


RAMPS = {Activation.HARD_SIGMOID_FIFTH: _ramp(5), Activation.HARD_SIGMOID_SIXTH: _ramp(6)}


def odd_part(function: Activation, argument: np.ndarray) -> np.ndarray:
    """Return int64, the odd part of `function` times 2^23: of TANH itself, of a sigmoid 2 * sigmoid(x) - 1.

    argument : int64, the magnitude of x times 2^22, of x / 2 for SIGMOID; from 0 to 8 * 2^22, where all are saturated
    """
    segment, offset = argument >> OFFSET_BITS, argument & ((1 << OFFSET_BITS) - 1)
    if function in RAMPS:
        ramp = RAMPS[function]
        odd = (ramp.start * segment >> RAMP_SHIFT) + (ramp.slope * offset >> SLOPE_SHIFT)
        return np.where(segment < ramp.end, odd, _ONE)
    c0, c1, c2 = TANH_COEFFICIENTS.T[:, segment]
    slope = c1 - (c2 * (offset >> (OFFSET_BITS - SQUARE_OFFSET_BITS)) >> SQUARE_SHIFT)
    return c0 + (slope * offset >> SLOPE_SHIFT)


def _odd_part(function: Activation, x: np.ndarray) -> np.ndarray:
    scale = _ARGUMENT_SCALE / 2 if function is Activation.SIGMOID else _ARGUMENT_SCALE
    # fmin turns NaN into the saturated argument.
    return odd_part(function, (np.fmin(np.abs(x), 8 * _ARGUMENT_SCALE / scale) * scale).astype(np.int64))


def _limited(x: np.ndarray, limit: np.ndarray) -> np.ndarray:
    words = x.view(np.uint32)
    sign = np.uint32(1 << 31)
    return (np.minimum(words & ~sign, np.asarray(limit, dtype=np.float32).view(np.uint32)) | words & sign).view(np.float32)


def activate(function: Activation, x: np.ndarray, limit: np.ndarray | None = None) -> np.ndarray:
    """Return `function` of `x` : float32, with the magnitude of `x` limited to `limit` : float32, not below 0, if given.

    IDENTITY knows no limit. NaN is beyond every limit, and a saturated argument of the sign it has; only RELU without a
    limit gives NaN, where its sign is clear.

    TANH is within TANH_ERROR_BOUND, has 23 fraction bits and the sign of `x`, also where it is zero. The sigmoids are
    within SIGMOID_ERROR_BOUND and HARD_SIGMOID_ERROR_BOUND and have 24 fraction bits. RELU of a set sign is +0.
    """
    x = np.asarray(x, dtype=np.float32)
    if function is Activation.IDENTITY:
        return x
    if limit is not None:
        x = _limited(x, limit)
    match function:
        case Activation.RELU:
            return np.where(np.signbit(x), np.float32(0), x)
        case Activation.TANH:
            return np.copysign(_odd_part(function, x).astype(np.float32) * np.float32(1 / _ONE), x)
    odd = _odd_part(function, x)
    return np.where(np.signbit(x), _ONE - odd, _ONE + odd).astype(np.float32) * np.float32(0.5 / _ONE)
