"""A neuron lane: activates four gates, updates one neuron's state and yields its result, as `Update` says.

Every update is a way through the same units: a product and a sum, phi, and a product (p q + a, then phi, then u times it);
a GRU adds a second product at the end. Gates come from the accumulators, or from the gate buffer, where an earlier group has
put them. Lane n keeps states and gates of the neurons that are n modulo the number of lanes.
"""

from amaranth.hdl import C, Module, Mux, Signal, unsigned
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from sharp.model.machine import Machine
from sharp.model.program import NO_LIMIT, Update

from .activation import FUNCTION_BITS, ActivationUnit
from .floating import Fp32Adder, Fp32Multiplier, fp32_to_fp16, saturate_cell
from .memory import Memory
from .pipeline import delay
from .slices import Slice

SLOTS = 4
UPDATE_BITS = 4
LIMIT_BITS = 31
ONE = C(0x3F800000, 32)

# Updates whose results are ready with the gates, after the last product, and after a sum at the end.
SHORT = (Update.HIDDEN, Update.STATE)
MIDDLE = (Update.LSTM, Update.OUTPUT, Update.RESET)
LONG = (Update.GRU, Update.CANDIDATE)


def among(update: Signal, updates: tuple[Update, ...]):
    """Return whether `update` is one of `updates`."""
    return sum((update == each for each in updates), start=C(0, 1)) != 0


def _depth(machine: Machine) -> int:
    return machine.buffers.cell_elements // machine.lanes


class NeuronLane(Slice):
    """One lane.

    Members
    -------
    valid, live, update, slot, row, functions, cell_function, limit : In, with the gates: `drain` cycles after the group's issue
    gates : In(4 * 32); live : In(4), those that come from sums and not from the gate buffer
    result : Out(32), hidden value (low 16 bits) or cell state, `writeback` - 1 cycles before the write ends
    saturated : Out, a pulse for each update of an LSTM whose cell state was clamped
    load_enable, load_row, load_data : In, write a cell state

    Timing
    ------
    `result` follows the issue of its group by `Contract.update_cycles` less one.
    """

    MODULE = "sharp_neuron_lane"

    @staticmethod
    def members(machine: Machine) -> dict:
        row = unsigned(max(1, ceil_log2(_depth(machine))))
        return {
            "valid": In(1),
            "live": In(SLOTS),
            "update": In(UPDATE_BITS),
            "slot": In(2),
            "row": In(row),
            "functions": In(unsigned(SLOTS * FUNCTION_BITS)),
            "cell_function": In(unsigned(FUNCTION_BITS)),
            "limit": In(LIMIT_BITS),
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
        multiply, add, activate = latencies.lane_multiply, latencies.lane_add, latencies.activate

        # g_ : gates activated.
        g_valid = delay(m, self.valid, activate, name="g_valid", reset=True)
        g_live = delay(m, self.live, activate, name="g_live")
        g_update = delay(m, self.update, activate, name="g_update")
        g_slot = delay(m, self.slot, activate, name="g_slot")
        g_limit = delay(m, self.limit, activate, name="g_limit")
        g_cell_function = delay(m, self.cell_function, activate, name="g_cell_function")
        row_ahead = delay(m, self.row, activate - 1, name="row_ahead")
        g_row = Signal.like(row_ahead)
        m.d.sync += g_row.eq(row_ahead)

        # y_ : phi, which PEEPHOLE keeps.
        y_valid = delay(m, g_valid & (g_update == Update.PEEPHOLE), multiply + add + activate, name="y_valid", reset=True)
        y_slot = delay(m, g_slot, multiply + add + activate, name="y_slot")
        y_row = delay(m, g_row, multiply + add + activate, name="y_row")
        y_value = Signal(32)

        gates, kept_gates = [], []
        for slot in range(SLOTS):
            m.submodules[f"gate_activation_{slot}"] = unit = ActivationUnit(latency=activate)
            m.submodules[f"gate_rows_{slot}"] = kept = Memory(depth=_depth(self.machine), lane_bits=32, transparent=True)
            gate = Signal(32, name=f"gate_{slot}")
            peeps = Signal(name=f"peeps_{slot}")
            m.d.comb += [
                unit.x.eq(self.gates.word_select(slot, 32)),
                unit.function.eq(self.functions.word_select(slot, FUNCTION_BITS)),
                unit.limit.eq(self.limit),
                peeps.eq(y_valid & (y_slot == slot)),
                kept.write_enable.eq(g_valid & (g_update == Update.KEEP) & g_live[slot] | peeps),
                kept.write_address.eq(Mux(peeps, y_row, g_row)),
                kept.write_data.eq(Mux(peeps, y_value, unit.o)),
                kept.read_address.eq(row_ahead),
                gate.eq(Mux(g_live[slot], unit.o, kept.read_data)),
            ]
            gates.append(gate)
            kept_gates.append(kept.read_data)

        def in_slot(values):
            return Mux(g_slot[1], Mux(g_slot[0], values[3], values[2]), Mux(g_slot[0], values[1], values[0]))

        m.submodules.cell_rows = cells = Memory(depth=_depth(self.machine), lane_bits=32)
        m.submodules.first_multiplier = first = Fp32Multiplier(latency=multiply)
        m.submodules.second_multiplier = second = Fp32Multiplier(latency=multiply)
        m.submodules.cell_adder = cell_adder = Fp32Adder(latency=add)
        m.submodules.complement_adder = complement = Fp32Adder(latency=add)
        state = cells.read_data
        g_lstm, g_long = Signal(), Signal()
        direct, leave = Signal(32), Signal(32)
        m.d.comb += [
            cells.read_address.eq(row_ahead),
            g_lstm.eq(g_update == Update.LSTM),
            g_long.eq(among(g_update, LONG)),
            first.a.eq(gates[1]),
            first.b.eq(state),
            second.a.eq(Mux(g_long, gates[1], gates[0])),
            second.b.eq(Mux(g_long, state, gates[2])),
            leave.eq(gates[3]),
            complement.a.eq(ONE),
            complement.b.eq(gates[1] ^ (1 << 31)),
        ]
        with m.Switch(g_update):
            with m.Case(Update.OUTPUT):
                m.d.comb += first.a.eq(ONE)
            with m.Case(Update.PEEPHOLE):
                m.d.comb += [first.a.eq(in_slot(gates)), direct.eq(in_slot(kept_gates))]
            with m.Case(Update.RESET):
                m.d.comb += [first.a.eq(gates[2]), leave.eq(ONE)]
            with m.Case(Update.GRU):
                m.d.comb += [first.a.eq(gates[2]), first.b.eq(gates[0]), direct.eq(gates[3])]
            with m.Case(Update.CANDIDATE):
                m.d.comb += [first.a.eq(0), first.b.eq(0), direct.eq(gates[3])]

        m_direct = delay(m, direct, multiply, name="m_direct")
        m_lstm = delay(m, g_lstm, multiply, name="m_lstm")
        m.d.comb += [cell_adder.a.eq(first.o), cell_adder.b.eq(Mux(m_lstm, second.o, m_direct))]

        # c_ : new cell state.
        c_valid = delay(m, g_valid & g_lstm, multiply + add, name="c_valid", reset=True)
        c_row = delay(m, g_row, multiply + add, name="c_row")
        c_limited = delay(m, g_long | (g_update == Update.PEEPHOLE), multiply + add, name="c_limited")
        c_limit = delay(m, g_limit, multiply + add, name="c_limit")
        c_state, c_beyond = saturate_cell(m, cell_adder.o)
        m.submodules.cell_activation = cell_activation = ActivationUnit(latency=activate)
        m.d.comb += [
            self.saturated.eq(c_valid & c_beyond),
            cell_activation.x.eq(c_state),
            cell_activation.function.eq(delay(m, g_cell_function, multiply + add, name="c_function")),
            cell_activation.limit.eq(Mux(c_limited, c_limit, NO_LIMIT)),
            y_value.eq(cell_activation.o),
        ]

        # u: what phi is multiplied by.
        a_leave = Signal(32)
        m.d.comb += a_leave.eq(Mux(delay(m, g_long, add, name="a_long"), complement.o, delay(m, leave, add, name="a_leave")))
        m.submodules.leave_multiplier = leave_multiplier = Fp32Multiplier(latency=multiply)
        m.submodules.last_adder = last_adder = Fp32Adder(latency=add)
        m.d.comb += [
            leave_multiplier.a.eq(delay(m, a_leave, multiply + activate, name="u")),
            leave_multiplier.b.eq(cell_activation.o),
            last_adder.a.eq(leave_multiplier.o),
            last_adder.b.eq(delay(m, second.o, add + activate + multiply, name="remembered")),
        ]

        # The three ends: s_ with the gates, h_ after the last product, l_ after the last sum. Groups of two never meet.
        h_cycles = multiply + add + activate + multiply
        s_valid = g_valid & among(g_update, SHORT)
        h_valid = delay(m, g_valid & among(g_update, MIDDLE), h_cycles, name="h_valid", reset=True)
        l_valid = delay(m, g_valid & g_long, h_cycles + add, name="l_valid", reset=True)
        l_row = delay(m, g_row, h_cycles + add, name="l_row")
        l_state, _ = saturate_cell(m, last_adder.o)
        m.d.comb += [
            cells.write_enable.eq(c_valid | l_valid | self.load_enable),
            cells.write_address.eq(Mux(self.load_enable, self.load_row, Mux(l_valid, l_row, c_row))),
            cells.write_data.eq(Mux(self.load_enable, self.load_data, Mux(l_valid, l_state, c_state))),
        ]
        value, result = Signal(32), Signal(32)
        m.d.comb += [
            value.eq(Mux(s_valid, in_slot(gates), Mux(h_valid, leave_multiplier.o, l_state))),
            result.eq(Mux(s_valid & (g_update == Update.STATE), state, fp32_to_fp16(m, value))),
            self.result.eq(delay(m, result, latencies.writeback - 1, name="result")),
        ]
        return m
