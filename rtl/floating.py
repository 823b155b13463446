"""Floating point units of the data path, bit for bit `sharp.model.arithmetic`.

Three rules. A unit takes operands in every cycle and gives each result `latency` cycles later; it cannot be stalled. Its
registers are spread over its steps from the operands on; those beyond the number of steps precede the first one. NaN
results are 0x7fc00000.

Thousands of these are simulated in each cycle. So every expression fits 64 bits, and a choice that is random in practice
(operand order, leading zeros) is no conditional that a compiler would turn into a mispredicted jump.
"""

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from sharp.model.arithmetic import CELL_LIMIT
from sharp.model.machine import MAX_STAGES

from .pipeline import delay

_NAN = 0x7FC00000
_INFINITE_EXPONENT = C(255, 8)
_CELL_LIMIT_BITS = int(CELL_LIMIT.view("uint32"))


class Unit(wiring.Component):
    """Base of units: a component with a latency."""

    def __init__(self, members: dict, *, latency: int):
        if latency not in range(1, MAX_STAGES + 1):
            raise ValueError(f"latency must be 1 to {MAX_STAGES} cycles, not {latency!r}")
        self.latency = latency
        super().__init__(members)


class Pipeline:
    """Places the registers of a unit whose logic falls into `steps` steps, from the operands on.

    Call `cut` before every step with the signals that enter it. Results are not registered: what takes them does that, and
    no logic stands before a unit's first register, so that a simulator evaluates each unit once a cycle.
    """

    def __init__(self, m: Module, *, latency: int, steps: int):
        self._m = m
        self._step = 0
        inner = min(latency, steps)
        self._registers = {0: 1 + latency - inner} | dict.fromkeys((round(i * steps / inner) for i in range(1, inner)), 1)

    def cut(self, *signals: Signal) -> tuple[Signal, ...]:
        """Return `signals` as the next step sees them."""
        cycles = self._registers.get(self._step, 0)
        self._step += 1
        return tuple(delay(self._m, signal, cycles, name=signal.name) for signal in signals)


def wire(m: Module, name: str, value: Value) -> Signal:
    """Give an unsigned expression a name: it is computed once and used often."""
    signal = Signal(len(value), name=name)
    m.d.comb += signal.eq(value)
    return signal


def leading_zeros(m: Module, value: Signal) -> Signal:
    """Return the number of zeros above the highest one of a `value` of 17 to 32 bits, or 31 if it is zero."""
    upper_empty = []
    rest = Cat(C(0, 32 - len(value)), value)
    for half in (16, 8, 4):
        empty = wire(m, f"upper_{half}_empty", rest[half:] == 0)
        rest = wire(m, f"upper_{half}", Mux(empty, rest[:half], rest[half:]))
        upper_empty.insert(0, empty)
    return wire(m, "zeros", Cat(~rest[3] & (rest[2] | ~rest[1]), ~(rest[3] | rest[2]), *upper_empty))


def fp32_to_fp16(m: Module, value: Signal) -> Signal:
    """Return binary16 of the binary32 `value`, rounded to nearest even, with subnormals; beyond the range it is the largest."""
    exponent = value[23:31]
    subnormal = wire(m, "half_subnormal", exponent < 113)
    # From a shift by 12 on the value is below half of the smallest subnormal; 36 bits lose nothing before.
    distance = wire(m, "half_distance", (C(113, 8) - exponent)[:8])
    fraction = Cat(C(0, 12), value[:23], C(1, 1))
    aligned = wire(m, "half_aligned", fraction >> Mux(subnormal, distance, 0))
    base = Mux(subnormal, 0, (exponent - 113)[:5])
    odd_or_sticky = (aligned[:24] != 0) | aligned[25]
    magnitude = wire(m, "half_magnitude", (Cat(C(0, 10), base) + aligned[25:] + (aligned[24] & odd_or_sticky))[:15])
    result = Signal(16, name="half")
    m.d.comb += result.eq(Cat(magnitude, value[31]))
    with m.If(value[:31] > _CELL_LIMIT_BITS):
        m.d.comb += result.eq(Cat(C(0x7BFF, 15), value[31]))
    return result


def saturate_cell(m: Module, value: Signal) -> tuple[Signal, Signal]:
    """Return the binary32 `value` limited to +-CELL_LIMIT, and whether it was beyond."""
    beyond = wire(m, f"{value.name}_beyond", value[:31] > _CELL_LIMIT_BITS)
    return wire(m, f"{value.name}_limited", Cat(Mux(beyond, C(_CELL_LIMIT_BITS, 31), value[:31]), value[31])), beyond


class Fp16Multiplier(Unit):
    """o = a * b, exact: binary16 operands, binary32 product.

    Parameters
    ----------
    latency : int
        Cycles from operands to product, 1 to 8.

    Members
    -------
    a, b : In(16)
    o : Out(32)
    """

    def __init__(self, *, latency: int):
        super().__init__({"a": In(16), "b": In(16), "o": Out(32)}, latency=latency)

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m, latency=self.latency, steps=5)
        a, b = pipeline.cut(self.a, self.b)

        normal_a = wire(m, "normal_a", a[10:15] != 0)
        normal_b = wire(m, "normal_b", b[10:15] != 0)
        product = wire(m, "product", Cat(a[:10], normal_a) * Cat(b[:10], normal_b))
        exponent = wire(m, "exponent", (a[10:15] + b[10:15] + ~normal_a + ~normal_b)[:6])
        sign = wire(m, "sign", a[15] ^ b[15])
        special = wire(m, "special", (a[10:15] == 31) | (b[10:15] == 31))
        nan = wire(m, "nan", (a[:15] > 0x7C00) | (b[:15] > 0x7C00))
        for _ in range(2):  # the second register is for a multiplier that is pipelined itself
            product, exponent, sign, special, nan = pipeline.cut(product, exponent, sign, special, nan)

        # Normal operands leave one zero at most. Only subnormal ones need the search, which a simulation then skips.
        zeros = wire(m, "product_zeros", Mux(product[20:] != 0, ~product[21], leading_zeros(m, product)))
        zero = wire(m, "zero", product == 0)
        product, zeros, exponent, sign, special, nan, zero = pipeline.cut(product, zeros, exponent, sign, special, nan, zero)

        # The product of two ones, 2^20 with exponents 15 + 15 and one leading zero, is binary32 with exponent 127.
        fraction = wire(m, "fraction", (product << zeros)[:21])
        exponent = wire(m, "exponent32", (exponent + 98 - zeros)[:8])
        fraction, exponent, sign, special, nan, zero = pipeline.cut(fraction, exponent, sign, special, nan, zero)

        result = Signal(32)
        with m.If(special):
            m.d.comb += result.eq(Mux(nan | zero, _NAN, Cat(C(0, 23), _INFINITE_EXPONENT, sign)))
        with m.Elif(zero):
            m.d.comb += result.eq(Cat(C(0, 31), sign))
        with m.Else():
            m.d.comb += result.eq(Cat(C(0, 2), fraction, exponent, sign))
        m.d.comb += self.o.eq(result)
        return m


class Fp32Adder(Unit):
    """o = a + b in binary32, rounded to nearest even, with subnormals; x + -x is +0.

    Parameters
    ----------
    latency : int
        Cycles from operands to sum, 1 to 8.

    Members
    -------
    a, b : In(32)
    o : Out(32)
    """

    def __init__(self, *, latency: int):
        super().__init__({"a": In(32), "b": In(32), "o": Out(32)}, latency=latency)

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m, latency=self.latency, steps=6)
        a, b = pipeline.cut(self.a, self.b)

        # x is the operand of larger magnitude, y the other's magnitude; exclusive or swaps without a jump.
        difference = wire(m, "difference", a ^ b)
        swap = wire(m, "swap", b[:31] > a[:31])
        exchanged = wire(m, "exchanged", difference & swap.replicate(32))
        x = wire(m, "x", a ^ exchanged)
        y = wire(m, "y", (b ^ exchanged)[:31])
        subtract = wire(m, "subtract", difference[31])
        x, y, subtract = pipeline.cut(x, y, subtract)

        # y is shifted to x's exponent. Three bits below the fraction are kept and the lowest of them stands for all lower ones.
        normal_x = wire(m, "normal_x", x[23:31] != 0)
        normal_y = wire(m, "normal_y", y[23:31] != 0)
        exponent_difference = wire(m, "exponent_difference", (x[23:31] - y[23:31])[:8])
        distance = wire(m, "distance", (exponent_difference - (normal_x ^ normal_y))[:8])
        shifted = wire(m, "shifted", Cat(C(0, 30), y[:23], normal_y) >> distance)
        aligned = wire(m, "aligned", Cat(shifted[:28] != 0, shifted[28:]))
        fraction = wire(m, "fraction", Cat(C(0, 3), x[:23], normal_x))
        exponent = wire(m, "exponent", x[23:31] | ~normal_x)
        nan = wire(m, "nan", x[:31] > 0x7F800000)
        sign = wire(m, "sign", x[31])
        fraction, aligned, exponent, sign, subtract, nan = pipeline.cut(fraction, aligned, exponent, sign, subtract, nan)

        total = wire(m, "total", Mux(subtract, (fraction - aligned)[:28], (fraction + aligned)[:28]))
        total, exponent, sign, subtract, nan = pipeline.cut(total, exponent, sign, subtract, nan)

        # A subnormal sum is shifted no further than its exponent allows.
        zeros = leading_zeros(m, total)
        distance = wire(m, "normalise", Mux(zeros > exponent, exponent[:5], zeros))
        cancelled = wire(m, "cancelled", (total == 0) & subtract)
        total, distance, exponent, sign, nan, cancelled = pipeline.cut(total, distance, exponent, sign, nan, cancelled)

        normal = wire(m, "normal", (total << distance)[:28])
        exponent_below = wire(m, "exponent_below", (exponent - distance)[:8])
        special = wire(m, "special", exponent == 255)
        normal, exponent_below, sign, special, nan, cancelled = pipeline.cut(normal, exponent_below, sign, special, nan, cancelled)

        # The fraction's highest bit is added to the exponent, and so is a carry of the rounding.
        rounded = wire(m, "rounded", (Cat(C(0, 27), exponent_below) + normal + C(7, 3) + normal[4])[4:35])
        result = Signal(32)
        with m.If(special | (rounded[23:] == 255)):
            m.d.comb += result.eq(Mux(special & (nan | cancelled), _NAN, Cat(C(0, 23), _INFINITE_EXPONENT, sign)))
        with m.Elif(cancelled):
            m.d.comb += result.eq(0)
        with m.Else():
            m.d.comb += result.eq(Cat(rounded, sign))
        m.d.comb += self.o.eq(result)
        return m


class Fp32Multiplier(Unit):
    """o = a * b in binary32 without subnormals: operands count as zero, results below 2^-126 after rounding become zero.

    Parameters
    ----------
    latency : int
        Cycles from operands to product, 1 to 8.

    Members
    -------
    a, b : In(32)
    o : Out(32)
    """

    def __init__(self, *, latency: int):
        super().__init__({"a": In(32), "b": In(32), "o": Out(32)}, latency=latency)

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m, latency=self.latency, steps=5)
        a, b = pipeline.cut(self.a, self.b)

        zero = wire(m, "zero", (a[23:31] == 0) | (b[23:31] == 0))
        special = wire(m, "special", (a[23:31] == 255) | (b[23:31] == 255))
        nan = wire(m, "nan", (a[:31] > 0x7F800000) | (b[:31] > 0x7F800000))
        sign = wire(m, "sign", a[31] ^ b[31])
        exponent = wire(m, "exponent", a[23:31] + b[23:31])
        product = wire(m, "product", Cat(a[:23], C(1, 1)) * Cat(b[:23], C(1, 1)))
        for _ in range(2):  # as above
            product, exponent, sign, zero, special, nan = pipeline.cut(product, exponent, sign, zero, special, nan)

        # 24 bits, the one below them, and one that stands for all lower ones.
        above = wire(m, "above", product[47])
        normal = wire(m, "normal", Mux(above, Cat(product[:23] != 0, product[23:]), Cat(product[:22] != 0, product[22:47])))
        exponent = wire(m, "exponent_above", (exponent + above)[:9])
        normal, exponent, sign, zero, special, nan = pipeline.cut(normal, exponent, sign, zero, special, nan)

        # As in the adder; the exponent is still 128 too high.
        rounded = wire(m, "rounded", (Cat(C(0, 25), exponent) + normal + C(1, 1) + normal[2])[2:35])
        rounded, sign, zero, special, nan = pipeline.cut(rounded, sign, zero, special, nan)

        result = Signal(32)
        with m.If(special):
            m.d.comb += result.eq(Mux(nan | zero, _NAN, Cat(C(0, 23), _INFINITE_EXPONENT, sign)))
        with m.Elif(zero | (rounded[23:] < 128 + 1)):
            m.d.comb += result.eq(Cat(C(0, 31), sign))
        with m.Elif(rounded[23:] >= 128 + 255):
            m.d.comb += result.eq(Cat(C(0, 23), _INFINITE_EXPONENT, sign))
        with m.Else():
            m.d.comb += result.eq(Cat(rounded[:30], ~rounded[30], sign))
        m.d.comb += self.o.eq(result)
        return m
