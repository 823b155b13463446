"""How long a machine's RTL takes to build for simulation, and how fast it then runs: figures, measured anew each time.

The build goes to a cache of its own, so that it is a cold one; the run is an LSTM layer with random weights, whose trace
must equal the prediction like any other.
"""

import os
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from sharp.model.layer import LayerShape
from sharp.model.machine import Machine
from sharp.model.program import Tiling

from . import bench
from .verification import Case, LayerCase, StreamCase, check

HIDDEN, STEPS, SEED = 128, 60, 1


@dataclass(frozen=True)
class Speed:
    """Seconds to convert to Verilog and to build, the largest memory of any program that did, and simulated cycles a second."""

    machine: Machine
    convert_s: float
    build_s: float
    build_bytes: int
    cycles: int
    cycles_per_second: float
    mismatch: str | None


@contextmanager
def _empty_cache():
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="sharp-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def measure(machine: Machine, progress: Callable[[str], None] = lambda phase: None) -> Speed:
    """Build and run `machine`; raises as `bench.simulate`."""
    height = machine.tile_heights[0]
    layer = LayerCase.of(LayerShape(name="lstm", cell="lstm", inputs=HIDDEN, hidden=HIDDEN), Tiling(height, height))
    streams = (StreamCase(layer=0, steps=STEPS, source=None),)
    case = Case(machine=machine, layers=(layer,), streams=streams, schedule="unfolded", seed=SEED, stall_seed=None)
    with _empty_cache():
        bench.verilog_text.cache_clear()
        start = time.perf_counter()
        progress("converting to Verilog")
        bench.verilog_text(machine)
        converted = time.perf_counter()
        bench.build(machine, progress)
        built = time.perf_counter()
        (outcome,) = check([case], progress)
    return Speed(
        machine=machine,
        convert_s=converted - start,
        build_s=built - converted,
        build_bytes=1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        cycles=outcome.trace.counts["cycles"],
        cycles_per_second=outcome.trace.counts["cycles"] / outcome.trace.seconds,
        mismatch=outcome.mismatch,
    )


def print_speeds(speeds: list[Speed], console: Console) -> None:
    """Print a row for each machine."""
    table = Table(
        "machine", "MACs", "convert, s", "build, s", "MB", "cycles/s", "as predicted",
        title=f"RTL of an LSTM {HIDDEN} -> {HIDDEN}, {STEPS} steps, {len(os.sched_getaffinity(0))} cores", title_justify="left",
    )  # fmt: skip
    for speed in speeds:
        table.add_row(
            speed.machine.name,
            f"{speed.machine.macs:,}",
            f"{speed.convert_s:.1f}",
            f"{speed.build_s:.1f}",
            f"{speed.build_bytes / 1e6:,.0f}",
            f"{speed.cycles_per_second:,.0f}",
            speed.mismatch or "yes",
        )
    console.print(table)


def result(speeds: list[Speed]) -> list[dict]:
    """Return what `sharp bench rtl --json` prints."""
    return [{**speed.__dict__, "machine": {"name": speed.machine.name, "hash": speed.machine.hash}} for speed in speeds]
