"""The tile engine: banks of vector-scalar slices, the add-reduce tree with its taps, and the accumulator groups.

Tile rows fall on accumulator groups by address: group a lies in column a mod G of the G groups, at depth a div G. A tap
gives the 2**tap nodes of a tree level; a group takes the node that is its own number modulo 2**tap, so that a tile may
start at any multiple of its height. Every tap is delayed to the depth of the whole tree: the latency does not depend on K.
"""

from types import SimpleNamespace

from amaranth.hdl import Cat, Module, Signal, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from sharp.model.machine import Machine
from sharp.model.timing import Contract

from .pipeline import delay
from .slices import AccumulatorSlice, AddNode, Bank, add_level, place, place_columns


def tile_layout(machine: Machine) -> data.StructLayout:
    """What the engine is told of an issued tile."""
    group = unsigned(max(1, ceil_log2(machine.buffers.accumulator_rows // machine.tile_rows.min)))
    return data.StructLayout(
        {
            "weight": unsigned(max(1, ceil_log2(machine.weight_words))),
            "tap": unsigned(max(1, ceil_log2(len(machine.tile_heights)))),
            "zero": unsigned(1),
            "read": group,
            "write": group,
        }
    )


class TileEngine(wiring.Component):
    """Multiplies tiles and accumulates their rows.

    Members
    -------
    valid : In; tile : In(tile_layout), the issued tile
    scalars : In(16 * slices), `operand` cycles after the issue
    drain_address : In, depth of the accumulator rows; drain_data : Out(32 * tile_rows.max), one cycle later
    load_weight : In(slices), a bit a slice; load_address, weight_data : In, write a weight word's slices, each its part of a beat
    load_accumulator, load_half, load_group, load_data : In, write half the rows of an accumulator group
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self.layout = tile_layout(machine)
        super().__init__(
            {
                "valid": In(1),
                "tile": In(self.layout),
                "scalars": In(unsigned(16 * machine.slices)),
                "drain_address": In(unsigned(max(1, ceil_log2(machine.accumulator_depth)))),
                "drain_data": Out(unsigned(32 * machine.tile_rows.max)),
                "load_weight": In(unsigned(machine.slices)),
                "load_address": In(self.layout["weight"].shape),
                "weight_data": In(unsigned(8 * machine.memory_bytes_per_cycle)),
                "load_accumulator": In(1),
                "load_half": In(1),
                "load_group": In(self.layout["read"].shape),
                "load_data": In(unsigned(16 * machine.tile_rows.min)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        machine, contract = self.machine, Contract(self.machine)
        taps = len(machine.tile_heights)

        whole = SimpleNamespace(
            load_enable=self.load_weight,
            load_address=self.load_address,
            load_data=self.weight_data,
            weight_address=self.tile.weight,
            scalar=self.scalars,
        )
        nodes = place_columns(m, Bank, machine, machine.row_groups, whole)

        # tapped[tap][node]: the nodes of a tap at the time of the tree's root.
        tapped = {}
        for tap in reversed(range(taps)):
            wait = tap * machine.latencies.add
            tapped[tap] = [delay(m, node, wait, name=f"tap_{tap}_{index}") for index, node in enumerate(nodes)]
            if tap:
                nodes = add_level(m, nodes, AddNode, machine)

        # n_ : one cycle before the nodes arrive.
        ahead = contract.sum_cycles - 1
        n_valid = delay(m, self.valid, ahead, name="n_valid", reset=True)
        n_tile = Signal(self.layout)
        m.d.comb += n_tile.eq(delay(m, self.tile.as_value(), ahead, name="n_tile"))
        drained = []
        group_bits = machine.row_groups.bit_length() - 1
        for group in range(machine.row_groups):
            unit = place(m, f"accumulator_{group}", AccumulatorSlice, machine)
            mine = Signal(name=f"mine_{group}")
            with m.Switch(n_tile.tap):
                for tap in range(taps):
                    with m.Case(tap):
                        m.d.comb += mine.eq(n_tile.write[:group_bits] >> tap == group >> tap)
            m.d.comb += [
                unit.valid.eq(n_valid & mine),
                unit.zero.eq(n_tile.zero),
                unit.tap.eq(n_tile.tap),
                unit.read_address.eq(n_tile.read[group_bits:]),
                unit.write_address.eq(n_tile.write[group_bits:]),
                unit.drain_address.eq(self.drain_address),
                unit.load_address.eq(self.load_group[group_bits:]),
                unit.load_data.eq(self.load_data),
            ]
            for half in range(2):
                chosen = self.load_accumulator & (self.load_half == half) & (self.load_group[:group_bits] == group)
                m.d.comb += unit.load_enable[half].eq(chosen)
            m.d.comb += unit.nodes.eq(Cat(*(tapped[tap][group % (1 << tap)] for tap in range(taps))))
            drained.append(unit.drain_data)
        m.d.comb += self.drain_data.eq(Cat(*drained))
        return m
