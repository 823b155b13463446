"""A vector buffer: holds x or h vectors, written by lanes and read as the scalars of a tile.

A tile of N columns reads N neighbouring elements; slice s multiplies column s mod N, so each element is broadcast to as
many slices as the tile has groups of rows. Slices beyond the last valid column get zero.
"""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, unsigned
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from sharp.model.machine import Machine

from .memory import Memory
from .pipeline import delay


class VectorBuffer(wiring.Component):
    """A buffer of `elements` float16 values.

    Members
    -------
    write_lanes : In(lanes), a bit an element; write_row, write_chunk : In; write_data : In(16 * lanes)
    read_row, read_offset, tap, columns : In, row, first element in the row, tile shape and number of valid columns
    scalars : Out(16 * slices), `operand` cycles later
    """

    def __init__(self, machine: Machine, elements: int):
        self.machine = machine
        self.depth = elements // machine.vector_row_elements
        self.chunks = machine.vector_row_elements // machine.lanes
        super().__init__(
            {
                "write_lanes": In(unsigned(machine.lanes)),
                "write_row": In(range(max(2, self.depth))),
                "write_chunk": In(range(max(2, self.chunks))),
                "write_data": In(unsigned(16 * machine.lanes)),
                "read_row": In(range(max(2, self.depth))),
                "read_offset": In(range(machine.vector_row_elements)),
                "tap": In(range(max(2, len(machine.tile_heights)))),
                "columns": In(range(machine.slices + 1)),
                "scalars": Out(unsigned(16 * machine.slices)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        machine = self.machine
        slices, bits = machine.slices, ceil_log2(machine.slices)
        m.submodules.rows = rows = Memory(depth=self.depth, lane_bits=16, lanes=machine.vector_row_elements)
        m.d.comb += [
            rows.write_enable.eq(self.write_lanes << (self.write_chunk * machine.lanes)),
            rows.write_address.eq(self.write_row),
            rows.write_data.eq(self.write_data.replicate(self.chunks)),
            rows.read_address.eq(self.read_row),
        ]

        # r_ : the row has been read.
        r_offset, r_tap, r_columns = Signal.like(self.read_offset), Signal.like(self.tap), Signal.like(self.columns)
        m.d.sync += [r_offset.eq(self.read_offset), r_tap.eq(self.tap), r_columns.eq(self.columns)]
        chosen = Signal(16 * slices)
        with m.Switch(r_offset[bits:]):
            for index in range(machine.vector_row_elements // slices):
                with m.Case(index):
                    m.d.comb += chosen.eq(rows.read_data[16 * slices * index : 16 * slices * (index + 1)])
        # Bit b of the element's place is the slice's own for narrow enough tiles, else the offset's.
        for bit in range(bits - len(machine.tile_heights) + 1, bits):
            elements = [chosen[16 * index : 16 * (index + 1)] for index in range(slices)]
            alike = [Mux(r_offset[bit], elements[index | 1 << bit], elements[index & ~(1 << bit)]) for index in range(slices)]
            shared = Signal(16 * slices, name=f"shared_{bit}")
            m.d.comb += shared.eq(Mux(r_tap >= bits - bit, Cat(*alike), chosen))
            chosen = shared
        width_mask = Signal(bits)
        m.d.comb += width_mask.eq(Const(slices - 1, bits) >> r_tap)
        masked = Signal(16 * slices)
        valid = [((width_mask & index) < r_columns).replicate(16) for index in range(slices)]
        m.d.comb += masked.eq(chosen & Cat(*valid))
        m.d.comb += self.scalars.eq(delay(m, masked, machine.latencies.operand - 1, name="scalars"))
        return m
