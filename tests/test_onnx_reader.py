"""What the reader takes out of ONNX models, and what it refuses."""

import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import WEIGHT_MAKERS, constant, lstm, lstm_model, lstm_outputs, model, nested_if_model, random_weights, save, value_info

from sharp.model.errors import NetworkError
from sharp.model.network import load_network
from sharp.model.onnx_reader import read_levels

SILERO = Path(find_spec("silero_vad").submodule_search_locations[0]) / "data"


def read_layers(path) -> list:
    return [layer for level in read_levels(path) for layer in level]


def refused(made, tmp_path, message: str) -> None:
    with pytest.raises(NetworkError, match=message) as caught:
        read_layers(save(made, tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "model.onnx") in str(caught.value)


def assert_weights(layer, weights) -> None:
    """Compare gate by gate: ONNX stores i, o, f, c."""
    hidden = layer.hidden
    for ours, theirs in enumerate((0, 2, 3, 1)):
        mine, stored = slice(ours * hidden, (ours + 1) * hidden), slice(theirs * hidden, (theirs + 1) * hidden)
        np.testing.assert_array_equal(layer.input_kernel[mine], weights["W"][0, stored])
        np.testing.assert_array_equal(layer.recurrent_kernel[mine], weights["R"][0, stored])
        both = weights["B"].reshape(2, 4 * hidden)
        np.testing.assert_array_equal(layer.bias[mine], both[0, stored] + both[1, stored])


@pytest.mark.parametrize("made_by", ["initialiser", *WEIGHT_MAKERS])
@pytest.mark.parametrize("hidden", [1, 3, 25])
def test_weights_are_read_whichever_way_the_graph_makes_them(tmp_path, made_by, hidden):
    made, weights = lstm_model(2, hidden, made_by=made_by)
    (layer,) = read_layers(save(made, tmp_path))
    assert (layer.name, layer.inputs, layer.hidden, layer.reverse) == ("cell", 2, hidden, False)
    assert_weights(layer, weights)
    assert layer.initial_hidden is layer.initial_cell is None


def test_a_node_without_bias_has_a_bias_of_zeros(tmp_path):
    (layer,) = read_layers(save(lstm_model(2, 3, words="X W R")[0], tmp_path))
    np.testing.assert_array_equal(layer.bias, np.zeros(12, np.float32))


@pytest.mark.parametrize("made_by", ["initialiser", "Reshape"])
def test_initial_states_that_are_constants_belong_to_the_layer(tmp_path, made_by):
    states = {"initial_h": np.full((1, 1, 4), 0.5, np.float32), "initial_c": np.arange(4, dtype=np.float32).reshape(1, 1, 4)}
    (layer,) = read_layers(save(lstm_model(2, 4, words="X W R B - initial_h initial_c", states=states, made_by=made_by)[0], tmp_path))
    np.testing.assert_array_equal(layer.initial_hidden, states["initial_h"][0, 0])
    np.testing.assert_array_equal(layer.initial_cell, states["initial_c"][0, 0])
    (layer,) = read_layers(save(lstm_model(2, 4, words="X W R B - initial_h initial_c")[0], tmp_path))
    assert layer.initial_hidden is layer.initial_cell is None


@pytest.mark.parametrize("outer_weights", [True, False])
def test_layers_in_nested_branches_are_all_found(tmp_path, outer_weights):
    made, weights = nested_if_model(3, 5, outer_weights=outer_weights)
    layers = read_layers(save(made, tmp_path))
    assert [layer.name for layer in layers] == ["cell_then", "cell_deep_then", "cell_deep_else"]
    for layer, kind in zip(layers, ("then", "deep_then", "deep_else")):
        assert_weights(layer, weights[kind])


def test_a_branch_that_is_never_taken_is_not_read(tmp_path):
    made, weights = nested_if_model(3, 5)
    for node in made.graph.node:
        node.input[0] = "always"
    made.graph.node.insert(0, constant("always", np.array(True)))
    (layer,) = read_layers(save(made, tmp_path))
    assert layer.name == "cell_then"
    assert_weights(layer, weights["then"])


def test_nodes_with_the_same_name_make_layers_with_different_ones(tmp_path):
    weights = random_weights(4, 4)
    first = lstm(4, outputs=["A", "", ""])
    squeeze = helper.make_node("Squeeze", ["A", "axes"], ["X2"])
    second = lstm(4, "X2 W R B")
    made = model(
        [first, squeeze, second], [value_info("X", ("steps", 1, 4))], lstm_outputs(4), {**weights, "axes": np.array([1], np.int64)}
    )
    assert [layer.name for layer in read_layers(save(made, tmp_path))] == ["cell", "cell.2"]


def test_a_layer_inside_a_model_function_is_read(tmp_path):
    made, weights = lstm_model(2, 3)
    body = [lstm(3)]
    made.functions.append(helper.make_function("own", "Cell", ["X", "W", "R", "B"], ["Y", "Y_h", "Y_c"], body, made.opset_import))
    made.graph.node[0].CopyFrom(helper.make_node("Cell", ["X", "W", "R", "B"], ["Y", "Y_h", "Y_c"], domain="own"))
    made.opset_import.append(helper.make_opsetid("own", 1))
    (layer,) = read_layers(save(made, tmp_path))
    assert_weights(layer, weights)


def test_silero_is_the_same_layer_in_each_of_its_files(tmp_path):
    network = load_network("silero-vad")
    (layer,) = network.layers
    assert (layer.inputs, layer.hidden) == (128, 128)
    assert network.levels == ((layer.shape,),)
    assert network.steps is None
    with pytest.raises(NetworkError, match="the number of steps comes with its inputs"):
        network.macs
    nested = load_network(str(SILERO / "silero_vad.onnx"))
    assert [other.digest == layer.digest for other in nested.layers] == [True, False]
    assert read_layers(SILERO / "silero_vad_16k_op15.onnx")[0].digest == layer.digest


def test_silero_decomposed_is_refused_as_what_it_is():
    with pytest.raises(NetworkError, match="ifless.onnx: holds no LSTM node but .*: a decomposed LSTM, which is not supported"):
        load_network(str(SILERO / "silero_vad_op18_ifless.onnx"))


ATTRIBUTES = [
    ({"clip": 8.0}, r"node 'cell': clip must be absent \(not supported now\), not 8.0"),
    ({"input_forget": 1}, r"node 'cell': input_forget must be 0 \(supported now\), not 1"),
    ({"layout": 2}, r"node 'cell': layout must be 0 or 1, not 2"),
    ({"activations": ["HardSigmoid", "Tanh", "Tanh"]}, r"activations must be Sigmoid, Tanh, Tanh .*'HardSigmoid', 'Tanh', 'Tanh'\]"),
    ({"activations": ["Sigmoid", "Tanh"]}, "activations must be"),
    ({"activation_alpha": [0.5]}, "activation_alpha must be absent"),
    ({"activation_beta": [0.5]}, "activation_beta must be absent"),
    ({"direction": "sideways"}, r"node 'cell': direction must be forward, reverse or bidirectional, not 'sideways'"),
    ({"direction": "bidirectional", "activations": ["Sigmoid", "Tanh", "Tanh"]}, r"Sigmoid, Tanh, Tanh in each direction .*, not \["),
    ({"direction": "bidirectional", "activations": 2 * ["Sigmoid", "Tanh", "Relu"]}, "activations must be .*'Relu'"),
    ({"direction": "reverse", "clip": 1.0}, "clip must be absent"),
]


@pytest.mark.parametrize(("attributes", "message"), ATTRIBUTES)
def test_an_attribute_without_support_is_refused_by_name(tmp_path, attributes, message):
    refused(lstm_model(2, 3, **attributes)[0], tmp_path, message)


@pytest.mark.parametrize(
    "attributes",
    [
        {"direction": "forward"},
        {"activations": ["sigmoid", "Tanh", "TANH"]},
        {"input_forget": 0},
        {"layout": 0},
        {"direction": "reverse", "activations": ["Sigmoid", "Tanh", "Tanh"]},
    ],
)
def test_an_attribute_that_states_the_default_is_accepted(tmp_path, attributes):
    assert len(read_layers(save(lstm_model(2, 3, **attributes)[0], tmp_path))) == 1


@pytest.mark.parametrize("layout", [0, 1])
def test_a_node_of_two_directions_is_a_level_of_two_layers(tmp_path, layout):
    states = {"initial_h": np.arange(6, dtype=np.float32).reshape(2, 1, 3)}
    given = {name: array.swapaxes(0, 1) if layout else array for name, array in states.items()}
    words, activations = "X W R B - initial_h", 2 * ["Sigmoid", "Tanh", "Tanh"]
    made, weights = lstm_model(2, 3, words=words, states=given, direction="bidirectional", layout=layout, activations=activations)
    path = save(made, tmp_path)
    ((forward, reverse),) = read_levels(path)
    assert [(layer.name, layer.reverse) for layer in (forward, reverse)] == [("cell", False), ("cell.reverse", True)]
    for direction, layer in enumerate((forward, reverse)):
        assert_weights(layer, {name: array[direction : direction + 1] for name, array in weights.items()})
        np.testing.assert_array_equal(layer.initial_hidden, states["initial_h"][direction, 0])
        assert layer.initial_cell is None
    network = load_network(str(path))
    assert network.levels == ((forward.shape, reverse.shape),)
    assert [layer.digest for layer in network.layers] == [forward.digest, reverse.digest]


def test_a_reverse_node_is_one_reverse_layer(tmp_path):
    made, weights = lstm_model(2, 3, direction="reverse")
    (layer,) = read_layers(save(made, tmp_path))
    assert (layer.name, layer.reverse) == ("cell", True)
    assert_weights(layer, weights)


def test_branches_that_differ_in_direction_alone_are_both_listed(tmp_path):
    made, _ = nested_if_model(3, 5, outer_weights=False)
    (otherwise,) = [a.g for a in made.graph.node[0].attribute if a.name == "else_branch"]
    then, other = ([a.g for a in otherwise.node[0].attribute if a.name == name][0] for name in ("then_branch", "else_branch"))
    for mine, theirs in zip(other.initializer, then.initializer):
        mine.raw_data = theirs.raw_data
    assert [layer.name for layer in read_layers(save(made, tmp_path))] == ["cell_then", "cell_deep_then"]
    other.node[0].attribute.append(helper.make_attribute("direction", "reverse"))
    assert [layer.name for layer in read_layers(save(made, tmp_path))] == ["cell_then", "cell_deep_then", "cell_deep_else"]


def test_an_attribute_that_onnx_does_not_know_is_refused(tmp_path):
    refused(lstm_model(2, 3, zoneout=0.5)[0], tmp_path, "zoneout")


def test_a_hidden_size_that_the_weights_contradict_is_refused(tmp_path):
    made, _ = lstm_model(2, 3)
    made.graph.node[0].attribute[0].i = 4
    refused(made, tmp_path, "node 'cell': hidden_size must be 3, as R has it, not 4")
    del made.graph.node[0].attribute[:]
    assert read_layers(save(made, tmp_path))[0].hidden == 3


def test_peepholes_are_refused_by_name(tmp_path):
    made, _ = lstm_model(2, 3, words="X W R B - - - P")
    made.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 9), np.float32), "P"))
    refused(made, tmp_path, r"P must be absent \(peepholes are not supported now\), not 'P'")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("W", np.zeros((1, 12, 2)), "W must be float32, not float64"),
        ("R", np.zeros((1, 12, 3), np.float16), "R must be float32, not float16"),
        ("B", np.zeros((1, 24), np.int32), "B must be float32, not int32"),
        ("W", np.zeros((2, 12, 2), np.float32), r"W must be of the shape \(1, 12, 2\), not \(2, 12, 2\)"),
        ("W", np.zeros((12, 2), np.float32), r"W must be of the shape \[1, 4 x hidden, ...\], not \(12, 2\)"),
        ("R", np.zeros((1, 16, 3), np.float32), r"R must be of the shape \(1, 12, 3\), not \(1, 16, 3\)"),
        ("B", np.zeros((1, 12), np.float32), r"B must be of the shape \(1, 24\), not \(1, 12\)"),
        ("W", np.zeros((1, 12, 0), np.float32), "input_kernel must be a matrix with rows and columns"),
        ("R", np.full((1, 12, 3), np.nan, np.float32), r"layer cell: recurrent_kernel\[0, 0\] must be finite, not nan"),
        ("W", np.full((1, 12, 2), 1e6, np.float32), r"layer cell: input_kernel\[0, 0\] must be within float16's range"),
        ("B", np.full((1, 24), 3e38, np.float32), r"layer cell: bias\[0\] must be finite, not inf"),
    ],
)
def test_weights_of_a_wrong_type_shape_or_value_are_refused(tmp_path, name, array, message):
    made, _ = lstm_model(2, 3)
    index = [tensor.name for tensor in made.graph.initializer].index(name)
    made.graph.initializer[index].CopyFrom(numpy_helper.from_array(array, name))
    refused(made, tmp_path, message)


def test_initial_states_for_a_batch_belong_to_no_layer(tmp_path):
    made, _ = lstm_model(2, 3, words="X W R B - initial_h initial_c", states={"initial_h": np.ones((1, 2, 3), np.float32)})
    (layer,) = read_layers(save(made, tmp_path))
    assert layer.initial_hidden is layer.initial_cell is None


@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 1, 4), (1, 3), (1, 0, 3)])
def test_initial_states_of_another_shape_are_refused(tmp_path, shape):
    made, _ = lstm_model(2, 3, words="X W R B - initial_h", states={"initial_h": np.zeros(shape, np.float32)})
    refused(made, tmp_path, rf"initial_h must be of the shape \(1, batch, 3\), not \({', '.join(map(str, shape))}\)")


def test_weights_computed_at_run_time_are_refused_with_what_they_depend_on(tmp_path):
    made, _ = lstm_model(2, 3, words="X raw R B")
    made.graph.input.append(value_info("scale", ()))
    made.graph.node[0].input[1] = "W"
    made.graph.initializer.append(numpy_helper.from_array(np.ones((1, 12, 2), np.float32), "raw"))
    made.graph.node.insert(0, helper.make_node("Mul", ["raw", "scale"], ["W"]))
    refused(made, tmp_path, "node 'cell': W must be constant, not computed at run time from the input 'scale'")
    made.graph.node[0].CopyFrom(helper.make_node("RandomNormal", [], ["W"], name="dice", shape=[1, 12, 2]))
    refused(made, tmp_path, "W must be constant, not computed at run time from the random node 'dice'")


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_another_recurrent_node_is_refused_by_its_kind_even_beside_an_lstm(tmp_path, kind):
    gates = {"GRU": 3, "RNN": 1}[kind]
    made, _ = lstm_model(2, 3)
    for name, size in (("W2", 2), ("R2", 3)):
        made.graph.initializer.append(numpy_helper.from_array(np.zeros((1, gates * 3, size), np.float32), name))
    made.graph.node.append(helper.make_node(kind, ["X", "W2", "R2"], ["Z"], name="other", hidden_size=3))
    refused(made, tmp_path, f"node 'other': kind must be LSTM, not '{kind}'")
    del made.graph.node[0]
    del made.graph.output[:]
    made.graph.output.append(value_info("Z", ("steps", 1, 1, 3)))
    refused(made, tmp_path, f"node 'other': kind must be LSTM, not '{kind}'")


def test_a_quantised_lstm_of_onnxruntime_is_refused_by_its_kind(tmp_path):
    node = helper.make_node("DynamicQuantizeLSTM", ["X", "W", "R"], ["Y"], name="int8", domain="com.microsoft", hidden_size=3)
    made = model([node], [value_info(name, ("a", "b", "c")) for name in "XWR"], [value_info("Y", ("steps", 1, 1, 3))])
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    refused(made, tmp_path, "node 'int8': kind must be LSTM, not 'com.microsoft.DynamicQuantizeLSTM'")


def test_an_lstm_inside_a_loop_is_refused_with_the_loop(tmp_path):
    weights = random_weights(3, 3)
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), lstm(3, "X W R B", outputs=["", "step_h"])],
        "body",
        [value_info("count", (), TensorProto.INT64), value_info("go", (), TensorProto.BOOL)],
        [value_info("go_on", (), TensorProto.BOOL), value_info("step_h", (1, 1, 3))],
    )
    loop = helper.make_node("Loop", ["times", ""], ["all"], name="around", body=body)
    made = model([loop], [value_info("X", (4, 1, 3))], [value_info("all", (2, 1, 1, 3))], {**weights, "times": np.array(2, np.int64)})
    refused(made, tmp_path, "node 'around': node around a recurrent node must be If, not 'Loop'")


def test_a_model_without_recurrent_nodes_lists_what_it_has(tmp_path):
    made = model([helper.make_node("Relu", ["X"], ["Y"])], [value_info("X", (2,))], [value_info("Y", (2,))])
    refused(made, tmp_path, r"holds no recurrent node \(supported: LSTM\); its nodes are Relu")


def test_sparse_weights_are_refused(tmp_path):
    made, _ = lstm_model(2, 3)
    values, indices = numpy_helper.from_array(np.ones(1, np.float32), "thin"), numpy_helper.from_array(np.array([3], np.int64))
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [8]))
    refused(made, tmp_path, "initialiser 'thin' is sparse")


def test_missing_external_data_is_one_line(tmp_path):
    made, _ = lstm_model(2, 3)
    onnx.external_data_helper.convert_model_to_external_data(made, location="weights.bin", size_threshold=0)
    onnx.save(made, tmp_path / "model.onnx")
    (layer,) = read_layers(tmp_path / "model.onnx")
    assert layer.hidden == 3
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(NetworkError, match=r"model\.onnx: external data: .*weights\.bin") as caught:
        read_layers(tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)


def test_an_opset_or_version_from_the_future_is_one_line(tmp_path):
    made, _ = lstm_model(2, 3)
    made.opset_import[0].version = 4000
    refused(made, tmp_path, "4000|[Oo]pset")
    made, _ = lstm_model(2, 3)
    made.ir_version = 4000
    refused(made, tmp_path, "4000")


def test_a_branch_with_outputs_missing_is_refused(tmp_path):
    made, _ = nested_if_model(2, 3)
    del made.graph.node[0].attribute[0].g.output[2]
    refused(made, tmp_path, "node 'Y': outputs of a branch must be 3, as many as the node's, not 2")


def test_an_output_that_no_node_makes_is_refused(tmp_path):
    made, _ = lstm_model(2, 3)
    made.graph.output[2].name = "Y_cell"
    refused(made, tmp_path, "output 'Y_cell' is not an output of any node")


def test_a_name_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(lstm_model(2, 3)[0].SerializeToString().replace(b"cell", b"ce\xffl"))
    with pytest.raises(NetworkError, match="is not UTF-8"):
        read_layers(path)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 64, b"PK\x03\x04", bytes(range(256)) * 8])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(NetworkError, match=r"model\.onnx: not an ONNX model, or a damaged one: ") as caught:
        read_layers(path)
    assert "\n" not in str(caught.value)


def test_a_folder_or_a_missing_file_is_refused(tmp_path):
    with pytest.raises(NetworkError, match="cannot be read: "):
        read_layers(tmp_path)
    with pytest.raises(NetworkError, match="cannot be read: No such file"):
        read_layers(tmp_path / "gone.onnx")


def test_a_file_past_the_limit_of_protobuf_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(NetworkError, match="must be at most 2 GiB, the limit of a protobuf message, not 2147483648 bytes"):
        read_layers(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    content = lstm_model(2, 3)[0].SerializeToString()
    path = tmp_path / "model.onnx"
    for length in [*range(0, len(content), 37), *range(len(content) - 20, len(content))]:
        path.write_bytes(content[:length])
        with pytest.raises(NetworkError) as caught:
            read_layers(path)
        assert "\n" not in str(caught.value)
    silero = (SILERO / "silero_vad_16k_sequence.onnx").read_bytes()
    for share in (0.1, 0.5, 0.9, 0.999):
        path.write_bytes(silero[: int(share * len(silero))])
        with pytest.raises(NetworkError, match="not an ONNX model, or a damaged one"):
            read_layers(path)


@pytest.mark.parametrize("made_by", ["initialiser", "Unsqueeze", "If"])
def test_damage_anywhere_is_refused_or_harmless_but_never_another_error(tmp_path, made_by):
    content = lstm_model(2, 3, made_by=made_by)[0].SerializeToString()
    generator = random.Random(1)
    path = tmp_path / "model.onnx"
    refusals = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(generator.choice((1, 1, 4))):
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            read_layers(path)
        except NetworkError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 20
