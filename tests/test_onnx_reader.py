"""What the reader takes out of ONNX models, and what it refuses."""

import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import (
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

from sharp.model.arithmetic import Activation
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


# The places of our gates among ONNX's: i, f, g, o among i, o, f, c; GRUs agree on z, r, n.
PLACES = {"LSTM": (0, 2, 3, 1), "GRU": (0, 1, 2), "RNN": (0,)}


def assert_weights(layer, weights, op: str = "LSTM", direction: int = 0) -> None:
    """Compare gate by gate; biases that are added up."""
    hidden = layer.hidden
    both = weights["B"][direction].reshape(2, -1)
    for ours, theirs in enumerate(PLACES[op]):
        mine, stored = slice(ours * hidden, (ours + 1) * hidden), slice(theirs * hidden, (theirs + 1) * hidden)
        np.testing.assert_array_equal(layer.input_kernel[mine], weights["W"][direction, stored])
        np.testing.assert_array_equal(layer.recurrent_kernel[mine], weights["R"][direction, stored])
        np.testing.assert_array_equal(layer.bias[mine], both[0, stored] + both[1, stored])


@pytest.mark.parametrize("made_by", ["initialiser", *WEIGHT_MAKERS])
@pytest.mark.parametrize("hidden", [1, 3, 25])
def test_weights_are_read_whichever_way_the_graph_makes_them(tmp_path, made_by, hidden):
    made, weights = lstm_model(2, hidden, made_by=made_by)
    (layer,) = read_layers(save(made, tmp_path))
    assert (layer.name, layer.inputs, layer.hidden, layer.reverse) == ("cell", 2, hidden, False)
    assert_weights(layer, weights)
    assert layer.initial_hidden is layer.initial_cell is None


@pytest.mark.parametrize("op", GATES)
def test_every_operator_becomes_its_cell_with_the_gates_in_our_order(tmp_path, op):
    made, weights = recurrent_model(op, 2, 3, direction="bidirectional")
    layers = read_layers(save(made, tmp_path))
    assert [layer.reverse for layer in layers] == [False, True]
    for direction, layer in enumerate(layers):
        assert layer.cell == op.lower()
        assert_weights(layer, weights, op, direction)
        assert (layer.peepholes, layer.candidate_bias, layer.clip, layer.coupled) == (None, None, None, False)
        assert layer.shape.reset_after == (op != "GRU")


@pytest.mark.parametrize("op", GATES)
def test_a_node_without_bias_is_a_layer_without_bias(tmp_path, op):
    (layer,) = read_layers(save(recurrent_model(op, 2, 3, words="X W R")[0], tmp_path))
    assert layer.bias is layer.candidate_bias is None


def test_the_candidates_recurrent_bias_stays_apart_where_the_reset_follows_the_product(tmp_path):
    made, weights = recurrent_model("GRU", 2, 3, linear_before_reset=1)
    (layer,) = read_layers(save(made, tmp_path))
    inputs, recurrent = weights["B"].reshape(2, 9)
    assert layer.reset_after
    np.testing.assert_array_equal(layer.candidate_bias, recurrent[6:])
    np.testing.assert_array_equal(layer.bias, np.concatenate((inputs[:6] + recurrent[:6], inputs[6:])))
    (layer,) = read_layers(save(recurrent_model("GRU", 2, 3, linear_before_reset=0)[0], tmp_path))
    assert not layer.reset_after and layer.candidate_bias is None
    np.testing.assert_array_equal(layer.bias, inputs + recurrent)


def test_peepholes_leave_in_the_order_input_forget_output(tmp_path):
    made, weights = lstm_model(2, 3, words="X W R B - - - P", direction="bidirectional")
    for layer, stored in zip(read_layers(save(made, tmp_path)), weights["P"].reshape(2, 3, 3)):
        np.testing.assert_array_equal(layer.peepholes, stored[[0, 2, 1]])


def test_clip_and_coupled_gates_are_the_layers(tmp_path):
    (layer,) = read_layers(save(lstm_model(2, 3, clip=0.75, input_forget=1)[0], tmp_path))
    assert (layer.clip, layer.coupled) == (0.75, True)


SIGMOID, TANH, RELU, IDENTITY = (Activation[name] for name in ("SIGMOID", "TANH", "RELU", "IDENTITY"))
FIFTH, SIXTH = Activation.HARD_SIGMOID_FIFTH, Activation.HARD_SIGMOID_SIXTH
BOTH = dict(direction="bidirectional")


@pytest.mark.parametrize(
    ("op", "attributes", "expected"),
    [
        ("LSTM", {}, [(SIGMOID, TANH, TANH)]),
        ("GRU", BOTH, [(SIGMOID, TANH)] * 2),
        ("RNN", {}, [(TANH,)]),
        ("RNN", {"activations": ["Relu"]}, [(RELU,)]),
        ("LSTM", {"activations": ["sigmoid", "RELU", "Tanh"]}, [(SIGMOID, RELU, TANH)]),
        ("GRU", {"activations": ["HardSigmoid", "Tanh"]}, [(FIFTH, TANH)]),
        ("GRU", {"activations": ["HardSigmoid", "Tanh"], "activation_alpha": [1 / 6]}, [(SIXTH, TANH)]),
        ("GRU", {"activations": ["HardSigmoid", "Tanh"], "activation_alpha": [0.2], "activation_beta": [0.5]}, [(FIFTH, TANH)]),
        # Each function takes its alpha off the list; those that take none leave it alone.
        (
            "LSTM",
            {"activations": ["Sigmoid", "HardSigmoid", "HardSigmoid"], "activation_alpha": [1 / 6]},
            [(SIGMOID, SIXTH, FIFTH)],
        ),
        ("RNN", {**BOTH, "activations": ["HardSigmoid", "HardSigmoid"], "activation_alpha": [0.2, 1 / 6]}, [(FIFTH,), (SIXTH,)]),
        ("RNN", {"activations": ["Affine"], "activation_alpha": [1.0], "activation_beta": [0.0]}, [(IDENTITY,)]),
    ],
)
def test_activations_are_read_with_their_alpha_and_beta(tmp_path, op, attributes, expected):
    layers = read_layers(save(recurrent_model(op, 2, 3, **attributes)[0], tmp_path))
    assert [layer.shape.activations for layer in layers] == expected


@pytest.mark.parametrize(
    "options", [{}, {"per_row": True, "zero_point": 7}, {"integers": np.uint8, "zero_point": 128, "direction": "bidirectional"}]
)
def test_a_quantised_lstm_has_the_weights_that_its_integers_stand_for(tmp_path, options):
    made, weights = quantised_model(2, 3, words="X W R B - - - P", **options)
    for direction, layer in enumerate(read_layers(save(made, tmp_path))):
        assert layer.cell == "lstm"
        np.testing.assert_array_equal(layer.peepholes, weights["P"][direction].reshape(3, 3)[[0, 2, 1]])
        for theirs, ours in (("W", layer.input_kernel), ("R", layer.recurrent_kernel)):
            stored = np.split(weights[theirs][direction], 4)
            np.testing.assert_allclose(ours, np.concatenate([stored[place] for place in PLACES["LSTM"]]), rtol=3e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"W": np.zeros((1, 2, 12), np.int16)}, "node 'cell': W must be int8 or uint8, not int16"),
        ({"R": np.zeros((1, 3, 12), np.float32)}, "node 'cell': R must be int8 or uint8, not float32"),
        ({"W": np.zeros((1, 12, 2), np.int8)}, r"W must be of the shape \(1, 12, 12\), not \(1, 12, 2\)"),
        ({"R": np.zeros((1, 12, 3), np.int8)}, r"W must be of the shape \(1, 2, 48\), not \(1, 2, 12\)"),
        ({"W": np.zeros((12, 2), np.int8)}, r"W must be of the shape \[1, ..., 4 x hidden\], not \(12, 2\)"),
        ({"W_scale": np.ones(12, np.float32)}, r"W_scale must be of the shape \(1,\) or \(1, 12\), not \(12,\)"),
        ({"R_scale": np.ones(1, np.float64)}, "R_scale must be float32, not float64"),
        ({"R_scale": np.full(1, np.inf, np.float32)}, r"layer cell: recurrent_kernel\[.*\] must be finite, not "),
        ({"W_zero_point": np.zeros(1, np.uint8)}, "W_zero_point must be int8, not uint8"),
        ({"W_zero_point": np.zeros((1, 3), np.int8)}, r"W_zero_point must be of the shape \(1,\) or \(1, 12\), not \(1, 3\)"),
        ({"R_scale": None}, "R_scale must be given, not None"),
        ({"R_zero_point": None}, "R_zero_point must be given, not None"),
        ({"B": np.zeros((1, 12), np.float32)}, r"B must be of the shape \(1, 24\), not \(1, 12\)"),
    ],
)
def test_a_quantised_lstm_with_a_wrong_tensor_is_refused(tmp_path, changes, message):
    refused(quantised_model(2, 3, changes=changes)[0], tmp_path, message)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"layout": 1}, "layout must be absent from com.microsoft.DynamicQuantizeLSTM, not 1"),
        ({"linear_before_reset": 1}, "linear_before_reset must be absent from com.microsoft.DynamicQuantizeLSTM, not 1"),
        ({"activations": ["Sigmoid", "Softsign", "Tanh"]}, "activations must be Sigmoid, .*, not 'Softsign'"),
        ({"activations": "Tanh"}, "node 'cell': activations must be of the type STRINGS, not STRING"),
        ({"clip": 1}, "node 'cell': clip must be of the type FLOAT, not INT"),
        ({"input_forget": 1.0}, "node 'cell': input_forget must be of the type INT, not FLOAT"),
        ({"direction": 1}, "node 'cell': direction must be of the type STRING, not INT"),
    ],
)
def test_a_quantised_lstm_with_a_wrong_attribute_is_refused(tmp_path, attributes, message):
    refused(quantised_model(2, 3, **attributes)[0], tmp_path, message)


def test_a_quantised_lstm_without_x_or_with_an_input_too_many_is_refused(tmp_path):
    made, _ = quantised_model(2, 3)
    made.graph.node[0].input.append("X")
    refused(made, tmp_path, "node 'cell': inputs must be at most 12, not 13")
    del made.graph.node[0].input[12]
    made.graph.node[0].input[0] = ""
    refused(made, tmp_path, "node 'cell': X must be given, not None")


def test_a_quantised_lstm_whose_scale_is_computed_at_run_time_is_refused(tmp_path):
    made, _ = quantised_model(2, 3, changes={"W_scale": None})
    made.graph.node[0].input[8] = "late"
    made.graph.input.append(value_info("late", (1,)))
    refused(made, tmp_path, "node 'cell': W_scale must be constant, not computed at run time from the input 'late'")


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
    with pytest.raises(NetworkError, match="ifless.onnx: holds no recurrent node but .*: a decomposed LSTM or GRU, which is not supported"):
        load_network(str(SILERO / "silero_vad_op18_ifless.onnx"))


SUPPORTED = r"activations must be Sigmoid, Tanh, Relu, HardSigmoid \(alpha 1/5 or 1/6, beta 1/2\) or Affine \(alpha 1, beta 0\), not "
THREE = ["HardSigmoid", "Tanh", "Tanh"]
ATTRIBUTES = [
    ({"clip": 0.0}, "layer cell: clip must be above 0 and finite, not 0.0"),
    ({"clip": -1.0, "direction": "reverse"}, "layer cell: clip must be above 0 and finite, not -1.0"),
    ({"input_forget": 2}, "node 'cell': input_forget must be 0 or 1, not 2"),
    ({"layout": 2}, r"node 'cell': layout must be 0 or 1, not 2"),
    ({"direction": "sideways"}, r"node 'cell': direction must be forward, reverse or bidirectional, not 'sideways'"),
    ({"activations": ["Sigmoid", "Tanh"]}, r"node 'cell': activations must be 3 for each direction, not \['Sigmoid', 'Tanh'\]"),
    ({**BOTH, "activations": THREE}, r"activations must be 3 for each direction, not \['HardSigmoid', 'Tanh', 'Tanh'\]"),
    ({"activations": ["Sigmoid", "Tanh", "Softsign"]}, SUPPORTED + "'Softsign'"),
    ({"activations": ["Sigmoid", "Elu", "Tanh"]}, SUPPORTED + "'Elu'"),
    ({"activations": ["Sigmoid", "LeakyRelu", "Tanh"], "activation_alpha": [0.5]}, SUPPORTED + "'LeakyRelu'"),
    ({"activations": ["Sigmoid", "ThresholdedRelu", "Tanh"]}, SUPPORTED + "'ThresholdedRelu'"),
    ({"activations": ["Sigmoid", "ScaledTanh", "Tanh"]}, SUPPORTED + "'ScaledTanh'"),
    ({"activations": ["Softplus", "Tanh", "Tanh"]}, SUPPORTED + "'Softplus'"),
    ({"activations": ["Sigmoid", "Affine", "Tanh"]}, SUPPORTED + r"'Affine' \(alpha None, beta None\)"),
    (
        {"activations": ["Sigmoid", "Affine", "Tanh"], "activation_alpha": [1.0], "activation_beta": [0.5]},
        SUPPORTED + r"'Affine' \(alpha 1.0, beta 0.5\)",
    ),
    ({"activations": THREE, "activation_alpha": [0.25]}, SUPPORTED + r"'HardSigmoid' \(alpha 0.25, beta 0.5\)"),
    ({"activations": THREE, "activation_beta": [0.25]}, SUPPORTED + r"'HardSigmoid' \(alpha 0.2, beta 0.25\)"),
    ({"activations": THREE, "activation_alpha": [0.2, 0.2]}, "activation_alpha must be no longer than what the activations take of it"),
    ({"activation_beta": [0.5]}, r"activation_beta must be no longer than what the activations take of it, not \[0.5\]"),
    ({"activations": ["Relu", "Tanh", "Tanh"], "input_forget": 1}, "coupled gates must be activated by SIGMOID or .*, not RELU"),
]


@pytest.mark.parametrize(("attributes", "message"), ATTRIBUTES)
def test_an_attribute_that_cannot_be_is_refused_by_name(tmp_path, attributes, message):
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


@pytest.mark.parametrize("shape", [(1, 12), (2, 9), (9,)])
def test_peepholes_of_another_shape_are_refused(tmp_path, shape):
    made, _ = lstm_model(2, 3, words="X W R B - - - P")
    made.graph.initializer[-1].CopyFrom(numpy_helper.from_array(np.zeros(shape, np.float32), "P"))
    refused(made, tmp_path, rf"node 'cell': P must be of the shape \(1, 9\), not \({shape[0]}")


@pytest.mark.parametrize(
    ("op", "name", "shape", "message"),
    [
        ("GRU", "W", (1, 12, 2), r"W must be of the shape \(1, 9, 2\), not \(1, 12, 2\)"),
        ("GRU", "R", (9, 3), r"R must be of the shape \[1, 3 x hidden, ...\], not \(9, 3\)"),
        ("GRU", "B", (1, 9), r"B must be of the shape \(1, 18\), not \(1, 9\)"),
        ("RNN", "W", (3, 2), r"W must be of the shape \[1, hidden, ...\], not \(3, 2\)"),
        ("RNN", "B", (1, 3), r"B must be of the shape \(1, 6\), not \(1, 3\)"),
    ],
)
def test_weights_of_another_cells_shape_are_refused(tmp_path, op, name, shape, message):
    made, _ = recurrent_model(op, 2, 3)
    index = [tensor.name for tensor in made.graph.initializer].index(name)
    made.graph.initializer[index].CopyFrom(numpy_helper.from_array(np.zeros(shape, np.float32), name))
    refused(made, tmp_path, message)


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


@pytest.mark.parametrize(("op", "domain"), [("AttnLSTM", "com.microsoft"), ("LSTM", "own"), ("DynamicQuantizeLSTM", "own")])
def test_a_recurrent_node_of_another_kind_is_refused_even_beside_one_that_is_known(tmp_path, op, domain):
    made, _ = lstm_model(2, 3)
    made.graph.node.append(helper.make_node(op, ["X", "W", "R"], ["Z"], name="other", domain=domain, hidden_size=3))
    made.opset_import.append(helper.make_opsetid(domain, 1))
    kinds = "LSTM, GRU, RNN, com.microsoft.DynamicQuantizeLSTM"
    refused(made, tmp_path, f"node 'other': kind must be {kinds}, not '{domain}.{op}'")


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
    refused(made, tmp_path, r"holds no recurrent node \(supported: LSTM, GRU, RNN, com.microsoft.DynamicQuantizeLSTM\); its nodes are Relu")


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
