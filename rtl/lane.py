"""A neuron lane: activates four gates, updates one neuron's cell state and yields its hidden value.

    c = saturate(f * c + i * g)        h = float16(o * phi(c))

Gates come from the accumulators in slots i, f, g, o, or from the gate buffer, where an earlier group has put them one
slot at a time. Lane n keeps the cell states and gates of the neurons that are n modulo the number of lanes.
"""

from amaranth.hdl import Module, Mux, Signal, unsigned
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from sharp.model.machine import Machine
from sharp.model.program import Source, Update

from .activation import FUNCTION_BITS, ActivationUnit
from .floating import Fp32Adder, Fp32Multiplier, fp32_to_fp16, saturate_cell
from .memory import Memory
from .pipeline import delay
from .slices import Slice

SLOTS = 4


def _depth(machine: Machine) -> int:
    return machine.buffers.cell_elements // machine.lanes


class NeuronLane(Slice):
    """One lane.

    Members
    -------
    valid, source, update, slot, row, functions, cell_function : In, with the gates: `drain` cycles after the group's issue
    gates : In(4 * 32)
    result : Out(32), hidden value (low 16 bits) or cell state, `writeback` - 1 cycles before the write ends
    saturated : Out, a pulse for each update whose cell state was clamped
    load_enable, load_row, load_data : In, write a cell state

    Timing
    ------
    `result` follows the inputs by activate + lane_multiply + lane_add + activate + lane_multiply + writeback - 1 cycles.
    """

    MODULE = "sharp_neuron_lane"

    @staticmethod
    def members(machine: Machine) -> dict:
        row = unsigned(max(1, ceil_log2(_depth(machine))))
        return {
            "valid": In(1),
            "source": In(2),
            "update": In(3),
            "slot": In(2),
            "row": In(row),
            "functions": In(unsigned(SLOTS * FUNCTION_BITS)),
            "cell_function": In(unsigned(FUNCTION_BITS)),
            "gates": In(unsigned(SLOTS * 32)),
            "result": Out(32),
            "saturated": Out(1),
            "load_enable": In(1),
            "load_row": In(row),
            "load_data": In(32),
        }

    def elaborate(self, platform):
        m = Module()
        latencies = self.machine.latencies
        update_cycles = latencies.lane_multiply + latencies.lane_add

        # g_ : gates activated.
        g_valid = delay(m, self.valid, latencies.activate, name="g_valid", reset=True)
        g_source = delay(m, self.source, latencies.activate, name="g_source")
        g_update = delay(m, self.update, latencies.activate, name="g_update")
        g_slot = delay(m, self.slot, latencies.activate, name="g_slot")
        g_cell_function = delay(m, self.cell_function, latencies.activate, name="g_cell_function")
        row_ahead = delay(m, self.row, latencies.activate - 1, name="row_ahead")
        g_row = Signal.like(row_ahead)
        m.d.sync += g_row.eq(row_ahead)
        gates = []
        for slot in range(SLOTS):
            m.submodules[f"gate_activation_{slot}"] = unit = ActivationUnit(latency=latencies.activate)
            m.submodules[f"gate_rows_{slot}"] = kept = Memory(depth=_depth(self.machine), lane_bits=32, transparent=True)
            gate = Signal(32, name=f"gate_{slot}")
            m.d.comb += [
                unit.x.eq(self.gates.word_select(slot, 32)),
                unit.function.eq(self.functions.word_select(slot, FUNCTION_BITS)),
                kept.write_enable.eq(g_valid & (g_source == Source.GATE) & (g_slot == slot)),
                kept.write_address.eq(g_row),
                kept.write_data.eq(unit.o),
                kept.read_address.eq(row_ahead),
                gate.eq(Mux(g_source == Source.BUFFER, kept.read_data, unit.o)),
            ]
            gates.append(gate)
        enter, forget, candidate, leave = gates

        m.submodules.cell_rows = cells = Memory(depth=_depth(self.machine), lane_bits=32)
        m.submodules.forget_multiplier = forget_multiplier = Fp32Multiplier(latency=latencies.lane_multiply)
        m.submodules.enter_multiplier = enter_multiplier = Fp32Multiplier(latency=latencies.lane_multiply)
        m.submodules.cell_adder = cell_adder = Fp32Adder(latency=latencies.lane_add)
        m.d.comb += [
            cells.read_address.eq(row_ahead),
            forget_multiplier.a.eq(forget),
            forget_multiplier.b.eq(cells.read_data),
            enter_multiplier.a.eq(enter),
            enter_multiplier.b.eq(candidate),
            cell_adder.a.eq(forget_multiplier.o),
            cell_adder.b.eq(enter_multiplier.o),
        ]

        # c_ : new cell state.
        c_valid = delay(m, g_valid & (g_update == Update.LSTM), update_cycles, name="c_valid", reset=True)
        c_row = delay(m, g_row, update_cycles, name="c_row")
        c_state, c_beyond = saturate_cell(m, cell_adder.o)
        m.d.comb += [
            self.saturated.eq(c_valid & c_beyond),
            cells.write_enable.eq(c_valid | self.load_enable),
            cells.write_address.eq(Mux(self.load_enable, self.load_row, c_row)),
            cells.write_data.eq(Mux(self.load_enable, self.load_data, c_state)),
        ]

        m.submodules.cell_activation = cell_activation = ActivationUnit(latency=latencies.activate)
        m.submodules.leave_multiplier = leave_multiplier = Fp32Multiplier(latency=latencies.lane_multiply)
        m.d.comb += [
            cell_activation.x.eq(c_state),
            cell_activation.function.eq(delay(m, g_cell_function, update_cycles, name="c_function")),
            leave_multiplier.a.eq(delay(m, leave, update_cycles + latencies.activate, name="leave")),
            leave_multiplier.b.eq(cell_activation.o),
        ]

        # h_ : hidden value.
        tail_cycles = update_cycles + latencies.activate + latencies.lane_multiply
        h_update = delay(m, g_update, tail_cycles, name="h_update")
        h_state = delay(m, cells.read_data, tail_cycles, name="h_state")
        h_result = Signal(32)
        m.d.comb += h_result.eq(Mux(h_update == Update.STATE, h_state, fp32_to_fp16(m, leave_multiplier.o)))
        m.d.comb += self.result.eq(delay(m, h_result, latencies.writeback - 1, name="result"))
        return m
