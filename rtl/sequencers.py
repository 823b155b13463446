"""The two sequencers that work off a program: tiles and post groups, each at most one a cycle.

A tile waits for its vector elements and for sums that are still in the accumulator pipeline; a post group waits for its
rows, for room in the output queue and, fenced, for the groups before it. Nothing else holds either of them up.
"""

from amaranth.hdl import Array, Module, Mux, Signal, unsigned
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from sharp.model.machine import Machine
from sharp.model.program import CHANNELS, Init, Opcode, Operand, Source, Update
from sharp.model.timing import Contract

from .engine import tile_layout
from .fetch import instruction_layout
from .pipeline import delay

# Elements are counted modulo this many bits; no vector is as long as half of it.
COUNT_BITS = 20


class TileSequencer(wiring.Component):
    """Walks a tile instruction's region and issues its tiles.

    Members
    -------
    i : In(stream of tile instructions)
    written : In(CHANNELS * COUNT_BITS), elements counted on each channel
    start : In, a run begins: cursors return to zero
    issue : Out; tile : Out(tile_layout), the tile issued
    operand, vector_row, vector_offset, columns, rows : Out, its scalars, and how much of it is valid
    height, width : Out, K and N
    completed : Out, rows that are finished `complete_cycles` - 1 cycles later; 0 where none are
    freed : Out, the last tile that reads an input vector is issued
    reads_sums, reads_bias : Out, what the tile adds to
    active, wait_operand, wait_accumulator : Out, why no tile is issued
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self.fields = fields = instruction_layout(Opcode.TILE)
        buffer_rows = max(machine.buffers.input_elements, machine.buffers.hidden_elements) // machine.vector_row_elements
        super().__init__(
            {
                "i": In(stream.Signature(fields)),
                "written": In(unsigned(CHANNELS * COUNT_BITS)),
                "start": In(1),
                "issue": Out(1),
                "tile": Out(tile_layout(machine)),
                "operand": Out(fields["operand"].shape),
                "vector_row": Out(range(max(2, buffer_rows))),
                "vector_offset": Out(range(machine.vector_row_elements)),
                "columns": Out(range(machine.slices + 1)),
                "rows": Out(range(machine.tile_rows.max + 1)),
                "height": Out(range(machine.tile_rows.max + 1)),
                "width": Out(range(machine.slices + 1)),
                "completed": Out(range(machine.tile_rows.max + 1)),
                "freed": Out(1),
                "reads_sums": Out(1),
                "reads_bias": Out(1),
                "active": Out(1),
                "wait_operand": Out(1),
                "wait_accumulator": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        machine = self.machine
        region = Signal(self.fields)
        rows_left, columns_left = Signal.like(region.rows), Signal.like(region.columns)
        block = Signal.like(region.accumulator)  # groups from the region's first to this tile's first
        column = Signal.like(region.columns)
        weight = Signal.like(region.weight)
        first_column = Signal()

        size = Signal(range(machine.row_groups + 1))
        last_block, last_column, last = Signal(), Signal(), Signal()
        m.d.comb += [
            size.eq(1 << region.tap),
            self.height.eq(machine.tile_rows.min << region.tap),
            self.width.eq(machine.slices >> region.tap),
            last_block.eq(rows_left <= self.height),
            last_column.eq(columns_left <= self.width),
            last.eq(last_block & last_column),
            self.rows.eq(Mux(last_block, rows_left, self.height)),
            self.columns.eq(Mux(last_column, columns_left, self.width)),
        ]

        cursors = Array(Signal(COUNT_BITS, name=f"cursor_{index}") for index in range(CHANNELS))
        counted, need = Signal(COUNT_BITS), Signal(COUNT_BITS)
        place = Signal(range(1 << 17))
        ready = Signal()
        m.d.comb += [
            place.eq(region.column + column),
            counted.eq(self.written.word_select(region.channel, COUNT_BITS) - cursors[region.cursor]),
            need.eq(place + self.columns),
            ready.eq(~region.wait | (counted >= need)),
        ]

        write, read = Signal.like(region.accumulator), Signal.like(region.accumulator)
        from_source = Signal()
        m.d.comb += [
            from_source.eq(first_column & (region.init == Init.SOURCE)),
            write.eq(region.accumulator + block),
            read.eq(Mux(from_source, region.source + block, write)),
            self.tile.zero.eq(first_column & (region.init == Init.ZERO)),
            self.reads_sums.eq(~self.tile.zero),
            self.reads_bias.eq(from_source),
        ]
        hazard = self._hazard(m, region, read, write)

        m.d.comb += [
            self.wait_operand.eq(self.active & ~ready),
            self.wait_accumulator.eq(self.active & ready & hazard & self.reads_sums),
            self.issue.eq(self.active & ready & ~(hazard & self.reads_sums)),
            self.tile.weight.eq(weight),
            self.tile.tap.eq(region.tap),
            self.tile.read.eq(read),
            self.tile.write.eq(write),
            self.operand.eq(region.operand),
            self.vector_row.eq(region.vector + (place >> (machine.vector_row_elements.bit_length() - 1))),
            self.vector_offset.eq(place),
            self.completed.eq(Mux(self.issue & region.complete & last_column, self.rows, 0)),
            self.freed.eq(self.issue & last & (region.advance != 0) & (region.operand == Operand.INPUT)),
        ]

        next_block = Signal.like(block)
        m.d.comb += next_block.eq(block + size)
        with m.If(self.issue):
            m.d.sync += weight.eq(weight + 1)
            with m.If(region.columns_outer):
                with m.If(last_block):
                    m.d.sync += [
                        block.eq(0),
                        rows_left.eq(region.rows),
                        column.eq(column + self.width),
                        columns_left.eq(columns_left - self.width),
                        first_column.eq(0),
                    ]
                with m.Else():
                    m.d.sync += [block.eq(next_block), rows_left.eq(rows_left - self.height)]
            with m.Else():
                with m.If(last_column):
                    m.d.sync += [
                        column.eq(0),
                        columns_left.eq(region.columns),
                        block.eq(next_block),
                        rows_left.eq(rows_left - self.height),
                        first_column.eq(1),
                    ]
                with m.Else():
                    m.d.sync += [column.eq(column + self.width), columns_left.eq(columns_left - self.width), first_column.eq(0)]
            with m.If(last):
                m.d.sync += [self.active.eq(0), cursors[region.cursor].eq(cursors[region.cursor] + region.advance)]
        m.d.comb += self.i.ready.eq(~self.active | (self.issue & last))
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                self.active.eq(1),
                region.eq(self.i.payload),
                rows_left.eq(self.i.payload.rows),
                columns_left.eq(self.i.payload.columns),
                block.eq(0),
                column.eq(0),
                weight.eq(self.i.payload.weight),
                first_column.eq(1),
            ]
        with m.If(self.start):
            m.d.sync += [cursor.eq(0) for cursor in cursors]
        return m

    def _hazard(self, m: Module, region, read, write):
        """Return whether a tile of the last `accumulate` - 1 cycles writes a group that this one reads."""
        clashes = []
        valid, start, tap = self.issue, write, region.tap
        for age in range(1, self.machine.latencies.accumulate):
            valid = delay(m, valid, 1, name=f"recent_valid_{age}", reset=True)
            start = delay(m, start, 1, name=f"recent_start_{age}")
            tap = delay(m, tap, 1, name=f"recent_tap_{age}")
            coarse = Signal.like(region.tap, name=f"coarse_{age}")
            m.d.comb += coarse.eq(Mux(tap > region.tap, tap, region.tap))
            # Tiles start at multiples of their power-of-two size, so two overlap where they agree at the coarser one.
            clashes.append(valid & (start >> coarse == read >> coarse))
        clash = Signal()
        for each in clashes:
            clash = clash | each
        return clash


class PostSequencer(wiring.Component):
    """Issues post groups.

    Members
    -------
    i : In(stream of post instructions)
    completed : In, rows finished in this cycle
    output_taken : In, a beat leaves the output queue; start : In, a run begins
    issue : Out; group : Out(instruction fields), the instruction issued from
    accumulator, neuron, count : Out, the group's first row and neuron, and its neurons
    active, busy : Out, work is waiting or under way
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self.fields = fields = instruction_layout(Opcode.POST)
        super().__init__(
            {
                "i": In(stream.Signature(fields)),
                "completed": In(range(machine.tile_rows.max + 1)),
                "output_taken": In(1),
                "start": In(1),
                "issue": Out(1),
                "group": Out(fields),
                "accumulator": Out(fields["accumulator"].shape),
                "neuron": Out(fields["neuron"].shape),
                "count": Out(range(machine.lanes + 1)),
                "rows": Out(range(4 * machine.lanes + 1)),
                "active": Out(1),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        machine, cycles = self.machine, Contract(self.machine).update_cycles
        group = self.group
        left = Signal.like(group.neurons)
        finished = Signal(COUNT_BITS)
        room = Signal(range(machine.queues.output + 1), init=machine.queues.output)
        busy_cycles = Signal(range(cycles + 1))
        size = Signal(range(machine.lanes + 1))
        reads_rows, last, emits = Signal(), Signal(), Signal()
        fenced = Signal()  # the fence is still to be passed, which the first group does
        m.d.comb += [
            size.eq(1 << group.stride),
            last.eq(left <= size),
            self.count.eq(Mux(last, left, size)),
            reads_rows.eq((group.update != Update.STATE) & (group.source != Source.BUFFER)),
            self.rows.eq(Mux(reads_rows, Mux(group.source == Source.INTERLEAVED, self.count << 2, self.count), 0)),
            self.busy.eq(busy_cycles != 0),
            self.issue.eq(
                self.active & (finished >= self.rows) & (~group.emit | (room != 0)) & (~fenced | ~self.busy)
            ),
            emits.eq(self.issue & group.emit),
        ]
        m.d.sync += [
            finished.eq(finished + self.completed - Mux(self.issue, self.rows, 0)),
            room.eq(room + self.output_taken - emits),
        ]
        with m.If(self.issue):
            m.d.sync += [
                fenced.eq(0),
                busy_cycles.eq(cycles - 1),
                left.eq(left - size),
                self.neuron.eq(self.neuron + size),
                self.accumulator.eq(self.accumulator + Mux(group.source == Source.INTERLEAVED, size << 2, size)),
            ]
            with m.If(last):
                m.d.sync += self.active.eq(0)
        with m.Elif(self.busy):
            m.d.sync += busy_cycles.eq(busy_cycles - 1)
        m.d.comb += self.i.ready.eq(~self.active | (self.issue & last))
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                self.active.eq(1),
                group.eq(self.i.payload),
                fenced.eq(self.i.payload.fence),
                left.eq(self.i.payload.neurons),
                self.neuron.eq(self.i.payload.neuron),
                self.accumulator.eq(self.i.payload.accumulator),
            ]
        with m.If(self.start):
            m.d.sync += finished.eq(0)
        return m
