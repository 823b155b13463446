"""Layers of every cell: their shapes, what they refuse, and identities that their formulas must meet."""

import numpy as np
import pytest
from float_layer import PHI, run, task_of

from sharp.model.arithmetic import Activation
from sharp.model.errors import NetworkError
from sharp.model.layer import CELLS, COUPLING_ACTIVATIONS, GATES, STANDARD_ACTIVATIONS, Layer, LayerShape
from sharp.model.sequence import Task

INPUTS, HIDDEN, PROJECTED = 2, 3, 2
FEATURES = {"projected": 2, "peepholes": True, "coupled": True}


def tensors(cell: str, projected: bool = False, seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Every tensor that the cell may have."""
    outputs = PROJECTED if projected else HIDDEN
    shapes = {
        "input_kernel": (GATES[cell] * HIDDEN, INPUTS),
        "recurrent_kernel": (GATES[cell] * HIDDEN, outputs),
        "bias": (GATES[cell] * HIDDEN,),
        "initial_hidden": (outputs,),
    }
    if cell == "lstm":
        shapes |= {"peepholes": (3, HIDDEN), "initial_cell": (HIDDEN,)} | ({"projection": (outputs, HIDDEN)} if projected else {})
    if cell == "gru":
        shapes["candidate_bias"] = (HIDDEN,)
    generator = np.random.default_rng(seed)
    return {name: generator.uniform(-scale, scale, shape).astype(np.float32) for name, shape in shapes.items()}


def layer(cell: str = "lstm", **changes) -> Layer:
    return Layer(**{"name": "a", "cell": cell, **tensors(cell), **changes})


def shape(cell: str, **changes) -> LayerShape:
    return LayerShape(**{"name": "a", "cell": cell, "inputs": INPUTS, "hidden": HIDDEN, **changes})


@pytest.mark.parametrize("cell", CELLS)
def test_a_layer_knows_its_shape(cell):
    made = layer(cell)
    assert made.shape == shape(cell, peepholes=cell == "lstm", activations=STANDARD_ACTIVATIONS[cell])
    assert (made.inputs, made.hidden, made.outputs) == (INPUTS, HIDDEN, HIDDEN)
    assert made.shape.weights == GATES[cell] * 3 * 5


def test_a_projection_gives_the_number_of_outputs_and_counts_as_weights():
    made = Layer(name="a", cell="lstm", **tensors("lstm", projected=True))
    assert (made.hidden, made.outputs, made.shape.projected, made.shape.outputs) == (HIDDEN, PROJECTED, PROJECTED, PROJECTED)
    assert made.shape.weights == 4 * 3 * (2 + 2) + 2 * 3


@pytest.mark.parametrize("cell", CELLS)
def test_tensors_may_be_left_out_where_they_mean_zeros(cell):
    optional = ("bias", "candidate_bias", "initial_hidden", "initial_cell")
    made = layer(cell, **dict.fromkeys(optional))
    zeros = {name: np.zeros_like(array) for name, array in tensors(cell).items() if name in optional}
    x = np.random.default_rng(1).uniform(-1, 1, (4, INPUTS)).astype(np.float32)
    np.testing.assert_array_equal(run(task_of(made, x)).y, run(task_of(made.replace(**zeros), x)).y)


def test_arrays_of_a_layer_cannot_be_written_and_those_given_stay_as_they_were():
    given = tensors("lstm")
    made = layer(**given)
    for name, array in given.items():
        with pytest.raises(ValueError, match="read-only"):
            getattr(made, name)[0] = 1
        array[0] = 1


@pytest.mark.parametrize("cell", CELLS)
def test_the_digest_counts_every_value_and_every_property_but_the_name(cell):
    made = layer(cell)
    digests = {made.digest}
    for name, array in tensors(cell).items():
        for index in np.ndindex(array.shape):
            changed = array.copy()
            changed[index] += 1
            digests.add(made.replace(**{name: changed}).digest)
    values = sum(array.size for array in tensors(cell).values())
    relu = (Activation.RELU, *STANDARD_ACTIVATIONS[cell][1:])
    changes = [{"reverse": True}, {"clip": 1.0}, {"clip": 2.0}, {"activations": relu}, {"bias": None}, {"bias": np.zeros_like(made.bias)}]
    changes += {"lstm": [{"coupled": True}, {"peepholes": None}], "gru": [{"reset_after": False, "candidate_bias": None}], "rnn": []}[cell]
    digests |= {made.replace(**change).digest for change in changes}
    assert len(digests) == 1 + values + len(changes)
    assert made.replace(name="b").digest == made.digest
    assert made.replace(activations=STANDARD_ACTIVATIONS[cell]).digest == made.digest
    if cell != "gru":
        assert made.replace(reset_after=False).digest == made.digest, "only a GRU resets"


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("cell", ["gru", "rnn"])
def test_what_only_an_lstm_may_have_is_refused_of_others(cell, feature):
    shape("lstm", **{feature: FEATURES[feature]})
    message = rf"layer a: {feature} must be absent for a cell of kind {cell} \(an LSTM may have it\)"
    with pytest.raises(NetworkError, match=message):
        shape(cell, **{feature: FEATURES[feature]})


@pytest.mark.parametrize(
    ("cell", "changes", "message"),
    [
        ("lstmm", {}, "layer a: cell must be lstm, gru, rnn, not 'lstmm'"),
        ("lstm", {"activations": (Activation.SIGMOID, Activation.TANH)}, "a cell of kind lstm must have 3 activations, not 2"),
        ("rnn", {"activations": STANDARD_ACTIVATIONS["lstm"]}, "a cell of kind rnn must have 1 activations, not 3"),
        ("lstm", {"clip": 0.0}, "layer a: clip must be above 0 and finite, not 0.0"),
        ("gru", {"clip": -1.0}, "layer a: clip must be above 0 and finite, not -1.0"),
        ("rnn", {"clip": np.inf}, "layer a: clip must be above 0 and finite, not inf"),
        ("rnn", {"clip": np.nan}, "layer a: clip must be above 0 and finite, not nan"),
        (
            "lstm",
            {"coupled": True, "activations": (Activation.RELU, Activation.TANH, Activation.TANH)},
            "coupled gates must be activated by SIGMOID or HARD_SIGMOID_FIFTH or HARD_SIGMOID_SIXTH, not RELU",
        ),
    ],
)
def test_a_shape_that_cannot_be_is_refused(cell, changes, message):
    with pytest.raises(NetworkError, match=message):
        shape(cell, **changes)


@pytest.mark.parametrize(
    ("cell", "changes", "message"),
    [
        ("lstm", {"input_kernel": np.zeros((12, 0), np.float32)}, r"input_kernel must be a matrix with .*, not of shape \(12, 0\)"),
        ("rnn", {"recurrent_kernel": np.zeros(3, np.float32)}, r"recurrent_kernel must be a matrix with .*, not of shape \(3,\)"),
        ("lstm", {"projection": np.zeros((0, 3), np.float32)}, r"projection must be a matrix with .*, not of shape \(0, 3\)"),
        ("lstm", {"input_kernel": np.zeros((8, 2), np.float32)}, r"layer a: input_kernel must have the shape \(12, 2\), not \(8, 2\)"),
        ("gru", {"input_kernel": np.zeros((12, 2), np.float32)}, r"layer a: input_kernel must have the shape \(9, 2\), not \(12, 2\)"),
        ("rnn", {"recurrent_kernel": np.zeros((3, 4), np.float32)}, r"recurrent_kernel must have the shape \(3, 3\), not \(3, 4\)"),
        ("lstm", {"projection": np.zeros((2, 3), np.float32)}, r"layer a: recurrent_kernel must have the shape \(12, 2\), not \(12, 3\)"),
        ("lstm", {"projection": np.zeros((3, 4), np.float32)}, r"layer a: projection must have the shape \(3, 3\), not \(3, 4\)"),
        ("gru", {"bias": np.zeros(12, np.float32)}, r"layer a: bias must have the shape \(9,\), not \(12,\)"),
        ("gru", {"candidate_bias": np.zeros(9, np.float32)}, r"layer a: candidate_bias must have the shape \(3,\), not \(9,\)"),
        ("lstm", {"peepholes": np.zeros(9, np.float32)}, r"layer a: peepholes must have the shape \(3, 3\), not \(9,\)"),
        ("lstm", {"initial_cell": np.zeros((1, 3), np.float32)}, r"layer a: initial_cell must have the shape \(3,\), not \(1, 3\)"),
        ("lstm", {"bias": np.zeros(12)}, "layer a: bias must be a float32 array, not float64"),
        ("lstm", {"bias": [0.0] * 12}, "layer a: bias must be a float32 array, not list"),
        ("rnn", {"peepholes": np.zeros((3, 3), np.float32)}, "layer a: peepholes must be absent for a cell of kind rnn"),
        ("gru", {"initial_cell": np.zeros(3, np.float32)}, "layer a: initial_cell must be absent for a cell of kind gru"),
        ("gru", {"reset_after": False}, "layer a: candidate_bias must be absent but for a GRU that resets after the product"),
        ("lstm", {"candidate_bias": np.zeros(3, np.float32)}, "layer a: candidate_bias must be absent but for a GRU that resets after"),
    ],
)
def test_a_layer_with_a_wrong_tensor_is_refused(cell, changes, message):
    with pytest.raises(NetworkError, match=message) as caught:
        layer(cell, **changes)
    assert "\n" not in str(caught.value)
    with pytest.raises(NetworkError, match=message):
        layer(cell).replace(**changes)


ALL_TENSORS = [(cell, name) for cell in CELLS for name in tensors(cell)] + [("lstm", "projection")]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("cell", "tensor"), ALL_TENSORS)
def test_the_first_value_that_is_not_finite_is_named(cell, tensor, value):
    given = tensors(cell, projected=tensor == "projection")
    array = np.zeros_like(given[tensor])
    array.flat[2] = array.flat[-1] = value
    place = ", ".join(str(index) for index in np.unravel_index(2, array.shape))
    with pytest.raises(NetworkError, match=rf"layer a: {tensor}\[{place}\] must be finite, not {value}"):
        Layer(name="a", cell=cell, **given | {tensor: array})


@pytest.mark.parametrize(("cell", "tensor"), ALL_TENSORS)
def test_a_value_that_float16_rounds_to_infinity_is_refused_where_float16_is_used(cell, tensor):
    given = tensors(cell, projected=tensor == "projection")
    for good in (65504.0, 65519.0):
        Layer(name="a", cell=cell, **given | {tensor: np.full_like(given[tensor], good)})
    too_large = given | {tensor: np.full_like(given[tensor], -65520.0)}
    if tensor in ("bias", "candidate_bias", "peepholes", "initial_cell"):
        Layer(name="a", cell=cell, **too_large)
        return
    with pytest.raises(NetworkError, match=rf"{tensor}\[.*\] must be within float16's range of \+-65504, not -65520.0"):
        Layer(name="a", cell=cell, **too_large)


def inputs(steps: int = 5) -> np.ndarray:
    return np.random.default_rng(7).uniform(-2, 2, (steps, INPUTS)).astype(np.float32)


@pytest.mark.parametrize("activation", COUPLING_ACTIVATIONS)
def test_a_coupled_gate_is_a_gate_with_the_input_gates_rows_negated(activation):
    functions = (activation, Activation.TANH, Activation.TANH)
    made = layer(coupled=True, activations=functions, clip=0.9)
    negated = {}
    for name in ("input_kernel", "recurrent_kernel", "bias"):
        rows = np.split(getattr(made, name), 4)
        negated[name] = np.concatenate((rows[0], -rows[0], *rows[2:]))
    p_i, _, p_o = made.peepholes
    free = made.replace(coupled=False, peepholes=np.stack((p_i, -p_i, p_o)), **negated)
    coupled, result = run(task_of(made, inputs())), run(task_of(free, inputs()))
    for name in ("y", "hidden", "cell"):
        np.testing.assert_allclose(getattr(coupled, name), getattr(result, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", sorted(set(PHI) - set(COUPLING_ACTIVATIONS)))
def test_functions_that_cannot_be_coupled_are_those_without_the_symmetry(activation):
    s = np.linspace(-4, 4, 33)
    assert np.abs(1 - PHI[activation](s) - PHI[activation](-s)).max() > 0.1


def test_a_projection_is_a_product_that_the_recurrent_kernel_may_take_over():
    made = Layer(name="a", cell="lstm", **tensors("lstm", projected=True, scale=0.5))
    m = np.array([0.3, -0.2, 0.1], np.float32)
    wide = made.replace(projection=None, recurrent_kernel=made.recurrent_kernel @ made.projection, initial_hidden=m)
    projected = run(task_of(made.replace(initial_hidden=made.projection @ m), inputs()))
    whole = run(task_of(wide, inputs()))
    np.testing.assert_allclose(projected.y, whole.y @ made.projection.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(projected.cell, whole.cell, rtol=1e-5, atol=1e-6)
    assert projected.hidden.shape == (PROJECTED,)


def test_resets_before_and_after_differ_unless_the_reset_gate_is_open():
    before = layer("gru", candidate_bias=None, reset_after=False)
    after = before.replace(reset_after=True)
    assert np.abs(run(task_of(before, inputs())).y - run(task_of(after, inputs())).y).max() > 0.01
    z, _, n = np.split(before.bias, 3)
    opened = np.concatenate((z, np.full_like(z, 100), n))
    results = [run(task_of(each.replace(bias=opened), inputs())).y for each in (before, after)]
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-6)


def test_a_task_has_its_layers_name_with_the_element_of_a_batch():
    made = layer("rnn")
    assert Task(made, inputs(), made.initial_hidden).name == "a"
    assert Task(made, inputs(), made.initial_hidden, element=0).name == "a[0]"
