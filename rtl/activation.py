"""Activation functions of the lanes, bit for bit `sharp.model.arithmetic`.

sigmoid(x) = 1/2 + tanh(x/2)/2, so both read one table of tanh, whose coefficients and bit widths are the model's; a hard
sigmoid puts a constant slope in its place. Function and limit may change in every cycle: they travel with their argument.
"""

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, unsigned
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from sharp.model.arithmetic import (
    ARGUMENT_FRACTION_BITS,
    COEFFICIENT_BITS,
    OFFSET_BITS,
    RAMP_SHIFT,
    RAMPS,
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


def _is_any(function: Value, *activations: Activation) -> Value:
    return Cat(function == each for each in activations).any()


def _fixed_point(m: Module, pipeline: Pipeline, x: Signal, function: Signal, argument: Signal, beyond: Signal) -> tuple[Signal, ...]:
    """Place the four steps from argument to result and return, in the last of them, x, function, magnitude and sign.

    x : its bit 31 is the sign; argument : as of `odd_part`, saturated if `beyond`; magnitude : in units of 2^-24
    """
    x, function, argument, beyond = pipeline.cut(x, function, argument, beyond)

    word = unsigned(sum(COEFFICIENT_BITS))
    m.submodules.coefficients = table = Memory(shape=word, depth=1 << _SEGMENT_BITS, init=_table_words())
    port = table.read_port(domain="comb")
    segment = wire(m, "segment", argument[OFFSET_BITS:])
    m.d.comb += port.addr.eq(segment)
    c0_bits, c1_bits, c2_bits = COEFFICIENT_BITS
    c0, c1, c2, end = Signal(c0_bits), Signal(c1_bits), Signal(c2_bits), Signal()
    with m.Switch(function):
        for activation, ramp in RAMPS.items():
            with m.Case(activation):
                m.d.comb += [c0.eq((segment * ramp.start) >> RAMP_SHIFT), c1.eq(ramp.slope), end.eq(segment >= ramp.end)]
        with m.Default():
            m.d.comb += Cat(c0, c1, c2).eq(port.data)
    beyond = wire(m, "beyond_end", beyond | end)
    offset = wire(m, "offset", argument[:OFFSET_BITS])
    x, function, beyond, offset, c0, c1, c2 = pipeline.cut(x, function, beyond, offset, c0, c1, c2)

    # No slope is below 0 and no result reaches 1: the tests of the model evaluate them all.
    slope = wire(m, "slope", (c1 - ((c2 * offset[-SQUARE_OFFSET_BITS:]) >> SQUARE_SHIFT))[:c1_bits])
    x, function, beyond, offset, c0, slope = pipeline.cut(x, function, beyond, offset, c0, slope)

    below_one = wire(m, "below_one", (c0 + ((slope * offset) >> SLOPE_SHIFT))[:RESULT_FRACTION_BITS])
    odd = wire(m, "odd", Mux(beyond, 1 << RESULT_FRACTION_BITS, below_one))
    x, function, odd = pipeline.cut(x, function, odd)

    one = C(1 << RESULT_FRACTION_BITS, RESULT_FRACTION_BITS + 1)
    is_tanh = wire(m, "is_tanh", function == Activation.TANH)
    sigmoid = wire(m, "sigmoid", Mux(x[31], (one - odd)[: RESULT_FRACTION_BITS + 2], one + odd))
    magnitude = wire(m, "magnitude", Mux(is_tanh, Cat(C(0, 1), odd), sigmoid))
    return x, function, magnitude, wire(m, "sign", is_tanh & x[31])


class ActivationUnit(Unit):
    """o = function(x with its magnitude limited), binary32.

    Parameters
    ----------
    latency : int
        Cycles from argument to result, 1 to 8.

    Members
    -------
    x : In(32)
    function : In(4), an `Activation`; other values act as IDENTITY
    limit : In(31), the largest magnitude of x, binary32 without its sign; NaN is above all others; IDENTITY ignores it
    o : Out(32)
    """

    def __init__(self, *, latency: int):
        super().__init__({"x": In(32), "function": In(FUNCTION_BITS), "limit": In(31), "o": Out(32)}, latency=latency)

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m, latency=self.latency, steps=6)

        # The magnitude, of x or of x/2, in fixed point.
        x, function, limit = pipeline.cut(self.x, self.function, self.limit)
        unlimited = (function == Activation.IDENTITY) | (function >= len(Activation))
        x = wire(m, "limited", Cat(Mux((x[:31] > limit) & ~unlimited, limit, x[:31]), x[31]))
        halved = wire(m, "halved", function == Activation.SIGMOID)
        largest = wire(m, "largest", (C(_EXPONENT_OF_4, 8) + halved)[:8])
        beyond = wire(m, "beyond", x[23:31] > largest)
        argument = wire(m, "argument", Cat(C(0, _ARGUMENT_BITS - 24), x[:23], C(1, 1)) >> (largest - x[23:31])[:8])

        x, function, magnitude, sign = _fixed_point(m, pipeline, x, function, argument, beyond)
        zeros = leading_zeros(m, magnitude)
        x, function, sign, magnitude, zeros = pipeline.cut(x, function, sign, magnitude, zeros)

        fraction = wire(m, "fraction", (magnitude << zeros)[1 : RESULT_FRACTION_BITS + 1])
        exponent = wire(m, "exponent", Mux(magnitude == 0, 0, (C(127, 8) - zeros)[:8]))
        result = wire(m, "result", x)
        with m.If(_is_any(function, Activation.SIGMOID, Activation.TANH, *RAMPS)):
            m.d.comb += result.eq(Cat(fraction, exponent, sign))
        with m.Elif((function == Activation.RELU) & x[31]):
            m.d.comb += result.eq(0)
        m.d.comb += self.o.eq(result)
        return m
