"""All arithmetic units at every latency in one Verilator model, fed with three words in each cycle by a C++ main."""

import subprocess
from functools import cache
from pathlib import Path

import numpy as np
from amaranth.back import verilog
from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from sharp.model.machine import MAX_STAGES
from sharp.rtl.activation import ActivationUnit
from sharp.rtl.floating import Fp16Multiplier, Fp32Adder, Fp32Multiplier, fp32_to_fp16, saturate_cell
from sharp.rtl.pipeline import delay
from sharp.sim.verilator import build

LATENCIES = range(1, MAX_STAGES + 1)
COMPONENTS = {"fp16_multiply": Fp16Multiplier, "fp32_add": Fp32Adder, "fp32_multiply": Fp32Multiplier, "activate": ActivationUnit}
UNITS = (*COMPONENTS, "to_fp16", "cell_state", "cell_beyond")

CPP_MAIN = """\
#include "Vtop.h"
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int, char** arguments) {
    FILE* input = fopen(arguments[1], "rb");
    FILE* output = fopen(arguments[2], "wb");
    if (!input || !output) return 1;
    Vtop top;
    top.unit = atoi(arguments[3]);
    std::vector<uint32_t> operands(3), results;
    while (fread(operands.data(), 4, 3, input) == 3) {
        top.a = operands[0];
        top.b = operands[1];
        top.c = operands[2];
        top.clk = 0;
        top.eval();
        top.clk = 1;
        top.eval();
        RESULTS
    }
    if (fwrite(results.data(), 4, results.size(), output) != results.size()) return 1;
    return fclose(output);
}
""".replace("RESULTS", " ".join(f"results.push_back(top.o{latency});" for latency in LATENCIES))


class ArithmeticBench(wiring.Component):
    """o<latency> : the result that `unit`, an index of UNITS, gives for the `a`, `b` and `c` of `latency` cycles ago.

    A component's inputs are `a`, `b` and `c` in the order of its members, as many as it has.
    """

    def __init__(self):
        operands = dict.fromkeys("abc", In(32))
        super().__init__(operands | {"unit": In(8)} | {f"o{latency}": Out(32) for latency in LATENCIES})

    def elaborate(self, platform):
        m = Module()
        a, b, c = Signal(32), Signal(32), Signal(32)
        m.d.comb += [a.eq(self.a), b.eq(self.b), c.eq(self.c)]
        state, beyond = saturate_cell(m, a)
        combinational = {"to_fp16": fp32_to_fp16(m, a), "cell_state": state, "cell_beyond": beyond}
        for latency in LATENCIES:
            results = {name: delay(m, value, latency, name=name) for name, value in combinational.items()}
            for name, component in COMPONENTS.items():
                m.submodules[f"{name}_{latency}"] = unit = component(latency=latency)
                inputs = [getattr(unit, port) for port, member in unit.signature.members.items() if member.flow is In]
                m.d.comb += [port.eq(operand) for port, operand in zip(inputs, (a, b, c), strict=False)]
                results[name] = unit.o
            with m.Switch(self.unit):
                for index, name in enumerate(UNITS):
                    with m.Case(index):
                        m.d.comb += getattr(self, f"o{latency}").eq(Cat(results[name]))
        return m


@cache
def simulator() -> Path:
    """Build the bench, or find it in the cache."""
    text = verilog.convert(ArithmeticBench(), name="arithmetic_bench", emit_src=False, strip_internal_attrs=True)
    return build({"arithmetic_bench.v": text}, "arithmetic_bench", cpp_main=CPP_MAIN)


def run_unit(name: str, operands: list[np.ndarray], folder: Path) -> dict[int, np.ndarray]:
    """Feed up to three `operands` : uint32[n], one of each a cycle, to the unit `name`; return uint32[n] by latency."""
    inputs, results = folder / "operands.bin", folder / "results.bin"
    count = len(operands[0])
    words = np.zeros((count + MAX_STAGES, 3), dtype=np.uint32)  # the last cycles flush the pipelines
    for index, operand in enumerate(operands):
        words[:count, index] = operand
    words.tofile(inputs)
    subprocess.run([simulator(), inputs, results, str(UNITS.index(name))], check=True)
    words = np.fromfile(results, dtype=np.uint32).reshape(-1, len(LATENCIES))
    # The row of a cycle is taken after its clock edge, so the latency of 1 stands in the row of its operands.
    return {latency: words[latency - 1 : latency - 1 + count, latency - 1] for latency in LATENCIES}
