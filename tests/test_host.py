"""The host's share of a graph: with a float layer in the accelerator's place, the outputs are onnxruntime's."""

import numpy as np
import onnxruntime
import pytest
from float_layer import run_all
from onnx import TensorProto, helper, numpy_helper
from onnx_models import (
    DIRECTIONS,
    GATES,
    WEIGHT_MAKERS,
    constant,
    lstm,
    lstm_model,
    lstm_outputs,
    model,
    nested_if_model,
    quantised_model,
    random_weights,
    recurrent_model,
    save,
    value_info,
)

from sharp.model.errors import NetworkError
from sharp.model.network import load_network
from sharp.sim.host import HostGraph
from sharp.sim.sound import chunk_kinds, silero_chunks, speech_and_noise


def numbers(*shape: int, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def load(made, tmp_path) -> HostGraph:
    return HostGraph.load(save(made, tmp_path))


def assert_equals_onnxruntime(host: HostGraph, inputs, recurrent=run_all) -> dict[str, np.ndarray]:
    results, reference = host.run(inputs, recurrent), host.reference(inputs)
    assert list(results) == list(reference) == [port.name for port in host.outputs]
    for name, expected in reference.items():
        assert (results[name].dtype, results[name].shape) == (expected.dtype, expected.shape), name
        np.testing.assert_allclose(results[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
    return results


@pytest.fixture(scope="module")
def silero() -> HostGraph:
    return HostGraph.load(load_network("silero-vad").model_file)


@pytest.fixture(scope="module")
def silero_inputs() -> dict[str, np.ndarray]:
    return {"input": silero_chunks(speech_and_noise()), "h": np.zeros((1, 1, 128), np.float32), "c": np.zeros((1, 1, 128), np.float32)}


def test_silero_equals_onnxruntime_over_speech_and_noise(silero, silero_inputs):
    assert silero_inputs["input"].shape[0] >= 500
    results = assert_equals_onnxruntime(silero, silero_inputs)
    np.testing.assert_allclose(results["speech_probs"], silero.reference(silero_inputs)["speech_probs"], rtol=0, atol=1e-5)


def test_the_sound_makes_the_detector_say_speech_and_noise(silero, silero_inputs):
    p = silero.reference(silero_inputs)["speech_probs"]
    kinds = np.array(chunk_kinds(p.size))
    assert set(kinds) == {"silence", "speech", "noise"}
    assert np.mean(p[kinds == "speech"] > 0.9) > 0.8
    assert np.median(p[kinds == "noise"]) < 0.05
    assert p[kinds == "noise"].max() < 0.5
    for first in (50, 64):
        assert np.sum(p[:first] > 0.9) >= 10
        assert np.sum(p[:first] < 0.05) >= 8


def test_the_sound_follows_from_its_seed_and_fits_the_converter():
    sound = speech_and_noise(5.0)
    assert (sound.dtype, sound.shape) == (np.float32, (80_000,))
    assert np.abs(sound).max() <= 1
    np.testing.assert_array_equal(sound, speech_and_noise(5.0))
    assert not np.array_equal(sound, speech_and_noise(5.0, seed=4))


def test_a_chunk_is_a_frame_with_the_end_of_the_frame_before_it():
    samples = np.arange(3 * 512 + 100, dtype=np.float32)
    chunks = silero_chunks(samples)
    assert (chunks.dtype, chunks.shape) == (np.float32, (3, 576))
    np.testing.assert_array_equal(chunks[0], np.concatenate((np.zeros(64), samples[:512])))
    np.testing.assert_array_equal(chunks[2], samples[2 * 512 - 64 : 3 * 512])


def test_silero_with_its_layer_in_nested_branches_runs_chunk_by_chunk(silero_inputs, silero):
    host = HostGraph.load(silero.path.parent / "silero_vad.onnx")
    state, speech = np.zeros((2, 1, 128), np.float32), []
    for chunk in silero_inputs["input"][:40]:
        inputs = {"input": chunk[None], "state": state, "sr": np.array(16000)}
        results = assert_equals_onnxruntime(host, inputs)
        state = results["stateN"]
        speech.append(results["output"].item())
    np.testing.assert_allclose(speech, silero.reference(silero_inputs)["speech_probs"][:40], rtol=0, atol=1e-4)


@pytest.mark.parametrize("made_by", ["initialiser", *WEIGHT_MAKERS])
def test_single_nodes_equal_onnxruntime_whichever_way_their_weights_are_made(tmp_path, made_by):
    host = load(lstm_model(5, 7, made_by=made_by)[0], tmp_path)
    assert_equals_onnxruntime(host, {"X": numbers(6, 1, 5)})


@pytest.mark.parametrize("words", ["X W R", "X W R - - initial_h", "X W R B - - initial_c", "X W R B - initial_h initial_c"])
@pytest.mark.parametrize("constants", [False, True])
def test_bias_and_initial_states_may_be_given_or_left_out(tmp_path, words, constants):
    states = {name: numbers(1, 1, 6, seed=seed) for seed, name in enumerate(("initial_h", "initial_c")) if name in words}
    host = load(lstm_model(4, 6, words=words, states=states if constants else None)[0], tmp_path)
    results = assert_equals_onnxruntime(host, {"X": numbers(3, 1, 4), **({} if constants else states)})
    if states:
        other = load(lstm_model(4, 6, words="X W R B" if "B" in words else "X W R")[0], tmp_path).run({"X": numbers(3, 1, 4)}, run_all)
        assert np.abs(other["Y"] - results["Y"]).max() > 1e-3, "the initial states changed nothing"


@pytest.mark.parametrize("outer_weights", [True, False])
@pytest.mark.parametrize(
    ("fast", "loud", "ran"), [(True, False, "cell_then"), (False, True, "cell_deep_then"), (False, False, "cell_deep_else")]
)
def test_the_branch_that_the_inputs_choose_is_the_one_that_runs(tmp_path, outer_weights, fast, loud, ran):
    calls = []

    def recurrent(tasks):
        calls.extend(task.layer.name for task in tasks)
        return run_all(tasks)

    host = load(nested_if_model(3, 5, outer_weights=outer_weights)[0], tmp_path)
    assert_equals_onnxruntime(host, {"X": numbers(4, 1, 3), "fast": np.array(fast), "loud": np.array(loud)}, recurrent)
    assert calls == [ran]


def node_inputs(op: str, direction: str, batch: int, hidden: int, *, lengths=True, steps=6) -> dict[str, np.ndarray]:
    given = {"X": numbers(steps, batch, 2)}
    if lengths:
        # A batch holds the longest, the shortest and others.
        given["sequence_lens"] = np.array([steps, 0, 4, 1][:batch], np.int32)
    for seed, name in enumerate(("initial_h", "initial_c") if op == "LSTM" else ("initial_h",)):
        given[name] = numbers(DIRECTIONS[direction], batch, hidden, seed=seed)
    return given


def words_for(given) -> str:
    """The node's inputs, as `recurrent` takes them, for these inputs of the model."""
    optional = ("sequence_lens", "initial_h", "initial_c")
    return " ".join(["X", "W", "R", "B", *(word if word in given else "-" for word in optional)]).removesuffix(" -")


@pytest.mark.parametrize("made_by", ["initialiser", "Constant"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", GATES)
def test_lengths_and_states_of_a_batch_may_be_constants(tmp_path, op, direction, made_by):
    given = node_inputs(op, direction, 3, 4)
    states = {name: array for name, array in given.items() if name != "X"}
    host = load(recurrent_model(op, 2, 4, words=words_for(given), states=states, made_by=made_by, direction=direction)[0], tmp_path)
    assert_equals_onnxruntime(host, {"X": given["X"]})


@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "no lengths"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", GATES)
def test_a_node_of_layout_1_equals_its_transposed_twin_of_layout_0(tmp_path, op, direction, lengths):
    given = node_inputs(op, direction, 3, 4, lengths=lengths)
    twin = load(recurrent_model(op, 2, 4, words=words_for(given), direction=direction)[0], tmp_path)
    expected = twin.reference(given)
    host = load(recurrent_model(op, 2, 4, words=words_for(given), direction=direction, layout=1)[0], tmp_path)
    turned = {name: array if name == "sequence_lens" else np.ascontiguousarray(array.swapaxes(0, 1)) for name, array in given.items()}
    results = assert_equals_onnxruntime(host, turned)
    np.testing.assert_allclose(results["Y"], expected["Y"].transpose(2, 0, 1, 3), rtol=1e-5, atol=1e-5)
    for name in expected.keys() - {"Y"}:
        np.testing.assert_allclose(results[name], expected[name].swapaxes(0, 1), rtol=1e-5, atol=1e-5)


def test_nodes_of_layout_1_that_share_a_state_and_leave_outputs_out_run_in_branches_too(tmp_path):
    made, _ = nested_if_model(3, 3)
    (then,) = [a.g for a in made.graph.node[0].attribute if a.name == "then_branch"]
    weights = {f"{name}_first": array for name, array in random_weights(3, 3, seed=7).items()}
    then.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    then.node[0].input[:] = ["flat", "W_then", "R_then", "B_then", "", "h"]
    before = [
        lstm(3, "X W_first R_first B_first - h", name="", outputs=["first", "", ""]),
        constant("axes", np.array([2], np.int64)),
        helper.make_node("Squeeze", ["first", "axes"], ["flat"]),
    ]
    for node in reversed(before):
        then.node.insert(0, node)
    for node in then.node:
        if node.op_type == "LSTM":
            node.attribute.append(helper.make_attribute("layout", 1))
    made.graph.input.append(value_info("h", ("n", 1, 3)))
    for port in made.graph.output:
        port.CopyFrom(value_info(port.name, tuple("abcd") if port.name == "Y" else tuple("abc")))
    host = load(made, tmp_path)
    given = {"X": numbers(4, 1, 3), "h": numbers(4, 1, 3, seed=3), "fast": np.array(True), "loud": np.array(False)}
    assert assert_equals_onnxruntime(host, given)["Y"].shape == (4, 1, 1, 3)


def test_tasks_of_a_node_are_handed_over_together_each_over_its_valid_steps(tmp_path):
    given = node_inputs("LSTM", "bidirectional", 3, 4)
    given["sequence_lens"] = np.array([6, 0, 2], np.int32)
    given["X"][2:, 2] = 7e4
    calls = []

    def recurrent(tasks):
        calls.append(list(tasks))
        return run_all(tasks)

    host = load(lstm_model(2, 4, words=words_for(given), direction="bidirectional")[0], tmp_path)
    assert_equals_onnxruntime(host, given, recurrent)
    (tasks,) = calls
    assert [(task.name, len(task.x)) for task in tasks] == [("cell[0]", 6), ("cell[2]", 2), ("cell.reverse[0]", 6), ("cell.reverse[2]", 2)]
    assert [task.layer for task in tasks] == [host.layers[0], host.layers[0], host.layers[1], host.layers[1]]
    for task, element in zip(tasks, (0, 2, 0, 2)):
        x = given["X"][: len(task.x), element]
        np.testing.assert_array_equal(task.x, x[::-1] if task.layer.reverse else x)
        np.testing.assert_array_equal(task.hidden, given["initial_h"][int(task.layer.reverse), element])
        np.testing.assert_array_equal(task.cell, given["initial_c"][int(task.layer.reverse), element])


@pytest.mark.parametrize("op", GATES)
def test_a_sequence_alone_has_its_layers_name_and_only_an_lstm_has_a_cell(tmp_path, op):
    calls = []

    def recurrent(tasks):
        calls.extend(tasks)
        return run_all(tasks)

    assert_equals_onnxruntime(load(recurrent_model(op, 2, 4)[0], tmp_path), {"X": numbers(3, 1, 2)}, recurrent)
    (task,) = calls
    assert (task.name, task.element, task.cell is None) == ("cell", None, op != "LSTM")


@pytest.mark.parametrize("op", GATES)
def test_without_any_valid_step_nothing_is_run_and_all_outputs_are_zero(tmp_path, op):
    given = node_inputs(op, "bidirectional", 2, 4) | {"sequence_lens": np.zeros(2, np.int32)}
    host = load(recurrent_model(op, 2, 4, words=words_for(given), direction="bidirectional")[0], tmp_path)
    results = assert_equals_onnxruntime(host, given, recurrent=None)
    assert not any(array.any() for array in results.values())


@pytest.mark.parametrize("count", [1, 3])
def test_an_accelerator_that_gives_too_few_or_too_many_results_is_caught(tmp_path, count):
    host = load(lstm_model(2, 4)[0], tmp_path)
    with pytest.raises(ValueError, match="zip"):
        host.run({"X": numbers(3, 2, 2)}, lambda tasks: (2 * run_all(tasks))[:count])


# onnxruntime quantises x and h to 8 bits at each step, SHARP does not: a step of h's scale is about 1/128.
QUANTISED_BOUND = 0.01
QUANTISED = {
    "int8": {},
    "uint8": dict(integers=np.uint8, zero_point=128),
    "uint8 off centre": dict(integers=np.uint8, zero_point=100),
    "int8 per row": dict(per_row=True),
    "uint8 per row": dict(per_row=True, integers=np.uint8, zero_point=128),
    "int8 off centre": dict(zero_point=-20),
    "peepholes and clip": dict(words="X W R B - initial_h initial_c P", clip=0.7),
    "coupled": dict(input_forget=1),
    "no bias": dict(words="X W R - - initial_h initial_c"),
    "reverse": dict(direction="reverse", words="X W R B sequence_lens initial_h initial_c"),
    "bidirectional": dict(direction="bidirectional", words="X W R B sequence_lens initial_h initial_c", per_row=True),
}


@pytest.mark.parametrize("hidden", [4, 25])
@pytest.mark.parametrize("options", QUANTISED.values(), ids=QUANTISED)
def test_a_quantised_lstm_is_the_lstm_of_its_weights_and_near_onnxruntime(tmp_path, options, hidden):
    made, weights = quantised_model(2, hidden, **options)
    given = node_inputs("LSTM", options.get("direction", "forward"), 3, hidden)
    given = {port.name: given[port.name] for port in made.graph.input}
    host = load(made, tmp_path)
    results, reference = host.run(given, run_all), host.reference(given)
    plain = {name: value for name, value in options.items() if name in ("words", "direction", "clip", "input_forget")}
    twin, _ = lstm_model(2, hidden, **plain)
    for tensor in twin.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    expected = load(twin, tmp_path).reference(given)
    for name in ("Y", "Y_h", "Y_c"):
        np.testing.assert_allclose(results[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
        assert 0 < np.abs(results[name] - reference[name]).max() < QUANTISED_BOUND, name


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([7, 1, 2], r"node 'cell': sequence_lens must be from 0 to 6, the steps of X, not \[7, 1, 2\]"),
        ([6, -1, 2], r"sequence_lens must be from 0 to 6, the steps of X, not \[6, -1, 2\]"),
        ([6, 1], r"sequence_lens must be int32 \(3,\), not int32 \(2,\)"),
        ([[6, 1, 2]], r"sequence_lens must be int32 \(3,\), not int32 \(1, 3\)"),
        (np.array([6, 1, 2], np.int64), r"sequence_lens must be int32 \(3,\), not int64 \(3,\)"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(tmp_path, lengths, message):
    lengths = lengths if isinstance(lengths, np.ndarray) else np.array(lengths, np.int32)
    calls = []
    host = load(lstm_model(2, 3, words="X W R B sequence_lens", states={"sequence_lens": lengths})[0], tmp_path)
    with pytest.raises(NetworkError, match=message):
        host.run({"X": numbers(6, 3, 2)}, lambda *arguments: calls.append(arguments))
    assert not calls


def two_layers():
    """X -> Tanh -> LSTM -> Squeeze -> Mul -> LSTM, and outputs that come from before, between and beside the layers."""
    first, second = random_weights(3, 4, seed=1), random_weights(4, 2, seed=2)
    tensors = {f"{name}1": array for name, array in first.items()} | {f"{name}2": array for name, array in second.items()}
    nodes = [
        helper.make_node("Tanh", ["X"], ["X1"]),
        lstm(4, "X1 W1 R1 B1", name="lower", outputs=["Y1", "h1", ""]),
        constant("axes", np.array([1], np.int64)),
        helper.make_node("Squeeze", ["Y1", "axes"], ["flat"]),
        constant("half", np.array(0.5, np.float32)),
        helper.make_node("Mul", ["flat", "half"], ["X2"]),
        helper.make_node("Add", ["X2", "half"], ["beside"]),
        lstm(2, "X2 W2 R2 B2", name="upper", outputs=["Y", "", "Y_c"]),
        helper.make_node("ReduceSum", ["X1"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "half"], ["early"]),
    ]
    outputs = [*lstm_outputs(2)[::2], value_info("h1", (1, 1, 4)), value_info("beside", ("steps", 1, 4)), value_info("early", ())]
    outputs += [value_info("half", ()), value_info("X1", ("steps", 1, 3))]
    return model(nodes, [value_info("X", ("steps", 1, 3))], outputs, tensors)


def test_layers_with_host_nodes_before_between_and_after_run_in_order(tmp_path):
    host = load(two_layers(), tmp_path)
    assert [layer.name for layer in host.layers] == ["lower", "upper"]
    assert_equals_onnxruntime(host, {"X": numbers(5, 1, 3)})
    assert_equals_onnxruntime(host, {"X": numbers(2, 1, 3, seed=1)})


def test_a_condition_may_follow_from_a_layer_before_it(tmp_path):
    made, _ = nested_if_model(3, 3)
    del made.graph.input[1:]
    tensors = {f"{name}0": array for name, array in random_weights(3, 3, seed=8).items()}
    tensors["zero"] = np.array(0, np.float32)
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    before = [
        lstm(3, "X W0 R0 B0", name="first", outputs=["Y0", "", ""]),
        helper.make_node("ReduceSum", ["Y0"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["fast"]),
        helper.make_node("Not", ["fast"], ["loud"]),
    ]
    for node in reversed(before):
        made.graph.node.insert(0, node)
    host = load(made, tmp_path)
    ran = set()

    def recurrent(tasks):
        ran.update(task.layer.name for task in tasks)
        return run_all(tasks)

    for seed in range(8):
        assert_equals_onnxruntime(host, {"X": 4 * numbers(4, 1, 3, seed=seed)}, recurrent)
    assert ran == {"first", "cell_then", "cell_deep_then"}


def test_ports_leave_out_inputs_that_have_a_default(tmp_path):
    made, _ = lstm_model(2, 3)
    made.graph.input.extend(value_info(tensor.name, tuple(tensor.dims)) for tensor in made.graph.initializer)
    host = load(made, tmp_path)
    assert [(port.name, port.dtype, port.shape) for port in host.inputs] == [("X", np.float32, ("steps", "batch", 2))]
    assert [port.name for port in host.outputs] == ["Y", "Y_h", "Y_c"]
    assert_equals_onnxruntime(host, {"X": numbers(3, 1, 2)})


def test_sessions_are_kept_between_runs(tmp_path, monkeypatch):
    host = load(two_layers(), tmp_path)
    host.run({"X": numbers(5, 1, 3)}, run_all)
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    host.run({"X": numbers(7, 1, 3)}, run_all)


GOOD_INPUTS = {"input": np.zeros((4, 576), np.float32), "h": np.zeros((1, 1, 128), np.float32), "c": np.zeros((1, 1, 128), np.float32)}


def spoiled(place, value) -> np.ndarray:
    array = np.zeros((4, 576), np.float32)
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": None}, r"input 'input' must be float32 \(sequence_length, 576\), not NoneType"),
        ({"input": [[0.0] * 576]}, "input 'input' must be .*, not list"),
        ({"input": np.zeros((4, 576))}, "input 'input' must be .*, not float64"),
        ({"input": np.zeros((4, 576), np.int16)}, "input 'input' must be .*, not int16"),
        ({"input": np.array([["a"] * 576], object)}, "input 'input' must be .*, not object"),
        ({"input": np.zeros((4, 512), np.float32)}, r"input 'input' must be of the shape .*\(sequence_length, 576\), not \(4, 512\)"),
        ({"input": np.zeros(576, np.float32)}, r"input 'input' must be of the shape .*, not \(576,\)"),
        ({"input": np.zeros((1, 4, 576), np.float32)}, r"input 'input' must be of the shape .*, not \(1, 4, 576\)"),
        ({"input": np.zeros((0, 576), np.float32)}, r"input 'input' must not be empty, not of shape \(0, 576\)"),
        ({"input": spoiled((2, 7), np.nan)}, r"input 'input'\[2, 7\] must be finite, not nan"),
        ({"input": spoiled((3, 575), -np.inf)}, r"input 'input'\[3, 575\] must be finite, not -inf"),
        ({"h": np.full((1, 1, 128), np.nan, np.float32)}, r"input 'h'\[0, 0, 0\] must be finite, not nan"),
        ({"c": np.zeros((1, 1, 64), np.float32)}, r"input 'c' must be of the shape float32 \(1, 1, 128\), not \(1, 1, 64\)"),
        ({"sr": np.array(16000)}, r"input 'sr' is unknown; inputs are input float32 \(sequence_length, 576\), h float32 \(1, 1, 128\), c "),
    ],
)
def test_a_wrong_input_is_refused_with_what_is_allowed(silero, changes, message):
    calls = []
    for use in (silero.check_inputs, silero.reference, lambda inputs: silero.run(inputs, lambda *a: calls.append(a))):
        with pytest.raises(NetworkError, match=message) as caught:
            use({**GOOD_INPUTS, **changes})
        assert "\n" not in str(caught.value)
    assert not calls


@pytest.mark.parametrize("name", ["input", "h", "c"])
def test_a_missing_input_is_refused(silero, name):
    with pytest.raises(NetworkError, match=rf"input '{name}' \(float32 .*\) is missing; inputs are input "):
        silero.check_inputs({other: array for other, array in GOOD_INPUTS.items() if other != name})
    silero.check_inputs(GOOD_INPUTS)


def test_free_dimensions_of_one_name_must_agree(tmp_path):
    made, _ = lstm_model(2, 3)
    made.graph.input.append(value_info("mask", ("steps", 1)))
    host = load(made, tmp_path)
    host.check_inputs({"X": numbers(4, 1, 2), "mask": numbers(4, 1)})
    with pytest.raises(NetworkError, match="input 'mask' must have steps = 4 as input 'X' has it, not 5"):
        host.check_inputs({"X": numbers(4, 1, 2), "mask": numbers(5, 1)})


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.full((4, 1, 2), 7e4, np.float32), r"node 'cell': X\[0, 0, 0\] must be within float16's range of \+-65504, not 70000.0"),
    ],
)
def test_values_that_the_accelerator_cannot_take_are_refused(tmp_path, x, message):
    with pytest.raises(NetworkError, match=message):
        load(lstm_model(2, 3)[0], tmp_path).run({"X": x}, run_all)


def test_values_that_the_host_makes_infinite_are_refused_before_the_accelerator(tmp_path):
    made, _ = lstm_model(2, 3, words="Xl W R B")
    made.graph.node.insert(0, helper.make_node("Log", ["X"], ["Xl"]))
    with pytest.raises(NetworkError, match=r"node 'cell': X\[0, 0, 1\] must be finite, not -inf"):
        load(made, tmp_path).run({"X": np.array([[[1.0, 0.0]]], np.float32)}, run_all)


def test_a_state_for_another_batch_is_refused(tmp_path):
    made, _ = lstm_model(2, 3, words="X W R B - initial_h initial_c")
    for port in list(made.graph.input)[1:]:
        port.CopyFrom(value_info(port.name, (1, "n", 3)))
    inputs = {"X": numbers(4, 1, 2), "initial_h": numbers(1, 1, 3), "initial_c": numbers(1, 2, 3)}
    host = load(made, tmp_path)
    with pytest.raises(NetworkError, match="input 'initial_c' must have n = 1 as input 'initial_h' has it, not 2"):
        host.run(inputs, run_all)
    with pytest.raises(NetworkError, match=r"node 'cell': initial_h must be float32 \(1, 1, 3\), not float32 \(1, 2, 3\)"):
        host.run({**inputs, "initial_h": numbers(1, 2, 3)}, run_all)


def test_errors_of_the_accelerator_pass_through_unchanged(silero):
    def broken(*arguments):
        raise ZeroDivisionError("in the accelerator")

    with pytest.raises(ZeroDivisionError, match="in the accelerator"):
        silero.run(GOOD_INPUTS, broken)


def test_a_host_node_that_fails_is_one_line(tmp_path):
    made, _ = lstm_model(2, 3, words="Xr W R B")
    made.graph.input.append(value_info("shape", (3,), TensorProto.INT64))
    made.graph.node.insert(0, helper.make_node("Reshape", ["X", "shape"], ["Xr"]))
    host = load(made, tmp_path)
    inputs = {"X": numbers(4, 1, 2), "shape": np.array([5, 1, 2])}
    for use in (lambda: host.run(inputs, run_all), lambda: host.reference(inputs)):
        with pytest.raises(NetworkError, match=r"model\.onnx: .*[Rr]eshape") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert_equals_onnxruntime(host, {**inputs, "shape": np.array([4, 1, 2])})


def test_an_input_that_is_no_tensor_is_refused(tmp_path):
    made, _ = lstm_model(2, 3)
    made.graph.input.append(helper.make_tensor_sequence_value_info("list", TensorProto.FLOAT, None))
    with pytest.raises(NetworkError, match="'list' must be a tensor, not of kind sequence_type"):
        load(made, tmp_path)
