"""The command line: what a user can set right is one line and exit code 2, a failed comparison is 1, and JSON comes alone."""

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from onnx import helper
from onnx_models import lstm_model, model, save, value_info
from small_cases import layer_case
from small_layers import tiny_machine

from sharp.model import numerics
from sharp.model.machine import load_machine
from sharp.model.program import Tiling
from sharp.model.steps import SCHEDULES
from sharp.sim import bench
from sharp.sim.bench_driver import Trace
from sharp.sim.cli import main
from sharp.sim.verification import write_case

COMMAND = [sys.executable, "-c", "from sharp.sim.cli import main; main()"]
COMMANDS = ([], ["run"], ["verify"], ["verilog"], ["bench"], ["bench", "bound"], ["bench", "tiles"], ["machines"], ["doctor"])
INPUTS, HIDDEN, STEPS = 6, 10, 4


@dataclasses.dataclass
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture
def sharp(monkeypatch, capfd):
    """Call the command line in this process."""

    def call(*arguments) -> Answer:
        monkeypatch.setattr(sys, "argv", ["sharp", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capfd.readouterr()
        return Answer(left.value.code, captured.out, captured.err)

    return call


@pytest.fixture
def refused(sharp):
    """Call with bad input; return the one line that says what is wrong."""

    def call(*arguments) -> str:
        answer = sharp(*arguments)
        assert (answer.code, answer.out) == (2, ""), answer
        assert answer.err.startswith("sharp: error: ") and answer.err.endswith("\n") and answer.err.count("\n") == 1, answer.err
        return answer.err.removeprefix("sharp: error: ").rstrip("\n")

    return call


def machine_data(**changes):
    return load_machine("sharp-64").model_dump() | changes


@pytest.fixture
def machine_file(tmp_path):
    def write(text="", **changes) -> Path:
        path = tmp_path / "machine.yaml"
        path.write_text(yaml.safe_dump(machine_data(**changes)) + text)
        return path

    return write


@pytest.fixture
def tiny_machine_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_machine().model_dump()))
    return path


@pytest.fixture
def network_file(tmp_path):
    def write(**changes) -> Path:
        names = dict(name="small", source="test", confidence="verbatim", cell="lstm")
        shape = dict(layers=1, inputs=INPUTS, hidden=HIDDEN, bidirectional=False, steps=STEPS, weights={"seed": 1})
        path = tmp_path / "network.yaml"
        path.write_text(yaml.safe_dump(names | shape | changes))
        return path

    return write


@pytest.fixture
def onnx_file(tmp_path):
    return save(lstm_model(INPUTS, HIDDEN)[0], tmp_path)


def inputs(tmp_path, **arrays) -> Path:
    path = tmp_path / "inputs.npz"
    np.savez(path, **arrays)
    return path


def good_x(steps=STEPS):
    return np.random.default_rng(1).uniform(-1, 1, (steps, 1, INPUTS)).astype(np.float32)


# Help and start.


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command_says_how_it_is_used(sharp, command):
    answer = sharp(*command, "--help")
    assert answer.code == 0 and answer.err == "" and f"Usage: sharp {' '.join(command)}".strip() in " ".join(answer.out.split())


def test_help_names_every_command(sharp):
    words = sharp("--help").out.split()
    assert {command[0] for command in COMMANDS if command} <= set(words)


def test_no_command_prints_the_help_and_is_an_error(sharp):
    answer = sharp()
    assert (answer.code, answer.err) == (2, "") and "Usage: sharp" in answer.out


def test_commands_that_need_no_simulator_do_not_load_one():
    code = COMMAND[-1].replace("main()", "\ntry: main()\nfinally: import sys; print(*sys.modules, file=sys.stderr)")
    loaded = subprocess.run([sys.executable, "-c", code, "machines"], capture_output=True, text=True, check=True).stderr.split()
    heavy = {"onnx", "onnxruntime", "matplotlib", "cocotb", "amaranth"}
    assert "sharp.sim.cli" in loaded and not heavy & {name.split(".")[0] for name in loaded}


def test_machines_lists_the_ready_made_ones_with_their_recurrence(sharp):
    answer = sharp("machines")
    assert answer.code == 0 and "sharp-1k" in answer.out and load_machine("sharp-64k").hash in answer.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'."),
        (["run"], "Missing argument 'NETWORK'."),
        (["run", "silero-vad", "--speed"], "No such option: --speed"),
        (["verify", "--cases", "0"], "Invalid value for '--cases'"),
        (["verify", "--machines", "few"], "Invalid value for '--machines'"),
    ],
)
def test_wrong_use_is_one_line(refused, arguments, message):
    assert refused(*arguments).startswith(message)


# Networks.


def test_unknown_network_lists_the_known_ones(refused):
    message = refused("run", "nonsense")
    assert "silero-vad" in message and message.endswith("not 'nonsense'")


def test_file_that_is_no_onnx_is_refused(refused, tmp_path):
    path = tmp_path / "text.onnx"
    path.write_text("hello, this is no model\n" * 3)
    assert str(path) in refused("run", path)


def test_truncated_onnx_is_refused(refused, onnx_file):
    content = onnx_file.read_bytes()
    onnx_file.write_bytes(content[: len(content) // 2])
    assert str(onnx_file) in refused("run", onnx_file)


def test_missing_onnx_is_refused(refused, tmp_path):
    assert "No such file" in refused("run", tmp_path / "absent.onnx")


def test_onnx_without_a_recurrent_node_is_refused(refused, tmp_path):
    relu = model([helper.make_node("Relu", ["X"], ["Y"])], [value_info("X", (1, 3))], [value_info("Y", (1, 3))])
    assert "recurrent" in refused("run", save(relu, tmp_path))


def test_unsupported_attribute_is_refused_by_name(refused, tmp_path):
    made, _ = lstm_model(INPUTS, HIDDEN, activations=["Sigmoid", "Softsign", "Tanh"])
    message = refused("run", save(made, tmp_path))
    assert "'cell'" in message and "Softsign" in message


def test_weights_that_are_not_numbers_are_refused(refused, tmp_path):
    made, _ = lstm_model(INPUTS, HIDDEN)
    (tensor,) = (tensor for tensor in made.graph.initializer if tensor.name == "R")
    weights = np.frombuffer(tensor.raw_data, np.float32).copy()
    weights[7] = np.nan
    tensor.raw_data = weights.tobytes()
    message = refused("run", save(made, tmp_path))
    assert "recurrent_kernel" in message and message.endswith("must be finite, not nan")


@pytest.mark.parametrize("streams", [0, 5])
def test_streams_that_the_machine_does_not_have_are_refused(refused, network_file, streams):
    assert str(streams) in refused("run", network_file(), "--machine", "sharp-64", "--streams", str(streams))


@pytest.mark.parametrize("hidden", [9000, 60_000])
def test_hidden_size_beyond_the_buffers_is_refused_before_weights_are_made(refused, network_file, hidden):
    message = refused("run", network_file(hidden=hidden), "--machine", "sharp-64")
    assert f"{hidden} hidden does not fit machine sharp-64: buffers." in message


def test_hidden_size_of_an_onnx_model_beyond_the_buffers_is_refused(refused, onnx_file, machine_file, tmp_path):
    small = machine_file(buffers=machine_data()["buffers"] | {"cell_elements": 8})
    message = refused("run", onnx_file, "--machine", small, "--inputs", inputs(tmp_path, X=good_x()))
    assert "buffers.cell_elements must be at least 12" in message and message.endswith("not 8")


# Inputs.


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "input 'X' (float32 (steps, batch, 6)) is missing"),
        ({"Z": good_x()}, "input 'Z' is unknown"),
        ({"X": good_x()[:, :, :5]}, "input 'X' must be of the shape float32 (steps, batch, 6), not (4, 1, 5)"),
        ({"X": good_x()[0]}, "input 'X' must be of the shape float32 (steps, batch, 6), not (1, 6)"),
        ({"X": good_x()[:0]}, "input 'X' must not be empty, not of shape (0, 1, 6)"),
        ({"X": good_x().astype(np.float64)}, "input 'X' must be float32 (steps, batch, 6), not float64"),
        ({"X": np.full_like(good_x(), np.inf)}, "input 'X'[0, 0, 0] must be finite, not inf"),
        ({"X": np.full_like(good_x(), 1e6)}, "node 'cell': X[0, 0, 0] must be within float16's range of +-65504, not 1000000.0"),
    ],
    ids="missing unknown size rank empty type infinite large".split(),
)
def test_wrong_inputs_are_refused(refused, onnx_file, tmp_path, arrays, message):
    assert refused("run", onnx_file, "-m", "sharp-64", "--inputs", inputs(tmp_path, **arrays)).startswith(message)


def test_model_of_ones_own_needs_inputs(refused, onnx_file):
    assert "needs inputs (--inputs FILE.npz) with X float32 (steps, batch, 6)" in refused("run", onnx_file, "-m", "sharp-64")


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 broken"], ids=["empty", "text", "broken"])
def test_inputs_that_are_no_npz_are_refused(refused, onnx_file, tmp_path, content):
    path = tmp_path / "inputs.npz"
    path.write_bytes(content)
    assert refused("run", onnx_file, "--inputs", path).startswith(f"{path}: cannot be read as .npz: ")


def test_single_array_is_refused(refused, onnx_file, tmp_path):
    np.save(tmp_path / "x.npy", good_x())
    assert "must be an .npz file" in refused("run", onnx_file, "--inputs", tmp_path / "x.npy")


def test_pickled_inputs_are_not_opened(refused, onnx_file, tmp_path):
    path = inputs(tmp_path, X=np.array([{"a": 1}], object))
    assert refused("run", onnx_file, "--inputs", path).startswith(f"{path}: cannot be read as .npz: ")


def test_archive_with_other_files_is_refused(refused, network_file, tmp_path):
    path = tmp_path / "inputs.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "not an array")
    assert refused("run", network_file(), "--inputs", path) == f"{path}: 'x' must be an array (.npy), not another file"


def test_missing_inputs_file_is_refused(refused, onnx_file, tmp_path):
    assert refused("run", onnx_file, "--inputs", tmp_path / "absent.npz").endswith("No such file or directory")


def test_wrong_inputs_of_a_shape_network_are_refused(refused, network_file, tmp_path):
    message = refused("run", network_file(), "-m", "sharp-64", "--inputs", inputs(tmp_path, x=np.zeros((4, INPUTS + 1), np.float32)))
    assert message == f"input 'x' must be float32 (steps, {INPUTS}), not float32 (4, {INPUTS + 1})"


# Machines, schedules, tiles.


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        ({}, "macs: 64\n", "key 'macs' is given twice"),
        ({"cores": 2}, "", "cores: unknown key; known keys are name, macs, tile_rows"),
        ({"lanes": "four"}, "", "lanes: input should be a valid integer, not 'four'"),
        ({"macs": 0}, "", "macs: input should be greater than or equal to 1, not 0"),
        ({"tile_rows": {"min": 8, "max": 24}}, "", "tile_rows.max must be a power of two, not 24"),
    ],
    ids="duplicate unknown text zero K".split(),
)
def test_wrong_machine_is_refused(refused, machine_file, network_file, changes, text, message):
    path = machine_file(text, **changes)
    answer = refused("run", network_file(), "--machine", path)
    assert answer.startswith(f"{path}: ") and message in answer


def test_unknown_machine_lists_the_known_ones(refused):
    assert "sharp-1k" in refused("verilog", "--machine", "nonsense")


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ("12", "--tile must be auto or a power of two, not 12"),
        ("0", "--tile must be auto or a power of two, not 0"),
        ("wide", "--tile must be auto or a number of rows, not 'wide'"),
        ("64", "tile must be auto or a height of machine sharp-64 (8, 16, 32), not 64"),
    ],
)
def test_wrong_tile_is_refused(refused, network_file, tile, message):
    assert refused("run", network_file(), "-m", "sharp-64", "--tile", tile) == message


def test_unknown_schedule_is_refused(refused, network_file):
    allowed = f"{', '.join(SCHEDULES)} or all"
    assert refused("run", network_file(), "--schedule", "random") == f"--schedule must be {allowed}, not 'random'"


# Output.


@pytest.mark.parametrize("command", ["run", "verify", "verilog"])
def test_folder_that_cannot_be_written_is_refused_before_the_work(refused, network_file, tmp_path, command):
    (tmp_path / "file").write_text("x")
    arguments = {
        "run": ["run", network_file(), "--out", tmp_path / "file" / "results"],
        "verify": ["verify", "--out", tmp_path / "file" / "results"],
        "verilog": ["verilog", "-o", tmp_path / "file" / "results" / "sharp.v"],
    }
    message = refused(*arguments[command])
    assert message == f"output folder {tmp_path / 'file' / 'results'} must be writable: Not a directory"


def test_folder_of_the_kernel_is_refused(refused, network_file):
    assert refused("run", network_file(), "--out", "/proc/sharp").startswith("output folder /proc/sharp must be writable: ")


def test_verilog_into_a_folder_is_refused(refused, tmp_path):
    assert refused("verilog", "-o", tmp_path) == f"--output must be a file, not the folder {tmp_path}"


def test_full_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "machines"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space left on device" in done.stderr


def test_reader_that_leaves_early_causes_no_complaint():
    done = subprocess.run(["bash", "-c", '"$@" | true', "bash", *COMMAND, "machines"], capture_output=True, text=True)
    assert done.stderr == ""


def test_json_is_alone_on_standard_output(sharp, network_file, tmp_path):
    answer = sharp("run", network_file(), "-m", "sharp-64", "--json", "--out", tmp_path / "out")
    assert answer.code == 0 and answer.err == ""
    result = json.loads(answer.out)
    assert result == json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["network"], result["steps"], result["rtl"], result["reference"]) == ("small", STEPS, None, None)


def test_onnx_model_is_held_against_onnxruntime(sharp, onnx_file, tmp_path):
    answer = sharp("run", onnx_file, "-m", "sharp-64", "--json", "--inputs", inputs(tmp_path, X=good_x()))
    errors = json.loads(answer.out)["reference"]["max_abs_error"]
    assert set(errors) == {"Y", "Y_h", "Y_c"} and max(errors.values()) < 0.01


def test_all_schedules_stand_in_one_json_and_in_a_folder_each(sharp, network_file, tmp_path):
    arguments = ["run", network_file(), "-m", "sharp-64", "--schedule", "all", "--out", tmp_path / "out"]
    table, as_json = sharp(*arguments), sharp(*arguments, "--json")
    assert table.code == as_json.code == 0 and all(schedule in table.out for schedule in SCHEDULES)
    results = json.loads(as_json.out)
    assert list(results) == list(SCHEDULES)
    for schedule, result in results.items():
        assert result == json.loads((tmp_path / "out" / schedule / "result.json").read_text()) and result["schedule"] == schedule
    assert results["unfolded"]["cycles"] < results["sequential"]["cycles"]


def test_bound_table_is_printed_and_is_json(sharp):
    table = sharp("bench", "bound")
    assert table.code == 0 and "geometric mean" in table.out and "deepbench-gru-512-t1" in table.out
    result = json.loads(sharp("bench", "bound", "--json").out)
    cell = next(cell for cell in result["networks"] if (cell["network"], cell["machine"]) == ("deepbench-lstm-2048-t25", "sharp-1k"))
    assert f"{cell['bound_ratio']:.4f}" in table.out and cell["bound_ratio"] == cell["bound_cycles"] / cell["cycles"]


def test_verilog_is_the_same_bytes_twice(tiny_machine_file, tmp_path):
    files = [tmp_path / "first.v", tmp_path / "second.v"]
    for seed, file in enumerate(files):
        # Another order of Python's sets each time.
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        subprocess.run([*COMMAND, "verilog", "-m", tiny_machine_file, "-o", file], env=environment, check=True, capture_output=True)
    first, second = (file.read_text() for file in files)
    assert first == second and "module sharp_top" in first and str(tmp_path) not in first


# Comparison with the RTL.


def test_missing_compiler_is_named_before_the_work(refused, network_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for command in (["run", network_file(), "--rtl"], ["verify"]):
        assert refused(*command).startswith("g++: not found on PATH; it is needed to build simulators: ")


def from_model(run: bench.Run) -> Trace:
    values = numerics.execute(run.program, run.inputs)
    counts = {**run.timing.counts, "saturations": values.saturations}
    return Trace(values.outputs, values.states, run.timing.output_cycles, counts, seconds=1.0)


@pytest.fixture
def rtl(monkeypatch):
    """Stand the model, with a trace changed by the given function, in the RTL's place."""

    def stand_in(change=lambda trace: trace):
        monkeypatch.setattr(bench, "simulate", lambda machine, runs, progress=None: [change(from_model(run)) for run in runs])

    return stand_in


def with_one_more_tile(trace: Trace) -> Trace:
    return dataclasses.replace(trace, counts=trace.counts | {"tiles": trace.counts["tiles"] + 1})


def with_a_late_beat(trace: Trace) -> Trace:
    return dataclasses.replace(trace, output_cycles=trace.output_cycles + (np.arange(len(trace.output_cycles)) == 0))


def with_a_flipped_bit(trace: Trace) -> Trace:
    first, *others = trace.outputs
    first = first.copy()
    first.view(np.uint16)[-1, -1] ^= 1
    return dataclasses.replace(trace, outputs=(first, *others))


def test_run_that_matches_ends_with_0(sharp, network_file, rtl):
    rtl()
    answer = sharp("run", network_file(), "-m", "sharp-64", "--rtl")
    assert answer.code == 0 and "NOT" not in answer.out


@pytest.mark.parametrize(
    ("change", "what"),
    [(with_a_flipped_bit, "values"), (with_a_late_beat, "cycles"), (with_one_more_tile, "events")],
    ids=["bit", "beat", "tile"],
)
def test_run_that_does_not_match_ends_with_1_and_says_what_differs(sharp, network_file, rtl, change, what):
    rtl(change)
    answer = sharp("run", network_file(), "-m", "sharp-64", "--rtl", "--json")
    found = json.loads(answer.out)["rtl"]
    assert answer.code == 1 and [name for name, good in found.items() if good is False] == [f"{what}_match"]


def test_verify_writes_a_mismatch_that_it_can_repeat(sharp, rtl, tmp_path):
    rtl(with_a_flipped_bit)
    answer = sharp("verify", "--machines", "2", "--cases", "3", "--out", tmp_path)
    assert answer.code == 1 and answer.out == "2 machines, 3 cases, 3 mismatches\n"
    case = sorted(tmp_path.glob("mismatch-*.yaml"))[0]
    assert sharp("verify", "--case", case, "--out", tmp_path / "again").code == 1
    rtl()
    answer = sharp("verify", "--case", case, "--out", tmp_path)
    assert answer.code == 0 and answer.out == "1 machines, 1 cases, 0 mismatches\n"


def test_case_file_that_is_wrong_is_refused(refused, tmp_path):
    path = tmp_path / "case.yaml"
    path.write_text("layers: 3\n")
    assert refused("verify", "--case", path, "--out", tmp_path).startswith(f"{path}: ")


def test_tiny_machine_runs_and_verifies_on_its_rtl(sharp, tmp_path, network_file, tiny_machine_file):
    run = sharp("run", network_file(), "-m", tiny_machine_file, "--schedule", "all", "--rtl", "--json")
    assert run.code == 0, run.err
    for result in json.loads(run.out).values():
        assert result["rtl"]["cycles"] == result["cycles"]
        assert all(result["rtl"][f"{what}_match"] is True for what in ("values", "cycles", "events"))
    tiling = Tiling(4, 8, 4, 3, lean=0.5, bundle=1)
    shape = dict(inputs=5, hidden=7, tiling=tiling, steps=(3,), schedule="unfolded", seed=2, large_cell=True)
    case_file = tmp_path / "case.yaml"
    write_case(layer_case(load_machine(str(tiny_machine_file)), **shape), case_file)
    verified = sharp("verify", "--case", case_file, "--out", tmp_path)
    assert (verified.code, verified.out) == (0, "1 machines, 1 cases, 0 mismatches\n"), verified.err
