"""Random checks of the RTL against the model: random machines, each built once, and random layers on each.

A case is a machine and a layer with its seeds; it is small, so that the one YAML file written for a mismatch repeats it.
Values, every output beat's cycle and every counter must be equal; under random stalls of the host only values must.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import yaml
from pydantic import Field

from sharp.model import numerics
from sharp.model.arithmetic import CELL_LIMIT
from sharp.model.compiler import SCHEDULES
from sharp.model.config import Schema, read_yaml, validate
from sharp.model.machine import Machine
from sharp.model.network import LayerShape, LstmLayer
from sharp.model.planner import Plan, plan
from sharp.model.program import Tiling

from . import bench
from .bench_driver import Trace
from .execution import LayerRun
from .files import write_whole

Size = Annotated[int, Field(ge=1, le=4096)]
Seed = Annotated[int, Field(ge=0)]

LARGEST_SIZE = 80
LARGEST_STEPS = 6
STALL_SHARE = 0.1
SATURATION_SHARE = 0.1


class Case(Schema):
    """A layer on a machine: everything else follows from the seeds. `large_cell` starts cell states next to their limit."""

    machine: Machine
    inputs: Size
    hidden: Size
    steps: Size
    schedule: Literal[SCHEDULES]
    input_rows: Size
    hidden_rows: Size
    tail_columns: Annotated[int, Field(ge=0, le=64)]
    tail_blocks: Annotated[int, Field(ge=1, le=64)]
    seed: Seed
    stall_seed: Seed | None
    large_cell: bool

    @property
    def name(self) -> str:
        stalls = "" if self.stall_seed is None else " with stalls"
        tiles = f"tiles of {self.input_rows} and {self.hidden_rows} rows"
        return f"{self.machine.name}: LSTM {self.inputs} -> {self.hidden}, {self.steps} steps, {self.schedule}, {tiles}{stalls}"

    def layer(self) -> tuple[LstmLayer, np.ndarray, np.ndarray, np.ndarray]:
        """Return the layer, its float16 inputs and the states before the first step, drawn from the seed."""
        generator = np.random.default_rng(self.seed)
        scale = generator.choice([0.05, 0.5, 3.0])

        def draw(*size: int) -> np.ndarray:
            values = scale * generator.standard_normal(size)
            return np.where(generator.random(size) < 0.05, 0.0, values).astype(np.float32)

        rows = 4 * self.hidden
        bias = draw(rows)
        cell = draw(self.hidden)
        if self.large_cell:
            bias[: 3 * self.hidden] += 20  # input, forget and candidate gates fully open
            cell = np.copysign(CELL_LIMIT - generator.random(self.hidden, dtype=np.float32), cell)
        layer = LstmLayer(name="case", input_kernel=draw(rows, self.inputs), recurrent_kernel=draw(rows, self.hidden), bias=bias)
        hidden = generator.uniform(-1, 1, self.hidden).astype(np.float32)
        return layer, draw(self.steps, self.inputs).astype(np.float16), hidden, cell

    def plan(self) -> Plan:
        shape = LayerShape(name="case", cell="lstm", inputs=self.inputs, hidden=self.hidden)
        tiling = Tiling(self.input_rows, self.hidden_rows, self.tail_columns, self.tail_blocks)
        return plan(self.machine, shape, steps=self.steps, schedule=self.schedule, tile=tiling)


@dataclass(frozen=True)
class Outcome:
    """A case, its trace, and what was wrong with it, None where nothing was."""

    case: Case
    trace: Trace
    mismatch: str | None


def random_machine(generator: np.random.Generator, index: int) -> Machine:
    """Draw a machine of 16 to 256 MACs with pipeline latencies of 1 to 4 cycles."""

    def draw(low: int, high: int) -> int:
        return int(generator.integers(low, high + 1))

    macs_bits = draw(4, 8)
    least_bits = draw(1, min(5, macs_bits - 1))
    most_bits = draw(max(2, least_bits), min(6, macs_bits))
    lane_bits = draw(0, most_bits - 2)
    row = max(1 << macs_bits - least_bits, 1 << lane_bits)
    vector = row * -(-LARGEST_SIZE // row) * 2
    names = ("operand", "multiply", "add", "accumulate", "drain", "activate", "lane_multiply", "lane_add", "writeback")
    return Machine(
        name=f"random-{index}",
        macs=1 << macs_bits,
        tile_rows={"min": 1 << least_bits, "max": 1 << most_bits},
        format="fp16",
        lanes=1 << lane_bits,
        clock_hz=500e6,
        buffers={
            "weight_bytes": (2 << macs_bits) << 13,
            "accumulator_rows": 2048,
            "input_elements": vector,
            "hidden_elements": vector,
            "cell_elements": 128,
            "program_words": 2048,
        },
        queues={"tile": draw(1, 6), "post": draw(1, 6), "output": int(generator.choice([2, 3, 8, 64]))},
        latencies={name: draw(1, 4) for name in names},
    )


def random_case(generator: np.random.Generator, machine: Machine) -> Case:
    """Draw a layer for `machine`."""

    def size() -> int:
        return int(generator.integers(1, LARGEST_SIZE + 1)) if generator.random() < 0.7 else int(generator.integers(1, 9))

    stalls = generator.random() < STALL_SHARE
    return Case(
        machine=machine,
        inputs=size(),
        hidden=size(),
        steps=int(generator.integers(1, LARGEST_STEPS + 1)),
        schedule=str(generator.choice(SCHEDULES)),
        input_rows=int(generator.choice(machine.tile_heights)),
        hidden_rows=int(generator.choice(machine.tile_heights)),
        tail_columns=int(generator.integers(0, 4)),
        tail_blocks=int(generator.integers(1, 4)),
        seed=int(generator.integers(1 << 32)),
        stall_seed=int(generator.integers(1 << 32)) if stalls else None,
        large_cell=bool(generator.random() < SATURATION_SHARE),
    )


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
    prepared = []
    for case in cases:
        layer, inputs, hidden, cell = case.layer()
        planned = case.plan()
        prepared.append((case, planned, planned.loaded(layer, hidden, cell), inputs))
    runs = [bench.Run(program, inputs, planned.timing, case.stall_seed) for case, planned, program, inputs in prepared]
    traces = bench.simulate(cases[0].machine, runs, progress)
    for (case, planned, program, inputs), trace in zip(prepared, traces, strict=True):
        values = numerics.execute(program, inputs)
        run = LayerRun("case", planned, program, inputs, values, trace)
        yield Outcome(case, trace, _mismatch(run, timed=case.stall_seed is None))


def _mismatch(run: LayerRun, *, timed: bool) -> str | None:
    """Return the first difference between prediction and trace, in the order in which one would look for its cause."""
    trace: Trace = run.trace
    if not run.values_match:
        wrong = np.argwhere(trace.outputs.view(np.uint16) != run.values.outputs.view(np.uint16))
        if len(wrong):
            step, neuron = wrong[0]
            got, expected = trace.outputs[step, neuron], run.values.outputs[step, neuron]
            return f"{len(wrong)} hidden values differ, the first at step {step}, neuron {neuron}: model {expected}, RTL {got}"
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
