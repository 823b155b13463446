"""Fetch: reads one instruction a cycle, runs loops without a bubble and hands tiles and post work to their queues."""

from amaranth.hdl import Module, Mux, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from sharp.model.machine import Machine
from sharp.model.program import FIELDS, WORD_BITS, Opcode

from .memory import Memory


def instruction_layout(opcode: Opcode) -> data.StructLayout:
    """Return the layout of an opcode's fields, as `Instruction.encode` packs them."""
    return data.StructLayout({name: unsigned(bits) for name, bits in FIELDS[opcode]})


class Fetch(wiring.Component):
    """The program memory and its sequencer.

    Members
    -------
    running : In, fetching goes on while high; while low the next instruction is the first
    tiles, posts : Out(streams), instructions for the two sequencers
    input, input_valid, weights, weights_valid : Out, an instruction for a receiver, for one cycle
    fetched : Out, an instruction leaves; halted : Out, a halt has left
    load_enable, load_address, load_data : In, write a program word
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self.address = unsigned(ceil_log2(machine.buffers.program_words))
        super().__init__(
            {
                "running": In(1),
                "tiles": Out(stream.Signature(instruction_layout(Opcode.TILE))),
                "posts": Out(stream.Signature(instruction_layout(Opcode.POST))),
                "input": Out(instruction_layout(Opcode.INPUT)),
                "input_valid": Out(1),
                "weights": Out(instruction_layout(Opcode.WEIGHTS)),
                "weights_valid": Out(1),
                "fetched": Out(1),
                "halted": Out(1),
                "load_enable": In(1),
                "load_address": In(self.address),
                "load_data": In(unsigned(WORD_BITS)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.words = words = Memory(depth=self.machine.buffers.program_words, lane_bits=WORD_BITS)
        word = words.read_data
        opcode = word[:4]
        position, target = Signal(self.address), Signal(self.address)
        loop_start = Signal(self.address)
        loop_layout = instruction_layout(Opcode.LOOP)
        loop_left = Signal(loop_layout["count"].shape)

        def fields(opcode):
            layout = instruction_layout(opcode)
            return data.View(layout, word[: layout.size])

        m.d.comb += [
            words.write_enable.eq(self.load_enable),
            words.write_address.eq(self.load_address),
            words.write_data.eq(self.load_data),
            self.tiles.payload.eq(fields(Opcode.TILE)),
            self.posts.payload.eq(fields(Opcode.POST)),
            self.input.eq(fields(Opcode.INPUT)),
            self.weights.eq(fields(Opcode.WEIGHTS)),
        ]
        active = Signal()
        m.d.comb += active.eq(self.running & ~self.halted)
        with m.Switch(opcode):
            with m.Case(Opcode.TILE):
                m.d.comb += [self.tiles.valid.eq(active), self.fetched.eq(active & self.tiles.ready)]
            with m.Case(Opcode.POST):
                m.d.comb += [self.posts.valid.eq(active), self.fetched.eq(active & self.posts.ready)]
            with m.Default():
                m.d.comb += self.fetched.eq(active)

        m.d.comb += target.eq(position + 1)
        with m.If(self.fetched):
            with m.Switch(opcode):
                with m.Case(Opcode.HALT):
                    m.d.sync += self.halted.eq(1)
                with m.Case(Opcode.LOOP):
                    m.d.sync += [loop_start.eq(position + 1), loop_left.eq(fields(Opcode.LOOP).count)]
                with m.Case(Opcode.END):
                    m.d.sync += loop_left.eq(loop_left - 1)
                    with m.If(loop_left > 1):
                        m.d.comb += target.eq(loop_start)
                with m.Case(Opcode.INPUT):
                    m.d.comb += self.input_valid.eq(1)
                with m.Case(Opcode.WEIGHTS):
                    m.d.comb += self.weights_valid.eq(1)
        following = Signal(self.address)
        m.d.comb += following.eq(Mux(self.running, Mux(self.fetched, target, position), 0))
        m.d.comb += words.read_address.eq(following)
        m.d.sync += position.eq(following)
        with m.If(~self.running):
            m.d.sync += self.halted.eq(0)
        return m
