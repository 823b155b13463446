"""The identical slices that a machine is made of, and how they are placed.

A slice is converted to Verilog once and placed many times by name, which is how silicon is laid out and keeps conversion
and simulation builds short. Rows of a slice are packed, row 0 in the lowest bits.
"""

from types import SimpleNamespace

from amaranth.hdl import ClockSignal, Instance, Module, Mux, ResetSignal, Signal, unsigned
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from sharp.model.machine import Machine

from .floating import Fp16Multiplier, Fp32Adder
from .memory import Memory
from .pipeline import delay


class Slice(wiring.Component):
    """Base of slices: `MODULE` is the Verilog name, `members` the interface on a machine."""

    MODULE: str

    def __init__(self, machine: Machine):
        self.machine = machine
        super().__init__(self.members(machine))


def place(m: Module, name: str, kind: type[Slice], machine: Machine) -> SimpleNamespace:
    """Place a slice in `m` as submodule `name`; return its members as signals."""
    signals, ports = {}, {}
    for member, port in kind.members(machine).items():
        signals[member] = Signal(port.shape, name=f"{name}_{member}")
        ports[f"{'i' if port.flow is In else 'o'}_{member}"] = signals[member]
    m.submodules[name] = Instance(kind.MODULE, i_clk=ClockSignal(), i_rst=ResetSignal(), **ports)
    return SimpleNamespace(**signals)


class VectorScalarSlice(Slice):
    """`tile_rows.min` rows times one column: multipliers that share a scalar, and their weight bank.

    product[r] = weight[weight_address][r] * scalar

    Members
    -------
    load_enable, load_address, load_data : In, write a weight word
    weight_address : In(bits of weight_words)
    scalar : In(16)
    product : Out(32 * rows)

    Timing
    ------
    The weight of an address meets the scalar given `operand` cycles later; the product follows `multiply` cycles after.
    """

    MODULE = "sharp_vector_scalar_slice"

    @staticmethod
    def members(machine: Machine) -> dict:
        address = unsigned(max(1, ceil_log2(machine.weight_words)))
        rows = machine.tile_rows.min
        return {
            "load_enable": In(1),
            "load_address": In(address),
            "load_data": In(unsigned(16 * rows)),
            "weight_address": In(address),
            "scalar": In(16),
            "product": Out(unsigned(32 * rows)),
        }

    def elaborate(self, platform):
        m = Module()
        latencies = self.machine.latencies
        rows = self.machine.tile_rows.min
        m.submodules.bank = bank = Memory(depth=self.machine.weight_words, lane_bits=16 * rows)
        m.d.comb += [
            bank.write_enable.eq(self.load_enable),
            bank.write_address.eq(self.load_address),
            bank.write_data.eq(self.load_data),
            bank.read_address.eq(self.weight_address),
        ]
        weight = delay(m, bank.read_data, latencies.operand - 1, name="weight")
        for row in range(rows):
            m.submodules[f"multiplier_{row}"] = multiplier = Fp16Multiplier(latency=latencies.multiply)
            m.d.comb += [
                multiplier.a.eq(weight[16 * row : 16 * (row + 1)]),
                multiplier.b.eq(self.scalar),
                self.product[32 * row : 32 * (row + 1)].eq(multiplier.o),
            ]
        return m


class AddSlice(Slice):
    """One node of the add-reduce tree: o[r] = a[r] + b[r], `tile_rows.min` adders wide, after `add` cycles.

    Members
    -------
    a, b : In(32 * rows)
    o : Out(32 * rows)
    """

    MODULE = "sharp_add_slice"

    @staticmethod
    def members(machine: Machine) -> dict:
        bits = unsigned(32 * machine.tile_rows.min)
        return {"a": In(bits), "b": In(bits), "o": Out(bits)}

    def elaborate(self, platform):
        m = Module()
        for row in range(self.machine.tile_rows.min):
            m.submodules[f"adder_{row}"] = adder = Fp32Adder(latency=self.machine.latencies.add)
            lane = slice(32 * row, 32 * (row + 1))
            m.d.comb += [adder.a.eq(self.a[lane]), adder.b.eq(self.b[lane]), self.o[lane].eq(adder.o)]
        return m


class Cluster(Slice):
    """Neighbouring vector-scalar slices and the part of the add-reduce tree below all taps that adds them up.

    product[r] = the tree's sum over slices of weight[weight_address][slice][r] * scalar[slice]

    Members
    -------
    load_enable : In(slices), one bit a slice; load_address : In; load_data : In, write the word's weights of as many slices
        as memory sends in a cycle, over and over
    weight_address : In(bits of weight_words)
    scalar : In(16 * slices)
    product : Out(32 * rows)

    Timing
    ------
    As its slices: `add` cycles more for each level of the tree.
    """

    MODULE = "sharp_cluster"

    @staticmethod
    def members(machine: Machine) -> dict:
        return _summed_members(machine, machine.cluster_slices)

    def elaborate(self, platform):
        m = Module()
        nodes = place_columns(m, VectorScalarSlice, self.machine, self.machine.cluster_slices, self)
        m.d.comb += self.product.eq(add_up(m, nodes, AddSlice, self.machine))
        return m


class AddNode(Slice):
    """An add slice above the clusters, by itself: a unit of its own for layout and simulation."""

    MODULE = "sharp_add_node"

    @staticmethod
    def members(machine: Machine) -> dict:
        return AddSlice.members(machine)

    def elaborate(self, platform):
        m = Module()
        unit = place(m, "slice", AddSlice, self.machine)
        m.d.comb += [unit.a.eq(self.a), unit.b.eq(self.b), self.o.eq(unit.o)]
        return m


class Bank(Slice):
    """All slices below one node of the tree's lowest tap, M / tile_rows.max of them: clusters, and add nodes over them.

    product[r] = the tree's sum over slices of weight[weight_address][slice][r] * scalar[slice]

    Members are those of a cluster, for all slices of the bank; its timing is that of the tree's levels in it.
    """

    MODULE = "sharp_bank"

    @staticmethod
    def members(machine: Machine) -> dict:
        return _summed_members(machine, machine.bank_slices)

    def elaborate(self, platform):
        m = Module()
        nodes = place_columns(m, Cluster, self.machine, self.machine.bank_slices // self.machine.cluster_slices, self)
        m.d.comb += self.product.eq(add_up(m, nodes, AddNode, self.machine))
        return m


def _summed_members(machine: Machine, slices: int) -> dict:
    """Return the interface of `slices` vector-scalar slices whose products are added up."""
    return VectorScalarSlice.members(machine) | {
        "load_enable": In(unsigned(slices)),
        "load_data": In(unsigned(8 * min(slices * machine.slice_word_bytes, machine.memory_bytes_per_cycle))),
        "scalar": In(unsigned(16 * slices)),
    }


def place_columns(m: Module, kind: type[Slice], machine: Machine, count: int, source) -> list[Signal]:
    """Place `count` units of slices side by side over the columns of `source`, which has their members for all; return their products.

    Weights to load come for a number of slices at once: slice i takes the part i modulo that number.
    """
    products = []
    slices = len(source.load_enable) // count
    for index in range(count):
        unit = place(m, f"{kind.MODULE.removeprefix('sharp_')}_{index}", kind, machine)
        first, last = index * slices, (index + 1) * slices
        m.d.comb += [
            unit.load_enable.eq(source.load_enable[first:last]),
            unit.load_address.eq(source.load_address),
            unit.load_data.eq(source.load_data[index * len(unit.load_data) % len(source.load_data) :][: len(unit.load_data)]),
            unit.weight_address.eq(source.weight_address),
            unit.scalar.eq(source.scalar[16 * first : 16 * last]),
        ]
        products.append(unit.product)
    return products


def add_up(m: Module, nodes: list[Signal], kind: type[Slice], machine: Machine) -> Signal:
    """Place a whole add-reduce tree over `nodes`; return its root."""
    while len(nodes) > 1:
        nodes = add_level(m, nodes, kind, machine)
    return nodes[0]


def add_level(m: Module, nodes: list, kind: type[Slice], machine: Machine) -> list:
    """Place one level of the add-reduce tree over `nodes`; return its sums."""
    sums = []
    for index, (left, right) in enumerate(zip(nodes[0::2], nodes[1::2], strict=True)):
        unit = place(m, f"add_{len(nodes) // 2}_{index}", kind, machine)
        m.d.comb += [unit.a.eq(left), unit.b.eq(right)]
        sums.append(unit.o)
    return sums


class AccumulatorSlice(Slice):
    """A group of `tile_rows.min` accumulators: their adders and their rows of the accumulator buffer.

    row[write_address] = (0 or row[read_address]) + node[tap]

    Two copies of the rows serve the two readers, accumulation and drain. A sum that is due in the very cycle in which it
    is needed again is taken from the adder's output, so that accumulation on one row repeats every `accumulate` cycles.

    Members
    -------
    valid, zero, tap, read_address, write_address : In, one cycle before the nodes
    nodes : In(taps * 32 * rows), the tree's node of this group for each tap
    drain_address : In; drain_data : Out(32 * rows), one cycle later, new sums included
    load_enable : In(2), one bit a half of the rows; load_address : In; load_data : In(16 * rows)
    """

    MODULE = "sharp_accumulator_slice"

    @staticmethod
    def members(machine: Machine) -> dict:
        rows, taps = machine.tile_rows.min, len(machine.tile_heights)
        address = unsigned(max(1, ceil_log2(machine.accumulator_depth)))
        return {
            "valid": In(1),
            "zero": In(1),
            "tap": In(range(max(2, taps))),
            "read_address": In(address),
            "write_address": In(address),
            "nodes": In(unsigned(taps * 32 * rows)),
            "drain_address": In(address),
            "drain_data": Out(unsigned(32 * rows)),
            "load_enable": In(2),
            "load_address": In(address),
            "load_data": In(unsigned(16 * rows)),
        }

    def elaborate(self, platform):
        m = Module()
        rows, cycles = self.machine.tile_rows.min, self.machine.latencies.accumulate
        half = 16 * rows

        # a_ : operands at the adders; s_ : sums.
        a_valid, a_zero, a_tap = Signal(), Signal(), Signal.like(self.tap)
        a_read, a_write = Signal.like(self.read_address), Signal.like(self.write_address)
        m.d.sync += [
            a_valid.eq(self.valid),
            a_zero.eq(self.zero),
            a_tap.eq(self.tap),
            a_read.eq(self.read_address),
            a_write.eq(self.write_address),
        ]
        s_valid = delay(m, a_valid, cycles, name="s_valid", reset=True)
        s_write = delay(m, a_write, cycles, name="s_write")
        s_sum = Signal(32 * rows)
        stored = Signal(32 * rows)
        for part in range(2):
            bits = slice(part * half, (part + 1) * half)
            for reader, address, data in (("sum", self.read_address, stored), ("drain", self.drain_address, self.drain_data)):
                m.submodules[f"{reader}_rows_{part}"] = memory = Memory(
                    depth=self.machine.accumulator_depth, lane_bits=half, transparent=True
                )
                m.d.comb += [
                    memory.write_enable.eq(s_valid | self.load_enable[part]),
                    memory.write_address.eq(Mux(self.load_enable[part], self.load_address, s_write)),
                    memory.write_data.eq(Mux(self.load_enable[part], self.load_data, s_sum[bits])),
                    memory.read_address.eq(address),
                    data[bits].eq(memory.read_data),
                ]

        node = Signal(32 * rows)
        with m.Switch(a_tap):
            for tap in range(len(self.machine.tile_heights)):
                with m.Case(tap):
                    m.d.comb += node.eq(self.nodes.word_select(tap, 32 * rows))
        kept = Signal(32 * rows)
        m.d.comb += kept.eq(Mux(a_zero, 0, Mux(s_valid & (s_write == a_read), s_sum, stored)))
        for row in range(rows):
            lane = slice(32 * row, 32 * (row + 1))
            m.submodules[f"adder_{row}"] = adder = Fp32Adder(latency=cycles)
            m.d.comb += [adder.a.eq(kept[lane]), adder.b.eq(node[lane]), s_sum[lane].eq(adder.o)]
        return m
