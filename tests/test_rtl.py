"""The Verilog of whole machines: the same bytes every time, clean under lint, and there for every ready-made machine."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from small_layers import tiny_machine

from sharp.model.machine import load_machine
from sharp.model.program import WORD_BITS
from sharp.rtl.memory import MEMORY_VERILOG
from sharp.rtl.top import SLICES, TOP_MODULE, Space, convert, program_pieces
from sharp.sim.bench import PUBLIC_PORTS
from sharp.sim.toolchain import find_toolchain
from sharp.sim.verilator import cache_folder, without_white_space

# What Verilator's strictest lint may say of Verilog that Amaranth and Yosys write; each is the way they write, not a fault.
TOLERATED = {
    "UNUSEDSIGNAL": "results of arithmetic are as wide as they can be, and are cut when they are used",
    "WIDTHEXPAND": "Yosys leaves it to the language to widen operands",
    "WIDTHTRUNC": "Yosys writes a reduction of several bits as `!` of them",
    "PROCASSINIT": "registers have their reset value as an initial value too",
    "CASEINCOMPLETE": "a default is assigned before each case",
    "CMPCONST": "a comparison may hold for every value that this machine's field can take",
    "ASCRANGE": "a field without bits, such as the lane of one, is written [-1:0]",
    "DECLFILENAME": "a file holds the modules below its own",
}


@pytest.fixture(scope="module")
def tiny():
    return convert(tiny_machine())


def lint(files, folder) -> list[str]:
    """Return the kinds of warnings and errors that Verilator's lint finds."""
    toolchain = without_white_space(find_toolchain(), cache_folder())
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [str(toolchain.verilator.executable), "--lint-only", "-Wall", "--top-module", TOP_MODULE, *files]
    printed = subprocess.run(command, cwd=folder, env=toolchain.environment(), capture_output=True, text=True).stderr
    found = re.findall(r"^%(?:Warning|Error)(?:-(\w+))?: (?!Exiting due to)(.*)", printed, re.MULTILINE)
    assert found or not printed, printed
    return [f"{kind}: {text}" for kind, text in found if kind not in TOLERATED]


def test_verilog_is_clean_under_lint(tiny, tmp_path):
    assert not lint(tiny, tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "planted", "kind"),
    [
        ("sharp_memory.v", "assign read_data = read_row;", "", "UNDRIVEN"),
        ("sharp_cluster.v", "endmodule", "reg latched; always @* if (load_enable[0]) latched = scalar[0]; endmodule", "LATCH"),
        ("sharp_top.v", "input clk;", "input clk; wire nowhere = somewhere;", ""),
    ],
    ids=["net without a driver", "latch", "unknown name"],
)
def test_lint_would_find_a_fault(tiny, tmp_path, file, text, planted, kind):
    assert text in tiny[file]
    assert any(found.startswith(kind + ":") for found in lint(tiny | {file: tiny[file].replace(text, planted)}, tmp_path))


def test_verilog_of_a_machine_is_the_same_in_another_process(tiny):
    code = (
        "import hashlib; from small_layers import tiny_machine; from sharp.rtl.top import convert\n"
        "print(*(f'{name} {hashlib.sha256(text.encode()).hexdigest()}' for name, text in convert(tiny_machine()).items()), sep='\\n')"
    )
    folders = os.pathsep.join(path for path in sys.path if path)
    # Another order of sets and dictionaries by hash.
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": folders}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [f"{name} {hashlib.sha256(text.encode()).hexdigest()}" for name, text in tiny.items()]


def test_verilog_names_no_file_of_the_machine_that_wrote_it(tiny):
    for text in tiny.values():
        assert "(* src" not in text and ".py" not in text and os.getcwd() not in text


def test_every_slice_is_converted_once_and_placed_by_name(tiny):
    assert set(tiny) == {f"{TOP_MODULE}.v", "sharp_memory.v"} | {f"{kind.MODULE}.v" for kind in SLICES}
    for kind in SLICES:
        assert sum(len(re.findall(rf"^module {kind.MODULE}\(", text, re.MULTILINE)) for text in tiny.values()) == 1
    assert tiny["sharp_memory.v"] == MEMORY_VERILOG
    counts = placed(tiny)
    assert all(counts[kind.MODULE] for kind in SLICES)


def test_machine_without_its_name_decides_the_verilog(tiny):
    assert convert(tiny_machine().replace(name="another")) == tiny
    longer = tiny_machine().latencies.replace(drain=3).model_dump()
    assert convert(tiny_machine().replace(latencies=longer)) != tiny


def test_ports_of_the_bench_are_ports_of_the_top(tiny):
    header = tiny[f"{TOP_MODULE}.v"].rpartition(f"module {TOP_MODULE}(")[2].partition(");")[0]
    assert sorted(name.strip() for name in header.split(",")) == sorted(PUBLIC_PORTS)


def test_load_port_is_wide_enough_for_every_memory():
    for name in ("sharp-64", "sharp-1k", "sharp-64k"):
        machine = load_machine(name)
        rows = 16 * machine.tile_rows.min
        widths = {Space.WEIGHT: rows, Space.ACCUMULATOR: rows, Space.HIDDEN: 16 * machine.lanes, Space.CELL: 32 * machine.lanes}
        assert max(widths.values()) <= machine.load_bits
        assert program_pieces(machine) * machine.load_bits >= WORD_BITS


def placed(files) -> Counter:
    """Return how often each module stands in the top, at any depth."""
    parents: dict[str, Counter] = {}
    for header, body in re.findall(r"^module (\S+?) ?\((.*?)^endmodule", "\n".join(files.values()), re.MULTILINE | re.DOTALL):
        parents[header] = Counter(re.findall(r"^  (\S+) +\S+ \($", body, re.MULTILINE))
    counts = Counter()
    layer = Counter([TOP_MODULE])
    while layer:
        counts += layer
        below = Counter()
        for module, times in layer.items():
            for name, number in parents.get(module, {}).items():
                below[name] += times * number
        layer = below
    return counts


def assert_elaborates(name):
    machine = load_machine(name)
    counts = placed(convert(machine))
    slices = counts["sharp_vector_scalar_slice"]
    assert slices == machine.slices and counts["sharp_add_slice"] == slices - 1
    multipliers = sum(number for module, number in counts.items() if re.search(r"scalar_slice\.multiplier_\d+$", module))
    assert multipliers == machine.macs
    assert counts["sharp_accumulator_slice"] == machine.row_groups and counts["sharp_neuron_lane"] == machine.lanes


def test_smallest_ready_made_machine_has_as_many_slices_as_its_numbers_say():
    assert_elaborates("sharp-64")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharp-256", "sharp-1k", "sharp-4k"])
def test_ready_made_machine_has_as_many_slices_as_its_numbers_say(name):
    assert_elaborates(name)
