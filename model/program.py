"""The program: what the compiler makes of a network and what RTL, numerics and timing all execute.

Three rules. An instruction names tiles, operands and destinations, never a cell or a gate by itself. The field table
below is the only description of the encoding; the RTL builds its decoders from it. Fields count machine units (vector
rows, accumulator groups), so a program belongs to one machine.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from .machine import Machine

WORD_BITS = 192
CHANNELS = 8
INPUT_CHANNEL = 0


class Opcode(IntEnum):
    HALT = 0
    LOOP = 1
    END = 2
    INPUT = 3
    TILE = 4
    POST = 5


class Init(IntEnum):
    """What the first tile of a row adds its sums to."""

    ACCUMULATE = 0
    ZERO = 1
    SOURCE = 2


class Operand(IntEnum):
    """Buffer that a tile's scalars come from."""

    INPUT = 0
    HIDDEN = 1


class Source(IntEnum):
    """Where a post group finds its gates: interleaved sums, the sums of one gate, or the gate buffer."""

    INTERLEAVED = 0
    GATE = 1
    BUFFER = 2


class Update(IntEnum):
    """What happens to a post group's gates: kept in the gate buffer, an LSTM update, or the cell state is sent out."""

    KEEP = 0
    LSTM = 1
    STATE = 2


_OPCODE = (("opcode", 4),)
FIELDS: dict[Opcode, tuple[tuple[str, int], ...]] = {
    Opcode.HALT: _OPCODE,
    Opcode.LOOP: (*_OPCODE, ("count", 24)),
    Opcode.END: _OPCODE,
    Opcode.INPUT: (*_OPCODE, ("vector", 14), ("stride", 14), ("slots", 8), ("elements", 16), ("count", 24)),
    Opcode.TILE: (
        *_OPCODE,
        ("tap", 4),
        ("columns_outer", 1),
        ("init", 2),
        ("complete", 1),
        ("operand", 1),
        ("wait", 1),
        ("channel", 3),
        ("cursor", 3),
        ("advance", 16),
        ("vector", 14),
        ("column", 16),
        ("rows", 18),
        ("columns", 16),
        ("accumulator", 16),
        ("source", 16),
        ("weight", 26),
    ),
    Opcode.POST: (
        *_OPCODE,
        ("source", 2),
        ("update", 3),
        ("function0", 4),
        ("function1", 4),
        ("function2", 4),
        ("function3", 4),
        ("cell_function", 4),
        ("slot", 2),
        ("stride", 4),
        ("accumulator", 20),
        ("neuron", 16),
        ("neurons", 16),
        ("vector", 14),
        ("cell", 14),
        ("signal", 1),
        ("channel", 3),
        ("emit", 1),
        ("fence", 1),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """Base: encodes the fields of its opcode, lowest bit first."""

    @property
    def opcode(self) -> Opcode:
        return _OPCODES[type(self)]

    def encode(self) -> int:
        """Return the program word; `ValueError` names a field whose value its bits cannot hold."""
        word = offset = 0
        for name, bits in FIELDS[self.opcode]:
            value = int(getattr(self, name))
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{type(self).__name__}.{name} must fit {bits} bits, not {value}")
            word |= value << offset
            offset += bits
        return word


@dataclass(frozen=True, kw_only=True)
class Halt(Instruction):
    """Stop fetching; the run ends when everything issued has drained."""


@dataclass(frozen=True, kw_only=True)
class Loop(Instruction):
    """Execute the instructions up to `End` `count` times, at least once. Loops do not nest."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"{type(self).__name__}.count must be at least 1, not {self.count}")


@dataclass(frozen=True, kw_only=True)
class End(Instruction):
    """Close the loop."""


@dataclass(frozen=True, kw_only=True)
class Input(Instruction):
    """Accept `count` vectors of `elements` from the input stream into a ring of `slots`, `stride` rows apart, at row `vector`."""

    vector: int
    stride: int
    slots: int
    elements: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Tile(Instruction):
    """Multiply a region of a matrix, `rows` x `columns`, by part of a vector in tiles of K = tile_rows.min << `tap` rows.

    The vector starts at row `vector` of its buffer and the region at its element `column` (a multiple of N). Sums go to
    the accumulator groups from `accumulator` on (a multiple of K); the first column of tiles starts from `init`, for
    `Init.SOURCE` the groups from `source` on. With `columns_outer` the walk visits all blocks of a column before the next
    column, else all columns of a block first; weights lie in that order from word `weight` on. `complete` hands the rows
    to the post sequencer. With `wait`, a tile needs `channel` to have counted as many elements since `cursor` as its last
    column; `advance` moves the cursor after the last tile.
    """

    tap: int
    columns_outer: bool
    init: Init
    complete: bool
    operand: Operand
    wait: bool
    channel: int
    cursor: int
    advance: int
    vector: int
    column: int
    rows: int
    columns: int
    accumulator: int
    source: int
    weight: int

    def blocks(self, machine: Machine) -> int:
        return -(-self.rows // self.height(machine))

    def column_tiles(self, machine: Machine) -> int:
        return -(-self.columns // self.width(machine))

    def height(self, machine: Machine) -> int:
        return machine.tile_shape(self.tap)[0]

    def width(self, machine: Machine) -> int:
        return machine.tile_shape(self.tap)[1]


@dataclass(frozen=True, kw_only=True)
class Post(Instruction):
    """Activate finished sums and update neurons, a group of up to `lanes` neurons a cycle, in rising order.

    Groups hold 1 << `stride` neurons; an interleaved group lies at accumulator row `accumulator` as that many rows of each
    of four gates in turn, groups one after another. `Source.GATE` reads one row a neuron and keeps the result in gate
    `slot`. New hidden values go to the vector at row `vector` and, with `emit`, to the output stream; `signal` counts them
    on `channel`. The cell state of neuron n lies in lane n mod `lanes`, row `cell` + n div `lanes`. `fence` makes the
    first group wait until all earlier ones have been written.
    """

    source: Source
    update: Update
    function0: int
    function1: int
    function2: int
    function3: int
    cell_function: int
    slot: int
    stride: int
    accumulator: int
    neuron: int
    neurons: int
    vector: int
    cell: int
    signal: bool
    channel: int
    emit: bool
    fence: bool

    @property
    def groups(self) -> int:
        return -(-self.neurons >> self.stride)


_OPCODES = {Halt: Opcode.HALT, Loop: Opcode.LOOP, End: Opcode.END, Input: Opcode.INPUT, Tile: Opcode.TILE, Post: Opcode.POST}


@dataclass(frozen=True)
class Tiling:
    """How a layer's matrices are cut into tiles.

    input_rows, hidden_rows : height K of most tiles of each part; what is left over gets the shapes that need fewest tiles
    tail_columns, tail_blocks : the last `tail_columns` columns of tiles of the hidden part are walked for `tail_blocks`
        blocks before the next ones, so that the first neurons are finished early; 0 walks them for all blocks
    """

    input_rows: int
    hidden_rows: int
    tail_columns: int = 0
    tail_blocks: int = 1


@dataclass(frozen=True, kw_only=True)
class Program:
    """Instructions and memory images for one layer on one machine.

    weights : uint16[words, slices, tile_rows.min], float16 bits in issue order
    accumulators : float32[rows], what the accumulator rows hold at the start (biases)
    hidden : float16[elements] and cell : float32[elements], states at the start, from row 0 of their buffers
    steps, inputs, neurons : shape of the layer; the output stream is steps x neurons hidden values, then the cell state
    """

    machine: Machine
    schedule: str
    tiling: Tiling
    steps: int
    inputs: int
    neurons: int
    instructions: tuple[Instruction, ...]
    weights: np.ndarray
    accumulators: np.ndarray
    hidden: np.ndarray
    cell: np.ndarray

    @property
    def tile(self) -> int:
        """Height K of most tiles that carry the recurrence."""
        return self.tiling.hidden_rows

    def executed(self) -> Iterator[Instruction]:
        """Yield instructions in the order in which they are fetched, loops unrolled."""
        position, start, left = 0, 0, 0
        while True:
            instruction = self.instructions[position]
            yield instruction
            position += 1
            match instruction:
                case Loop(count=count):
                    start, left = position, count
                case End():
                    left -= 1
                    if left:
                        position = start
                case Halt():
                    return

    @cached_property
    def words(self) -> list[int]:
        """Encoded instructions."""
        return [instruction.encode() for instruction in self.instructions]

    def replace(self, **changes) -> "Program":
        return dataclasses.replace(self, **changes)
