"""The cocotb side of the bench: plays jobs on the top's ports and writes down what comes out, and when.

The clock runs inside the simulator; Python wakes only in cycles in which something crosses the boundary, unless a job asks
for random stalls, which decide anew in every cycle.
"""

import os
import pickle
import random
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge, RisingEdge, with_timeout

from sharp.model.timing import Count

JOBS_VARIABLE, TRACES_VARIABLE, PROGRESS_VARIABLE = "SHARP_BENCH_JOBS", "SHARP_BENCH_TRACES", "SHARP_BENCH_PROGRESS"
PERIOD_STEPS = 2
Port = namedtuple("Port", "payload valid ready")
QUIET_CYCLES = 32  # watched after a run: nothing more may come


@dataclass(frozen=True)
class Job:
    """One run: what to load as (space, address, data), the beats to send, and when to give up.

    outputs : (steps, P) of each stream; memory is sent over and over, `memory_beats` beats in all
    """

    lanes: int
    outputs: list[tuple[int, int]]
    loads: list[tuple[int, int, int]]
    beats: list[int]
    memory: list[int]
    memory_beats: int
    limit_cycles: int
    stall_seed: int | None


@dataclass(frozen=True)
class Trace:
    """What a run did.

    outputs : float16[steps, P] of each stream; states : float32[H], empty where none was sent
    output_cycles : int64[beats], the cycle in which each beat passed
    counts : {counter name: value}; seconds : wall time from start to end of the run
    """

    outputs: tuple[np.ndarray, ...]
    states: tuple[np.ndarray, ...]
    output_cycles: np.ndarray
    counts: dict[str, int]
    seconds: float


@cocotb.test()
async def play(dut):
    jobs = pickle.loads(Path(os.environ[JOBS_VARIABLE]).read_bytes())
    for port in ("load_valid", "load_space", "load_address", "load_data", "start", "counter_address"):
        getattr(dut, port).value = 0
    for port in ("i__payload", "i__valid", "m__payload", "m__valid", "o__ready"):
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
    feed = _feed if stalls is None else partial(_feed_with_stalls, stalls)
    inputs = Port(dut.i__payload, dut.i__valid, dut.i__ready)
    memory = Port(dut.m__payload, dut.m__valid, dut.m__ready)
    words = islice(cycle(job.memory), job.memory_beats)
    feeders = [cocotb.start_soon(feed(dut.clk, port, beats)) for port, beats in ((inputs, job.beats), (memory, words))]
    taker = cocotb.start_soon(_take(dut, take) if stalls is None else _take_with_stalls(dut, take, stalls))
    await with_timeout(FallingEdge(dut.running), job.limit_cycles * PERIOD_STEPS, "step")
    seconds = time.perf_counter() - started
    for _ in range(QUIET_CYCLES):
        await RisingEdge(dut.clk)
    for feeder, sent in zip(feeders, (f"{len(job.beats)} input", f"{job.memory_beats} memory"), strict=True):
        assert feeder.done(), f"the run ended before it took all of its {sent} beats"
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


async def _feed(clock, port, beats):
    for beat in beats:
        port.valid.value = 1
        port.payload.value = beat
        await RisingEdge(clock)
        if not port.ready.value:
            await RisingEdge(port.ready)
            await RisingEdge(clock)
    port.valid.value = 0


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


async def _feed_with_stalls(stalls, clock, port, beats):
    for beat in beats:
        while stalls.random() < 0.4:
            await RisingEdge(clock)
        port.valid.value = 1
        port.payload.value = beat
        await RisingEdge(clock)
        while not port.ready.value:
            await RisingEdge(clock)
        port.valid.value = 0


async def _take_with_stalls(dut, take, stalls):
    while True:
        ready = stalls.random() < 0.6
        dut.o__ready.value = int(ready)
        await RisingEdge(dut.clk)
        if ready and dut.o__valid.value:
            take()


def _trace(job: Job, beats: list[tuple[int, int]], counts: dict[str, int], seconds: float) -> Trace:
    hidden, states = ([[np.zeros(0, np.uint32)] for _ in job.outputs] for _ in range(2))
    data_bits = 32 * job.lanes
    for _, payload in beats:
        words = np.frombuffer((payload & (1 << data_bits) - 1).to_bytes(4 * job.lanes, "little"), np.uint32)
        keep = np.array([payload >> data_bits + lane & 1 for lane in range(job.lanes)], bool)
        is_state, stream = payload >> data_bits + job.lanes & 1, payload >> data_bits + job.lanes + 1
        (states if is_state else hidden)[stream].append(words[keep])
    outputs = []
    for stream, (words, (steps, elements)) in enumerate(zip(map(np.concatenate, hidden), job.outputs, strict=True)):
        assert len(words) == steps * elements, f"{steps * elements} hidden values of stream {stream} must come out, not {len(words)}"
        outputs.append(words.astype(np.uint16).view(np.float16).reshape(steps, elements))
    return Trace(
        outputs=tuple(outputs),
        states=tuple(np.concatenate(words).view(np.float32) for words in states),
        output_cycles=np.array([cycle for cycle, _ in beats], np.int64),
        counts=counts,
        seconds=seconds,
    )
