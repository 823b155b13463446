"""The cycle contract: predicts every cycle and every event of a program, with tolerance zero.

Cycle 0 is the first in which the machine runs. The host is always ready: it offers an input beat and takes an output beat
whenever it can. Three units work in program order, each at most once a cycle: fetch (an instruction), tiles, post groups.
An event waits for the latest of its conditions, so that time is a chain of maxima and sums; `_walk` is that chain.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np
from numba import njit

from .machine import Machine
from .layer import LayerShape
from .program import FIELDS, INPUT_CHANNEL, WORK, Init, Input, Opcode, Operand, Post, Program, Source, Tile, Update, Weights


# The layer whose L stands for a machine; sizes play no part in it.
LSTM = LayerShape(name="lstm", cell="lstm", inputs=1, hidden=1)


@dataclass(frozen=True)
class Contract:
    """Composite latencies in cycles, sums of the machine's named ones; the RTL is built from the same sums."""

    machine: Machine

    @property
    def product_cycles(self) -> int:
        """From the issue of a tile to its products."""
        return self.machine.latencies.operand + self.machine.latencies.multiply

    @property
    def sum_cycles(self) -> int:
        """From the issue of a tile to its sums at the accumulators. Every height is tapped after the full depth of the tree."""
        return self.product_cycles + self.machine.tree_levels * self.machine.latencies.add

    @property
    def complete_cycles(self) -> int:
        """From the issue of a row's last tile to the first post group that can take it."""
        return self.sum_cycles + self.machine.latencies.accumulate

    @property
    def gate_cycles(self) -> int:
        """From the issue of a post group to its activated gates."""
        return self.machine.latencies.drain + self.machine.latencies.activate

    @property
    def cell_cycles(self) -> int:
        """From the issue of a post group to its new cell state."""
        return self.gate_cycles + self.machine.latencies.lane_multiply + self.machine.latencies.lane_add

    @property
    def tail_cycles(self) -> int:
        """From a new cell state to the product that is a hidden value, written."""
        return self.machine.latencies.activate + self.machine.latencies.lane_multiply + self.machine.latencies.writeback

    def update_cycles(self, update: Update) -> int:
        """From the issue of a post group to the first tile that can read its hidden values, and to its output beat.

        For PEEPHOLE it is to its value in the gate buffer, for KEEP nothing.
        """
        match update:
            case Update.KEEP:
                return 0
            case Update.STATE | Update.HIDDEN:
                return self.gate_cycles + self.machine.latencies.writeback
            case Update.LSTM | Update.OUTPUT | Update.RESET:
                return self.cell_cycles + self.tail_cycles
            case Update.PEEPHOLE:
                return self.cell_cycles + self.machine.latencies.activate
            case Update.GRU | Update.CANDIDATE:
                return self.cell_cycles + self.tail_cycles + self.machine.latencies.lane_add

    def recurrence_cycles(self, shape: LayerShape) -> int:
        """L: from the last tile of a step to the first tile that needs its h, with all updates between."""
        complete, cycles = self.complete_cycles, self.update_cycles
        match shape.cell:
            case "rnn":
                return complete + cycles(Update.HIDDEN)
            case "gru":
                reset_before = 2 * complete + cycles(Update.RESET) + cycles(Update.CANDIDATE)
                return complete + cycles(Update.GRU) if shape.reset_after else reset_before
        update = cycles(Update.LSTM)
        if shape.peepholes:
            # KEEP, and PEEPHOLE of two gates, each a cycle after the one before; then cell state, third gate, output.
            update += 2 + 2 * cycles(Update.PEEPHOLE) + cycles(Update.OUTPUT)
        if shape.projected is not None:
            update += complete + cycles(Update.HIDDEN)
        return complete + update


class Count(IntEnum):
    """The counters that model and RTL share, in the order in which the RTL numbers them."""

    cycles = 0
    tiles = auto()
    tile_rows = auto()
    active_macs = auto()
    input_reads = auto()
    hidden_reads = auto()
    accumulator_reads = auto()
    bias_reads = auto()
    instructions = auto()
    input_writes = auto()
    weight_writes = auto()
    drained_rows = auto()
    gate_activations = auto()
    gate_writes = auto()
    gate_reads = auto()
    cell_activations = auto()
    lane_multiplications = auto()
    lane_additions = auto()
    cell_updates = auto()
    cell_reads = auto()
    hidden_writes = auto()
    outputs = auto()
    saturations = auto()
    idle_program = auto()
    idle_input = auto()
    idle_hidden = auto()
    idle_weights = auto()
    idle_accumulator = auto()
    idle_drained = auto()


IDLE_REASONS = tuple(count.name.removeprefix("idle_") for count in Count if count.name.startswith("idle_"))


@dataclass(frozen=True)
class Timing:
    """A run's prediction.

    counts : {counter name: value}; saturations are the numerics' and 0 here
    output_cycles : int64[beats], the cycle in which each output beat passes
    tile_spans, post_spans : int64[instructions, 4] of (first cycle, last cycle, issues, index among executed instructions)
    input_spans : int64[vectors, 2] of (first, last cycle) in which a vector was received
    word_cycles : int64[words], the cycle from which each streamed weight word can be read
    """

    counts: Mapping[str, int]
    output_cycles: np.ndarray
    tile_spans: np.ndarray
    post_spans: np.ndarray
    input_spans: np.ndarray
    word_cycles: np.ndarray

    @property
    def cycles(self) -> int:
        return self.counts["cycles"]

    @property
    def idle(self) -> dict[str, int]:
        return {reason: self.counts[f"idle_{reason}"] for reason in IDLE_REASONS}


def predict(program: Program) -> Timing:
    """Predict the run of `program` on its machine."""
    machine, contract = program.machine, Contract(program.machine)
    executed = list(program.executed())
    rows = {id(each): _row(each) for each in program.instructions}
    table = np.array([rows[id(each)] for each in executed])
    tiles = [each for each in executed if isinstance(each, Tile)]
    posts = [each for each in executed if isinstance(each, Post)]
    blocks = sum(tile.blocks(machine) for tile in tiles if tile.complete)
    groups = sum(post.groups(machine) for post in posts)
    vectors = sum(each.count for each in executed if isinstance(each, Input))
    words = sum(each.words for each in executed if isinstance(each, Weights))
    parameters = np.array(
        [
            machine.macs,
            machine.tile_rows.min,
            machine.lanes,
            machine.channels,
            machine.cursors,
            machine.memory_beats,
            contract.complete_cycles,
            machine.latencies.accumulate,
            machine.queues.tile,
            machine.queues.post,
            machine.queues.output,
        ],
        np.int64,
    )
    updates = np.array([contract.update_cycles(update) for update in Update], np.int64)
    counts = np.zeros(len(Count), np.int64)
    outputs = np.zeros(groups, np.int64)
    tile_spans = np.zeros((len(tiles), 4), np.int64)
    post_spans = np.zeros((len(posts), 4), np.int64)
    input_spans = np.zeros((vectors, 2), np.int64)
    word_cycles = np.zeros(words, np.int64)
    emitted = _walk(table, parameters, updates, blocks, groups, counts, outputs, tile_spans, post_spans, input_spans, word_cycles)
    if emitted < 0:
        raise ValueError("the program waits for something that no earlier instruction produces")
    named = {count.name: int(counts[count]) for count in Count}
    return Timing(named, outputs[:emitted], tile_spans, post_spans, input_spans, word_cycles)


# The columns of the table that `_walk` reads: the union of all instructions' fields.
Field = IntEnum("Field", list(dict.fromkeys(name for fields in FIELDS.values() for name, _ in fields)), start=0)


# WORK as a table of numbers by update; the gates are a set of bits.
_WORK = np.array(
    [
        (sum(1 << gate for gate in work.gates), work.multiplications, work.additions, work.activations, work.state_reads, work.state_writes)
        for work in (WORK[update] for update in Update)
    ],
    np.int64,
)


def _row(instruction) -> np.ndarray:
    row = np.zeros(len(Field), np.int64)
    for name, _ in FIELDS[instruction.opcode]:
        row[Field[name]] = getattr(instruction, name)
    return row


@njit(cache=True)
def _gate_bits(source, update, slot):
    """Return which gates (bits 0 to 3) a post group takes from finished sums, and which from the gate buffer."""
    if source == Source.INTERLEAVED:
        return 15, 0
    if source == Source.BUFFER:
        return 0, _WORK[update, 0]
    kept = _WORK[update, 0] & ~(1 << slot)
    return 1 << slot, 1 << slot if update == Update.PEEPHOLE else kept


@njit(cache=True)
def _ones(bits):
    return (bits & 1) + (bits >> 1 & 1) + (bits >> 2 & 1) + (bits >> 3 & 1)


@njit(cache=True)
def _walk(table, parameters, updates, blocks, groups, counts, outputs, tile_spans, post_spans, input_spans, word_ready):
    """Fill the result arrays; return the number of output beats, or -1 where the program would wait for ever."""
    macs, least_rows, lanes, channels, cursors, memory_beats = parameters[:6]
    complete_cycles, accumulate_cycles, tile_queue, post_queue, output_queue = parameters[6:]
    # Logs of what became available when: finished rows for post, written elements for tiles (by channel), freed input slots.
    row_total = np.zeros(blocks + 1, np.int64)
    row_cycle = np.zeros(blocks + 1, np.int64)
    rows_logged, rows_taken, row_pointer = 0, 0, 1
    channel_total = np.zeros((channels, groups + 1), np.int64)
    channel_cycle = np.zeros((channels, groups + 1), np.int64)
    channel_logged = np.zeros(channels, np.int64)
    cursor_base = np.zeros(cursors, np.int64)
    cursor_pointer = np.zeros(cursors, np.int64)
    vectors = len(input_spans)
    freed = np.zeros(vectors + 1, np.int64)
    vectors_freed, vectors_received, input_total = 0, 0, 0
    input_ready, input_elements, input_slots, input_count = 0, 0, 0, 0
    beat_next = 0
    # The last accumulate_cycles - 1 tiles, whose sums are not back yet.
    recent_cycle = np.full(accumulate_cycles, -(1 << 40), np.int64)
    recent_start = np.zeros(accumulate_cycles, np.int64)
    recent_size = np.zeros(accumulate_cycles, np.int64)
    recent_next = 0

    fetch = -1
    tile_index, post_index, emitted = 0, 0, 0
    tile_pops = np.full(len(tile_spans) + 1, -1, np.int64)
    post_pops = np.full(len(post_spans) + 1, -1, np.int64)
    tile_last, post_last = -1, -1
    # The update of the last groups that are not KEEP, and the cycle from which they have been written.
    kind, kind_written = -1, -1
    # The cycle in which the tile was issued that took a word sent from memory.
    words = len(word_ready)
    word_taken = np.zeros(words, np.int64)
    words_sent, words_taken, word_ring, memory_next = 0, 0, 0, 0
    idle_program = 0
    last_write = -1

    for line in range(len(table)):
        row = table[line]
        opcode = row[Field.opcode]
        fetch += 1
        if opcode == Opcode.TILE and tile_index >= tile_queue:
            fetch = max(fetch, tile_pops[tile_index - tile_queue] + 1)
        if opcode == Opcode.POST and post_index >= post_queue:
            fetch = max(fetch, post_pops[post_index - post_queue] + 1)
        counts[Count.instructions] += 1
        if opcode == Opcode.INPUT:
            input_ready, input_elements, input_slots, input_count = fetch + 1, row[Field.elements], row[Field.slots], row[Field.count]
            beat_next = max(beat_next, input_ready)
        elif opcode == Opcode.WEIGHTS:
            word_ring, memory_next = row[Field.ring], fetch + 1
        elif opcode == Opcode.TILE:
            pop = max(fetch + 1, tile_last)
            tile_pops[tile_index] = pop
            idle_program += pop - tile_last
            height = least_rows << row[Field.tap]
            width = macs // height
            size = 1 << row[Field.tap]
            block_count = -(-row[Field.rows] // height)
            column_count = -(-row[Field.columns] // width)
            issue = pop
            for index in range(block_count * column_count):
                if row[Field.columns_outer]:
                    column, block = index // block_count, index % block_count
                else:
                    block, column = index // column_count, index % column_count
                earliest = issue + 1
                ready = earliest
                active_columns = min(width, row[Field.columns] - column * width)
                if row[Field.wait]:
                    cursor, channel = row[Field.cursor], row[Field.channel]
                    need = cursor_base[cursor] + row[Field.column] + column * width + active_columns
                    if channel == INPUT_CHANNEL:
                        # Received vectors are logged lazily: each waits for the slot that an earlier tile frees.
                        while input_total < need:
                            if vectors_received >= input_count:
                                return -1
                            if vectors_received >= input_slots:
                                if vectors_received - input_slots >= vectors_freed:
                                    return -1
                                beat_next = max(beat_next, freed[vectors_received - input_slots] + 1)
                            input_spans[vectors_received, 0] = beat_next
                            beat_next += -(-input_elements // lanes)
                            input_spans[vectors_received, 1] = beat_next - 1
                            vectors_received += 1
                            input_total += input_elements
                        vector = (need - 1) // input_elements
                        beat = (need - 1 - vector * input_elements) // lanes
                        ready = max(ready, input_spans[vector, 0] + beat + 1)
                    else:
                        pointer = cursor_pointer[cursor]
                        while channel_total[channel, pointer] < need:
                            pointer += 1
                            if pointer > channel_logged[channel]:
                                return -1
                        cursor_pointer[cursor] = pointer
                        ready = max(ready, channel_cycle[channel, pointer])
                loaded = ready
                if row[Field.streamed]:
                    if words_taken >= words:
                        return -1
                    while words_sent <= words_taken:
                        if words_sent >= word_ring:
                            memory_next = max(memory_next, word_taken[words_sent - word_ring] + 1)
                        memory_next += memory_beats
                        word_ready[words_sent] = memory_next
                        words_sent += 1
                    loaded = max(loaded, word_ready[words_taken])
                place = block * size
                if row[Field.run]:
                    place += block // row[Field.run] * row[Field.gap]
                start = row[Field.accumulator] + place
                free = loaded
                first_column = column == 0
                if not (first_column and row[Field.init] == Init.ZERO):
                    read = row[Field.source] + place if first_column and row[Field.init] == Init.SOURCE else start
                    for other in range(accumulate_cycles):
                        if recent_start[other] < read + size and read < recent_start[other] + recent_size[other]:
                            free = max(free, recent_cycle[other] + accumulate_cycles)
                    counts[Count.accumulator_reads] += height
                    if first_column and row[Field.init] == Init.SOURCE:
                        counts[Count.bias_reads] += height
                waited = Count.idle_input if row[Field.operand] == Operand.INPUT else Count.idle_hidden
                counts[waited] += ready - earliest
                counts[Count.idle_weights] += loaded - ready
                counts[Count.idle_accumulator] += free - loaded
                issue = free
                if row[Field.streamed]:
                    word_taken[words_taken] = issue
                    words_taken += 1
                recent_cycle[recent_next], recent_start[recent_next], recent_size[recent_next] = issue, start, size
                recent_next = (recent_next + 1) % accumulate_cycles
                active_rows = min(height, row[Field.rows] - block * height)
                if row[Field.complete] and column == column_count - 1:
                    row_total[rows_logged + 1] = row_total[rows_logged] + active_rows
                    rows_logged += 1
                    row_cycle[rows_logged] = issue + complete_cycles
                counts[Count.tiles] += 1
                counts[Count.tile_rows] += height
                counts[Count.active_macs] += active_rows * active_columns
                counts[Count.input_reads if row[Field.operand] == Operand.INPUT else Count.hidden_reads] += width
                if index == 0:
                    tile_spans[tile_index, 0] = issue
            tile_last = issue
            tile_spans[tile_index, 1] = issue
            tile_spans[tile_index, 2] = block_count * column_count
            tile_spans[tile_index, 3] = line
            tile_index += 1
            if row[Field.advance]:
                cursor_base[row[Field.cursor]] += row[Field.advance]
                if row[Field.operand] == Operand.INPUT:
                    freed[vectors_freed] = tile_last
                    vectors_freed += 1
        elif opcode == Opcode.POST:
            pop = max(fetch + 1, post_last)
            post_pops[post_index] = pop
            issue = pop
            left = row[Field.neurons]
            source, update = row[Field.source], row[Field.update]
            live, kept = _gate_bits(source, update, row[Field.slot])
            activated = 0
            for slot in range(4):
                if live >> slot & 1 and row[Field.function0 + slot]:
                    activated += 1
            bundle = 1 << row[Field.stride]
            group = 0
            while left > 0:
                done = row[Field.neurons] - left
                taken = min(left, bundle, lanes)
                issue += 1
                if source == Source.INTERLEAVED or source == Source.GATE:
                    rows_taken += taken
                    if source == Source.INTERLEAVED and done % bundle == 0:
                        rows_taken += (row[Field.runs] - 1) * bundle
                    while row_pointer > rows_logged or row_total[row_pointer] < rows_taken:
                        row_pointer += 1
                        if row_pointer > rows_logged:
                            return -1
                    issue = max(issue, row_cycle[row_pointer])
                if update == Update.KEEP:
                    if kind == Update.PEEPHOLE:
                        issue = max(issue, kind_written)
                elif kind != update:
                    issue = max(issue, kind_written)
                written = issue + updates[update]
                if row[Field.emit]:
                    if emitted >= output_queue:
                        issue = max(issue, outputs[emitted - output_queue] + 1)
                        written = issue + updates[update]
                    outputs[emitted] = written
                    emitted += 1
                    counts[Count.outputs] += taken
                counts[Count.drained_rows] += taken * _ones(live)
                counts[Count.gate_activations] += taken * activated
                counts[Count.gate_reads] += taken * _ones(kept)
                if update == Update.KEEP:
                    counts[Count.gate_writes] += taken * _ones(live)
                else:
                    kind, kind_written = update, written
                    if update == Update.PEEPHOLE:
                        counts[Count.gate_writes] += taken
                counts[Count.lane_multiplications] += taken * _WORK[update, 1]
                counts[Count.lane_additions] += taken * _WORK[update, 2]
                if row[Field.cell_function]:
                    counts[Count.cell_activations] += taken * _WORK[update, 3]
                counts[Count.cell_reads] += taken * _WORK[update, 4]
                counts[Count.cell_updates] += taken * _WORK[update, 5]
                if row[Field.signal]:
                    counts[Count.hidden_writes] += taken
                    channel = row[Field.channel]
                    entry = channel_logged[channel] + 1
                    channel_total[channel, entry] = channel_total[channel, entry - 1] + taken
                    channel_cycle[channel, entry] = written
                    channel_logged[channel] = entry
                if group == 0:
                    post_spans[post_index, 0] = issue
                left -= taken
                group += 1
            post_last = issue
            post_spans[post_index, 1] = issue
            post_spans[post_index, 2] = group
            post_spans[post_index, 3] = line
            post_index += 1

    while vectors_received < min(input_count, input_slots + vectors_freed):
        if vectors_received >= input_slots:
            beat_next = max(beat_next, freed[vectors_received - input_slots] + 1)
        input_spans[vectors_received, 0] = beat_next
        beat_next += -(-input_elements // lanes)
        input_spans[vectors_received, 1] = beat_next - 1
        vectors_received += 1
        input_total += input_elements
    if emitted:
        last_write = outputs[emitted - 1] + 1
    end = max(fetch + 1, last_write)
    if tile_index:
        end = max(end, tile_last + complete_cycles)
    end = max(end, kind_written, beat_next)
    if words:
        if words_taken < words:
            return -1
        end = max(end, memory_next)
    counts[Count.cycles] = end + 1
    counts[Count.input_writes] = input_total
    counts[Count.weight_writes] = words
    # After the last tile: fetching until the halt has been seen, drained after that.
    idle_program += max(0, fetch - tile_last)
    counts[Count.idle_program] = idle_program
    counts[Count.idle_drained] = end - max(fetch, tile_last)
    return emitted
