"""Reports: the tables say what the result says, and the folder holds what the run made."""

import dataclasses
import io
import json

import numpy as np
import pytest
from onnx_models import lstm_model, save
from rich.console import Console

from sharp.model.machine import load_machine
from sharp.model.network import ShapeFile, load_network
from sharp.model.steps import SCHEDULES
from sharp.model.timing import IDLE_REASONS
from sharp.sim.bench_driver import Trace
from sharp.sim.execution import execute
from sharp.sim.report import EVENT_UNITS, IDLE_MEANINGS, RESULT_FILES, print_runs, write_run

SMALL = ShapeFile(
    name="small",
    source="this test",
    confidence="verbatim",
    cell="lstm",
    layers=2,
    inputs=9,
    hidden=12,
    bidirectional=True,
    steps=4,
    weights={"seed": 1},
)


@pytest.fixture(scope="module")
def executions():
    return [execute(SMALL.network(), load_machine("sharp-64"), schedule=schedule, tile=None) for schedule in SCHEDULES]


@pytest.fixture(scope="module")
def onnx_execution(tmp_path_factory):
    model, _ = lstm_model(6, 10)
    network = load_network(str(save(model, tmp_path_factory.mktemp("model"))))
    inputs = {"X": np.random.default_rng(1).uniform(-1, 1, (5, 1, 6)).astype(np.float32)}
    return execute(network, load_machine("sharp-64"), schedule="unfolded", tile=8, inputs=inputs)


def with_traces(execution, **changes):
    """Return the execution as if the RTL had run it, with the first run's trace changed."""
    runs = []
    for run in execution.runs:
        trace = Trace(run.values.outputs, run.values.states, run.plan.timing.output_cycles, dict(run.counts), seconds=0.5)
        runs.append(dataclasses.replace(run, trace=trace))
    runs[0] = dataclasses.replace(runs[0], trace=dataclasses.replace(runs[0].trace, **changes))
    return dataclasses.replace(execution, runs=tuple(runs), simulated=True)


def printed(*executions):
    console = Console(file=io.StringIO(), width=200, color_system=None)
    print_runs(executions, console)
    return console.file.getvalue()


def row(text, name):
    """Return the cells right of the one that holds `name`."""
    rows = ([cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│"))
    (found,) = (cells[1:] for cells in rows if cells[0] == name)
    return found


def test_every_event_has_a_unit_and_every_idle_reason_a_meaning(executions):
    assert set(EVENT_UNITS) == set(executions[0].events)
    assert tuple(IDLE_MEANINGS) == IDLE_REASONS


def test_schedules_stand_side_by_side_with_the_numbers_of_their_results(executions):
    text = printed(*executions)
    results = [execution.result() for execution in executions]
    assert [word for word in text.split() if word in SCHEDULES] == 2 * list(SCHEDULES)
    assert row(text, "cycles") == [f"{result['cycles']:,}" for result in results]
    assert row(text, "bound / cycles") == [f"{result['bound_ratio']:.4f}" for result in results]
    assert row(text, "idle cycles") == [f"{sum(result['idle'].values()):,}" for result in results]
    assert row(text, "wait for h") == [f"{result['idle']['hidden']:,}" for result in results]
    assert row(text, "cell_updates")[-len(results) :] == [f"{result['events']['cell_updates']:,}" for result in results]
    assert executions[0].machine.hash in text


def test_events_of_a_run_alone_have_their_units(executions):
    text = printed(executions[-1])
    for name, count in executions[-1].events.items():
        assert row(text, name) == [EVENT_UNITS[name], f"{count:,}"]


def test_idle_cycles_and_tiles_add_up_to_all_cycles(executions):
    for execution in executions:
        result = execution.result()
        assert sum(result["idle"].values()) + result["events"]["tiles"] == result["cycles"]


def test_layers_of_the_same_shape_and_tile_are_one_line(executions):
    alone = execute(SMALL.network(), load_machine("sharp-64"), schedule="unfolded", tile=8, streams=1)
    text = printed(alone)
    assert row(text, "layers") == ["2 x LSTM 9 -> 12"] and row(text, "tile rows K") == ["8"]
    assert "│ 2 x LSTM 24 -> 12 │" in " ".join(text.split())


def test_streams_that_run_together_are_one_line(executions):
    text = printed(executions[-1])
    assert row(text, "layers") == ["(LSTM 9 -> 12) x 2"] and "│ (LSTM 24 -> 12) x 2 │" in " ".join(text.split())


def test_run_without_rtl_says_so(executions):
    assert row(printed(executions[0]), "RTL") == ["not run"]


def test_equal_trace_is_called_equal(executions):
    text = printed(with_traces(executions[-1]))
    assert [row(text, f"RTL {what}") for what in ("values", "cycles", "events")] == [["equal"]] * 3
    seconds = 0.5 * len(executions[-1].runs)
    assert row(text, "RTL speed") == [f"{executions[-1].cycles / seconds:,.0f} /s"]


@pytest.mark.parametrize("what", ["values", "cycles", "events"])
def test_difference_in_one_run_is_called_not_equal(executions, what):
    run = executions[-1].runs[0]
    first, *others = run.values.outputs
    changes = {
        "values": {"outputs": (np.where(np.arange(12) == 3, np.float16(0.25), first), *others)},
        "cycles": {"output_cycles": run.plan.timing.output_cycles + (np.arange(len(run.plan.timing.output_cycles)) == 2)},
        "events": {"counts": run.counts | {"bias_reads": run.counts["bias_reads"] + 1}},
    }
    text = printed(with_traces(executions[-1], **changes[what]))
    others = {"values", "cycles", "events"} - {what}
    assert row(text, f"RTL {what}") == ["NOT equal"] and all(row(text, f"RTL {other}") == ["equal"] for other in others)


def test_reference_errors_are_given_by_output(onnx_execution):
    text = printed(onnx_execution)
    errors = onnx_execution.result()["reference"]["max_abs_error"]
    assert set(errors) == {"Y", "Y_h", "Y_c"} and max(errors.values()) < 0.01
    for name, error in errors.items():
        assert row(text, f"error of {name}") == [f"{error:.2e}"]


def test_folder_holds_the_result_the_outputs_and_both_timelines(onnx_execution, tmp_path):
    folder = tmp_path / "new" / "folder"
    write_run(onnx_execution, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(RESULT_FILES)
    assert json.loads((folder / "result.json").read_text()) == onnx_execution.result()
    outputs = np.load(folder / "outputs.npz")
    assert set(outputs.files) == {"Y", "Y_h", "Y_c"}
    assert all(np.array_equal(outputs[name], array) for name, array in onnx_execution.outputs.items())
    trace = json.loads((folder / "timeline.json").read_text())
    assert trace["otherData"]["cycles"] == onnx_execution.cycles
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_result_holds_what_scripts_may_rely_on(onnx_execution):
    result = with_traces(onnx_execution).result()
    names = "network machine schedule cycles steps cycles_per_step bound_cycles bound_ratio utilisation seconds events idle rtl reference"
    assert set(names.split()) <= set(result)
    assert set(result["rtl"]) == {"cycles", "values_match", "cycles_match", "events_match", "cycles_per_second"}
    assert result["seconds"] == result["cycles"] / onnx_execution.machine.clock_hz
    assert result["bound_ratio"] == result["bound_cycles"] / result["cycles"]
