"""Compiles one recurrent layer for one machine into a program.

A schedule is a generator over the same instructions. `sequential` computes and activates one gate after another; `batch`
computes the hidden parts of all gates, then their input parts, then activates them; `intergate` interleaves the rows of
the gates, so that a block yields whole neurons, whose update overlaps the next block; `unfolded` is intergate with the
input part of step t+1 in the time in which h_t is not there yet, where the others take it after the hidden part of its
own step. All walk columns first, so that the newest elements of h are needed last.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Literal

import numpy as np

from .arithmetic import Activation
from .errors import ConfigError, NetworkError
from .machine import Machine
from .program import (
    INPUT_CHANNEL,
    End,
    Halt,
    Init,
    Input,
    Instruction,
    Loop,
    Operand,
    Post,
    Program,
    Source,
    Tile,
    Tiling,
    Update,
)

GATES = 4
GATE_FUNCTIONS = (Activation.SIGMOID, Activation.SIGMOID, Activation.TANH, Activation.SIGMOID)
INPUT_SLOTS = 2
HIDDEN_CHANNEL = 1
EDGE_DEPTH = 2  # a leftover of rows or columns is itself cut once more
INTERLEAVED = ("intergate", "unfolded")
SCHEDULES = ("sequential", "batch", *INTERLEAVED)

Part = Literal["input", "hidden"]
Emit = Callable[[int], list[Instruction]]  # the instructions of a step


@dataclass(frozen=True)
class Region:
    """A rectangle of a part's packed matrix that one tile shape covers; `weight` is its first weight word."""

    part: Part
    row: int
    rows: int
    column: int
    columns: int
    tap: int
    weight: int = 0

    def tiles(self, machine: Machine) -> tuple[int, int]:
        """Return (blocks of rows, tiles of columns)."""
        height, width = machine.tile_shape(self.tap)
        return -(-self.rows // height), -(-self.columns // width)

    def count(self, machine: Machine) -> int:
        """Return the number of tiles."""
        return prod(self.tiles(machine))


def cover(machine: Machine, part: Part, row: int, rows: int, columns: int, tap: int) -> list[Region]:
    """Cover `rows` x `columns` with tiles of `tap`, and the rows and columns left over with the shapes that need fewest tiles.

    Regions come in an order in which every row meets its columns from left to right and rows are completed in rising order.
    """
    taps = len(machine.tile_heights)

    @cache
    def tiled(row: int, rows: int, column: int, columns: int, tap: int, depth: int) -> tuple[int, tuple[Region, ...]]:
        """Return the tiles and regions of a rectangle whose upper left corner is tiled with `tap`."""
        height, width = machine.tile_shape(tap)
        whole_rows, whole_columns = rows - rows % height, columns - columns % width
        full = Region(part, row, rows, column, columns, tap)
        choices = [(full.count(machine), (full,))]
        for main_rows in {whole_rows, rows} - {0} if depth else ():
            for main_columns in {whole_columns, columns} - {0}:
                main = Region(part, row, main_rows, column, main_columns, tap)
                right, rights = best(row, main_rows, column + main_columns, columns - main_columns, depth - 1)
                below, belows = best(row + main_rows, rows - main_rows, column, columns, depth - 1)
                choices.append((main.count(machine) + right + below, (main, *rights, *belows)))
        return min(choices, key=lambda choice: (choice[0], len(choice[1])))

    def best(row: int, rows: int, column: int, columns: int, depth: int) -> tuple[int, tuple[Region, ...]]:
        if not rows or not columns:
            return 0, ()
        shapes = map(machine.tile_shape, range(taps))
        aligned = [tap for tap, (height, width) in enumerate(shapes) if row % height == 0 and column % width == 0]
        return min((tiled(row, rows, column, columns, tap, depth) for tap in aligned), key=lambda choice: (choice[0], len(choice[1])))

    return list(tiled(row, rows, 0, columns, tap, EDGE_DEPTH)[1])


def _with_tail(machine: Machine, regions: list[Region], columns: int, tiling: Tiling) -> list[Region]:
    """Split the regions that complete rows, those that end at `columns`, as `tiling` says of the tail."""
    if not tiling.tail_columns:
        return regions
    split = []
    for region in regions:
        blocks, column_tiles = region.tiles(machine)
        if region.column + region.columns < columns or column_tiles <= tiling.tail_columns or blocks <= tiling.tail_blocks:
            split.append(region)
            continue
        height, width = machine.tile_shape(region.tap)
        head = (column_tiles - tiling.tail_columns) * width
        split.append(replace(region, columns=head))
        rows = tiling.tail_blocks * height
        for first in range(0, region.rows, rows):
            size = min(rows, region.rows - first)
            split.append(replace(region, row=region.row + first, rows=size, column=region.column + head, columns=region.columns - head))
    return split


@dataclass(frozen=True)
class Layout:
    """Where a layer's rows lie. `order[r]` is the matrix row of packed row r; gates are i, f, g, o."""

    order: np.ndarray
    bases: tuple[int, ...]
    padded_rows: int


def _pack_interleaved(machine: Machine, hidden: int) -> Layout:
    order = []
    for first, size in _groups(machine, hidden):
        order += [gate * hidden + neuron for gate in range(GATES) for neuron in range(first, first + size)]
    return Layout(np.array(order), (0,), _round_up(GATES * hidden, machine.tile_rows.max))


def _pack_gates(machine: Machine, hidden: int) -> Layout:
    padded = _round_up(hidden, machine.tile_rows.max)
    return Layout(np.arange(GATES * hidden), tuple(gate * padded for gate in range(GATES)), GATES * padded)


def _groups(machine: Machine, hidden: int) -> list[tuple[int, int]]:
    """Split the neurons into full groups of `lanes`, then powers of two, so that no row of a group is empty."""
    groups = [(first, machine.lanes) for first in range(0, hidden - hidden % machine.lanes, machine.lanes)]
    first = len(groups) * machine.lanes
    while first < hidden:
        size = 1 << ((hidden - first).bit_length() - 1)
        groups.append((first, size))
        first += size
    return groups


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class _Generator:
    """Emits the instructions of an LSTM layer's steps."""

    def __init__(self, machine: Machine, inputs: int, hidden: int, tiling: Tiling):
        self.machine, self.inputs, self.hidden, self.tiling = machine, inputs, hidden, tiling
        self.input_stride = -(-inputs // machine.vector_row_elements)
        self.hidden_stride = -(-hidden // machine.vector_row_elements)
        self.weight_words = 0

    def regions(self, part: Part, row: int, rows: int) -> list[Region]:
        """Cover a part's rows and give each region its weight words."""
        machine, tiling = self.machine, self.tiling
        if part == "input":
            regions = cover(machine, part, row, rows, self.inputs, machine.tile_heights.index(tiling.input_rows))
        else:
            regions = cover(machine, part, row, rows, self.hidden, machine.tile_heights.index(tiling.hidden_rows))
            regions = _with_tail(machine, regions, self.hidden, tiling)
        placed = []
        for region in regions:
            placed.append(replace(region, weight=self.weight_words))
            self.weight_words += region.count(machine)
        return placed

    def tiles(self, regions: list[Region], *, base: int, step: int, starts: bool, consume: bool = True) -> list[Instruction]:
        """Return the tiles of one part in one step; sums lie from accumulator row `base` on, biases from row 0 on.

        The part that `starts` adds to the biases, and the other completes the rows. With `consume` the vector is done with.
        """
        minimum = self.machine.tile_rows.min
        from_input = regions[0].part == "input"
        waits = from_input or step > 0
        columns = self.inputs if from_input else self.hidden
        slot = step % INPUT_SLOTS * self.input_stride if from_input else (step + 1) % 2 * self.hidden_stride
        instructions = []
        for index, region in enumerate(regions):
            last = index == len(regions) - 1
            source = starts and region.column == 0
            instructions.append(
                Tile(
                    tap=region.tap,
                    columns_outer=True,
                    init=Init.SOURCE if source else Init.ACCUMULATE,
                    complete=not starts and region.column + region.columns == columns,
                    operand=Operand.INPUT if from_input else Operand.HIDDEN,
                    wait=waits,
                    channel=INPUT_CHANNEL if from_input else HIDDEN_CHANNEL,
                    cursor=INPUT_CHANNEL if from_input else HIDDEN_CHANNEL,
                    advance=columns if last and consume and waits else 0,
                    vector=slot,
                    column=region.column,
                    rows=region.rows,
                    columns=region.columns,
                    accumulator=(base + region.row) // minimum,
                    source=region.row // minimum if source else 0,
                    weight=region.weight,
                )
            )
        return instructions

    def post(self, *, step: int, source: Source, update: Update, row: int = 0, slot: int = 0) -> list[Instruction]:
        """Return the post instructions that take all neurons through one activation or update."""
        lanes = self.machine.lanes
        whole = self.hidden - self.hidden % lanes
        spans = [(0, self.hidden, lanes)]
        if source is Source.INTERLEAVED:
            spans = [(0, whole, lanes)] if whole else []
            spans += [(first, size, size) for first, size in _groups(self.machine, self.hidden) if size < lanes]
        updates = update is Update.LSTM
        functions = [GATE_FUNCTIONS[slot]] * GATES if source is Source.GATE else GATE_FUNCTIONS
        return [
            Post(
                source=source,
                update=update,
                function0=functions[0],
                function1=functions[1],
                function2=functions[2],
                function3=functions[3],
                cell_function=Activation.TANH,
                slot=slot,
                stride=size.bit_length() - 1,
                accumulator=row + first * (GATES if source is Source.INTERLEAVED else 1),
                neuron=first,
                neurons=count,
                vector=step % 2 * self.hidden_stride,
                cell=0,
                signal=updates,
                channel=HIDDEN_CHANNEL,
                emit=update is not Update.KEEP,
                fence=update is Update.STATE and first == 0,
            )
            for first, count, size in spans
        ]


def _interleaved(generator: _Generator, layout: Layout, steps: int, *, ahead: bool) -> tuple[list[Region], Emit]:
    """Intergate, or with `ahead` unfolded."""
    rows = GATES * generator.hidden
    inputs = generator.regions("input", 0, rows)
    hiddens = generator.regions("hidden", 0, rows)

    def base(step: int) -> int:
        return layout.padded_rows * (1 + step % 2)

    def input_part(step: int) -> list[Instruction]:
        return generator.tiles(inputs, base=base(step), step=step, starts=ahead)

    def emit(step: int) -> list[Instruction]:
        code = input_part(0) if ahead and step == 0 else []
        code += generator.tiles(hiddens, base=base(step), step=step, starts=not ahead)
        if not ahead:
            code += input_part(step)
        code += generator.post(step=step, source=Source.INTERLEAVED, update=Update.LSTM, row=base(step))
        if ahead and step + 1 < steps:
            code += input_part(step + 1)
        return code

    return inputs + hiddens, emit


def _gate_by_gate(generator: _Generator, layout: Layout, *, batch: bool) -> tuple[list[Region], Emit]:
    """Sequential, or with `batch` all gates before the first activation."""
    parts = [
        (generator.regions("input", base, generator.hidden), generator.regions("hidden", base, generator.hidden)) for base in layout.bases
    ]

    def emit(step: int) -> list[Instruction]:
        base = layout.padded_rows * (1 + step % 2)
        hidden_parts, input_parts, activations = [], [], []
        for gate, (inputs, hiddens) in enumerate(parts):
            last = gate == GATES - 1
            hidden_parts.append(generator.tiles(hiddens, base=base, step=step, starts=True, consume=last))
            input_parts.append(generator.tiles(inputs, base=base, step=step, starts=False, consume=last))
            activations.append(generator.post(step=step, source=Source.GATE, update=Update.KEEP, row=base + layout.bases[gate], slot=gate))
        by_gate = zip(hidden_parts, input_parts, activations, strict=True)
        pieces = hidden_parts + input_parts + activations if batch else [piece for gate in by_gate for piece in gate]
        return [each for piece in pieces for each in piece] + generator.post(step=step, source=Source.BUFFER, update=Update.LSTM)

    return [region for pair in parts for part in pair for region in part], emit


def _roll(emit: Emit, steps: int) -> list[Instruction]:
    """Lay out all steps, those between the first and the last as a loop over pairs (buffers alternate by step)."""
    pairs = max(0, (steps - 2) // 2)
    code = emit(0)
    if pairs:
        code += [Loop(count=pairs), *emit(1), *emit(2), End()]
    for step in range(1 + 2 * pairs, steps):
        code += emit(step)
    return code


def compile_layer(
    machine: Machine, *, inputs: int, hidden: int, steps: int, schedule: str, tile: int | Tiling
) -> tuple[Program, list[Region], Layout]:
    """Compile an LSTM layer of the given shape; weights and states are added by `load`. A number as `tile` is one height for all.

    Raises ConfigError for a schedule or tile that the machine does not have, NetworkError for a size that does not fit.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
    tiling = tile if isinstance(tile, Tiling) else Tiling(tile, tile)
    for height in (tiling.input_rows, tiling.hidden_rows):
        if height not in machine.tile_heights:
            allowed = ", ".join(map(str, machine.tile_heights))
            raise ConfigError(f"tile must be auto or a height of machine {machine.name} ({allowed}), not {height!r}")
    for name, value in (("inputs", inputs), ("hidden", hidden), ("steps", steps)):
        if value < 1:
            raise NetworkError(f"{name} must be at least 1, not {value}")
    generator = _Generator(machine, inputs, hidden, tiling)
    if schedule in INTERLEAVED:
        layout = _pack_interleaved(machine, hidden)
        regions, emit = _interleaved(generator, layout, steps, ahead=schedule == "unfolded")
    else:
        layout = _pack_gates(machine, hidden)
        regions, emit = _gate_by_gate(generator, layout, batch=schedule == "batch")
    _require_fit(machine, generator, layout, hidden, inputs)
    instructions = [
        Input(vector=0, stride=generator.input_stride, slots=INPUT_SLOTS, elements=inputs, count=steps),
        *_roll(emit, steps),
        *generator.post(step=0, source=Source.BUFFER, update=Update.STATE),
        Halt(),
    ]
    if len(instructions) > machine.buffers.program_words:
        raise NetworkError(f"the program needs {len(instructions)} words; machine {machine.name} has {machine.buffers.program_words}")
    program = Program(
        machine=machine,
        schedule=schedule,
        tiling=tiling,
        steps=steps,
        inputs=inputs,
        neurons=hidden,
        instructions=tuple(instructions),
        weights=np.zeros((0, machine.slices, machine.tile_rows.min), np.uint16),
        accumulators=np.zeros(0, np.float32),
        hidden=np.zeros(0, np.float16),
        cell=np.zeros(0, np.float32),
    )
    return program, regions, layout


def _require_fit(machine: Machine, generator: _Generator, layout: Layout, hidden: int, inputs: int) -> None:
    buffers, row = machine.buffers, machine.vector_row_elements
    word_bytes = machine.weight_word_bytes
    needs = (
        ("weight_bytes", generator.weight_words * word_bytes, f"{generator.weight_words} words of {word_bytes} bytes"),
        ("accumulator_rows", 3 * layout.padded_rows, f"3 x {layout.padded_rows} rows: biases and the sums of two steps"),
        ("input_elements", INPUT_SLOTS * generator.input_stride * row, f"{INPUT_SLOTS} vectors of {inputs} elements in rows of {row}"),
        ("hidden_elements", 2 * generator.hidden_stride * row, f"2 vectors of {hidden} elements in rows of {row}"),
        ("cell_elements", _round_up(hidden, machine.lanes), f"{hidden} neurons in rows of {machine.lanes}"),
    )
    for name, need, how in needs:
        have = getattr(buffers, name)
        if need > have:
            raise NetworkError(
                f"an LSTM of {inputs} inputs and {hidden} hidden does not fit machine {machine.name}: "
                f"buffers.{name} must be at least {need} (= {how}), not {have}"
            )


def load(
    program: Program,
    regions: list[Region],
    layout: Layout,
    *,
    input_kernel: np.ndarray,
    recurrent_kernel: np.ndarray,
    bias: np.ndarray,
    hidden: np.ndarray,
    cell: np.ndarray,
) -> Program:
    """Return the program with its memory images.

    input_kernel : float[4H, D]; recurrent_kernel : float[4H, H]; bias : float[4H]; gates in the order i, f, g, o
    hidden, cell : float[H], the states before the first step
    """
    machine, neurons = program.machine, program.neurons
    gate_rows = _packed_rows(layout, neurons)
    kernels = {"input": _quantise(input_kernel), "hidden": _quantise(recurrent_kernel)}
    words = max(region.weight + region.count(machine) for region in regions)
    weights = np.zeros((words, machine.slices, machine.tile_rows.min), np.uint16)
    for region in regions:
        weights[region.weight :][: region.count(machine)] = _tile(machine, region, kernels[region.part], gate_rows)
    accumulators = np.zeros(layout.padded_rows, np.float32)
    filled = gate_rows >= 0
    # A bias of -0 would let the sign of a zero sum depend on padding; adding +0 makes it +0.
    accumulators[filled] = np.asarray(bias, np.float32)[gate_rows[filled]] + np.float32(0)
    row = machine.vector_row_elements
    stride = -(-neurons // row) * row
    hiddens = np.zeros(2 * stride, np.float16)
    hiddens[stride : stride + neurons] = _quantise(hidden)
    cells = np.zeros(_round_up(neurons, machine.lanes), np.float32)
    cells[:neurons] = cell
    return program.replace(weights=weights, accumulators=accumulators, hidden=hiddens, cell=cells)


def _quantise(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).astype(np.float16)


def _packed_rows(layout: Layout, neurons: int) -> np.ndarray:
    """Return int[padded_rows]: the matrix row in each accumulator row, -1 where there is none."""
    rows = np.full(layout.padded_rows, -1)
    size = GATES * neurons // len(layout.bases)
    for index, base in enumerate(layout.bases):
        rows[base : base + size] = layout.order[index * size : (index + 1) * size]
    return rows


def _tile(machine: Machine, region: Region, kernel: np.ndarray, gate_rows: np.ndarray) -> np.ndarray:
    """Return uint16[tiles, slices, tile_rows.min]: the region's weights, zero-padded, in issue order (columns outer)."""
    blocks, column_tiles = region.tiles(machine)
    height, width = machine.tile_shape(region.tap)
    padded = np.zeros((blocks * height, column_tiles * width), np.float16)
    rows = gate_rows[region.row : region.row + region.rows]
    padded[: region.rows, : region.columns] = kernel[rows, region.column : region.column + region.columns]
    split = padded.view(np.uint16).reshape(blocks, 1 << region.tap, machine.tile_rows.min, column_tiles, width)
    return split.transpose(3, 0, 1, 4, 2).reshape(blocks * column_tiles, machine.slices, machine.tile_rows.min)
