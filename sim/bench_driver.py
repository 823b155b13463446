"""The cocotb side of the bench: plays jobs on the top's ports and writes down what comes out, and when.

The clock runs inside the simulator; Python wakes only in cycles in which something crosses the boundary, unless a job asks
for random stalls, which decide anew in every cycle.
"""

import os
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge, RisingEdge, with_timeout

from sharp.model.timing import Count

JOBS_VARIABLE, TRACES_VARIABLE, PROGRESS_VARIABLE = "SHARP_BENCH_JOBS", "SHARP_BENCH_TRACES", "SHARP_BENCH_PROGRESS"
PERIOD_STEPS = 2
QUIET_CYCLES = 32  # watched after a run: nothing more may come


@dataclass(frozen=True)
class Job:
    """One run: what to load as (space, address, data), the input beats, and when to give up."""

    lanes: int
    steps: int
    neurons: int
    loads: list[tuple[int, int, int]]
    beats: list[int]
    limit_cycles: int
    stall_seed: int | None


@dataclass(frozen=True)
class Trace:
    """What a run did.

    outputs : float16[steps, H]; cell : float32[H]; output_cycles : int64[beats], the cycle in which each beat passed
    counts : {counter name: value}; seconds : wall time from start to end of the run
    """

    outputs: np.ndarray
    cell: np.ndarray
    output_cycles: np.ndarray
    counts: dict[str, int]
    seconds: float


@cocotb.test()
async def play(dut):
    jobs = pickle.loads(Path(os.environ[JOBS_VARIABLE]).read_bytes())
    for port in ("load_valid", "load_space", "load_address", "load_data", "start", "i__payload", "i__valid", "o__ready", "counter_address"):
        getattr(dut, port).value = 0
    dut.rst.value = 1
    Clock(dut.clk, PERIOD_STEPS, "step", impl="gpi").start(start_high=False)
    for _ in range(4):
        await RisingEdge(dut.clk)
    dut.rst.value = 0
    # A byte for each output beat, so that a waiting user sees the run go on.
    with open(os.environ[PROGRESS_VARIABLE], "wb", buffering=0) as progress:
        results = [await _play(dut, job, lambda: progress.write(b".")) for job in jobs]
    Path(os.environ[TRACES_VARIABLE]).write_bytes(pickle.dumps(results))


async def _play(dut, job: Job, progress: Callable[[], object]) -> Trace:
    await _load(dut, job.loads)
    beats: list[tuple[int, int]] = []

    def take() -> None:
        beats.append((dut.cycle.value.to_unsigned(), dut.o__payload.value.to_unsigned()))
        progress()

    stalls = None if job.stall_seed is None else random.Random(job.stall_seed)
    dut.start.value = 1
    await RisingEdge(dut.clk)
    dut.start.value = 0
    started = time.perf_counter()
    feeder = cocotb.start_soon(_feed(dut, job.beats) if stalls is None else _feed_with_stalls(dut, job.beats, stalls))
    taker = cocotb.start_soon(_take(dut, take) if stalls is None else _take_with_stalls(dut, take, stalls))
    await with_timeout(FallingEdge(dut.running), job.limit_cycles * PERIOD_STEPS, "step")
    seconds = time.perf_counter() - started
    for _ in range(QUIET_CYCLES):
        await RisingEdge(dut.clk)
    assert feeder.done(), f"the run ended before it took all of its {len(job.beats)} input beats"
    taker.cancel()
    counts = {}
    for count in Count:
        dut.counter_address.value = int(count)
        await RisingEdge(dut.clk)
        await RisingEdge(dut.clk)
        counts[count.name] = dut.counter_value.value.to_unsigned()
    return _trace(job, beats, counts, seconds)


async def _load(dut, loads):
    dut.load_valid.value = 1
    for space, address, word in loads:
        dut.load_space.value = space
        dut.load_address.value = address
        dut.load_data.value = word
        await RisingEdge(dut.clk)
    dut.load_valid.value = 0
    await RisingEdge(dut.clk)


async def _feed(dut, beats):
    dut.i__valid.value = 1
    for beat in beats:
        dut.i__payload.value = beat
        await RisingEdge(dut.clk)
        if not dut.i__ready.value:
            await RisingEdge(dut.i__ready)
            await RisingEdge(dut.clk)
    dut.i__valid.value = 0


async def _take(dut, take):
    dut.o__ready.value = 1
    await RisingEdge(dut.clk)
    while True:
        if not dut.o__valid.value:
            await RisingEdge(dut.o__valid)
            await RisingEdge(dut.clk)
        else:
            take()
            await RisingEdge(dut.clk)


async def _feed_with_stalls(dut, beats, stalls):
    for beat in beats:
        while stalls.random() < 0.4:
            await RisingEdge(dut.clk)
        dut.i__valid.value = 1
        dut.i__payload.value = beat
        await RisingEdge(dut.clk)
        while not dut.i__ready.value:
            await RisingEdge(dut.clk)
        dut.i__valid.value = 0


async def _take_with_stalls(dut, take, stalls):
    while True:
        ready = stalls.random() < 0.6
        dut.o__ready.value = int(ready)
        await RisingEdge(dut.clk)
        if ready and dut.o__valid.value:
            take()


def _trace(job: Job, beats: list[tuple[int, int]], counts: dict[str, int], seconds: float) -> Trace:
    hidden, cell = [], []
    data_bits = 32 * job.lanes
    for _, payload in beats:
        words = np.frombuffer((payload & (1 << data_bits) - 1).to_bytes(4 * job.lanes, "little"), np.uint32)
        keep = np.array([payload >> data_bits + lane & 1 for lane in range(job.lanes)], bool)
        is_state = payload >> data_bits + job.lanes & 1
        (cell if is_state else hidden).append(words[keep])
    outputs = np.concatenate(hidden) if hidden else np.zeros(0, np.uint32)
    expected = job.steps * job.neurons
    assert len(outputs) == expected, f"{expected} hidden values must come out, not {len(outputs)}"
    return Trace(
        outputs=outputs.astype(np.uint16).view(np.float16).reshape(job.steps, job.neurons),
        cell=np.concatenate(cell).view(np.float32),
        output_cycles=np.array([cycle for cycle, _ in beats], np.int64),
        counts=counts,
        seconds=seconds,
    )
