"""Executes a program's arithmetic: the values that the RTL computes, bit for bit.

Sums are float32 in the RTL's order: products of a tile pairwise up the add-reduce tree, then tiles in issue order onto
the accumulator. Nothing here depends on time.
"""

from dataclasses import dataclass

import numpy as np

from . import arithmetic
from .arithmetic import Activation
from .program import Init, Input, Operand, Post, Program, Source, Tile, Update


@dataclass(frozen=True)
class Values:
    """What a run yields.

    outputs : float16[steps, H], the hidden values; cell : float32[H], the last cell state
    saturations : updates in which the cell state was clamped
    """

    outputs: np.ndarray
    cell: np.ndarray
    saturations: int


def execute(program: Program, inputs: np.ndarray) -> Values:
    """Run `program` on `inputs` : float16[steps, D]."""
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
        self.ring: Input | None = None
        self.consumed = 0
        self.emitted: list[np.ndarray] = []
        self.final: list[np.ndarray] = []
        self.saturations = 0

    def run(self) -> Values:
        for instruction in self.program.executed():
            match instruction:
                case Input():
                    self.ring = instruction
                case Tile():
                    self.tile(instruction)
                case Post(update=Update.STATE):
                    first = instruction.cell * self.machine.lanes + instruction.neuron
                    self.final.append(self.cell[first : first + instruction.neurons].copy())
                case Post():
                    self.post(instruction)
        outputs = np.concatenate(self.emitted).reshape(self.program.steps, self.program.neurons)
        return Values(outputs, np.concatenate(self.final), self.saturations)

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
        row = tile.accumulator * machine.tile_rows.min
        rows = slice(row, row + blocks * height)
        match tile.init:
            case Init.ACCUMULATE:
                total = self.sums[rows]
            case Init.ZERO:
                total = np.zeros(blocks * height, np.float32)
            case Init.SOURCE:
                source = tile.source * machine.tile_rows.min
                total = self.sums[source : source + blocks * height]
        for column in range(column_tiles):
            total = arithmetic.add_fp32(total, sums[0, column].reshape(-1))
        self.sums[rows] = total
        if tile.operand is Operand.INPUT and tile.advance:
            self.consumed += 1

    def receive(self) -> None:
        """Place the vectors that the ring has room for."""
        ring = self.ring
        while self.arrived < min(self.consumed + ring.slots, ring.count):
            start = (ring.vector + self.arrived % ring.slots * ring.stride) * self.machine.vector_row_elements
            self.vectors[Operand.INPUT][start : start + ring.elements] = next(self.stream)
            self.arrived += 1

    def unpacked(self, tile: Tile) -> np.ndarray:
        """Return float32[N, column tiles, blocks, K], the weights of a tile instruction; kept, since steps repeat."""
        key = tile.weight, tile.tap, tile.columns_outer, tile.rows, tile.columns
        if key not in self.weights:
            machine = self.machine
            blocks, column_tiles = tile.blocks(machine), tile.column_tiles(machine)
            words = self.program.weights[tile.weight : tile.weight + blocks * column_tiles].view(np.float16)
            outer = (column_tiles, blocks) if tile.columns_outer else (blocks, column_tiles)
            split = words.reshape(*outer, 1 << tile.tap, tile.width(machine), machine.tile_rows.min)
            order = (3, 0, 1, 2, 4) if tile.columns_outer else (3, 1, 0, 2, 4)
            shape = (tile.width(machine), column_tiles, blocks, tile.height(machine))
            self.weights[key] = np.ascontiguousarray(split.transpose(order).reshape(shape), np.float32)
        return self.weights[key]

    def post(self, post: Post) -> None:
        lanes = slice(post.neuron, post.neuron + post.neurons)
        functions = [Activation(getattr(post, f"function{slot}")) for slot in range(4)]
        match post.source:
            case Source.INTERLEAVED:
                size = 1 << post.stride
                rows = self.sums[post.accumulator : post.accumulator + 4 * post.neurons]
                split = rows.reshape(-1, 4, size).transpose(1, 0, 2).reshape(4, post.neurons)
                gates = [arithmetic.activate(function, values) for function, values in zip(functions, split, strict=True)]
            case Source.GATE:
                values = self.sums[post.accumulator : post.accumulator + post.neurons]
                self.gates[post.slot, lanes] = arithmetic.activate(functions[post.slot], values)
                return
            case Source.BUFFER:
                gates = list(self.gates[:, lanes])
        enter, forget, update, leave = gates
        start = post.cell * self.machine.lanes + post.neuron
        cells = slice(start, start + post.neurons)
        cell = arithmetic.add_fp32(arithmetic.lane_multiply(forget, self.cell[cells]), arithmetic.lane_multiply(enter, update))
        self.cell[cells], clamped = arithmetic.saturate_cell(cell)
        self.saturations += int(np.count_nonzero(clamped))
        activated = arithmetic.activate(Activation(post.cell_function), self.cell[cells])
        hidden = arithmetic.round_fp16(arithmetic.lane_multiply(leave, activated))
        first = post.vector * self.machine.vector_row_elements + post.neuron
        self.vectors[Operand.HIDDEN][first : first + post.neurons] = hidden
        if post.emit:
            self.emitted.append(hidden)
