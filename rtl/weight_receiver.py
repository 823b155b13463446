"""The receiver of streamed weights: the memory's side of the weight buffer."""

from amaranth.hdl import Module, Mux, Signal, unsigned
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from sharp.model.machine import Machine
from sharp.model.program import Opcode

from .fetch import instruction_layout


class WeightReceiver(wiring.Component):
    """Writes weight words from memory into a ring of the weight buffer, and tells which one the next streamed tile takes.

    Members
    -------
    setup_valid, setup : In, a weights instruction
    taken : In, a streamed tile is issued
    i : In(stream of 8 * memory_bytes_per_cycle bits), `memory_beats` beats a word
    write : Out, the beat is written; write_beat, write_address : Out, which of the word's beats, and the word
    address : Out, the word of the next streamed tile; ready : Out, it has been received
    received : Out, the last beat of a word; busy : Out, words are still to come
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        address = unsigned(max(1, ceil_log2(machine.weight_words)))
        super().__init__(
            {
                "setup_valid": In(1),
                "setup": In(instruction_layout(Opcode.WEIGHTS)),
                "taken": In(1),
                "i": In(stream.Signature(unsigned(8 * machine.memory_bytes_per_cycle))),
                "write": Out(1),
                "write_beat": Out(range(max(2, machine.memory_beats))),
                "write_address": Out(address),
                "address": Out(address),
                "ready": Out(1),
                "received": Out(1),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        ring = Signal.like(self.setup)
        left, free, held = Signal.like(ring.words), Signal.like(ring.ring), Signal.like(ring.ring)
        last = Signal()

        def after(address):
            return Mux(address == ring.weight + ring.ring - 1, ring.weight, address + 1)

        m.d.comb += [
            last.eq(self.write_beat == self.machine.memory_beats - 1),
            self.i.ready.eq((left != 0) & (free != 0)),
            self.write.eq(self.i.valid & self.i.ready),
            self.received.eq(self.write & last),
            self.ready.eq(held != 0),
            self.busy.eq(left != 0),
        ]
        m.d.sync += [held.eq(held + self.received - self.taken), free.eq(free + self.taken - self.received)]
        with m.If(self.write):
            m.d.sync += self.write_beat.eq(Mux(last, 0, self.write_beat + 1))
        with m.If(self.received):
            m.d.sync += [self.write_address.eq(after(self.write_address)), left.eq(left - 1)]
        with m.If(self.taken):
            m.d.sync += self.address.eq(after(self.address))
        with m.If(self.setup_valid):
            m.d.sync += [
                ring.eq(self.setup),
                left.eq(self.setup.words),
                free.eq(self.setup.ring),
                held.eq(0),
                self.write_address.eq(self.setup.weight),
                self.address.eq(self.setup.weight),
            ]
        return m
