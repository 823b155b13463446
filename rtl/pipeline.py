"""Delays: the registers that keep a signal beside a pipeline of known length."""

from amaranth.hdl import Module, Signal, Value


def delay(m: Module, value, cycles: int, *, name: str, reset: bool = False):
    """Return `value` as it was `cycles` cycles ago. With `reset` the stages start from zero: for valid bits and the like."""
    for stage in range(cycles):
        register = Signal(Value.cast(value).shape(), name=f"{name}_{stage + 1}", reset_less=not reset)
        m.d.sync += register.eq(value)
        value = register
    return value
