"""The two sequencers that work off a program: tiles and post groups, each at most one a cycle.

A tile waits for its vector elements, for its weights if they are streamed, and for sums that are still in the accumulator
pipeline; a post group waits for its rows, for room in the output queue and for groups of another update. Nothing else holds
either of them up.
"""

from amaranth.hdl import Array, Module, Mux, Signal, unsigned
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from sharp.model.machine import Machine
from sharp.model.program import Init, Opcode, Operand, Source, Update
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
    written : In(channels * COUNT_BITS), elements counted on each channel
    loaded : In, the next streamed word is there; ring_address : In, where; taken : Out, it is issued
    start : In, a run begins: cursors return to zero
    issue : Out; tile : Out(tile_layout), the tile issued
    operand, vector_row, vector_offset, columns, rows : Out, its scalars, and how much of it is valid
    height, width : Out, K and N
    completed : Out, rows that are finished `complete_cycles` - 1 cycles later; 0 where none are
    freed : Out, the last tile that reads an input vector is issued
    reads_sums, reads_bias : Out, what the tile adds to
    active, wait_operand, wait_weights, wait_accumulator : Out, why no tile is issued
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self.fields = fields = instruction_layout(Opcode.TILE)
        buffer_rows = max(machine.buffers.input_elements, machine.buffers.hidden_elements) // machine.vector_row_elements
        super().__init__(
            {
                "i": In(stream.Signature(fields)),
                "written": In(unsigned(machine.channels * COUNT_BITS)),
                "loaded": In(1),
                "ring_address": In(tile_layout(machine)["weight"].shape),
                "taken": Out(1),
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
                "wait_weights": Out(1),
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
        run_left = Signal.like(region.run)
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

        cursors = Array(Signal(COUNT_BITS, name=f"cursor_{index}") for index in range(machine.cursors))
        counted, need = Signal(COUNT_BITS), Signal(COUNT_BITS)
        place = Signal(range(1 << 17))
        ready, loaded = Signal(), Signal()
        m.d.comb += [
            place.eq(region.column + column),
            counted.eq(self.written.word_select(region.channel, COUNT_BITS) - cursors[region.cursor]),
            need.eq(place + self.columns),
            # Below 0 where the rest of a vector that a tile has already done with is still to come.
            ready.eq(~region.wait | (~counted[-1] & (counted >= need))),
            loaded.eq(~region.streamed | self.loaded),
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
            self.wait_weights.eq(self.active & ready & ~loaded),
            self.wait_accumulator.eq(self.active & ready & loaded & hazard & self.reads_sums),
            self.issue.eq(self.active & ready & loaded & ~(hazard & self.reads_sums)),
            self.taken.eq(self.issue & region.streamed),
            self.tile.weight.eq(Mux(region.streamed, self.ring_address, weight)),
            self.tile.tap.eq(region.tap),
            self.tile.read.eq(read),
            self.tile.write.eq(write),
            self.operand.eq(region.operand),
            self.vector_row.eq(region.vector + (place >> (machine.vector_row_elements.bit_length() - 1))),
            self.vector_offset.eq(place),
            self.completed.eq(Mux(self.issue & region.complete & last_column, self.rows, 0)),
            self.freed.eq(self.issue & last & (region.advance != 0) & (region.operand == Operand.INPUT)),
        ]

        next_block, ends_run = Signal.like(block), Signal()
        next_run_left = Signal.like(run_left)
        m.d.comb += [
            ends_run.eq(run_left == 1),
            next_block.eq(block + size + Mux(ends_run, region.gap, 0)),
            next_run_left.eq(Mux(ends_run, region.run, run_left - 1)),
        ]
        with m.If(self.issue):
            m.d.sync += weight.eq(weight + 1)
            with m.If(region.columns_outer):
                with m.If(last_block):
                    m.d.sync += [
                        block.eq(0),
                        run_left.eq(region.run),
                        rows_left.eq(region.rows),
                        column.eq(column + self.width),
                        columns_left.eq(columns_left - self.width),
                        first_column.eq(0),
                    ]
                with m.Else():
                    m.d.sync += [block.eq(next_block), run_left.eq(next_run_left), rows_left.eq(rows_left - self.height)]
            with m.Else():
                with m.If(last_column):
                    m.d.sync += [
                        column.eq(0),
                        columns_left.eq(region.columns),
                        block.eq(next_block),
                        run_left.eq(next_run_left),
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
                run_left.eq(self.i.payload.run),
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
    live : Out(4), the gates that come from sums
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
                "live": Out(4),
                "active": Out(1),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        machine = self.machine
        update_cycles = {update: Contract(machine).update_cycles(update) for update in Update}
        group = self.group
        left = Signal.like(group.neurons)
        done = Signal.like(group.neurons)  # of the bundle, by earlier groups
        finished = Signal(COUNT_BITS)
        room = Signal(range(machine.queues.output + 1), init=machine.queues.output)
        # The update of the last groups that are not KEEP, and the cycles until they have been written.
        kind = Signal.like(group.update)
        kind_cycles = Signal(range(max(update_cycles.values())))
        cycles = Signal.like(kind_cycles)
        bundle, size, rows = Signal(range((1 << 15) + 1)), Signal(range(machine.lanes + 1)), Signal(COUNT_BITS)
        interleaved, starts_bundle, ends_bundle = (Signal(name=name) for name in ("interleaved", "starts_bundle", "ends_bundle"))
        waits_for_rows, waits_for_kind = Signal(), Signal()
        last, emits = Signal(), Signal()
        m.d.comb += [
            bundle.eq(1 << group.stride),
            size.eq(Mux(bundle > machine.lanes, machine.lanes, bundle)),
            last.eq(left <= size),
            self.count.eq(Mux(last, left, size)),
            starts_bundle.eq(done == 0),
            ends_bundle.eq(done + size == bundle),
            interleaved.eq(group.source == Source.INTERLEAVED),
            waits_for_rows.eq(interleaved | (group.source == Source.GATE)),
            rows.eq(self.count + Mux(interleaved & starts_bundle, ((group.runs - 1)[:3] << group.stride), 0)),
            waits_for_kind.eq(
                (kind_cycles != 0) & Mux(group.update == Update.KEEP, kind == Update.PEEPHOLE, kind != group.update)
            ),
            self.busy.eq(kind_cycles != 0),
            self.issue.eq(
                self.active
                & (~waits_for_rows | (finished >= rows))
                & (~group.emit | (room != 0))
                & ~waits_for_kind
            ),
            emits.eq(self.issue & group.emit),
        ]
        with m.If(interleaved):
            m.d.comb += self.live.eq(0b1111)
        with m.Elif(group.source != Source.BUFFER):
            m.d.comb += self.live.eq(1 << group.slot)
        with m.Switch(group.update):
            for update, count in update_cycles.items():
                if count:
                    with m.Case(update):
                        m.d.comb += cycles.eq(count - 1)
        m.d.sync += [
            finished.eq(finished + self.completed - Mux(self.issue & waits_for_rows, rows, 0)),
            room.eq(room + self.output_taken - emits),
        ]
        with m.If(self.issue & (group.update != Update.KEEP)):
            m.d.sync += [kind.eq(group.update), kind_cycles.eq(cycles)]
        with m.Elif(self.busy):
            m.d.sync += kind_cycles.eq(kind_cycles - 1)
        with m.If(self.issue):
            m.d.sync += [
                left.eq(left - size),
                done.eq(Mux(ends_bundle, 0, done + size)),
                self.neuron.eq(self.neuron + size),
                self.accumulator.eq(self.accumulator + size + Mux(interleaved & ends_bundle, (bundle << 1) + bundle, 0)),
            ]
            with m.If(last):
                m.d.sync += self.active.eq(0)
        m.d.comb += self.i.ready.eq(~self.active | (self.issue & last))
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                self.active.eq(1),
                group.eq(self.i.payload),
                left.eq(self.i.payload.neurons),
                done.eq(0),
                self.neuron.eq(self.i.payload.neuron),
                self.accumulator.eq(self.i.payload.accumulator),
            ]
        with m.If(self.start):
            m.d.sync += finished.eq(0)
        return m
