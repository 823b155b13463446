"""Compiles recurrent layers for one machine into a program.

The machine's buffers are shared out, steps become instructions with addresses (`steps` says in which order), and streams
take turns, a step each in a round. A stream whose x is another's h follows it at a distance at which that h is written
before it is needed and is still there. Rounds that repeat become loops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .errors import ConfigError, NetworkError
from .layer import LayerShape
from .machine import CHANNELS_PER_STREAM, CURSORS_PER_STREAM, Machine
from .packing import constant_rows, round_up
from .program import (
    INPUT_CHANNEL,
    NO_LIMIT,
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
    Stream,
    Tile,
    Tiling,
    Update,
    Weights,
)
from .steps import PEEPHOLE_SLOTS, SCHEDULES, Groups, Piece, Step, Walk, build_step

SLOTS_PER_STREAM = 2  # input vectors that are held for a stream
RING_SHARE = 4  # streamed weights pass through one part in so many of the weight buffer
MAX_PERIOD = 32  # rounds after which a repetition is looked for


@dataclass(frozen=True)
class Recurrence:
    """A stream to be: `steps` steps through the layer number `layer`, on the h of stream `source` or on x from outside."""

    layer: int
    steps: int
    source: int | None = None


@dataclass(frozen=True, eq=False)
class LayerImage:
    """Where a layer's values go: its step's pieces, and the accumulator rows of biases and peepholes."""

    shape: LayerShape
    step: Step
    biases: int
    peepholes: int


@dataclass(frozen=True, eq=False)
class StreamImage:
    """Where a stream's states lie at the start: rows of the h buffer and of the cell buffer."""

    layer: int
    hidden: int
    cell: int


@dataclass(frozen=True, eq=False)
class Compiled:
    """A program without its memory images, and where they come from (`images`).

    constants : accumulator rows of all biases and peepholes, which come first; weight_words, memory_words : words of the images
    """

    program: Program
    layers: tuple[LayerImage, ...]
    streams: tuple[StreamImage, ...]
    constants: int
    weight_words: int
    memory_words: int


def compile_streams(
    machine: Machine, shapes: Sequence[LayerShape], recurrences: Sequence[Recurrence], *, schedule: str, tilings: Sequence[Tiling]
) -> Compiled:
    """Compile recurrences, up to `machine.streams`, through layers of the given shapes, each with its tiling.

    Raises ConfigError for a schedule or tile that the machine does not have, NetworkError for a size that does not fit.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
    for tiling in tilings:
        for height in (tiling.input_rows, tiling.hidden_rows, tiling.last_rows or tiling.hidden_rows):
            if height not in machine.tile_heights:
                allowed = ", ".join(map(str, machine.tile_heights))
                raise ConfigError(f"tile must be auto or a height of machine {machine.name} ({allowed}), not {height!r}")
        bundle = tiling.bundle
        if bundle and (bundle & (bundle - 1) or bundle > machine.lanes):
            raise ConfigError(f"bundle must be a power of two up to the {machine.lanes} lanes of machine {machine.name}, not {bundle}")
    if not 1 <= len(recurrences) <= machine.streams:
        raise NetworkError(f"machine {machine.name} runs 1 to {machine.streams} streams together, not {len(recurrences)}")
    for recurrence in recurrences:
        if recurrence.steps < 1:
            raise NetworkError(f"layer {shapes[recurrence.layer].name}: steps must be at least 1, not {recurrence.steps}")
    return _Compiler(machine, shapes, recurrences, schedule, tilings).compile()


class _Compiler:
    def __init__(self, machine, shapes, recurrences, schedule, tilings):
        self.machine, self.recurrences, self.schedule, self.tilings = machine, recurrences, schedule, tuple(tilings)
        self.ring_words = self.weight_words = self.memory_words = 0
        self.rows = self.vectors = self.cells = 0
        self.layers = self._lay_out(shapes)
        self.constants = self.rows
        self.sources = [index for index, each in enumerate(recurrences) if each.source is None]
        self.input_elements = max((shapes[recurrences[index].layer].inputs for index in self.sources), default=1)
        self.input_stride = self._vector_rows(self.input_elements)
        self.slots = SLOTS_PER_STREAM * max(1, len(self.sources))
        self.streams = [_StreamCode(self, index) for index in range(len(recurrences))]

    def compile(self) -> Compiled:
        rounds, order = self._rounds()
        self._require_fit()
        instructions = []
        if self.memory_words:
            words = self.memory_words * self.recurrences[0].steps
            instructions.append(Weights(weight=self.weight_words, ring=self.ring_words, words=words))
        if order:
            stride, count = self.input_stride, len(order)
            instructions.append(Input(vector=0, stride=stride, slots=self.slots, elements=self.input_elements, count=count))
        instructions += _roll(rounds, self._emit)
        for stream in self.streams:
            instructions += stream.final_state()
        instructions.append(Halt())
        machine = self.machine
        if len(instructions) > machine.buffers.program_words:
            have = machine.buffers.program_words
            raise NetworkError(f"the program needs {len(instructions)} words; machine {machine.name} has buffers.program_words {have}")
        empty = np.zeros((0, machine.slices, machine.tile_rows.min), np.uint16)
        program = Program(
            machine=machine,
            schedule=self.schedule,
            tilings=self.tilings,
            streams=tuple(stream.description for stream in self.streams),
            input_order=np.array(order, np.int64).reshape(-1, 2),
            instructions=tuple(instructions),
            weights=empty,
            memory=empty,
            accumulators=np.zeros(0, np.float32),
            hidden=np.zeros(0, np.float16),
            cell=np.zeros(0, np.float32),
        )
        images = (StreamImage(stream.recurrence.layer, stream.hidden, stream.cell) for stream in self.streams)
        return Compiled(program, self.layers, tuple(images), self.constants, self.weight_words, self.memory_words)

    def take_rows(self, rows: int) -> int:
        """Return the first of `rows` accumulator rows, rounded up to whole rows of the buffer."""
        first = self.rows
        self.rows += round_up(rows, self.machine.tile_rows.max)
        return first

    def take_vector(self, elements: int) -> int:
        """Return the first row of a vector in the h buffer."""
        first = self.vectors
        self.vectors += self._vector_rows(elements)
        return first

    def take_cells(self, neurons: int) -> int:
        """Return the first row of the cell buffer for `neurons`."""
        first = self.cells
        self.cells += -(-neurons // self.machine.lanes)
        return first

    def _vector_rows(self, elements: int) -> int:
        return -(-elements // self.machine.vector_row_elements)

    def _lay_out(self, shapes: Sequence[LayerShape]) -> tuple[LayerImage, ...]:
        """Order the steps of all layers and give their pieces weight words, constants accumulator rows."""

        def steps(cyclic: bool) -> list[Step]:
            pairs = zip(shapes, self.tilings, strict=True)
            return [build_step(self.machine, shape, self.schedule, tiling, cyclic=cyclic) for shape, tiling in pairs]

        built = steps(cyclic=False)
        words = sum(piece.count(self.machine) for step in built for piece in step.pieces)
        if words > self.machine.weight_words:
            if len(self.recurrences) > 1:
                need = words * self.machine.weight_word_bytes
                raise NetworkError(
                    f"streams run together on machine {self.machine.name} with all weights in its buffer: buffers.weight_bytes must be "
                    f"at least {need} (= {words} words of {self.machine.weight_word_bytes} bytes), not {self.machine.buffers.weight_bytes}"
                )
            built = steps(cyclic=True)
            words = sum(piece.count(self.machine) for step in built for piece in step.pieces)
            self.ring_words = max(2, min(self.machine.weight_words // RING_SHARE, words))
        resident = min(words, self.machine.weight_words - self.ring_words)
        images = []
        for shape, step in zip(shapes, built, strict=True):
            step = step.with_pieces([self._place(piece, resident) for piece in step.pieces])
            biases = self.take_rows(step.packing.rows)
            peepholes = self.take_rows(len(PEEPHOLE_SLOTS) * constant_rows(self.machine, shape)) if shape.peepholes else 0
            images.append(LayerImage(shape, step, biases, peepholes))
        return tuple(images)

    def _place(self, piece: Piece, resident: int) -> list[Piece]:
        """Give a piece its words: in the weight buffer up to `resident` words, else in memory."""
        blocks, columns = piece.region.tiles(self.machine)
        fitting = min(columns, (resident - self.weight_words) // blocks)
        placed = []
        if 0 < fitting < columns:
            first, piece = piece.split(self.machine, fitting)
            placed.append(replace(first, weight=self.weight_words))
            self.weight_words += blocks * fitting
        if fitting == columns:
            placed.append(replace(piece, weight=self.weight_words))
            self.weight_words += blocks * columns
        else:
            placed.append(replace(piece, weight=self.memory_words, streamed=True))
            self.memory_words += piece.count(self.machine)
        return placed

    def _require_fit(self) -> None:
        machine, buffers = self.machine, self.machine.buffers
        row, lanes = machine.vector_row_elements, machine.lanes
        inputs = self.slots * self.input_stride if self.sources else 0
        many = f"{len(self.streams)} streams" if len(self.streams) > 1 else "a stream"
        needs = (
            ("accumulator_rows", self.rows, f"biases, and the sums of two steps of {many}, in units of {machine.tile_rows.max} rows"),
            ("input_elements", inputs * row, f"{self.slots} vectors of {self.input_elements} elements in rows of {row}"),
            ("hidden_elements", self.vectors * row, f"two vectors of h of {many} in rows of {row}"),
            ("cell_elements", self.cells * lanes, f"the neurons of {many} in rows of {lanes}"),
        )
        for name, need, how in needs:
            have = getattr(buffers, name)
            if need > have:
                names = ", ".join(dict.fromkeys(_described(image.shape) for image in self.layers))
                raise NetworkError(
                    f"{names} does not fit machine {machine.name}: buffers.{name} must be at least {need} (= {how}), not {have}"
                )

    def _rounds(self) -> tuple[list[tuple], list[tuple[int, int]]]:
        """Return what each round does, a key for each stream at work, and the order (stream, step) of input vectors."""
        ahead = self.layers[0].step.ahead
        lags = []
        for each in self.recurrences:
            lags.append(0 if each.source is None else lags[each.source] + (2 if ahead else 1))
        rounds, order = [], []
        for number in range(-1 if ahead else 0, max(lag + each.steps for lag, each in zip(lags, self.recurrences, strict=True))):
            keys = []
            for index, (lag, each) in enumerate(zip(lags, self.recurrences, strict=True)):
                step = number - lag
                if not (-1 if ahead else 0) <= step < each.steps:
                    continue
                read = step + 1 if ahead else step  # the vector x that this round consumes
                slot = None
                if read < each.steps and each.source is None:
                    slot = len(order) % self.slots
                    order.append((index, read))
                keys.append(_Turn(index, min(step, 1), step % 2, read < each.steps, slot))
            rounds.append(tuple(keys))
        return rounds, order

    def _emit(self, turns: tuple["_Turn", ...]) -> list[Instruction]:
        return [each for turn in turns for each in self.streams[turn.stream].emit(turn)]


@dataclass(frozen=True)
class _Turn:
    """What a stream does in a round.

    age : -1 before its first step, 0 in it, 1 later; parity : of the step; reads : it consumes a vector x; slot : in the input ring
    """

    stream: int
    age: int
    parity: int
    reads: bool
    slot: int | None


class _StreamCode:
    """A stream's addresses, and the instructions of its steps."""

    def __init__(self, compiler: _Compiler, index: int):
        self.compiler, self.machine, self.index = compiler, compiler.machine, index
        self.recurrence = recurrence = compiler.recurrences[index]
        self.image = compiler.layers[recurrence.layer]
        self.shape = shape = self.image.shape
        self.sums = [compiler.take_rows(self.image.step.packing.rows) for _ in range(2)]
        self.projection = compiler.take_rows(shape.projected) if shape.projected else 0
        self.vectors = [compiler.take_vector(shape.outputs) for _ in range(2)]
        needs_auxiliary = shape.projected is not None or not shape.reset_after
        self.auxiliary = compiler.take_vector(shape.hidden) if needs_auxiliary else 0
        self.cell = compiler.take_cells(shape.hidden)
        self.channel = 1 + CHANNELS_PER_STREAM * index
        self.cursor = 1 + CURSORS_PER_STREAM * index

    @property
    def hidden(self) -> int:
        """Row of the vector that step 0 takes for h."""
        return self.vectors[1]

    @property
    def description(self) -> Stream:
        shape, recurrence = self.shape, self.recurrence
        return Stream(
            layer=recurrence.layer,
            steps=recurrence.steps,
            inputs=shape.inputs,
            outputs=shape.outputs,
            states=shape.hidden if shape.cell == "lstm" else 0,
            source=recurrence.source,
        )

    def emit(self, turn: _Turn) -> list[Instruction]:
        step, queues = self.image.step, self.machine.queues
        code: list[Instruction] = []
        posts: list[Instruction] = []
        for item in step.items:
            ahead = isinstance(item, Walk) and item.part == "input" and step.ahead
            if isinstance(item, Groups):
                posts += self.posts(item, turn.parity) if turn.age >= 0 else []
            elif ahead and turn.reads:
                # Groups that wait for their rows and fill their queue must not hold back the fetch of tiles that go on meanwhile.
                tiles = self.tiles(item, turn, 1 - turn.parity)
                code += posts[: queues.post] + tiles[: queues.tile] + posts[queues.post :] + tiles[queues.tile :]
                posts = []
            elif not ahead and turn.age >= 0:
                code += posts + self.tiles(item, turn, turn.parity)
                posts = []
        return code + posts

    def tiles(self, walk: Walk, turn: _Turn, parity: int) -> list[Instruction]:
        minimum = self.machine.tile_rows.min
        operand, wait, advance = Operand.HIDDEN, True, self.shape.outputs
        channel, cursor, vector = self.channel, self.cursor, self.vectors[1 - parity]
        if walk.part == "hidden":
            wait = turn.age > 0
        elif walk.part == "auxiliary":
            channel, cursor, vector, advance = self.channel + 1, self.cursor + 1, self.auxiliary, self.shape.hidden
        elif self.recurrence.source is None:
            operand, channel, cursor, advance = Operand.INPUT, INPUT_CHANNEL, INPUT_CHANNEL, self.compiler.input_elements
            vector = turn.slot * self.compiler.input_stride
        else:
            source = self.compiler.streams[self.recurrence.source]
            channel, cursor, vector, advance = source.channel, self.cursor + 2, source.vectors[parity], self.shape.inputs
        instructions = []
        for piece in walk.pieces:
            region, band = piece.region, piece.band
            projects = piece.matrix == "projection"
            base = self.projection if projects else self.sums[parity]
            height = self.machine.tile_shape(region.tap)[0]
            crosses = band.run and region.row // band.run != (region.row + region.rows - 1) // band.run
            row = band.place(region.row)
            init = Init.ACCUMULATE if not piece.fresh else Init.ZERO if projects else Init.SOURCE
            instructions.append(
                Tile(
                    tap=region.tap,
                    columns_outer=True,
                    init=init,
                    complete=piece.ends,
                    operand=operand,
                    wait=wait,
                    channel=channel,
                    cursor=cursor,
                    advance=advance if piece is walk.pieces[-1] and walk.consume and wait else 0,
                    vector=vector,
                    column=region.column,
                    rows=region.rows,
                    columns=region.columns,
                    run=band.run // height if crosses else 0,
                    gap=band.gap // minimum if crosses else 0,
                    accumulator=(base + row) // minimum,
                    source=(self.image.biases + row) // minimum if init is Init.SOURCE else 0,
                    weight=0 if piece.streamed else piece.weight,
                    streamed=piece.streamed,
                )
            )
        return instructions

    def posts(self, work: Groups, parity: int) -> list[Instruction]:
        shape = self.shape
        match work.rows:
            case "sums":
                base = self.sums[parity]
            case "projection":
                base = self.projection
            case "constants":
                base = self.image.peepholes + constant_rows(self.machine, shape) * PEEPHOLE_SLOTS.index(work.slot)
        target, channel = self.vectors[parity], self.channel
        if work.target == "auxiliary":
            target, channel = self.auxiliary, self.channel + 1
        return [
            Post(
                source=work.source,
                update=work.update,
                **{f"function{slot}": function for slot, function in enumerate(work.functions)},
                cell_function=work.cell_function,
                limit=NO_LIMIT if shape.clip is None else int(np.float32(shape.clip).view(np.uint32)),
                slot=work.slot,
                stride=group.bundle.bit_length() - 1,
                runs=work.runs,
                accumulator=0 if work.source is Source.BUFFER else base + group.row,
                neuron=group.neuron,
                neurons=group.neurons,
                vector=target if work.target else 0,
                cell=self.cell,
                signal=work.target is not None,
                channel=channel if work.target else 0,
                emit=work.target == "hidden",
                stream=self.index,
            )
            for group in work.groups
        ]

    def final_state(self) -> list[Instruction]:
        """Return the instruction that sends the cell state out, if there is one."""
        if not self.description.states:
            return []
        return [
            Post(
                source=Source.BUFFER,
                update=Update.STATE,
                stride=self.machine.lanes.bit_length() - 1,
                neuron=0,
                neurons=self.shape.hidden,
                cell=self.cell,
                emit=True,
                stream=self.index,
            )
        ]


def _described(shape: LayerShape) -> str:
    projected = "" if shape.projected is None else f" and {shape.projected} projected"
    return f"a layer of {shape.inputs} inputs and {shape.hidden} hidden{projected}"


def _roll(rounds: list[tuple], emit: Callable[[tuple], list[Instruction]]) -> list[Instruction]:
    """Lay out all rounds, those that repeat as loops."""
    emitted: dict[tuple, list[Instruction]] = {}
    code, start = [], 0
    while start < len(rounds):
        period, times = _repetition(rounds, start)
        body = []
        for key in rounds[start : start + period]:
            if key not in emitted:
                emitted[key] = emit(key)
            body += emitted[key]
        code += [Loop(count=times), *body, End()] if times > 1 else body
        start += period * times
    return code


def _repetition(rounds: list[tuple], start: int) -> tuple[int, int]:
    """Return the shortest period with which rounds repeat from `start` on, and how often; (1, 1) where they do not."""
    longest = min(MAX_PERIOD, (len(rounds) - start) // 2)
    for period in range(1, longest + 1):
        pattern = rounds[start : start + period]
        times = 1
        while rounds[start + times * period : start + (times + 1) * period] == pattern:
            times += 1
        if times > 1:
            return period, times
    return 1, 1

