"""Execution: whole networks on a machine, held against references, and what their results say."""

import dataclasses
import json

import float_layer
import numpy as np
import pytest

from sharp.model.errors import ConfigError, NetworkError
from sharp.model.layer import CELLS
from sharp.model.machine import load_machine
from sharp.model.network import ShapeFile, load_network
from sharp.model.sequence import Task
from sharp.model.steps import SCHEDULES
from sharp.model.timing import IDLE_REASONS
from sharp.sim import execution
from sharp.sim.sound import silero_chunks, speech_and_noise

RTL_CHUNKS = 64


@pytest.fixture(scope="module")
def silero():
    return execution.execute(load_network("silero-vad"), load_machine("sharp-1k"), schedule="unfolded", tile=None)


def shape_network(**changes):
    shape = dict(cell="lstm", layers=1, inputs=6, hidden=10, bidirectional=False, steps=5, weights={"seed": 1})
    return ShapeFile(name="small", source="test", confidence="verbatim", **shape | changes).network()


def execute(network, *, machine="sharp-64", schedule="unfolded", tile=None, **options):
    return execution.execute(network, load_machine(machine), schedule=schedule, tile=tile, **options)


def expected_of(network, x):
    """Run the levels of a network in float64; return its outputs."""
    layers, hiddens, cells = iter(network.layers), [], []
    for level in network.levels:
        results = []
        for layer in (next(layers) for _ in level):
            hidden = np.zeros(layer.outputs) if layer.initial_hidden is None else layer.initial_hidden
            cell = None
            if layer.cell == "lstm":
                cell = np.zeros(layer.hidden) if layer.initial_cell is None else layer.initial_cell
            result = float_layer.run(Task(layer, x[::-1] if layer.reverse else x, hidden, cell))
            results.append(result.y[::-1] if layer.reverse else result.y)
            hiddens.append(result.hidden)
            cells += [] if cell is None else [result.cell]
        x = np.concatenate(results, axis=1)
    return {"y": x, "h": np.stack(hiddens)} | ({"c": np.stack(cells)} if cells else {})


def inputs_of(network, steps=5, seed=2):
    return np.random.default_rng(seed).uniform(-1, 1, (steps, network.levels[0][0].inputs)).astype(np.float32)


def assert_close(outputs, expected, bound=0.002):
    assert outputs.keys() == expected.keys()
    for name, values in expected.items():
        assert outputs[name].shape == values.shape and np.abs(outputs[name] - values).max() < bound, name


def test_speech_probability_is_within_five_thousandths_of_onnxruntime_on_every_chunk(silero):
    probabilities, expected = silero.outputs["speech_probs"], silero.reference["speech_probs"]
    assert probabilities.shape == expected.shape == (531,) and np.isfinite(probabilities).all()
    assert np.abs(probabilities - expected).max() < 0.005
    assert expected.max() > 0.9 and expected.min() < 0.04, "the sound holds speech and noise"


def test_states_of_the_speech_network_are_carried_out(silero):
    for name in ("hn", "cn"):
        assert np.abs(silero.reference[name]).max() > 0.1
        assert np.abs(silero.outputs[name] - silero.reference[name]).max() < 0.05


RESULT = {
    "network": str, "machine": dict, "schedule": str, "cycles": int, "steps": int, "cycles_per_step": float, "bound_cycles": int,
    "bound_ratio": float, "utilisation": float, "seconds": float, "events": dict, "idle": dict, "rtl": type(None), "reference": dict,
}  # fmt: skip


def test_result_holds_what_it_promises(silero):
    result = silero.result()
    assert {name: type(result[name]) for name in RESULT} == RESULT
    assert (result["network"], result["schedule"], result["steps"]) == ("silero-vad", "unfolded", 531)
    assert result["machine"] == {"name": "sharp-1k", "hash": load_machine("sharp-1k").hash}
    assert set(result["idle"]) == set(IDLE_REASONS)
    assert all(type(count) is int for count in [*result["events"].values(), *result["idle"].values()])
    assert result["reference"]["max_abs_error"].keys() == silero.outputs.keys()
    assert json.loads(json.dumps(result)) == result


def test_figures_of_a_result_fit_each_other(silero):
    result, machine = silero.result(), load_machine("sharp-1k")
    assert result["cycles_per_step"] == result["cycles"] / 531 and result["seconds"] == result["cycles"] / machine.clock_hz
    assert result["bound_ratio"] == result["bound_cycles"] / result["cycles"] <= 1
    events = result["events"]
    assert events["tiles"] + sum(result["idle"].values()) == result["cycles"]
    assert events["active_macs"] == 531 * 4 * 128 * 256
    assert events["active_macs"] + events["padded_macs"] == events["multiplications"] == events["tiles"] * machine.macs
    # A tile of K rows takes M - K additions in the tree, and K onto the accumulators.
    assert events["tree_additions"] + events["accumulations"] == events["multiplications"]
    assert result["utilisation"] == events["active_macs"] / (machine.macs * result["cycles"]) <= 1
    assert result["reference"]["max_abs_error"]["speech_probs"] == pytest.approx(
        np.abs(silero.outputs["speech_probs"].astype(float) - silero.reference["speech_probs"]).max()
    )


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layer_alone_is_the_cell(schedule, cell):
    network = shape_network(cell=cell)
    x = inputs_of(network)
    run = execute(network, schedule=schedule, inputs={"x": x})
    assert_close(run.outputs, expected_of(network, x))
    assert 0 < run.utilisation <= 1 and run.reference is None


def test_reverse_layer_runs_from_the_last_vector_and_gives_its_outputs_in_input_order():
    network = shape_network()
    (shape,), (layer,) = network.shapes, network.layers
    reverse = dataclasses.replace(shape, reverse=True)
    network = network.replace(levels=((reverse,),), build=lambda shape: layer.replace(reverse=True))
    x = inputs_of(network)
    outputs = execute(network, inputs={"x": x}).outputs
    assert_close(outputs, expected_of(network, x))
    assert np.array_equal(outputs["h"][0], outputs["y"][0]), "its last step is the first vector's"


def test_levels_of_two_directions_run_in_order():
    network = shape_network(layers=2, bidirectional=True)
    x = inputs_of(network)
    run = execute(network, inputs={"x": x})
    expected = expected_of(network, x)
    assert expected["y"].shape == (5, 20) and expected["h"].shape == (4, 10)
    assert_close(run.outputs, expected)
    forward, reverse, *_ = network.shapes
    assert [len(each.plan.recurrences) for each in run.runs] == [2, 2] and run.runs[0].name == f"{forward.name} + {reverse.name}"
    alone = execute(network, inputs={"x": x}, streams=1)
    assert [each.name for each in alone.runs] == [shape.name for shape in network.shapes]
    assert all(np.array_equal(alone.outputs[name], array) for name, array in run.outputs.items())


def test_figures_of_runs_add_up():
    run = execute(shape_network(layers=3), streams=1)
    assert run.cycles == sum(each.plan.timing.cycles for each in run.runs) and len(run.runs) == 3
    assert run.bound_cycles == sum(each.plan.bound_cycles for each in run.runs)
    assert run.result()["idle"] == {reason: sum(each.plan.timing.idle[reason] for each in run.runs) for reason in IDLE_REASONS}
    assert [each["cycles"] for each in run.result()["runs"]] == [each.plan.timing.cycles for each in run.runs]
    assert run.events["tiles"] + sum(run.result()["idle"].values()) == run.cycles


@pytest.mark.parametrize("cell", CELLS)
def test_layers_in_a_chain_give_the_same_bits_in_fewer_cycles(cell):
    network = shape_network(cell=cell, layers=3, steps=9)
    chain, alone = execute(network, machine="sharp-1k"), execute(network, machine="sharp-1k", streams=1)
    assert [[each.source for each in run.plan.recurrences] for run in chain.runs] == [[None, 0, 1]]
    assert chain.cycles < alone.cycles
    assert all(np.array_equal(alone.outputs[name], array) for name, array in chain.outputs.items())


def test_elements_of_a_batch_run_together_and_give_the_bits_that_they_give_alone():
    machine = load_machine("sharp-1k")
    (layer,) = shape_network().layers
    generator = np.random.default_rng(4)
    zeros = np.zeros(10, np.float32)
    tasks = [Task(layer, generator.uniform(-1, 1, (steps, 6)).astype(np.float32), zeros, zeros) for steps in (5, 2, 7, 5, 1, 3)]
    together = execution.machine_recurrent(machine)
    results = together(tasks)
    assert [sorted(each.steps for each in run.plan.recurrences) for run in together.runs] == [[3, 5, 5, 7], [1, 2]]
    for task, result in zip(tasks, results, strict=True):
        (alone,) = execution.machine_recurrent(machine)([task])
        assert np.array_equal(alone.y, result.y) and np.array_equal(alone.cell, result.cell) and len(result.y) == len(task.x)


def test_streams_whose_weights_do_not_fit_together_run_one_by_one():
    machine = load_machine("sharp-64")
    buffers = machine.buffers.replace(weight_bytes=128 * 8).model_dump()
    network = shape_network(layers=2)
    run = execution.execute(network, machine.replace(buffers=buffers), schedule="unfolded", tile=8)
    assert len(run.runs) == 2 and all(each.plan.compiled.memory_words for each in run.runs)
    whole = execution.execute(network, machine, schedule="unfolded", tile=8)
    assert all(np.array_equal(whole.outputs[name], array) for name, array in run.outputs.items())
    assert run.events["weight_writes"] > 0 == whole.events["weight_writes"] and run.cycles > whole.cycles


@pytest.mark.parametrize("streams", [0, 5])
def test_streams_that_the_machine_does_not_have_are_refused(streams):
    with pytest.raises(ConfigError, match=f"^streams must be 1 to 4, those of machine sharp-64, not {streams}$"):
        execute(shape_network(), streams=streams)


def test_initial_states_of_a_layer_are_where_it_starts():
    network = shape_network()
    (layer,) = network.layers
    generator = np.random.default_rng(3)
    hidden, cell = generator.uniform(-1, 1, (2, 10)).astype(np.float32)
    started = network.replace(build=lambda shape: layer.replace(initial_hidden=hidden, initial_cell=cell))
    x = inputs_of(network)
    assert_close(execute(started, inputs={"x": x}).outputs, expected_of(started, x))
    assert not np.array_equal(execute(started, inputs={"x": x}).outputs["y"], execute(network, inputs={"x": x}).outputs["y"])


def test_inputs_of_a_shape_follow_from_a_seed_and_its_steps():
    network = shape_network(steps=7)
    one, other = execute(network), execute(network)
    assert one.outputs["y"].shape == (7, 10) and one.steps == 7
    assert np.array_equal(one.outputs["y"], other.outputs["y"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"inputs of network small must be x float32 \(steps, 6\), not nothing"),
        ({"y": np.zeros((5, 6), np.float32)}, r"inputs of network small must be x float32 \(steps, 6\), not y"),
        ({"x": np.zeros((5, 6))}, r"input 'x' must be float32 \(steps, 6\), not float64 \(5, 6\)"),
        ({"x": np.zeros((5, 7), np.float32)}, r"input 'x' must be float32 \(steps, 6\), not float32 \(5, 7\)"),
        ({"x": np.zeros((0, 6), np.float32)}, r"input 'x' must be float32 \(steps, 6\), not float32 \(0, 6\)"),
        ({"x": np.full((1, 6), np.nan, np.float32)}, r"input 'x'\[0, 0\] must be finite, not nan"),
        ({"x": np.full((1, 6), 1e5, np.float32)}, r"input 'x'\[0, 0\] must be within float16's range of \+-65504, not 100000.0"),
    ],
)
def test_wrong_inputs_are_refused(inputs, message):
    with pytest.raises(NetworkError, match=f"^{message}$"):
        execute(shape_network(), inputs=inputs)


@pytest.mark.slow
def test_speech_network_on_the_rtl_is_the_model():
    chunks = silero_chunks(speech_and_noise())[:RTL_CHUNKS]
    state = np.zeros((1, 1, 128), np.float32)
    run = execute(load_network("silero-vad"), machine="sharp-1k", inputs={"input": chunks, "h": state, "c": state}, rtl=True)
    rtl = run.result()["rtl"]
    assert (rtl["values_match"], rtl["cycles_match"], rtl["events_match"]) == (True, True, True) and run.matches
    assert rtl["cycles"] == run.cycles and run.steps == RTL_CHUNKS >= 50
    assert run.runs[0].trace.outputs[0].shape == (RTL_CHUNKS, 128)
    assert np.abs(run.outputs["speech_probs"] - run.reference["speech_probs"]).max() < 0.005
    print(f"{rtl['cycles_per_second']:.0f} cycles/s")


def test_modules_that_stand_side_by_side_are_no_chain():
    with pytest.raises(NetworkError, match="^network g2p-en: its layers do not follow each other; run it without inputs, as the task"):
        execute(load_network("g2p-en"), inputs={"x": np.zeros((3, 256), np.float32)})


def test_levels_that_do_not_fit_each_other_are_refused():
    (first, second), steps = (shape_network(inputs=each).levels[0][0] for each in (6, 9)), 5
    network = shape_network().replace(levels=((first,), (second,)), steps=steps)
    with pytest.raises(NetworkError, match="must take the 10 outputs of the layers before, not 9 values: what lies"):
        execute(network)


def test_a_run_is_named_after_its_tasks():
    (layer,) = shape_network().layers
    tasks = [dataclasses.replace(Task.of(layer, np.zeros((2, 6), np.float32)), element=element) for element in (0, 2)]
    runner = execution.machine_recurrent(load_machine("sharp-64"))
    runner(tasks)
    assert [run.name for run in runner.runs] == [f"{layer.name}[0] + {layer.name}[2]"]
