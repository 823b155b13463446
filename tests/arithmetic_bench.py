"""All arithmetic units at every latency in one Verilator model, fed with a pair of words in each cycle by a C++ main."""

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
COMPONENTS = {"fp16_multiply": Fp16Multiplier, "fp32_add": Fp32Adder, "fp32_multiply": Fp32Multiplier}
UNITS = (*COMPONENTS, "activate", "to_fp16", "cell_state", "cell_beyond")

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
    std::vector<uint32_t> pair(2), results;
    while (fread(pair.data(), 4, 2, input) == 2) {
        top.a = pair[0];
        top.b = pair[1];
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
    """o<latency> : the result that `unit`, an index of UNITS, gives for the `a` and `b` of `latency` cycles ago."""

    def __init__(self):
        super().__init__({"a": In(32), "b": In(32), "unit": In(8)} | {f"o{latency}": Out(32) for latency in LATENCIES})

    def elaborate(self, platform):
        m = Module()
        a, b = Signal(32), Signal(32)
        m.d.comb += [a.eq(self.a), b.eq(self.b)]
        state, beyond = saturate_cell(m, a)
        combinational = {"to_fp16": fp32_to_fp16(m, a), "cell_state": state, "cell_beyond": beyond}
        for latency in LATENCIES:
            results = {name: delay(m, value, latency, name=name) for name, value in combinational.items()}
            for name, component in COMPONENTS.items():
                m.submodules[f"{name}_{latency}"] = unit = component(latency=latency)
                m.d.comb += [unit.a.eq(a), unit.b.eq(b)]
                results[name] = unit.o
            m.submodules[f"activate_{latency}"] = unit = ActivationUnit(latency=latency)
            m.d.comb += [unit.x.eq(a), unit.function.eq(b)]
            results["activate"] = unit.o
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


def run_unit(name: str, a: np.ndarray, b: np.ndarray, folder: Path) -> dict[int, np.ndarray]:
    """Feed `a` and `b` : uint32[n], a pair a cycle, to the unit `name`; return uint32[n] by latency."""
    operands, results = folder / "operands.bin", folder / "results.bin"
    filler = np.zeros((MAX_STAGES, 2), dtype=np.uint32)  # flushes the pipelines
    np.concatenate([np.stack([a, b], axis=1).astype(np.uint32), filler]).tofile(operands)
    subprocess.run([simulator(), operands, results, str(UNITS.index(name))], check=True)
    words = np.fromfile(results, dtype=np.uint32).reshape(-1, len(LATENCIES))
    # The row of a cycle is taken after its clock edge, so the latency of 1 stands in the row of its operands.
    return {latency: words[latency - 1 : latency - 1 + len(a), latency - 1] for latency in LATENCIES}
