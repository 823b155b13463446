"""Compiles one recurrent layer for one machine into a program.

A schedule is a generator over the same instructions: `unfolded` interleaves the four gates of a group of neurons and
computes the input part of step t+1 while h_t is on its way; `sequential` finishes one gate after another. Both walk
columns first, so that the newest elements of h are needed last.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
    Update,
)

GATES = 4
GATE_FUNCTIONS = (Activation.SIGMOID, Activation.SIGMOID, Activation.TANH, Activation.SIGMOID)
INPUT_SLOTS = 2
HIDDEN_CHANNEL = 1
SCHEDULES = ("sequential", "unfolded")

Part = Literal["input", "hidden"]


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
        return -(-self.rows // (machine.tile_rows.min << self.tap)), -(-self.columns // (machine.slices >> self.tap))


def cover(machine: Machine, part: Part, row: int, rows: int, columns: int, tap: int) -> list[Region]:
    """Cover `rows` x `columns` with tiles of `tap`, the rows and columns left over with the shapes that need fewest tiles."""
    height, width = machine.tile_rows.min << tap, machine.slices >> tap
    taps = range(len(machine.tile_heights))

    def best(row: int, rows: int, column: int, columns: int, allowed: range) -> list[Region]:
        if not rows or not columns:
            return []
        choices = [Region(part, row, rows, column, columns, other) for other in allowed]
        return [min(choices, key=lambda region: (int(np.prod(region.tiles(machine))), abs(region.tap - tap)))]

    whole_rows, whole_columns = rows - rows % height, columns - columns % width
    full = Region(part, row, rows, 0, columns, tap)
    candidates = [[full]]
    for main_rows in {whole_rows, rows}:
        for main_columns in {whole_columns, columns}:
            if not main_rows or not main_columns:
                continue
            candidates.append(
                [
                    Region(part, row, main_rows, 0, main_columns, tap),
                    *best(row, main_rows, main_columns, columns - main_columns, taps[tap:]),
                    *best(row + main_rows, rows - main_rows, 0, columns, taps[: tap + 1]),
                ]
            )
    return min(candidates, key=lambda regions: (sum(int(np.prod(region.tiles(machine))) for region in regions), len(regions)))


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

    def __init__(self, machine: Machine, inputs: int, hidden: int, tap: int):
        self.machine, self.inputs, self.hidden, self.tap = machine, inputs, hidden, tap
        self.input_stride = -(-inputs // machine.vector_row_elements)
        self.hidden_stride = -(-hidden // machine.vector_row_elements)
        self.weight_words = 0

    def regions(self, part: Part, row: int, rows: int) -> list[Region]:
        """Cover a part's rows and give each region its weight words."""
        columns = self.inputs if part == "input" else self.hidden
        placed = []
        for region in cover(self.machine, part, row, rows, columns, self.tap):
            placed.append(Region(**{**region.__dict__, "weight": self.weight_words}))
            self.weight_words += int(np.prod(region.tiles(self.machine)))
        return placed

    def tiles(self, regions: list[Region], *, base: int, step: int, consume: bool) -> list[Instruction]:
        """Return the tiles of one part in one step; sums lie from accumulator row `base` on, biases from row 0 on."""
        minimum = self.machine.tile_rows.min
        from_input = regions[0].part == "input"
        waits = from_input or step > 0
        columns = self.inputs if from_input else self.hidden
        slot = step % INPUT_SLOTS * self.input_stride if from_input else (step + 1) % 2 * self.hidden_stride
        instructions = []
        for index, region in enumerate(regions):
            last = index == len(regions) - 1
            source = from_input and region.column == 0
            instructions.append(
                Tile(
                    tap=region.tap,
                    columns_outer=True,
                    init=Init.SOURCE if source else Init.ACCUMULATE,
                    complete=not from_input and region.column + region.columns == columns,
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


def _unfolded(generator: _Generator, layout: Layout, steps: int) -> tuple[list[Region], Callable[[int], list[Instruction]]]:
    rows = GATES * generator.hidden
    inputs = generator.regions("input", 0, rows)
    hiddens = generator.regions("hidden", 0, rows)

    def base(step: int) -> int:
        return layout.padded_rows * (1 + step % 2)

    def emit(step: int) -> list[Instruction]:
        code = generator.tiles(inputs, base=base(0), step=0, consume=True) if step == 0 else []
        code += generator.tiles(hiddens, base=base(step), step=step, consume=True)
        code += generator.post(step=step, source=Source.INTERLEAVED, update=Update.LSTM, row=base(step))
        if step + 1 < steps:
            code += generator.tiles(inputs, base=base(step + 1), step=step + 1, consume=True)
        return code

    return inputs + hiddens, emit


def _sequential(generator: _Generator, layout: Layout, steps: int) -> tuple[list[Region], Callable[[int], list[Instruction]]]:
    parts = [
        (generator.regions("input", base, generator.hidden), generator.regions("hidden", base, generator.hidden)) for base in layout.bases
    ]

    def emit(step: int) -> list[Instruction]:
        base = layout.padded_rows * (1 + step % 2)
        code = []
        for gate, (inputs, hiddens) in enumerate(parts):
            last = gate == GATES - 1
            code += generator.tiles(inputs, base=base, step=step, consume=last)
            code += generator.tiles(hiddens, base=base, step=step, consume=last)
            code += generator.post(step=step, source=Source.GATE, update=Update.KEEP, row=base + layout.bases[gate], slot=gate)
        return code + generator.post(step=step, source=Source.BUFFER, update=Update.LSTM)

    return [region for pair in parts for part in pair for region in part], emit


def _roll(emit: Callable[[int], list[Instruction]], steps: int) -> list[Instruction]:
    """Lay out all steps, those between the first and the last as a loop over pairs (buffers alternate by step)."""
    pairs = max(0, (steps - 2) // 2)
    code = emit(0)
    if pairs:
        code += [Loop(count=pairs), *emit(1), *emit(2), End()]
    for step in range(1 + 2 * pairs, steps):
        code += emit(step)
    return code


def compile_layer(machine: Machine, *, inputs: int, hidden: int, steps: int, schedule: str, tile: int) -> tuple[Program, list[Region], Layout]:
    """Compile an LSTM layer of the given shape; weights and states are added by `load`.

    Raises ConfigError for a schedule or tile that the machine does not have, NetworkError for a size that does not fit.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
    if tile not in machine.tile_heights:
        allowed = ", ".join(map(str, machine.tile_heights))
        raise ConfigError(f"tile must be auto or a height of machine {machine.name} ({allowed}), not {tile!r}")
    for name, value in (("inputs", inputs), ("hidden", hidden), ("steps", steps)):
        if value < 1:
            raise NetworkError(f"{name} must be at least 1, not {value}")
    generator = _Generator(machine, inputs, hidden, machine.tile_heights.index(tile))
    if schedule == "unfolded":
        layout = _pack_interleaved(machine, hidden)
        regions, emit = _unfolded(generator, layout, steps)
    else:
        layout = _pack_gates(machine, hidden)
        regions, emit = _sequential(generator, layout, steps)
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
        tile=tile,
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
    needs = (
        ("weight_bytes", generator.weight_words * machine.weight_word_bytes, f"{generator.weight_words} words of {machine.weight_word_bytes} bytes"),
        ("accumulator_rows", 3 * layout.padded_rows, f"3 x {layout.padded_rows} rows: biases and the sums of two steps"),
        ("input_elements", INPUT_SLOTS * generator.input_stride * row, f"{INPUT_SLOTS} vectors of {inputs} elements in rows of {row}"),
        ("hidden_elements", 2 * generator.hidden_stride * row, f"2 vectors of {hidden} elements in rows of {row}"),
        ("cell_elements", _round_up(hidden, machine.lanes), f"{hidden} neurons in rows of {machine.lanes}"),
    )
    for name, need, how in needs:
        have = getattr(buffers, name)
        if need > have:
            raise NetworkError(
                f"an LSTM of {inputs} inputs and {hidden} hidden does not fit machine {machine.name}: buffers.{name} must be at least {need} (= {how}), not {have}"
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
    words = max(region.weight + int(np.prod(region.tiles(machine))) for region in regions)
    weights = np.zeros((words, machine.slices, machine.tile_rows.min), np.uint16)
    for region in regions:
        weights[region.weight :][: int(np.prod(region.tiles(machine)))] = _tile(machine, region, kernels[region.part], gate_rows)
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
    height, width = machine.tile_rows.min << region.tap, machine.slices >> region.tap
    padded = np.zeros((blocks * height, column_tiles * width), np.float16)
    rows = gate_rows[region.row : region.row + region.rows]
    padded[: region.rows, : region.columns] = kernel[rows, region.column : region.column + region.columns]
    split = padded.view(np.uint16).reshape(blocks, 1 << region.tap, machine.tile_rows.min, column_tiles, width)
    return split.transpose(3, 0, 1, 4, 2).reshape(blocks * column_tiles, machine.slices, machine.tile_rows.min)
