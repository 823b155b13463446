"""The event counters: one for every number that the timing model predicts."""

from amaranth.hdl import Array, Module, Signal, unsigned
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from sharp.model.timing import Count

COUNTER_BITS = 48
STEP_BITS = 24


class Counters(wiring.Component):
    """All counters of `Count`, cleared by `clear`, each advanced by its own step in every cycle.

    Members
    -------
    clear : In
    steps : In(STEP_BITS a counter)
    address : In, a counter's number; value : Out, its value
    """

    def __init__(self):
        super().__init__(
            {
                "clear": In(1),
                "steps": In(unsigned(STEP_BITS * len(Count))),
                "address": In(range(len(Count))),
                "value": Out(COUNTER_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        counters = Array(Signal(COUNTER_BITS, name=count.name) for count in Count)
        for count in Count:
            m.d.sync += counters[count].eq(counters[count] + self.steps.word_select(count, STEP_BITS))
        with m.If(self.clear):
            m.d.sync += [counter.eq(0) for counter in counters]
        m.d.comb += self.value.eq(counters[self.address])
        return m
