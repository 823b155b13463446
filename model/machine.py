"""The machine: everything that is fixed when the hardware is built.

A machine is read from YAML (`configs/machines/`), frozen, and taken whole by model, RTL and tests, which vary it by
`replace`. Numbers that follow from others are properties here and keys nowhere.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sharp.configs import ROOT

from .config import Schema, read_yaml, validate
from .errors import ConfigError

Count = Annotated[int, Field(ge=1)]
# Multipliers of a unit of the engine. Larger ones cross fewer boundaries in simulation, but compile longer.
CLUSTER_MACS = 64

MAX_STAGES = 8  # of a pipeline
# What a stream has beside the input stream's one: counted vectors (h, and one within a step), and readers of counts (of its
# h, of the vector within a step, of another stream's h).
CHANNELS_PER_STREAM, CURSORS_PER_STREAM = 2, 3

Stages = Annotated[int, Field(ge=1, le=MAX_STAGES)]


def _require_power_of_two(name: str, value: int) -> None:
    if value & (value - 1):
        raise ValueError(f"{name} must be a power of two, not {value}")


class TileRows(Schema):
    """The tile heights K that the add-reduce tree can be tapped for: every power of two from `min` to `max`."""

    min: Count
    max: Count


class Buffers(Schema):
    """Capacities. A vector element is one x or h value; an accumulator row is one running sum (32 bits)."""

    weight_bytes: Count
    accumulator_rows: Count
    input_elements: Count
    hidden_elements: Count
    cell_elements: Count
    program_words: Annotated[int, Field(ge=16, le=65536)]


class Queues(Schema):
    """Depths in entries: decoded tile and post instructions, and beats of output."""

    tile: Annotated[int, Field(ge=1, le=64)]
    post: Annotated[int, Field(ge=1, le=64)]
    output: Annotated[int, Field(ge=2, le=1024)]


class Latencies(Schema):
    """Pipeline depths in cycles. The RTL cuts its pipelines, and the model adds up its latencies, from these names."""

    operand: Stages
    multiply: Stages
    add: Stages
    accumulate: Stages
    drain: Stages
    activate: Stages
    lane_multiply: Stages
    lane_add: Stages
    writeback: Stages


class Machine(Schema):
    """One SHARP machine.

    `macs` multipliers work on tiles of K rows and N = `macs` / K columns. `lanes` neurons are updated in a cycle: each
    lane has four gate activations, the cell arithmetic and the activation of the cell state. Up to `streams` recurrences
    run together. Weights that do not fit their buffer come from memory, `memory_bytes_per_cycle` at a time.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    macs: Count
    tile_rows: TileRows
    format: Literal["fp16"]
    lanes: Count
    streams: Annotated[int, Field(ge=1, le=8)]
    memory_bytes_per_cycle: Count
    clock_hz: Annotated[float, Field(gt=0)]
    buffers: Buffers
    queues: Queues
    latencies: Latencies

    @model_validator(mode="after")
    def _check(self) -> "Machine":
        rows = self.tile_rows
        for name, value in (("macs", self.macs), ("tile_rows.min", rows.min), ("tile_rows.max", rows.max), ("lanes", self.lanes)):
            _require_power_of_two(name, value)
        if not rows.min <= rows.max <= self.macs:
            raise ValueError(f"tile_rows must satisfy min <= max <= macs, not {rows.min}, {rows.max}, {self.macs}")
        if self.macs == rows.min:
            raise ValueError(f"tile_rows.min must be below macs (a tree needs two slices), not {rows.min} of {self.macs}")
        if rows.min < 2:
            raise ValueError(f"tile_rows.min must be 2 or more, not {rows.min}")
        if 4 * self.lanes > rows.max:
            bound = f"tile_rows.max / 4 = {rows.max // 4} (four gates of a lane are drained at once)"
            raise ValueError(f"lanes must be at most {bound}, not {self.lanes}")
        least, most = self.slice_word_bytes, self.weight_word_bytes
        bandwidth = self.memory_bytes_per_cycle
        if bandwidth & (bandwidth - 1) or not least <= bandwidth <= most:
            bound = f"from {least} (the weights of a slice) to {most} (a weight word)"
            raise ValueError(f"memory_bytes_per_cycle must be a power of two {bound}, not {bandwidth}")
        units = (
            ("buffers.weight_bytes", self.buffers.weight_bytes, self.weight_word_bytes, "bytes of one weight word = macs x 2"),
            ("buffers.accumulator_rows", self.buffers.accumulator_rows, rows.max, "tile_rows.max"),
            ("buffers.input_elements", self.buffers.input_elements, self.vector_row_elements, "elements of one vector row"),
            ("buffers.hidden_elements", self.buffers.hidden_elements, self.vector_row_elements, "elements of one vector row"),
            ("buffers.cell_elements", self.buffers.cell_elements, self.lanes, "lanes"),
        )
        for name, value, unit, meaning in units:
            if value % unit or value < 2 * unit:
                raise ValueError(f"{name} must be a multiple of {unit} ({meaning}), at least {2 * unit}, not {value}")
        return self

    @cached_property
    def slices(self) -> int:
        """Vector-scalar slices, each `tile_rows.min` multipliers with one scalar: leaves of the add-reduce tree."""
        return self.macs // self.tile_rows.min

    @property
    def bank_slices(self) -> int:
        """Slices below one node of the tree's lowest tap; there are `row_groups` such banks."""
        return self.columns(self.tile_rows.max)

    @property
    def cluster_slices(self) -> int:
        """Neighbouring slices that are built as one unit: below every tap of the tree, and small enough to simulate fast."""
        return min(self.bank_slices, max(1, CLUSTER_MACS // self.tile_rows.min))

    @property
    def tree_levels(self) -> int:
        return (self.slices).bit_length() - 1

    @property
    def row_groups(self) -> int:
        """Groups of `tile_rows.min` accumulator lanes."""
        return self.tile_rows.max // self.tile_rows.min

    @property
    def tile_heights(self) -> tuple[int, ...]:
        """Every legal K, ascending."""
        return tuple(self.tile_shape(tap)[0] for tap in range(self.row_groups.bit_length()))

    @property
    def weight_word_bytes(self) -> int:
        return 2 * self.macs

    @property
    def slice_word_bytes(self) -> int:
        """Bytes that a slice takes of a weight word."""
        return 2 * self.tile_rows.min

    @property
    def memory_beats(self) -> int:
        """Cycles in which memory sends one weight word."""
        return self.weight_word_bytes // self.memory_bytes_per_cycle

    @property
    def bundle(self) -> int:
        """Neurons whose rows of each gate lie together where parts skip one gate of four: a quarter of the largest tile."""
        return self.tile_rows.max // 4

    @property
    def channels(self) -> int:
        """Counters of the scoreboard: the input stream's, then those of each stream."""
        return 1 + CHANNELS_PER_STREAM * self.streams

    @property
    def cursors(self) -> int:
        """Places that are remembered in those counts: the input stream's, then those of each stream."""
        return 1 + CURSORS_PER_STREAM * self.streams

    def require_streams(self, streams: int) -> None:
        """Raise `ConfigError` where so many streams cannot run together."""
        if not 1 <= streams <= self.streams:
            raise ConfigError(f"streams must be 1 to {self.streams}, those of machine {self.name}, not {streams}")

    @property
    def weight_words(self) -> int:
        """Depth of every weight bank; one word of all banks feeds one tile."""
        return self.buffers.weight_bytes // self.weight_word_bytes

    @property
    def accumulator_depth(self) -> int:
        return self.buffers.accumulator_rows // self.tile_rows.max

    @property
    def vector_row_elements(self) -> int:
        """Elements in a row of the x and h buffers: enough for the widest tile and for one write of all lanes."""
        return max(self.slices, self.lanes)

    @property
    def load_bits(self) -> int:
        """Width of the port that loads weights, biases, states and programs."""
        return max(16 * self.tile_rows.min, 32 * self.lanes, 64)

    def tile_shape(self, tap: int) -> tuple[int, int]:
        """Rows K and columns N of a tile at a tap of the tree, 0 its root."""
        return self.tile_rows.min << tap, self.slices >> tap

    def columns(self, rows: int) -> int:
        """Columns N of a tile of `rows` rows."""
        return self.macs // rows

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits that name everything but the machine's name."""
        content = json.dumps(self.model_dump(exclude={"name"}), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]


def load_machine(name_or_path: str) -> Machine:
    """Load a machine by the name of a file in `configs/machines` or by the path of a YAML file."""
    folder = ROOT / "machines"
    path = Path(name_or_path)
    if not path.suffix:
        path = folder / f"{name_or_path}.yaml"
        if not path.is_file():
            known = ", ".join(machine_names())
            raise ConfigError(f"machine {name_or_path!r} is not known; known machines are {known}, or give a .yaml file")
    return validate(Machine, read_yaml(path), str(path))


def machine_names() -> list[str]:
    """Names of the ready-made machines, smallest first."""
    return sorted((path.stem for path in (ROOT / "machines").glob("*.yaml")), key=lambda name: (load_machine(name).macs, name))
