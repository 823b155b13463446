"""A first-in first-out queue; an entry written in one cycle can be read in the next."""

from amaranth.hdl import Module, Mux, Shape, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from .memory import Memory


class Queue(wiring.Component):
    """A queue of `depth` entries.

    Ready depends on registers alone: an entry taken frees its place in the next cycle.

    Members
    -------
    i : In(stream of `shape`)
    o : Out(stream of `shape`)
    level : Out, entries held
    """

    def __init__(self, shape, *, depth: int):
        self.shape, self.depth = shape, depth
        super().__init__(
            {
                "i": In(stream.Signature(shape)),
                "o": Out(stream.Signature(shape)),
                "level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.entries = entries = Memory(depth=self.depth, lane_bits=Shape.cast(self.shape).width, transparent=True)
        head, tail = Signal(range(self.depth)), Signal(range(self.depth))
        put, get = self.i.valid & self.i.ready, self.o.valid & self.o.ready
        next_head = Signal.like(head)

        def after(pointer):
            return Mux(pointer == self.depth - 1, 0, pointer + 1)

        m.d.comb += [
            self.i.ready.eq(self.level != self.depth),
            self.o.valid.eq(self.level != 0),
            # The memory reads one cycle ahead and passes on what is being written.
            next_head.eq(Mux(get, after(head), head)),
            entries.read_address.eq(next_head),
            entries.write_enable.eq(put),
            entries.write_address.eq(tail),
            entries.write_data.eq(self.i.payload),
            self.o.payload.eq(entries.read_data),
        ]
        m.d.sync += [head.eq(next_head), self.level.eq(self.level + put - get)]
        with m.If(put):
            m.d.sync += tail.eq(after(tail))
        return m
