"""Executes a program's arithmetic: the values that the RTL computes, bit for bit.

Sums are float32 in the RTL's order: products of a tile pairwise up the add-reduce tree, then tiles in issue order onto
the accumulator. Nothing here depends on time.
"""

from dataclasses import dataclass

import numpy as np

from . import arithmetic
from .arithmetic import Activation
from .program import NO_LIMIT, Init, Input, Operand, Post, Program, Source, Tile, Update

# Updates whose cell function's argument is limited, as those of the gates are.
LIMITED_STATE = (Update.GRU, Update.CANDIDATE, Update.PEEPHOLE)


@dataclass(frozen=True)
class Values:
    """What a run yields, of each stream in turn.

    outputs : float16[steps, P], the hidden values; states : float32[H], the last cell state, empty where none is sent
    saturations : updates in which an LSTM's cell state was clamped
    """

    outputs: tuple[np.ndarray, ...]
    states: tuple[np.ndarray, ...]
    saturations: int


def execute(program: Program, inputs: np.ndarray) -> Values:
    """Run `program` on its input stream, float16[vectors, input_elements]."""
    return _Executor(program, inputs).run()


class _Executor:
    def __init__(self, program: Program, inputs: np.ndarray):
        machine = program.machine
        self.program, self.machine = program, machine
        self.stream = iter(inputs)
        self.arrived = 0
        self.sums = np.zeros(machine.buffers.accumulator_rows, np.float32)
        self.sums[: len(program.accumulators)] = program.accumulators
        self.vectors = {
            Operand.INPUT: np.zeros(machine.buffers.input_elements, np.float16),
            Operand.HIDDEN: np.zeros(machine.buffers.hidden_elements, np.float16),
        }
        self.vectors[Operand.HIDDEN][: len(program.hidden)] = program.hidden
        self.cell = np.zeros(machine.buffers.cell_elements, np.float32)
        self.cell[: len(program.cell)] = program.cell
        self.gates = np.zeros((4, machine.buffers.cell_elements), np.float32)
        self.weights: dict[tuple, np.ndarray] = {}
        self.memory_word = 0
        self.ring: Input | None = None
        self.consumed = 0
        self.emitted: list[list[np.ndarray]] = [[] for _ in program.streams]
        self.final: list[list[np.ndarray]] = [[] for _ in program.streams]
        self.saturations = 0

    def run(self) -> Values:
        for instruction in self.program.executed():
            match instruction:
                case Input():
                    self.ring = instruction
                case Tile():
                    self.tile(instruction)
                case Post():
                    self.post(instruction)
        outputs, states = [], []
        for stream, emitted, final in zip(self.program.streams, self.emitted, self.final, strict=True):
            outputs.append(np.concatenate(emitted).reshape(stream.steps, stream.outputs))
            states.append(np.concatenate([np.zeros(0, np.float32), *final]))
        return Values(tuple(outputs), tuple(states), self.saturations)

    def tile(self, tile: Tile) -> None:
        machine = self.machine
        if tile.operand is Operand.INPUT:
            self.receive()
        blocks, column_tiles = tile.blocks(machine), tile.column_tiles(machine)
        height, width = tile.height(machine), tile.width(machine)
        first = tile.vector * machine.vector_row_elements + tile.column
        scalars = np.zeros(column_tiles * width, np.float32)
        scalars[: tile.columns] = self.vectors[tile.operand][first : first + tile.columns]
        sums = arithmetic.multiply_fp16(self.unpacked(tile), scalars.reshape(column_tiles, width).T[:, :, None, None])
        while len(sums) > 1:
            sums = arithmetic.add_fp32(sums[0::2], sums[1::2])
        rows = self.rows(tile, tile.accumulator)
        match tile.init:
            case Init.ACCUMULATE:
                total = self.sums[rows]
            case Init.ZERO:
                total = np.zeros(blocks * height, np.float32)
            case Init.SOURCE:
                total = self.sums[self.rows(tile, tile.source)]
        for column in range(column_tiles):
            total = arithmetic.add_fp32(total, sums[0, column].reshape(-1))
        self.sums[rows] = total
        if tile.operand is Operand.INPUT and tile.advance:
            self.consumed += 1

    def rows(self, tile: Tile, group: int) -> slice | np.ndarray:
        """Return the accumulator rows of a tile instruction whose first one is that of `group`."""
        minimum, blocks, height = self.machine.tile_rows.min, tile.blocks(self.machine), tile.height(self.machine)
        if not tile.run:
            return slice(group * minimum, group * minimum + blocks * height)
        block = np.arange(blocks)
        starts = group * minimum + block * height + block // tile.run * tile.gap * minimum
        return (starts[:, None] + np.arange(height)).reshape(-1)

    def receive(self) -> None:
        """Place the vectors that the ring has room for."""
        ring = self.ring
        while self.arrived < min(self.consumed + ring.slots, ring.count):
            start = (ring.vector + self.arrived % ring.slots * ring.stride) * self.machine.vector_row_elements
            self.vectors[Operand.INPUT][start : start + ring.elements] = next(self.stream)
            self.arrived += 1

    def unpacked(self, tile: Tile) -> np.ndarray:
        """Return float32[N, column tiles, blocks, K], the weights of a tile instruction; kept, since steps repeat."""
        machine = self.machine
        blocks, column_tiles = tile.blocks(machine), tile.column_tiles(machine)
        source, first = self.program.weights, tile.weight
        if tile.streamed:
            source, first = self.program.memory, self.memory_word % len(self.program.memory)
            self.memory_word += blocks * column_tiles
        key = tile.streamed, first, tile.tap, tile.columns_outer, tile.rows, tile.columns
        if key not in self.weights:
            words = source[first : first + blocks * column_tiles].view(np.float16)
            outer = (column_tiles, blocks) if tile.columns_outer else (blocks, column_tiles)
            split = words.reshape(*outer, 1 << tile.tap, tile.width(machine), machine.tile_rows.min)
            order = (3, 0, 1, 2, 4) if tile.columns_outer else (3, 1, 0, 2, 4)
            shape = (tile.width(machine), column_tiles, blocks, tile.height(machine))
            self.weights[key] = np.ascontiguousarray(split.transpose(order).reshape(shape), np.float32)
        return self.weights[key]

    def post(self, post: Post) -> None:
        first = post.cell * self.machine.lanes + post.neuron
        cells = slice(first, first + post.neurons)
        limit = None if post.limit == NO_LIMIT else np.uint32(post.limit).view(np.float32)
        gates, live = self.gate_values(post, cells, limit)
        if post.update is Update.KEEP:
            for slot in live:
                self.gates[slot, cells] = gates[slot]
            return
        if post.update is Update.STATE:
            self.final[post.stream].append(self.cell[cells].copy())
            return
        result = gates[post.slot] if post.update is Update.HIDDEN else self.updated(post, gates, cells, limit)
        if result is None:
            return
        hidden = arithmetic.round_fp16(result)
        if post.signal:
            start = post.vector * self.machine.vector_row_elements + post.neuron
            self.vectors[Operand.HIDDEN][start : start + post.neurons] = hidden
        if post.emit:
            self.emitted[post.stream].append(hidden)

    def gate_values(self, post: Post, cells: slice, limit: np.float32 | None) -> tuple[list[np.ndarray], tuple[int, ...]]:
        """Return the four gates, activated where they come from sums and else as kept, and the slots of the former."""
        gates = list(self.gates[:, cells])
        match post.source:
            case Source.INTERLEAVED:
                size = 1 << post.stride
                rows = self.sums[post.accumulator : post.accumulator + 4 * post.neurons]
                sums = dict(enumerate(rows.reshape(-1, 4, size).transpose(1, 0, 2).reshape(4, post.neurons)))
            case Source.GATE | Source.CONSTANT:
                sums = {post.slot: self.sums[post.accumulator : post.accumulator + post.neurons]}
            case Source.BUFFER:
                sums = {}
        for slot, values in sums.items():
            gates[slot] = arithmetic.activate(Activation(getattr(post, f"function{slot}")), values, limit)
        return gates, tuple(sums)

    def updated(self, post: Post, gates: list[np.ndarray], cells: slice, limit: np.float32 | None) -> np.ndarray | None:
        """Update the neurons' states and return the result as float32, None for one that stays in the gate buffer."""
        multiply, add = arithmetic.lane_multiply, arithmetic.lane_add
        cell = self.cell[cells]
        nothing, one = np.zeros(post.neurons, np.float32), np.ones(post.neurons, np.float32)
        match post.update:
            case Update.LSTM:
                factors, addend = (gates[1], cell), multiply(gates[0], gates[2])
            case Update.OUTPUT:
                factors, addend = (one, cell), nothing
            case Update.RESET:
                factors, addend = (gates[2], cell), nothing
            case Update.PEEPHOLE:
                factors, addend = (gates[post.slot], cell), self.gates[post.slot, cells]
            case Update.GRU:
                factors, addend = (gates[2], gates[0]), gates[3]
            case Update.CANDIDATE:
                factors, addend = (nothing, nothing), gates[3]
        state, clamped = arithmetic.saturate_cell(add(multiply(*factors), addend))
        function = Activation(post.cell_function)
        activated = arithmetic.activate(function, state, limit if post.update in LIMITED_STATE else None)
        match post.update:
            case Update.PEEPHOLE:
                self.gates[post.slot, cells] = activated
                return None
            case Update.LSTM:
                self.cell[cells] = state
                self.saturations += int(np.count_nonzero(clamped))
                return multiply(gates[3], activated)
            case Update.OUTPUT:
                return multiply(gates[3], activated)
            case Update.RESET:
                return multiply(one, activated)
        entered = multiply(add(one, -gates[1]), activated)
        self.cell[cells], _ = arithmetic.saturate_cell(add(entered, multiply(gates[1], cell)))
        return self.cell[cells].copy()
