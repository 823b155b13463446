"""The host's share of a graph: with a plain LSTM in the accelerator's place, the outputs are onnxruntime's."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import (
    WEIGHT_MAKERS,
    constant,
    lstm,
    lstm_model,
    lstm_outputs,
    model,
    nested_if_model,
    random_weights,
    run_lstm,
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


def assert_equals_onnxruntime(host: HostGraph, inputs, recurrent=run_lstm) -> dict[str, np.ndarray]:
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


def test_a_layer_with_gates_in_another_order_would_be_seen(silero, silero_inputs):
    def pytorch_order(layer, x, h, c):
        i, o, f, g = np.split(np.arange(4 * layer.hidden), 4)
        order = np.concatenate((i, f, g, o))
        misread = {name: getattr(layer, name)[order] for name in ("input_kernel", "recurrent_kernel", "bias")}
        return run_lstm(layer.replace(**misread), x, h, c)

    with pytest.raises(AssertionError):
        assert_equals_onnxruntime(silero, silero_inputs, pytorch_order)


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


@pytest.mark.parametrize("hidden", [1, 3, 25, 50])
@pytest.mark.parametrize("inputs", [1, 3, 25, 50])
@pytest.mark.parametrize("steps", [1, 9])
def test_single_nodes_of_odd_sizes_equal_onnxruntime(tmp_path, inputs, hidden, steps):
    host = load(lstm_model(inputs, hidden, seed=hidden)[0], tmp_path)
    assert_equals_onnxruntime(host, {"X": numbers(steps, 1, inputs)})


@pytest.mark.parametrize("words", ["X W R", "X W R - - initial_h", "X W R B - - initial_c", "X W R B - initial_h initial_c"])
@pytest.mark.parametrize("constants", [False, True])
def test_bias_and_initial_states_may_be_given_or_left_out(tmp_path, words, constants):
    states = {name: numbers(1, 1, 6, seed=seed) for seed, name in enumerate(("initial_h", "initial_c")) if name in words}
    host = load(lstm_model(4, 6, words=words, states=states if constants else None)[0], tmp_path)
    results = assert_equals_onnxruntime(host, {"X": numbers(3, 1, 4), **({} if constants else states)})
    if states:
        other = load(lstm_model(4, 6, words="X W R B" if "B" in words else "X W R")[0], tmp_path).run({"X": numbers(3, 1, 4)}, run_lstm)
        assert np.abs(other["Y"] - results["Y"]).max() > 1e-3, "the initial states changed nothing"


@pytest.mark.parametrize("outer_weights", [True, False])
@pytest.mark.parametrize(
    ("fast", "loud", "ran"), [(True, False, "cell_then"), (False, True, "cell_deep_then"), (False, False, "cell_deep_else")]
)
def test_the_branch_that_the_inputs_choose_is_the_one_that_runs(tmp_path, outer_weights, fast, loud, ran):
    calls = []

    def recurrent(layer, *arguments):
        calls.append(layer.name)
        return run_lstm(layer, *arguments)

    host = load(nested_if_model(3, 5, outer_weights=outer_weights)[0], tmp_path)
    assert_equals_onnxruntime(host, {"X": numbers(4, 1, 3), "fast": np.array(fast), "loud": np.array(loud)}, recurrent)
    assert calls == [ran]


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

    def recurrent(layer, *arguments):
        ran.add(layer.name)
        return run_lstm(layer, *arguments)

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
    host.run({"X": numbers(5, 1, 3)}, run_lstm)
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    host.run({"X": numbers(7, 1, 3)}, run_lstm)


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
        (numbers(4, 3, 2), r"node 'cell': the batch must be 1 \(supported now\), not 3"),
        (np.full((4, 1, 2), 7e4, np.float32), r"node 'cell': X\[0, 0, 0\] must be within float16's range of \+-65504, not 70000.0"),
    ],
)
def test_values_that_the_accelerator_cannot_take_are_refused(tmp_path, x, message):
    with pytest.raises(NetworkError, match=message):
        load(lstm_model(2, 3)[0], tmp_path).run({"X": x}, run_lstm)


def test_values_that_the_host_makes_infinite_are_refused_before_the_accelerator(tmp_path):
    made, _ = lstm_model(2, 3, words="Xl W R B")
    made.graph.node.insert(0, helper.make_node("Log", ["X"], ["Xl"]))
    with pytest.raises(NetworkError, match=r"node 'cell': X\[0, 0, 1\] must be finite, not -inf"):
        load(made, tmp_path).run({"X": np.array([[[1.0, 0.0]]], np.float32)}, run_lstm)


def test_a_state_for_a_batch_is_refused(tmp_path):
    made, _ = lstm_model(2, 3, words="X W R B - initial_h initial_c")
    for port in list(made.graph.input)[1:]:
        port.CopyFrom(value_info(port.name, (1, "n", 3)))
    inputs = {"X": numbers(4, 1, 2), "initial_h": numbers(1, 1, 3), "initial_c": numbers(1, 2, 3)}
    host = load(made, tmp_path)
    with pytest.raises(NetworkError, match="input 'initial_c' must have n = 1 as input 'initial_h' has it, not 2"):
        host.run(inputs, run_lstm)
    with pytest.raises(NetworkError, match=r"node 'cell': initial_h must be float32 \(1, 1, 3\), not float32 \(1, 2, 3\)"):
        host.run({**inputs, "initial_h": numbers(1, 2, 3)}, run_lstm)


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
    for use in (lambda: host.run(inputs, run_lstm), lambda: host.reference(inputs)):
        with pytest.raises(NetworkError, match=r"model\.onnx: .*[Rr]eshape") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert_equals_onnxruntime(host, {**inputs, "shape": np.array([4, 1, 2])})


def test_an_input_that_is_no_tensor_is_refused(tmp_path):
    made, _ = lstm_model(2, 3)
    made.graph.input.append(helper.make_tensor_sequence_value_info("list", TensorProto.FLOAT, None))
    with pytest.raises(NetworkError, match="'list' must be a tensor, not of kind sequence_type"):
        load(made, tmp_path)
