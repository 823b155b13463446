"""The accelerator: wiring of sequencers, buffers, engine and lanes, and its Verilog.

The host loads memories while the machine rests, pulses `start`, feeds the input stream and takes the output stream; memory
sends the weights that a program streams. `running` falls when the program has halted and everything has left.
"""

from enum import IntEnum

from amaranth.back import verilog
from amaranth.hdl import Cat, Module, Mux, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from sharp.model.arithmetic import Activation
from sharp.model.machine import Machine
from sharp.model.program import INPUT_CHANNEL, WORD_BITS, WORK, Opcode, Operand, Update
from sharp.model.timing import Contract, Count

from .activation import FUNCTION_BITS
from .counters import COUNTER_BITS, STEP_BITS, Counters
from .drain import Drain
from .engine import TileEngine
from .fetch import Fetch, instruction_layout
from .lane import LONG, MIDDLE, SHORT, SLOTS, NeuronLane, among
from .memory import MEMORY_VERILOG
from .pipeline import delay
from .queue import Queue
from .receiver import Receiver
from .sequencers import COUNT_BITS, PostSequencer, TileSequencer
from .slices import AccumulatorSlice, AddNode, AddSlice, Bank, Cluster, VectorScalarSlice, place
from .vector_buffer import VectorBuffer
from .weight_receiver import WeightReceiver

TOP_MODULE = "sharp_top"
SLICES = (VectorScalarSlice, AddSlice, Cluster, AddNode, Bank, AccumulatorSlice, NeuronLane)
# Those that a simulator builds once each and places many times.
UNITS = (Cluster, AddNode, AccumulatorSlice, NeuronLane)


class Space(IntEnum):
    """Memories that the load port writes, and the unit of their addresses."""

    PROGRAM = 0
    """`load_bits` pieces of a program word, low piece first, `program_pieces` addresses a word."""
    WEIGHT = 1
    """One slice's weights of a word: word * slices + slice; 16 * tile_rows.min bits."""
    ACCUMULATOR = 2
    """Half the rows of an accumulator group: group * 2 + half; 16 * tile_rows.min bits."""
    HIDDEN = 3
    """`lanes` elements of the h buffer; 16 * lanes bits."""
    CELL = 4
    """`lanes` cell states; 32 * lanes bits."""


def program_pieces(machine: Machine) -> int:
    """Load addresses that a program word takes, a power of two."""
    pieces = -(-WORD_BITS // machine.load_bits)
    return 1 << (pieces - 1).bit_length()


class Top(wiring.Component):
    """A SHARP machine.

    Members
    -------
    load_valid, load_space, load_address, load_data : In, write a memory, one word a cycle; only while not running
    start : In, pulse; running : Out
    i : In(stream of 16 * lanes bits), x vectors, `lanes` float16 elements a beat
    m : In(stream of 8 * memory_bytes_per_cycle bits), streamed weight words in the order of their tiles, low slices first
    o : Out(stream): data (32 bits a lane: float16 hidden value or float32 cell state), keep (valid lanes), state (cell states),
        stream (whose they are)
    cycle : Out(48), cycles since the start
    counter_address : In, counter_value : Out, the event counters in the order of `Count`
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        stream_field = instruction_layout(Opcode.POST)["stream"].shape
        self.beat = data.StructLayout(
            {"data": unsigned(32 * machine.lanes), "keep": unsigned(machine.lanes), "state": unsigned(1), "stream": stream_field}
        )
        super().__init__(
            {
                "load_valid": In(1),
                "load_space": In(3),
                "load_address": In(32),
                "load_data": In(unsigned(machine.load_bits)),
                "start": In(1),
                "running": Out(1),
                "i": In(stream.Signature(unsigned(16 * machine.lanes))),
                "m": In(stream.Signature(unsigned(8 * machine.memory_bytes_per_cycle))),
                "o": Out(stream.Signature(self.beat)),
                "cycle": Out(COUNTER_BITS),
                "counter_address": In(range(len(Count))),
                "counter_value": Out(COUNTER_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        machine = self.machine
        m.submodules.fetch = fetch = Fetch(machine)
        m.submodules.tile_queue = tile_queue = Queue(fetch.tiles.payload.shape(), depth=machine.queues.tile)
        m.submodules.post_queue = post_queue = Queue(fetch.posts.payload.shape(), depth=machine.queues.post)
        m.submodules.tiles = tiles = TileSequencer(machine)
        m.submodules.posts = posts = PostSequencer(machine)
        m.submodules.engine = engine = TileEngine(machine)
        m.submodules.receiver = receiver = Receiver(machine)
        m.submodules.weight_receiver = weights = WeightReceiver(machine)
        m.submodules.inputs = inputs = VectorBuffer(machine, machine.buffers.input_elements)
        m.submodules.hiddens = hiddens = VectorBuffer(machine, machine.buffers.hidden_elements)
        m.submodules.output_queue = outputs = Queue(self.beat, depth=machine.queues.output)
        m.submodules.counters = counters = Counters()

        begin = Signal()
        m.d.comb += [
            begin.eq(self.start & ~self.running),
            fetch.running.eq(self.running),
            tiles.start.eq(begin),
            posts.start.eq(begin),
            receiver.setup_valid.eq(fetch.input_valid),
            receiver.setup.eq(fetch.input),
            receiver.freed.eq(tiles.freed),
            weights.setup_valid.eq(fetch.weights_valid),
            weights.setup.eq(fetch.weights),
            weights.taken.eq(tiles.taken),
            tiles.loaded.eq(weights.ready),
            tiles.ring_address.eq(weights.address),
        ]
        wiring.connect(m, fetch.tiles, tile_queue.i)
        wiring.connect(m, tile_queue.o, tiles.i)
        wiring.connect(m, fetch.posts, post_queue.i)
        wiring.connect(m, post_queue.o, posts.i)
        wiring.connect(m, wiring.flipped(self.i), receiver.i)
        wiring.connect(m, wiring.flipped(self.m), weights.i)
        wiring.connect(m, outputs.o, wiring.flipped(self.o))

        self._operands(m, tiles, engine, receiver, inputs, hiddens)
        saturated, written_channel, written_count = self._lanes(m, posts, engine, hiddens, outputs)
        self._scoreboard(m, begin, tiles, posts, receiver, outputs, written_channel, written_count)
        self._load(m, fetch, engine, weights)
        self._run(m, begin, fetch, tile_queue, post_queue, tiles, posts, (receiver, weights), outputs)
        self._count(m, begin, counters, fetch, tile_queue, tiles, posts, receiver, weights, saturated)
        return m

    def _operands(self, m, tiles, engine, receiver, inputs, hiddens):
        """Issued tiles to the engine, with their scalars from the x or the h buffer."""
        machine = self.machine
        operand = delay(m, tiles.operand, machine.latencies.operand, name="operand")
        m.d.comb += [
            engine.valid.eq(tiles.issue),
            engine.tile.eq(tiles.tile),
            inputs.write_lanes.eq(receiver.write_lanes),
            inputs.write_row.eq(receiver.write_row),
            inputs.write_chunk.eq(receiver.write_chunk),
            inputs.write_data.eq(self.i.payload),
            engine.scalars.eq(Mux(operand == Operand.HIDDEN, hiddens.scalars, inputs.scalars)),
        ]
        for buffer in (inputs, hiddens):
            m.d.comb += [
                buffer.read_row.eq(tiles.vector_row),
                buffer.read_offset.eq(tiles.vector_offset),
                buffer.tap.eq(tiles.tile.tap),
                buffer.columns.eq(tiles.columns),
            ]

    def _lanes(self, m, posts, engine, hiddens, outputs):
        """Post groups through drain and lanes to the h buffer and the output queue.

        Returns the saturation bits, and channel and number of the hidden values written in this cycle.
        """
        machine, contract = self.machine, Contract(self.machine)
        lanes, group = machine.lanes, posts.group
        lane_bits = lanes.bit_length() - 1
        row_bits = machine.vector_row_elements.bit_length() - 1
        window = machine.tile_rows.max.bit_length() - 1
        m.submodules.drain = drain = Drain(machine)
        m.d.comb += [
            engine.drain_address.eq(posts.accumulator[window:]),
            drain.offset.eq(posts.accumulator),
            drain.source.eq(group.source),
            drain.stride.eq(group.stride),
            drain.rows.eq(engine.drain_data),
        ]
        count = Signal(range(lanes + 1))
        m.d.comb += count.eq(Mux(posts.issue, posts.count, 0))
        first = posts.neuron[:lane_bits]

        def enabled(first, count):
            return [(lane >= first) & (lane < first + count) for lane in range(lanes)]

        # d_ : gates drained.
        wait = machine.latencies.drain
        fields = [group[f"function{slot}"] for slot in range(SLOTS)]
        d_count = delay(m, count, wait, name="d_count", reset=True)
        d_first = delay(m, first, wait, name="d_first")
        d_live = delay(m, posts.live, wait, name="d_live")
        d_update = delay(m, group.update, wait, name="d_update")
        d_slot = delay(m, group.slot, wait, name="d_slot")
        d_row = delay(m, group.cell + (posts.neuron >> lane_bits), wait, name="d_row")
        d_limit = delay(m, group.limit, wait, name="d_limit")
        d_cell_function = delay(m, group.cell_function, wait, name="d_cell_function")
        d_functions = [delay(m, field, wait, name=f"d_function_{slot}") for slot, field in enumerate(fields)]
        results, saturated = [], []
        for lane, valid in enumerate(enabled(d_first, d_count)):
            unit = place(m, f"lane_{lane}", NeuronLane, machine)
            m.d.comb += [
                unit.valid.eq(valid),
                unit.live.eq(d_live),
                unit.update.eq(d_update),
                unit.slot.eq(d_slot),
                unit.row.eq(d_row),
                unit.cell_function.eq(d_cell_function),
                unit.limit.eq(d_limit),
                unit.gates.eq(drain.gates.word_select(lane, SLOTS * 32)),
                unit.load_enable.eq(self.load_valid & (self.load_space == Space.CELL)),
                unit.load_row.eq(self.load_address),
                unit.load_data.eq(self.load_data[32 * lane : 32 * (lane + 1)]),
            ]
            m.d.comb += [unit.functions.word_select(slot, FUNCTION_BITS).eq(field) for slot, field in enumerate(d_functions)]
            results.append(unit.result)
            saturated.append(unit.saturated)

        # w_ : results written at the end of the cycle, after as many cycles as their update takes.
        results_layout = data.StructLayout(
            {
                "count": count.shape(),
                "first": unsigned(len(first)),
                "state": 1,
                "emit": 1,
                "signal": 1,
                "channel": group.channel.shape(),
                "stream": group.stream.shape(),
                "row": hiddens.write_row.shape(),
                "chunk": hiddens.write_chunk.shape(),
            }
        )
        issued = Signal(results_layout)
        m.d.comb += [
            issued.count.eq(count),
            issued.first.eq(first),
            issued.state.eq(group.update == Update.STATE),
            issued.emit.eq(group.emit),
            issued.signal.eq(group.signal),
            issued.channel.eq(group.channel),
            issued.stream.eq(group.stream),
            issued.row.eq(group.vector + (posts.neuron >> row_bits)),
            issued.chunk.eq(posts.neuron[:row_bits] >> lane_bits),
        ]
        written = Signal(results_layout)
        w_valid = Signal()
        before, ends = issued.as_value(), 0
        valids = []
        for name, updates in (("short", SHORT), ("middle", MIDDLE), ("long", LONG)):
            end = contract.update_cycles(updates[0]) - 1
            before = delay(m, before, end - ends, name=f"written_{name}")
            ends = end
            valid = Signal(name=f"valid_{name}")
            m.d.comb += valid.eq(delay(m, posts.issue & among(group.update, updates), end, name=f"issued_{name}", reset=True))
            valids.append(valid)
            with m.If(valid):
                m.d.comb += written.eq(before)
        m.d.comb += w_valid.eq(Cat(*valids).any())
        w_count = Signal.like(count)
        w_emit, w_signal, w_first = written.emit & w_valid, written.signal & w_valid, written.first
        m.d.comb += w_count.eq(Mux(w_valid, written.count, 0))
        w_enabled = enabled(w_first, w_count)
        loads_hidden = self.load_valid & (self.load_space == Space.HIDDEN)
        chunk_bits = row_bits - lane_bits
        m.d.comb += [
            hiddens.write_lanes.eq(Mux(loads_hidden, ~0, Mux(w_signal, Cat(*w_enabled), 0))),
            hiddens.write_data.eq(Mux(loads_hidden, self.load_data, Cat(*(result[:16] for result in results)))),
            outputs.i.payload.data.eq(Cat(*results)),
            outputs.i.payload.keep.eq(Cat(*w_enabled)),
            hiddens.write_row.eq(Mux(loads_hidden, self.load_address >> chunk_bits, written.row)),
            hiddens.write_chunk.eq(Mux(loads_hidden, self.load_address[:chunk_bits], written.chunk)),
            outputs.i.payload.state.eq(written.state),
            outputs.i.payload.stream.eq(written.stream),
            outputs.i.valid.eq(w_emit),
        ]
        return saturated, written.channel, Mux(w_signal, w_count, 0)

    def _scoreboard(self, m, begin, tiles, posts, receiver, outputs, written_channel, written_count):
        """Counts of elements written, finished rows and free places of the output queue."""
        contract = Contract(self.machine)
        for channel in range(self.machine.channels):
            written = Signal(COUNT_BITS, name=f"written_{channel}")
            step = receiver.written if channel == INPUT_CHANNEL else Mux(written_channel == channel, written_count, 0)
            m.d.sync += written.eq(Mux(begin, 0, written + step))
            m.d.comb += tiles.written.word_select(channel, COUNT_BITS).eq(written)
        m.d.comb += [
            posts.completed.eq(delay(m, tiles.completed, contract.complete_cycles - 1, name="completed", reset=True)),
            posts.output_taken.eq(outputs.o.valid & outputs.o.ready),
        ]

    def _load(self, m, fetch, engine, weights):
        """The load port to the memories that are not written in `_lanes`."""
        machine = self.machine
        pieces = program_pieces(machine)
        piece_bits, slice_bits = pieces.bit_length() - 1, machine.slices.bit_length() - 1
        loads_weight = self.load_valid & (self.load_space == Space.WEIGHT)
        slice_word_bits = 8 * machine.slice_word_bytes
        parts_of_beat = machine.memory_bytes_per_cycle // machine.slice_word_bytes
        for beat in range(machine.memory_beats):
            of_beat = (weights.write & (weights.write_beat == beat)).replicate(parts_of_beat)
            chosen = loads_weight & (self.load_address[parts_of_beat.bit_length() - 1 : slice_bits] == beat)
            places = [self.load_address[: parts_of_beat.bit_length() - 1] == part for part in range(parts_of_beat)]
            bits = slice(beat * parts_of_beat, (beat + 1) * parts_of_beat)
            m.d.comb += engine.load_weight[bits].eq(of_beat | Cat(*(chosen & place for place in places)))
        loads_program = self.load_valid & (self.load_space == Space.PROGRAM)
        word = Signal(WORD_BITS)
        parts = []
        for piece in range(pieces):
            last = piece == pieces - 1
            part = Signal(machine.load_bits, name=f"program_piece_{piece}")
            if last:
                m.d.comb += part.eq(self.load_data)
            else:
                with m.If(loads_program & (self.load_address[:piece_bits] == piece)):
                    m.d.sync += part.eq(self.load_data)
            parts.append(part)
        for piece, part in enumerate(parts):
            low, high = piece * machine.load_bits, min(WORD_BITS, (piece + 1) * machine.load_bits)
            if low < high:
                m.d.comb += word[low:high].eq(part)
        m.d.comb += [
            fetch.load_enable.eq(loads_program & (self.load_address[:piece_bits] == pieces - 1)),
            fetch.load_address.eq(self.load_address >> piece_bits),
            fetch.load_data.eq(word),
            engine.load_address.eq(Mux(weights.write, weights.write_address, self.load_address >> slice_bits)),
            engine.weight_data.eq(Mux(weights.write, self.m.payload, self.load_data[:slice_word_bits].replicate(parts_of_beat))),
            engine.load_accumulator.eq(self.load_valid & (self.load_space == Space.ACCUMULATOR)),
            engine.load_half.eq(self.load_address[0]),
            engine.load_group.eq(self.load_address >> 1),
            engine.load_data.eq(self.load_data),
        ]

    def _run(self, m, begin, fetch, tile_queue, post_queue, tiles, posts, receivers, outputs):
        """Start and end of a run."""
        cycles = Contract(self.machine).complete_cycles
        tile_cycles = Signal(range(cycles + 1))
        with m.If(tiles.issue):
            m.d.sync += tile_cycles.eq(cycles - 1)
        with m.Elif(tile_cycles != 0):
            m.d.sync += tile_cycles.eq(tile_cycles - 1)
        working = (
            ~fetch.halted
            | (tile_queue.level != 0)
            | tiles.active
            | (tile_cycles != 0)
            | (post_queue.level != 0)
            | posts.active
            | posts.busy
            | (outputs.level != 0)
        )
        for receiver in receivers:
            working = working | receiver.busy
        with m.If(begin):
            m.d.sync += [self.running.eq(1), self.cycle.eq(0)]
        with m.Elif(self.running):
            m.d.sync += [self.running.eq(working), self.cycle.eq(self.cycle + 1)]

    def _count(self, m, begin, counters, fetch, tile_queue, tiles, posts, receiver, weights, saturated):
        """Event counters."""
        group, issue = posts.group, posts.issue
        live, activated = Signal(range(SLOTS + 1)), Signal(range(SLOTS + 1))
        kept, multiplications, additions = Signal(range(SLOTS + 1)), Signal(2), Signal(2)
        cell_activations, cell_reads, cell_updates = Signal(), Signal(), Signal()
        functions = [posts.live[slot] & (group[f"function{slot}"] != Activation.IDENTITY) for slot in range(SLOTS)]
        m.d.comb += [live.eq(sum(posts.live[slot] for slot in range(SLOTS))), activated.eq(sum(functions))]
        with m.Switch(group.update):
            for update, work in WORK.items():
                with m.Case(update):
                    needed = [~posts.live[gate] for gate in work.gates]
                    m.d.comb += [
                        kept.eq(1 if update is Update.PEEPHOLE else sum(needed)),
                        multiplications.eq(work.multiplications),
                        additions.eq(work.additions),
                        cell_activations.eq((group.cell_function != Activation.IDENTITY) if work.activations else 0),
                        cell_reads.eq(work.state_reads),
                        cell_updates.eq(work.state_writes),
                    ]
        neurons = Signal.like(posts.count)
        m.d.comb += neurons.eq(Mux(issue, posts.count, 0))
        writes_gates = Mux(group.update == Update.KEEP, live, group.update == Update.PEEPHOLE)
        no_more_tiles = fetch.halted & (tile_queue.level == 0)
        idle = self.running & ~tiles.active
        steps = {
            Count.cycles: self.running,
            Count.tiles: tiles.issue,
            Count.tile_rows: Mux(tiles.issue, tiles.height, 0),
            Count.active_macs: Mux(tiles.issue, tiles.rows * tiles.columns, 0),
            Count.input_reads: Mux(tiles.issue & (tiles.operand == Operand.INPUT), tiles.width, 0),
            Count.hidden_reads: Mux(tiles.issue & (tiles.operand == Operand.HIDDEN), tiles.width, 0),
            Count.accumulator_reads: Mux(tiles.issue & tiles.reads_sums, tiles.height, 0),
            Count.bias_reads: Mux(tiles.issue & tiles.reads_bias, tiles.height, 0),
            Count.instructions: fetch.fetched,
            Count.input_writes: receiver.written,
            Count.weight_writes: weights.received,
            Count.drained_rows: neurons * live,
            Count.gate_activations: neurons * activated,
            Count.gate_writes: neurons * writes_gates,
            Count.gate_reads: neurons * kept,
            Count.cell_activations: Mux(cell_activations, neurons, 0),
            Count.lane_multiplications: neurons * multiplications,
            Count.lane_additions: neurons * additions,
            Count.cell_updates: Mux(cell_updates, neurons, 0),
            Count.cell_reads: Mux(cell_reads, neurons, 0),
            Count.hidden_writes: Mux(group.signal, neurons, 0),
            Count.outputs: Mux(group.emit, neurons, 0),
            Count.saturations: sum(saturated),
            Count.idle_program: idle & ~no_more_tiles,
            Count.idle_input: tiles.wait_operand & (tiles.operand == Operand.INPUT),
            Count.idle_hidden: tiles.wait_operand & (tiles.operand == Operand.HIDDEN),
            Count.idle_weights: tiles.wait_weights,
            Count.idle_accumulator: tiles.wait_accumulator,
            Count.idle_drained: idle & no_more_tiles,
        }
        m.d.comb += [
            counters.clear.eq(begin),
            counters.address.eq(self.counter_address),
            self.counter_value.eq(counters.value),
        ]
        m.d.comb += [counters.steps.word_select(count, STEP_BITS).eq(step) for count, step in steps.items()]


def convert(machine: Machine) -> dict[str, str]:
    """Return {file name: Verilog} of a machine, its slices each once; the same text for the same machine."""
    parts = {TOP_MODULE: Top(machine)} | {kind.MODULE: kind(machine) for kind in SLICES}
    files = {f"{name}.v": verilog.convert(part, name=name, emit_src=False, strip_internal_attrs=True) for name, part in parts.items()}
    return files | {"sharp_memory.v": MEMORY_VERILOG}

