"""The drain: brings a post group's sums from the accumulator rows to the lanes that activate them.

Slot s of lane l takes the row at s * stride + l mod stride of an interleaved group, and row l of a single gate's group. A
stride is that of a bundle of at most `lanes` neurons, or that of the largest, a quarter of the accumulator row.
"""

from amaranth.hdl import Cat, Module, Signal, unsigned
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from sharp.model.machine import Machine
from sharp.model.program import Source

from .lane import SLOTS
from .pipeline import delay


class Drain(wiring.Component):
    """Row alignment.

    Members
    -------
    offset : In, the group's first row in the accumulator row; source, stride : In, its layout; all with the group's issue
    rows : In(32 * tile_rows.max), the accumulator row, one cycle later
    gates : Out(lanes * 4 * 32), lane by lane, `drain` cycles after the issue
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        super().__init__(
            {
                "offset": In(range(machine.tile_rows.max)),
                "source": In(2),
                "stride": In(4),
                "rows": In(unsigned(32 * machine.tile_rows.max)),
                "gates": Out(unsigned(32 * SLOTS * machine.lanes)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        lanes = self.machine.lanes
        window = SLOTS * lanes
        window_bits, lane_bits = window.bit_length() - 1, lanes.bit_length() - 1
        r_offset, r_source, r_stride = Signal.like(self.offset), Signal.like(self.source), Signal.like(self.stride)
        m.d.sync += [r_offset.eq(self.offset), r_source.eq(self.source), r_stride.eq(self.stride)]

        rows = Signal(32 * window)
        # Constant slices instead of shifts: Amaranth checks every bit of a shift against every other for cycles.
        with m.Switch(r_offset[window_bits:]):
            for index in range(self.machine.tile_rows.max // window):
                with m.Case(index):
                    m.d.comb += rows.eq(self.rows[32 * window * index : 32 * window * (index + 1)])
        # No group starts at a finer step than four rows of stride 1, or one lane row of a single gate.
        for bit in range(min(2, lane_bits), window_bits):
            shifted = Signal.like(rows, name=f"rows_{bit}")
            with m.If(r_offset[bit]):
                m.d.comb += shifted.eq(rows[32 << bit :])
            with m.Else():
                m.d.comb += shifted.eq(rows)
            rows = shifted

        gates = Signal.like(self.gates)
        with m.If(r_source != Source.INTERLEAVED):
            m.d.comb += gates.eq(_pick(rows, [lane for lane in range(lanes) for _ in range(SLOTS)]))
        with m.Else():
            with m.Switch(r_stride):
                for bits in range(lane_bits + 1):
                    stride = 1 << bits
                    with m.Case(bits):
                        m.d.comb += gates.eq(_pick(rows, [slot * stride + lane % stride for lane in range(lanes) for slot in range(SLOTS)]))
                if self.machine.bundle > lanes:
                    with m.Default():
                        m.d.comb += gates.eq(self._bundled(m, r_offset))
        m.d.comb += self.gates.eq(delay(m, gates, self.machine.latencies.drain - 1, name="gates"))
        return m

    def _bundled(self, m: Module, offset: Signal) -> Signal:
        """Return the gates of a group of a bundle that fills the accumulator row."""
        lanes, bundle = self.machine.lanes, self.machine.bundle
        gates = Signal.like(self.gates, name="bundled_gates")
        with m.Switch(offset[lanes.bit_length() - 1 : bundle.bit_length() - 1]):
            for index in range(bundle // lanes):
                with m.Case(index):
                    places = [slot * bundle + index * lanes + lane for lane in range(lanes) for slot in range(SLOTS)]
                    m.d.comb += gates.eq(_pick(self.rows, places))
        return gates


def _pick(rows: Signal, places: list[int]) -> Cat:
    """Return the 32-bit rows at `places`, one after another."""
    return Cat(*(rows[32 * place : 32 * (place + 1)] for place in places))
