"""Activation functions of the lanes, bit for bit `sharp.model.arithmetic`.

sigmoid(x) = 1/2 + tanh(x/2)/2, so both read one table of tanh, whose coefficients and bit widths are the model's. The
function may change in every cycle: it travels with its argument.
"""

from amaranth.hdl import C, Cat, Module, Mux, unsigned
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from sharp.model.arithmetic import (
    ARGUMENT_FRACTION_BITS,
    COEFFICIENT_BITS,
    OFFSET_BITS,
    RESULT_FRACTION_BITS,
    SLOPE_SHIFT,
    SQUARE_OFFSET_BITS,
    SQUARE_SHIFT,
    TANH_COEFFICIENTS,
    Activation,
)

from .floating import Pipeline, Unit, leading_zeros, wire

FUNCTION_BITS = 4

_ARGUMENT_BITS = ARGUMENT_FRACTION_BITS + 3  # below 8
_SEGMENT_BITS = _ARGUMENT_BITS - OFFSET_BITS
_EXPONENT_OF_4 = 127 + 2


def _table_words() -> list[int]:
    """Return c2, c1, c0 of each segment in one word, c0 lowest."""
    words = []
    for row in TANH_COEFFICIENTS[: 1 << _SEGMENT_BITS]:
        word = offset = 0
        for coefficient, bits in zip(row, COEFFICIENT_BITS, strict=True):
            word |= int(coefficient) << offset
            offset += bits
        words.append(word)
    return words


class ActivationUnit(Unit):
    """o = function(x), binary32.

    Parameters
    ----------
    latency : int
        Cycles from argument to result, 1 to 8.

    Members
    -------
    x : In(32)
    function : In(4), an `Activation`; other values act as IDENTITY
    o : Out(32)
    """

    def __init__(self, *, latency: int):
        super().__init__({"x": In(32), "function": In(FUNCTION_BITS), "o": Out(32)}, latency=latency)

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m, latency=self.latency, steps=6)

        # The magnitude, of x or of x/2, in fixed point.
        x, function = pipeline.cut(self.x, self.function)
        halved = wire(m, "halved", function == Activation.SIGMOID)
        largest = wire(m, "largest", (C(_EXPONENT_OF_4, 8) + halved)[:8])
        beyond = wire(m, "beyond", x[23:31] > largest)
        argument = wire(m, "argument", Cat(C(0, _ARGUMENT_BITS - 24), x[:23], C(1, 1)) >> (largest - x[23:31])[:8])
        x, function, beyond, argument = pipeline.cut(x, function, beyond, argument)

        word = unsigned(sum(COEFFICIENT_BITS))
        m.submodules.coefficients = table = Memory(shape=word, depth=1 << _SEGMENT_BITS, init=_table_words())
        port = table.read_port(domain="comb")
        m.d.comb += port.addr.eq(argument[OFFSET_BITS:])
        c0_bits, c1_bits, c2_bits = COEFFICIENT_BITS
        c0 = wire(m, "c0", port.data[:c0_bits])
        c1 = wire(m, "c1", port.data[c0_bits : c0_bits + c1_bits])
        c2 = wire(m, "c2", port.data[-c2_bits:])
        offset = wire(m, "offset", argument[:OFFSET_BITS])
        x, function, beyond, offset, c0, c1, c2 = pipeline.cut(x, function, beyond, offset, c0, c1, c2)

        # No slope is below 0 and no result reaches 1: the tests of the model evaluate them all.
        slope = wire(m, "slope", (c1 - ((c2 * offset[-SQUARE_OFFSET_BITS:]) >> SQUARE_SHIFT))[:c1_bits])
        x, function, beyond, offset, c0, slope = pipeline.cut(x, function, beyond, offset, c0, slope)

        below_one = wire(m, "below_one", (c0 + ((slope * offset) >> SLOPE_SHIFT))[:RESULT_FRACTION_BITS])
        tanh = wire(m, "tanh", Mux(beyond, 1 << RESULT_FRACTION_BITS, below_one))
        x, function, tanh = pipeline.cut(x, function, tanh)

        # The result in units of 2^-24.
        one = C(1 << RESULT_FRACTION_BITS, RESULT_FRACTION_BITS + 1)
        is_tanh = wire(m, "is_tanh", function == Activation.TANH)
        sigmoid = wire(m, "sigmoid", Mux(x[31], (one - tanh)[: RESULT_FRACTION_BITS + 2], one + tanh))
        fixed = wire(m, "fixed", Mux(is_tanh, Cat(C(0, 1), tanh), sigmoid))
        zeros = leading_zeros(m, fixed)
        sign = wire(m, "sign", is_tanh & x[31])
        x, function, sign, fixed, zeros = pipeline.cut(x, function, sign, fixed, zeros)

        fraction = wire(m, "fraction", (fixed << zeros)[1 : RESULT_FRACTION_BITS + 1])
        exponent = wire(m, "exponent", Mux(fixed == 0, 0, (C(127, 8) - zeros)[:8]))
        result = wire(m, "result", x)
        with m.If((function == Activation.SIGMOID) | (function == Activation.TANH)):
            m.d.comb += result.eq(Cat(fraction, exponent, sign))
        m.d.comb += self.o.eq(result)
        return m
