"""The cocotb bench of test_verilator.py: not collected by pytest, run inside the simulator.

It shows how a bench sleeps: the clock is driven inside the simulator (`impl="gpi"`), Python wakes when `valid` rises, then
at each clock edge of the burst, where it reads what a register would capture.
"""

import os
import signal

import cocotb
from cocotb.clock import Clock
from cocotb.simtime import get_sim_time
from cocotb.triggers import RisingEdge, Timer

PERIOD_STEPS = 2


async def start(dut):
    dut.rst.value = 1
    Clock(dut.clk, PERIOD_STEPS, "step", impl="gpi").start(start_high=False)
    await Timer(2 * PERIOD_STEPS, "step")
    dut.rst.value = 0


@cocotb.test()
async def collects_bursts(dut):
    await start(dut)
    beats, wake_ups = [], 0
    while len(beats) < 8:
        await RisingEdge(dut.valid)
        await RisingEdge(dut.clk)
        while dut.valid.value == 1:
            beats.append((dut.cycle.value.to_unsigned(), dut.total.value.to_unsigned()))
            wake_ups += 1
            await RisingEdge(dut.clk)
        wake_ups += 2
    # valid holds in cycles 60 to 63 of each 64; total is the sum of the four slices, each of which adds its number a cycle.
    assert beats == [(cycle, 10 * (cycle - 1)) for cycle in (60, 61, 62, 63, 124, 125, 126, 127)]
    assert wake_ups == 12
    assert get_sim_time("step") < 135 * PERIOD_STEPS


@cocotb.test()
async def reads_environment(dut):
    await start(dut)
    assert os.environ["EXPECTED"] == "from the caller"


@cocotb.test()
async def fails(dut):
    await start(dut)
    await RisingEdge(dut.valid)
    assert dut.cycle.value.to_unsigned() == 61, "deliberate mismatch"


@cocotb.test()
async def is_killed(dut):
    await start(dut)
    os.kill(os.getpid(), signal.SIGKILL)
