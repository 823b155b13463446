"""The program: what the compiler makes of a network and what RTL, numerics and timing all execute.

Three rules. An instruction names tiles, operands and destinations, never a cell or a gate by itself. The field table
below is the only description of the encoding; the RTL builds its decoders from it. Fields count machine units (vector
rows, accumulator groups), so a program belongs to one machine.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from .machine import Machine

WORD_BITS = 256
INPUT_CHANNEL = 0
NO_LIMIT = (1 << 31) - 1


class Opcode(IntEnum):
    HALT = 0
    LOOP = 1
    END = 2
    INPUT = 3
    TILE = 4
    POST = 5
    WEIGHTS = 6


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
    """Where a post group finds its four gates.

    INTERLEAVED : finished sums of all; GATE : finished sums of the gate in `slot`, the others from the gate buffer;
    CONSTANT : as GATE, but rows that are always there; BUFFER : the gate buffer
    """

    INTERLEAVED = 0
    GATE = 1
    CONSTANT = 2
    BUFFER = 3


class Update(IntEnum):
    """What happens to a post group's activated gates g0 to g3, the neurons' states c and what the gate buffer keeps.

    With phi the cell function and k the gate buffer's value in `slot`; the argument of phi and every new state saturate:
    """

    KEEP = 0
    """The activated gates go to the gate buffer: all of an interleaved group, else the one in `slot`."""
    STATE = 1
    """The result is c."""
    HIDDEN = 2
    """The result is the gate in `slot`."""
    LSTM = 3
    """c becomes g1 c + g0 g2; the result is g3 phi(c)."""
    OUTPUT = 4
    """The result is g3 phi(c)."""
    PEEPHOLE = 5
    """phi(gate in `slot` c + k) goes to the gate buffer's `slot`."""
    RESET = 6
    """The result is g2 c."""
    GRU = 7
    """c and the result become (1 - g1) phi(g2 g0 + g3) + g1 c."""
    CANDIDATE = 8
    """c and the result become (1 - g1) phi(g3) + g1 c."""


@dataclass(frozen=True)
class Work:
    """What an update costs a neuron: gates that it needs, arithmetic, activations of phi, reads and writes of c."""

    gates: tuple[int, ...] = ()
    multiplications: int = 0
    additions: int = 0
    activations: int = 0
    state_reads: int = 0
    state_writes: int = 0


# PEEPHOLE and HIDDEN need the gate in `slot`, whichever that is; the former reads one value of the gate buffer besides.
WORK: dict[Update, Work] = {
    Update.KEEP: Work(),
    Update.STATE: Work(state_reads=1),
    Update.HIDDEN: Work(),
    Update.LSTM: Work(gates=(0, 1, 2, 3), multiplications=3, additions=1, activations=1, state_reads=1, state_writes=1),
    Update.OUTPUT: Work(gates=(3,), multiplications=1, activations=1, state_reads=1),
    Update.PEEPHOLE: Work(multiplications=1, additions=1, activations=1, state_reads=1),
    Update.RESET: Work(gates=(2,), multiplications=1, state_reads=1),
    Update.GRU: Work(gates=(0, 1, 2, 3), multiplications=3, additions=3, activations=1, state_reads=1, state_writes=1),
    Update.CANDIDATE: Work(gates=(1, 3), multiplications=2, additions=2, activations=1, state_reads=1, state_writes=1),
}

_OPCODE = (("opcode", 4),)
FIELDS: dict[Opcode, tuple[tuple[str, int], ...]] = {
    Opcode.HALT: _OPCODE,
    Opcode.LOOP: (*_OPCODE, ("count", 24)),
    Opcode.END: _OPCODE,
    Opcode.INPUT: (*_OPCODE, ("vector", 14), ("stride", 14), ("slots", 8), ("elements", 16), ("count", 24)),
    Opcode.WEIGHTS: (*_OPCODE, ("weight", 26), ("ring", 26), ("words", 32)),
    Opcode.TILE: (
        *_OPCODE,
        ("tap", 4),
        ("columns_outer", 1),
        ("init", 2),
        ("complete", 1),
        ("operand", 1),
        ("wait", 1),
        ("channel", 5),
        ("cursor", 5),
        ("advance", 16),
        ("vector", 14),
        ("column", 16),
        ("rows", 18),
        ("columns", 16),
        ("run", 8),
        ("gap", 8),
        ("accumulator", 16),
        ("source", 16),
        ("weight", 26),
        ("streamed", 1),
    ),
    Opcode.POST: (
        *_OPCODE,
        ("source", 2),
        ("update", 4),
        ("function0", 4),
        ("function1", 4),
        ("function2", 4),
        ("function3", 4),
        ("cell_function", 4),
        ("limit", 31),
        ("scale", 14),
        ("hidden_multiplier", 16),
        ("hidden_shift", 5),
        ("slot", 2),
        ("stride", 4),
        ("runs", 3),
        ("accumulator", 20),
        ("neuron", 16),
        ("neurons", 16),
        ("vector", 14),
        ("cell", 14),
        ("signal", 1),
        ("channel", 5),
        ("emit", 1),
        ("stream", 4),
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
class Weights(Instruction):
    """Accept `words` weight words from memory into a ring of `ring` words from word `weight` on, as streamed tiles free them."""

    weight: int
    ring: int
    words: int


@dataclass(frozen=True, kw_only=True)
class Tile(Instruction):
    """Multiply a region of a matrix, `rows` x `columns`, by part of a vector in tiles of K = tile_rows.min << `tap` rows.

    The vector starts at row `vector` of its buffer and the region at its element `column` (a multiple of N). Sums go to
    the accumulator groups from `accumulator` on (a multiple of K); the first column of tiles starts from `init`, for
    `Init.SOURCE` the groups from `source` on. With `run`, `gap` groups are left out after every `run` blocks, of both.
    With `columns_outer` the walk visits all blocks of a column before the next column, else all columns of a block first;
    weights lie in that order from word `weight` on or, `streamed`, are the next ones that memory has sent. `complete` hands
    the rows to the post sequencer. With `wait`, a tile needs `channel` to have counted as many elements since `cursor` as
    its last column; `advance` moves the cursor after the last tile.
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
    run: int = 0
    gap: int = 0
    accumulator: int
    source: int
    weight: int
    streamed: bool = False

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

    The sums of 1 << `stride` neurons lie together: an interleaved bundle from accumulator row `accumulator` on as that
    many rows of each of four gates in turn, bundles one after another, of whose gates the first group needs `runs` to have
    been finished in order; else one row a neuron. `limit` is the largest magnitude (bits of a float32 without its sign)
    of the arguments of all functions but IDENTITY and the phi of an LSTM's state. New hidden values go to the vector at
    row `vector` and are counted on `channel` with `signal`, and with `emit` to the output stream, marked as of `stream`.
    The state of neuron n lies in lane n mod `lanes`, row `cell` + n div `lanes`, and so do its kept gates.
    In int8, the sums' scales lie as the sums do, the first group's in row `scale` (of tile_rows.max) of their memory, and
    hidden values are multiplied by `hidden_multiplier` / 2**`hidden_shift` before they are rounded.

    A group of another update than the one before waits until all earlier groups have been written, but KEEP goes together
    with every update except PEEPHOLE.
    """

    source: Source
    update: Update
    function0: int = 0
    function1: int = 0
    function2: int = 0
    function3: int = 0
    cell_function: int = 0
    limit: int = NO_LIMIT
    scale: int = 0
    hidden_multiplier: int = 0
    hidden_shift: int = 0
    slot: int = 0
    stride: int
    runs: int = 0
    accumulator: int = 0
    neuron: int
    neurons: int
    vector: int = 0
    cell: int
    signal: bool = False
    channel: int = 0
    emit: bool = False
    stream: int

    def groups(self, machine: Machine) -> int:
        return -(-self.neurons // min(machine.lanes, 1 << self.stride))


_OPCODES = {
    Halt: Opcode.HALT,
    Loop: Opcode.LOOP,
    End: Opcode.END,
    Input: Opcode.INPUT,
    Weights: Opcode.WEIGHTS,
    Tile: Opcode.TILE,
    Post: Opcode.POST,
}


@dataclass(frozen=True)
class Tiling:
    """How a layer's matrices are cut into tiles, and their order.

    input_rows, hidden_rows : height K of most tiles of each part; what is left over gets the shapes that need fewest tiles
    bundle : neurons whose gates lie together and are activated in one cycle, 0 for as many as there are lanes

    For `unfolded` alone:
    last_rows, last_columns : height of the tiles over so many of the last columns of the hidden part; 0 rows are the same height
    trim : columns left over of the hidden part get other shapes too
    lean : how far tiles of small columns go before those of small rows (`walk`), None walks region after region
    """

    input_rows: int
    hidden_rows: int
    last_rows: int = 0
    last_columns: int = 0
    lean: float | None = None
    bundle: int = 0
    trim: bool = True


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One recurrence of a program: a sequence of `steps` steps through the layer number `layer`.

    inputs D, outputs P, states H : elements of x, of h, and of the state that is sent out at the end (0 for none)
    source : the stream whose h is this one's x in every step, None where x comes with the input stream
    """

    layer: int
    steps: int
    inputs: int
    outputs: int
    states: int
    source: int | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    """Instructions and memory images for recurrences that run together on one machine.

    input_order : int[vectors, 2], stream and step of each vector of the input stream, all padded to the longest
    weights : uint16[words, slices, tile_rows.min], float16 bits in issue order; `memory` : the same for words that are
        streamed from memory in every step, over and over
    accumulators : float32[rows], what the accumulator rows hold at the start (biases, peepholes)
    hidden : float16[elements] and cell : float32[elements], states at the start, from row 0 of their buffers
    """

    machine: Machine
    schedule: str
    tilings: tuple[Tiling, ...]
    streams: tuple[Stream, ...]
    input_order: np.ndarray
    instructions: tuple[Instruction, ...]
    weights: np.ndarray
    memory: np.ndarray
    accumulators: np.ndarray
    hidden: np.ndarray
    cell: np.ndarray

    @property
    def tile(self) -> int:
        """Height K of most tiles that carry the first layer's recurrence."""
        return self.tilings[0].hidden_rows

    @property
    def input_elements(self) -> int:
        """Elements of a vector of the input stream."""
        return max((stream.inputs for stream in self.streams if stream.source is None), default=0)

    def input_stream(self, sequences: Sequence[np.ndarray | None]) -> np.ndarray:
        """Return [vectors, input_elements] in the order of the input stream; `sequences` : [steps, D] of each stream."""
        vectors = np.zeros((len(self.input_order), self.input_elements), np.float16)
        for index, (stream, step) in enumerate(self.input_order):
            vectors[index, : self.streams[stream].inputs] = sequences[stream][step]
        return vectors

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
