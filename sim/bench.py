"""Runs programs on the RTL: `simulate` builds a machine's simulator (or finds it), runs programs on it and returns traces.

The build is made once for a machine and kept; any number of runs share one simulation, each loaded over the ports that a
host would use. The cocotb side of the bench is `bench_driver`.
"""

import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from sharp.model.machine import Machine
from sharp.model.program import Program, Weights
from sharp.model.timing import Timing
from sharp.rtl.top import TOP_MODULE, UNITS, Space, convert, program_pieces

from . import verilator
from .bench_driver import JOBS_VARIABLE, PROGRESS_VARIABLE, TRACES_VARIABLE, Job, Trace

PUBLIC_PORTS = (
    "clk",
    "rst",
    "load_valid",
    "load_space",
    "load_address",
    "load_data",
    "start",
    "running",
    "i__payload",
    "i__valid",
    "i__ready",
    "m__payload",
    "m__valid",
    "m__ready",
    "o__payload",
    "o__valid",
    "o__ready",
    "cycle",
    "counter_address",
    "counter_value",
)
# A run that takes this many times its predicted cycles hangs; random stalls may stretch it further.
HANG_FACTOR, STALLED_HANG_FACTOR, HANG_MARGIN_CYCLES = 2, 40, 20_000


@dataclass(frozen=True)
class Run:
    """A program, its input stream (`Program.input_stream`), its prediction, and the seed of random stalls, if any."""

    program: Program
    inputs: np.ndarray
    timing: Timing
    stall_seed: int | None = None


def build(machine: Machine, progress: Callable[[str], None] | None = None) -> Path:
    """Return the simulator of `machine`, built if it is not in the cache."""
    if progress:
        progress("converting to Verilog")
    units = [kind.MODULE for kind in UNITS]
    return verilator.build(verilog_text(machine), TOP_MODULE, {TOP_MODULE: PUBLIC_PORTS}, units, progress=progress)


@lru_cache(maxsize=1)
def verilog_text(machine: Machine) -> dict[str, str]:
    """Return a machine's Verilog by file name; kept, since a network runs layer after layer on the same machine."""
    return convert(machine)


def simulate(machine: Machine, runs: Sequence[Run], progress: Callable[[str], None] | None = None) -> list[Trace]:
    """Run all `runs` on the RTL of `machine`, one after another, and return their traces.

    Raises `SimulationError` when the bench fails or a run does not end.
    """
    report = progress or (lambda phase: None)
    simulator = build(machine, progress)
    total = sum(len(run.timing.output_cycles) for run in runs)
    with tempfile.TemporaryDirectory(prefix="sharp-") as name:
        folder = Path(name)
        jobs, traces, passed = folder / "jobs", folder / "traces", folder / "progress"
        jobs.write_bytes(pickle.dumps([_job(run) for run in runs]))
        passed.touch()
        verilator.run(
            simulator,
            test_module="sharp.sim.bench_driver",
            top=TOP_MODULE,
            log=folder / "bench.log",
            environment={JOBS_VARIABLE: str(jobs), TRACES_VARIABLE: str(traces), PROGRESS_VARIABLE: str(passed)},
            watch=lambda: report(f"simulating, {100 * passed.stat().st_size // max(1, total)} %"),
        )
        return pickle.loads(traces.read_bytes())


def _job(run: Run) -> Job:
    machine = run.program.machine
    factor = HANG_FACTOR if run.stall_seed is None else STALLED_HANG_FACTOR
    return Job(
        lanes=machine.lanes,
        outputs=[(stream.steps, stream.outputs) for stream in run.program.streams],
        loads=_loads(run.program),
        beats=_beats(machine, run.inputs),
        memory=_words(run.program.memory, machine.memory_bytes_per_cycle),
        memory_beats=machine.memory_beats * sum(each.words for each in run.program.executed() if isinstance(each, Weights)),
        limit_cycles=factor * run.timing.cycles + HANG_MARGIN_CYCLES,
        stall_seed=run.stall_seed,
    )


def _loads(program: Program) -> list[tuple[int, int, int]]:
    """Return (space, address, data) of every word that the load port takes before a run."""
    machine = program.machine
    loads = []

    def write(space: Space, address: int, words: np.ndarray) -> None:
        loads.extend((int(space), address + index, int.from_bytes(word.tobytes(), "little")) for index, word in enumerate(words))

    pieces, bits = program_pieces(machine), machine.load_bits
    for index, word in enumerate(program.words):
        mask = (1 << bits) - 1
        loads.extend((int(Space.PROGRAM), index * pieces + piece, word >> piece * bits & mask) for piece in range(pieces))
    rows = machine.tile_rows.min
    write(Space.WEIGHT, 0, program.weights.reshape(-1, rows))
    write(Space.ACCUMULATOR, 0, program.accumulators.reshape(-1, rows // 2))
    write(Space.HIDDEN, 0, program.hidden.reshape(-1, machine.lanes))
    write(Space.CELL, 0, program.cell.reshape(-1, machine.lanes))
    return loads


def _beats(machine: Machine, inputs: np.ndarray) -> list[int]:
    """Return the input stream: every vector in beats of `lanes` elements, the last one padded."""
    vectors, elements = inputs.shape
    beats = -(-elements // machine.lanes)
    padded = np.zeros((vectors, beats * machine.lanes), np.float16)
    padded[:, :elements] = inputs
    return _words(padded, 2 * machine.lanes)


def _words(array: np.ndarray, size: int) -> list[int]:
    """Return the bytes of an array as integers of `size` bytes, low byte first."""
    content = array.tobytes()
    return [int.from_bytes(content[first : first + size], "little") for first in range(0, len(content), size)]
