"""Random checks of the RTL against the model: random machines, each built once, and random layers on each.

A case is a machine and a layer with its seeds; it is small, so that the one YAML file written for a mismatch repeats it.
Values, every output beat's cycle and every counter must be equal; under random stalls of the host only values must.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import yaml
from pydantic import Field

from sharp.model import numerics
from sharp.model.arithmetic import CELL_LIMIT, Activation
from sharp.model.compiler import Recurrence
from sharp.model.config import Schema, read_yaml, validate
from sharp.model.errors import NetworkError
from sharp.model.layer import CELLS, COUPLING_ACTIVATIONS, GATES, STANDARD_ACTIVATIONS, Layer, LayerShape
from sharp.model.machine import Machine
from sharp.model.planner import LEANS, Plan, plan_streams
from sharp.model.program import Program, Tiling
from sharp.model.steps import SCHEDULES

from . import bench
from .bench_driver import Trace
from .execution import MachineRun
from .files import write_whole

Size = Annotated[int, Field(ge=1, le=4096)]
Seed = Annotated[int, Field(ge=0)]

LARGEST_SIZE = 80
LARGEST_STEPS = 6
STALL_SHARE = 0.1
SATURATION_SHARE = 0.1
# A machine's weight buffer in words: all weights fit, or most must be streamed.
LARGE_BUFFER_WORDS, SMALL_BUFFER_WORDS = 1 << 13, 64
SMALL_BUFFER_SHARE = 0.25


class LayerCase(Schema):
    """A layer's shape and tiling; its values follow from the case's seed. `large_cell` starts cell states next to their limit."""

    cell: Literal[CELLS]
    inputs: Size
    hidden: Size
    projected: Size | None
    peepholes: bool
    coupled: bool
    reset_after: bool
    clip: float | None
    activations: Annotated[tuple[str, ...], Field(strict=False)]
    input_rows: Size
    hidden_rows: Size
    last_rows: Annotated[int, Field(ge=0, le=4096)]
    last_columns: Annotated[int, Field(ge=0, le=4096)]
    lean: Annotated[float, Field(ge=0)] | None
    bundle: Annotated[int, Field(ge=0, le=4096)]
    trim: bool
    large_cell: bool

    @classmethod
    def of(cls, shape: LayerShape, tiling: Tiling, *, large_cell: bool = False) -> "LayerCase":
        """Return the case of a layer of `shape` with `tiling`."""
        names = ("cell", "inputs", "hidden", "projected", "peepholes", "coupled", "reset_after", "clip")
        activations = tuple(each.name for each in shape.activations)
        values = {name: getattr(shape, name) for name in names} | vars(tiling)
        return cls(**values, activations=activations, large_cell=large_cell)

    @property
    def shape(self) -> LayerShape:
        values = self.model_dump(include={"cell", "inputs", "hidden", "projected", "peepholes", "coupled", "reset_after", "clip"})
        return LayerShape(name="case", activations=tuple(Activation[name] for name in self.activations), **values)

    @property
    def tiling(self) -> Tiling:
        return Tiling(**self.model_dump(include={each.name for each in fields(Tiling)}))

    @property
    def name(self) -> str:
        kind = {"lstm": "LSTM", "gru": "GRU" if self.reset_after else "GRU (reset before)", "rnn": "RNN"}[self.cell]
        said = [word for word in ("peepholes", "coupled") if getattr(self, word)]
        said += [f"clip {self.clip}"] if self.clip else []
        said += [f"{self.projected} projected"] if self.projected else []
        said += [f"tiles of {self.input_rows} and {self.hidden_rows} rows"]
        return f"{kind} {self.inputs} -> {self.hidden} ({', '.join(said)})"

    def layer(self, generator: np.random.Generator) -> Layer:
        """Draw the layer's values."""
        scale = generator.choice([0.05, 0.5, 3.0])
        shape = self.shape
        rows = GATES[self.cell] * self.hidden
        bias = _draw(generator, scale, rows)
        if self.large_cell and self.cell == "lstm":
            bias[: 3 * self.hidden] += 20  # input, forget and candidate gates fully open
        return Layer(
            name="case",
            cell=self.cell,
            input_kernel=_draw(generator, scale, rows, self.inputs),
            recurrent_kernel=_draw(generator, scale, rows, shape.outputs),
            bias=bias,
            candidate_bias=_draw(generator, scale, self.hidden) if self.cell == "gru" and self.reset_after else None,
            peepholes=_draw(generator, scale, 3, self.hidden) if self.peepholes else None,
            projection=_draw(generator, scale, self.projected, self.hidden) if self.projected else None,
            coupled=self.coupled,
            reset_after=self.reset_after,
            clip=self.clip,
            activations=shape.activations,
        )


class StreamCase(Schema):
    """A stream: `steps` steps through layer number `layer`, on the h of stream `source` where that is given."""

    layer: Annotated[int, Field(ge=0)]
    steps: Size
    source: Annotated[int, Field(ge=0)] | None


class Case(Schema):
    """Layers and streams on a machine: everything else follows from the seeds."""

    machine: Machine
    layers: Annotated[tuple[LayerCase, ...], Field(strict=False, min_length=1)]
    streams: Annotated[tuple[StreamCase, ...], Field(strict=False, min_length=1)]
    schedule: Literal[SCHEDULES]
    seed: Seed
    stall_seed: Seed | None

    @property
    def name(self) -> str:
        stalls = "" if self.stall_seed is None else " with stalls"
        streams = ", ".join(
            f"{self.layers[each.layer].name} {each.steps} steps" + ("" if each.source is None else f" after stream {each.source}")
            for each in self.streams
        )
        return f"{self.machine.name}: {self.schedule}, {streams}{stalls}"

    def plan(self) -> Plan:
        """Compile the case; `NetworkError` where its streams do not fit the machine."""
        shapes = [layer.shape for layer in self.layers]
        recurrences = [Recurrence(each.layer, each.steps, each.source) for each in self.streams]
        return plan_streams(
            self.machine, shapes, recurrences, schedule=self.schedule, tilings=[layer.tiling for layer in self.layers]
        )

    def loaded(self, plan: Plan) -> tuple[Program, np.ndarray]:
        """Return the program with its images, and its input stream, drawn from the seed."""
        generator = np.random.default_rng(self.seed)
        layers = [layer.layer(generator) for layer in self.layers]
        states, inputs = [], []
        for stream in self.streams:
            layer = layers[stream.layer]
            cell = None
            if layer.cell == "lstm":
                cell = _draw(generator, 1, layer.hidden)
                if self.layers[stream.layer].large_cell:
                    cell = np.copysign(CELL_LIMIT - generator.random(layer.hidden, dtype=np.float32), cell)
            states.append((generator.uniform(-1, 1, layer.outputs).astype(np.float32), cell))
            inputs.append(_draw(generator, 1, stream.steps, layer.inputs).astype(np.float16))
        program = plan.loaded(layers, states)
        return program, program.input_stream(inputs)


def _draw(generator: np.random.Generator, scale: float, *size: int) -> np.ndarray:
    values = scale * generator.standard_normal(size)
    return np.where(generator.random(size) < 0.05, 0.0, values).astype(np.float32)


@dataclass(frozen=True)
class Outcome:
    """A case, its trace, and what was wrong with it, None where nothing was."""

    case: Case
    trace: Trace
    mismatch: str | None


def random_machine(generator: np.random.Generator, index: int) -> Machine:
    """Draw a machine of 16 to 256 MACs with pipeline latencies of 1 to 4 cycles and 1 to 4 streams."""

    def draw(low: int, high: int) -> int:
        return int(generator.integers(low, high + 1))

    macs_bits = draw(4, 8)
    least_bits = draw(1, min(5, macs_bits - 1))
    most_bits = draw(max(2, least_bits), min(6, macs_bits))
    lane_bits = draw(0, most_bits - 2)
    streams = draw(1, 4)
    row = max(1 << macs_bits - least_bits, 1 << lane_bits)
    vector = row * -(-LARGEST_SIZE // row)
    words = SMALL_BUFFER_WORDS if generator.random() < SMALL_BUFFER_SHARE else LARGE_BUFFER_WORDS
    names = ("operand", "multiply", "add", "accumulate", "drain", "activate", "lane_multiply", "lane_add", "writeback")
    return Machine(
        name=f"random-{index}",
        macs=1 << macs_bits,
        tile_rows={"min": 1 << least_bits, "max": 1 << most_bits},
        format="fp16",
        lanes=1 << lane_bits,
        streams=streams,
        memory_bytes_per_cycle=2 << draw(least_bits, macs_bits),
        clock_hz=500e6,
        buffers={
            "weight_bytes": (2 << macs_bits) * words,
            "accumulator_rows": 16384,
            "input_elements": 2 * streams * vector,
            "hidden_elements": 3 * streams * vector,
            "cell_elements": 512,
            "program_words": 4096,
        },
        queues={"tile": draw(1, 6), "post": draw(1, 6), "output": int(generator.choice([2, 3, 8, 64]))},
        latencies={name: draw(1, 4) for name in names},
    )


def random_layer(generator: np.random.Generator, machine: Machine, inputs: int | None = None) -> LayerCase:
    """Draw a layer for `machine`, of so many inputs if that is given."""

    def size() -> int:
        return int(generator.integers(1, LARGEST_SIZE + 1)) if generator.random() < 0.7 else int(generator.integers(1, 9))

    def chance(share: float) -> bool:
        return bool(generator.random() < share)

    cell = str(generator.choice(CELLS, p=(0.5, 0.35, 0.15)))
    lstm = cell == "lstm"
    hidden = size()
    activations = STANDARD_ACTIVATIONS[cell]
    if chance(0.3):
        activations = tuple(Activation(int(each)) for each in generator.integers(0, len(Activation), len(activations)))
    return LayerCase(
        cell=cell,
        inputs=size() if inputs is None else inputs,
        hidden=hidden,
        projected=int(generator.integers(1, hidden + 1)) if lstm and chance(0.2) else None,
        peepholes=lstm and chance(0.25),
        coupled=lstm and activations[0] in COUPLING_ACTIVATIONS and chance(0.2),
        reset_after=cell != "gru" or chance(0.6),
        clip=float(generator.uniform(0.1, 3)) if chance(0.2) and Activation.IDENTITY not in activations[:2] else None,
        activations=tuple(each.name for each in activations),
        input_rows=int(generator.choice(machine.tile_heights)),
        hidden_rows=int(generator.choice(machine.tile_heights)),
        last_rows=int(generator.choice((0, *machine.tile_heights))),
        last_columns=int(generator.integers(0, 24)),
        lean=None if generator.random() < 0.4 else float(generator.choice(LEANS)),
        bundle=int(generator.choice((0, *(1 << shift for shift in range(machine.lanes.bit_length()))))),
        trim=chance(0.5),
        large_cell=lstm and chance(SATURATION_SHARE),
    )


def random_case(generator: np.random.Generator, machine: Machine) -> Case:
    """Draw layers and streams for `machine`: one stream, elements of a batch, networks side by side or layers in a chain."""
    steps = int(generator.integers(1, LARGEST_STEPS + 1))
    count = int(generator.integers(1, machine.streams + 1))
    layers = [random_layer(generator, machine)]
    streams = [StreamCase(layer=0, steps=steps, source=None)]
    kind = str(generator.choice(["batch", "side by side", "chain"]))
    for index in range(1, count):
        steps = steps if kind == "chain" else int(generator.integers(1, LARGEST_STEPS + 1))
        if kind != "batch":
            layers.append(random_layer(generator, machine, layers[-1].shape.outputs if kind == "chain" else None))
        streams.append(StreamCase(layer=len(layers) - 1, steps=steps, source=index - 1 if kind == "chain" else None))
    case = Case(
        machine=machine,
        layers=tuple(layers),
        streams=tuple(streams),
        schedule=str(generator.choice(SCHEDULES)),
        seed=int(generator.integers(1 << 32)),
        stall_seed=int(generator.integers(1 << 32)) if generator.random() < STALL_SHARE else None,
    )
    try:
        case.plan()
    except NetworkError:
        # Streams keep all their weights on the machine; alone, the first one streams them from memory.
        case = case.replace(layers=case.layers[:1], streams=case.streams[:1])
    return case


def random_cases(machines: int, cases: int, seed: int) -> list[list[Case]]:
    """Draw `cases` cases, spread evenly over `machines` machines."""
    generator = np.random.default_rng(seed)
    counts = [cases // machines + (index < cases % machines) for index in range(machines)]
    drawn = []
    for index, count in enumerate(counts):
        machine = random_machine(generator, index)
        drawn.append([random_case(generator, machine) for _ in range(count)])
    return drawn


def check(cases: Sequence[Case], progress: Callable[[str], None] = lambda phase: None) -> Iterator[Outcome]:
    """Run cases of one machine on model and RTL and yield what came of each, in order."""
    plans = [case.plan() for case in cases]
    loaded = [case.loaded(plan) for case, plan in zip(cases, plans, strict=True)]
    runs = [
        bench.Run(program, inputs, plan.timing, case.stall_seed) for case, plan, (program, inputs) in zip(cases, plans, loaded, strict=True)
    ]
    traces = bench.simulate(cases[0].machine, runs, progress)
    for case, plan, (program, inputs), trace in zip(cases, plans, loaded, traces, strict=True):
        run = MachineRun("case", plan, numerics.execute(program, inputs), trace)
        yield Outcome(case, trace, _mismatch(run, timed=case.stall_seed is None))


def _mismatch(run: MachineRun, *, timed: bool) -> str | None:
    """Return the first difference between prediction and trace, in the order in which one would look for its cause."""
    trace: Trace = run.trace
    if not run.values_match:
        for stream, (got, expected) in enumerate(zip(trace.outputs, run.values.outputs, strict=True)):
            wrong = np.argwhere(got.view(np.uint16) != expected.view(np.uint16))
            if len(wrong):
                step, neuron = wrong[0]
                values = f"model {expected[step, neuron]}, RTL {got[step, neuron]}"
                return f"{len(wrong)} hidden values of stream {stream} differ, the first at step {step}, neuron {neuron}: {values}"
        return "final cell states differ"
    if not timed:
        return None
    if not run.cycles_match:
        expected, got = run.plan.timing.output_cycles, trace.output_cycles
        if len(expected) != len(got):
            return f"output beats: model {len(expected)}, RTL {len(got)}"
        wrong = np.flatnonzero(expected != got)
        if len(wrong):
            first = wrong[0]
            return f"{len(wrong)} output beats differ in cycle, the first is beat {first}: model {expected[first]}, RTL {got[first]}"
        return f"cycles: model {run.counts['cycles']}, RTL {trace.counts['cycles']}"
    different = {name: (value, trace.counts[name]) for name, value in run.counts.items() if trace.counts[name] != value}
    if different:
        return "counters (model, RTL): " + ", ".join(f"{name} {pair}" for name, pair in different.items())
    return None


def write_case(case: Case, path: Path) -> None:
    """Write a case as YAML that `read_case` takes; ConfigError as for `write_whole`."""
    write_whole(path, yaml.safe_dump(case.model_dump(), sort_keys=False).encode())


def read_case(path: Path) -> Case:
    """Read a case; ConfigError as for any configuration file."""
    return validate(Case, read_yaml(path), str(path))
