"""The input receiver: writes vectors from the input stream into a ring of slots as they become free."""

from amaranth.hdl import Module, Mux, Signal, unsigned
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from sharp.model.machine import Machine
from sharp.model.program import Opcode

from .fetch import instruction_layout


class Receiver(wiring.Component):
    """The input side of the x buffer.

    Members
    -------
    setup_valid, setup : In, an input instruction
    freed : In, a slot may be written again
    i : In(stream of 16 * lanes bits), `lanes` elements a beat, the last beat of a vector partly used
    write_lanes, write_row, write_chunk : Out, to the x buffer; written : Out, elements written in this cycle
    busy : Out, vectors are still to come
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        depth = machine.buffers.input_elements // machine.vector_row_elements
        chunks = machine.vector_row_elements // machine.lanes
        super().__init__(
            {
                "setup_valid": In(1),
                "setup": In(instruction_layout(Opcode.INPUT)),
                "freed": In(1),
                "i": In(stream.Signature(unsigned(16 * machine.lanes))),
                "write_lanes": Out(unsigned(machine.lanes)),
                "write_row": Out(range(max(2, depth))),
                "write_chunk": Out(range(max(2, chunks))),
                "written": Out(range(machine.lanes + 1)),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        lanes = self.machine.lanes
        lane_bits = lanes.bit_length() - 1
        row_bits = self.machine.vector_row_elements.bit_length() - 1
        ring = Signal.like(self.setup)
        vectors_left = Signal.like(ring.count)
        free, slot = Signal.like(ring.slots), Signal.like(ring.slots)
        slot_row = Signal.like(ring.vector)
        elements_left, place = Signal.like(ring.elements), Signal.like(ring.elements)
        remaining, starts, take, ends = Signal.like(ring.elements), Signal(), Signal(), Signal()
        m.d.comb += [
            starts.eq(elements_left == 0),
            remaining.eq(Mux(starts, ring.elements, elements_left)),
            ends.eq(remaining <= lanes),
            self.i.ready.eq(~starts | ((vectors_left != 0) & (free != 0))),
            take.eq(self.i.valid & self.i.ready),
            self.written.eq(Mux(take, Mux(ends, remaining, lanes), 0)),
            self.write_row.eq(slot_row + (place >> row_bits)),
            self.write_chunk.eq(place[:row_bits] >> lane_bits),
            self.busy.eq(~starts | (vectors_left != 0)),
        ]
        m.d.comb += [self.write_lanes[lane].eq(lane < self.written) for lane in range(lanes)]
        with m.If(take):
            m.d.sync += [elements_left.eq(Mux(ends, 0, remaining - lanes)), place.eq(Mux(ends, 0, place + lanes))]
            with m.If(starts):
                m.d.sync += vectors_left.eq(vectors_left - 1)
            with m.If(ends):
                wraps = slot == ring.slots - 1
                m.d.sync += [slot.eq(Mux(wraps, 0, slot + 1)), slot_row.eq(Mux(wraps, ring.vector, slot_row + ring.stride))]
        m.d.sync += free.eq(free + self.freed - (take & starts))
        with m.If(self.setup_valid):
            m.d.sync += [
                ring.eq(self.setup),
                vectors_left.eq(self.setup.count),
                free.eq(self.setup.slots),
                slot.eq(0),
                slot_row.eq(self.setup.vector),
            ]
        return m
