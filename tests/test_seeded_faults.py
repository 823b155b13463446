"""Faults seeded on purpose into reader and host: each must show in a comparison of a few small models with onnxruntime.

Most are faults that some tool for recurrent networks really had. One that no model showed would mean that the models are too
few or too tame, so a comparison that passes says as much as these do.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from float_layer import run_all
from onnx_models import quantised_model, recurrent_model, save

from sharp.model import onnx_reader
from sharp.model.arithmetic import Activation
from sharp.model.layer import Layer
from sharp.model.onnx_reader import open_session
from sharp.model.sequence import Result, Task
from sharp.sim import host
from sharp.sim.host import HostGraph

# Equal sizes, so that a mix-up of axes shows in values alone.
SIZE = 3
LENGTHS = np.array([3, 0, 2], np.int32)
LSTM, OTHERS = "X W R B sequence_lens initial_h initial_c", "X W R B sequence_lens initial_h"
BOTH = dict(direction="bidirectional")
NODES: dict[str, tuple[str, dict]] = {
    "lstm": ("LSTM", dict(words=LSTM, **BOTH)),
    "lstm with peepholes and clip": ("LSTM", dict(words=LSTM + " P", clip=0.6)),
    "lstm with coupled gates": ("LSTM", dict(words=LSTM, input_forget=1, direction="reverse")),
    "lstm with functions": ("LSTM", dict(words=LSTM, activations=["HardSigmoid", "Relu", "Tanh"], activation_alpha=[1 / 6])),
    "gru": ("GRU", dict(words=OTHERS, **BOTH)),
    "gru that resets after": ("GRU", dict(words=OTHERS, linear_before_reset=1, clip=0.8)),
    "rnn": ("RNN", dict(words=OTHERS, activations=["Tanh", "Relu"], **BOTH)),
    "lstm of layout 1": ("LSTM", dict(words=LSTM, layout=1, **BOTH)),
    "quantised lstm": ("DynamicQuantizeLSTM", dict(words=LSTM, integers=np.uint8, zero_point=120, **BOTH)),
}
# onnxruntime quantises a quantised node's inputs and states too.
BOUNDS = {name: 0.01 if op == "DynamicQuantizeLSTM" else 1e-5 for name, (op, _) in NODES.items()}
# Axes of tensors in layout 1 as places in layout 0.
LAYOUT_1 = {"X": (1, 0, 2), "initial_h": (1, 0, 2), "initial_c": (1, 0, 2), "Y": (2, 0, 1, 3), "Y_h": (1, 0, 2), "Y_c": (1, 0, 2)}


def made_of(op: str, attributes: dict):
    if op == "DynamicQuantizeLSTM":
        return quantised_model(SIZE, SIZE, seed=5, **attributes)[0]
    return recurrent_model(op, SIZE, SIZE, seed=5, **attributes)[0]


def turned(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.transpose(LAYOUT_1[name]).copy() if name in LAYOUT_1 else array for name, array in arrays.items()}


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple]:
    """Each model with its inputs and the outputs that onnxruntime gives, from before any fault."""
    found = {}
    for name, (op, attributes) in NODES.items():
        generator = np.random.default_rng(3)
        state = (2 if attributes.get("direction") == "bidirectional" else 1, len(LENGTHS), SIZE)
        given = {"X": generator.uniform(-1, 1, (SIZE, len(LENGTHS), SIZE)).astype(np.float32), "sequence_lens": LENGTHS}
        given |= {word: generator.uniform(-1, 1, state).astype(np.float32) for word in attributes["words"].split() if "initial" in word}
        # onnxruntime refuses layout 1; it computes the same node in layout 0.
        twin = made_of(op, {key: value for key, value in attributes.items() if key != "layout"})
        names = [port.name for port in twin.graph.output]
        expected = dict(zip(names, open_session(twin).run(names, given)))
        if "layout" in attributes:
            given, expected = turned(given), turned(expected)
        found[name] = made_of(op, attributes), given, expected
    return found


def wrong_models(cases, tmp_path) -> list[str]:
    """Names of the models whose outputs are not onnxruntime's."""
    wrong = []
    for name, (model, given, expected) in cases.items():
        results = HostGraph.load(save(model, tmp_path)).run(given, run_all)
        assert {key: array.shape for key, array in results.items()} == {key: array.shape for key, array in expected.items()}
        if any(np.abs(results[key] - expected[key]).max() > BOUNDS[name] for key in expected):
            wrong.append(name)
    return wrong


def reading(change: Callable[[Layer], dict]) -> Callable:
    """A fault in what the reader makes of a direction of a node."""

    def faulty(**tensors) -> Layer:
        layer = Layer(**tensors)
        return layer.replace(**change(layer))

    return lambda patch: patch.setattr(onnx_reader, "Layer", faulty)


def reading_gates(op: str, *order: int) -> Callable:
    """A fault in where the gates of an operator are."""
    return lambda patch: patch.setitem(onnx_reader._KINDS, op, dataclasses.replace(onnx_reader._KINDS[op], order=order))


def reading_levels(change: Callable[[tuple[Layer, ...]], tuple[Layer, ...]]) -> Callable:
    """A fault in which layer is which direction's."""
    true = onnx_reader._Reader._level
    return lambda patch: patch.setattr(onnx_reader._Reader, "_level", lambda *given: change(true(*given)))


def reading_constants(suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable:
    """A fault in the constants whose names end so."""
    true = onnx_reader._Reader._constant

    def faulty(self, scope, node, name, *others):
        value = true(self, scope, node, name, *others)
        return change(value) if name.endswith(suffix) else value

    return lambda patch: patch.setattr(onnx_reader._Reader, "_constant", faulty)


def turning(table: str, tensor: str, *axes: int) -> Callable:
    """A fault in how layout 1 is turned."""
    return lambda patch: patch.setitem(getattr(onnx_reader, table), tensor, axes)


def handing_over(change: Callable[[Task], dict]) -> Callable:
    """A fault in the tasks."""

    def faulty(*given, **named) -> Task:
        task = Task(*given, **named)
        return dataclasses.replace(task, **change(task))

    return lambda patch: patch.setattr(host, "Task", faulty)


def running(*, inputs=lambda level, given: {}, result=lambda task, result: {}, outputs=lambda y, last, given: (y, *last)) -> Callable:
    """A fault in the run of a node.

    inputs(level, given) : the node's inputs that are wrong, by place, out of all of them; result(task, result) : what is taken
    wrongly from a result; outputs(y, last, given) : wrong outputs out of Y and (Y_h, Y_c)
    """
    true = HostGraph._run_level

    def faulty(self, level, node, values, recurrent):
        def results(tasks: list[Task]) -> list[Result]:
            return [dataclasses.replace(each, **result(task, each)) for task, each in zip(tasks, recurrent(tasks))]

        given = [values.get(name) for name in node.input]
        spoilt = {node.input[place]: array for place, array in inputs(level, given).items()}
        y, *last = true(self, level, node, {**values, **spoilt}, results)
        return outputs(y, last, given)

    return lambda patch: patch.setattr(HostGraph, "_run_level", faulty)


def recurrent_bias_dropped(patch: pytest.MonkeyPatch) -> None:
    true = onnx_reader._biases
    halves = np.array([[1], [0]], np.float32)
    patch.setattr(onnx_reader, "_biases", lambda stored, *others: true((stored.reshape(2, -1) * halves).ravel(), *others))


def folded(layer: Layer) -> dict:
    if layer.candidate_bias is None:
        return {}
    return {"bias": layer.bias + np.concatenate((np.zeros(2 * SIZE, np.float32), layer.candidate_bias)), "candidate_bias": None}


def reset_before(layer: Layer) -> dict:
    return {**folded(layer), "reset_after": False} if layer.cell == "gru" else {}


def last_rows(level: tuple[Layer, ...], given: list) -> dict:
    """X such that a reverse layer begins at the last step, valid or not."""
    if not level[0].reverse:
        return {}
    return {0: np.stack([np.roll(x, length - SIZE, axis=0) for x, length in zip(given[0].swapaxes(0, 1), LENGTHS)], axis=1)}


def rows_past_the_length(y, last, given) -> tuple:
    past = np.arange(SIZE)[:, None, None, None] >= LENGTHS[:, None]
    return np.where(past, last[0], y), *last


def state_without_steps(y, last, given) -> tuple:
    return y, *(np.where(LENGTHS[:, None] == 0, state, array) for state, array in zip(given[5:], last))


def reverse_state_at_the_end_of_y(y, last, given) -> tuple:
    h = last[0].copy()
    h[1:] = y[LENGTHS - 1, 1:, np.arange(len(LENGTHS))].swapaxes(0, 1) * (LENGTHS[:, None] > 0)
    return y, h, *last[1:]


def peepholes(*order: int) -> Callable:
    return reading(lambda layer: {} if layer.peepholes is None else {"peepholes": layer.peepholes[list(order)]})


def weights_swapped(level: tuple[Layer, ...]) -> tuple[Layer, ...]:
    tensors = ("input_kernel", "recurrent_kernel", "bias")
    return tuple(one.replace(**{name: getattr(other, name) for name in tensors}) for one, other in zip(level, level[::-1]))


SIXTH_AS_FIFTH = {Activation.HARD_SIGMOID_SIXTH: Activation.HARD_SIGMOID_FIFTH}

FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "lstm gates taken as i, f, g, o": reading_gates("LSTM", 0, 1, 2, 3),
    "lstm gates taken as i, f, o, g": reading_gates("LSTM", 0, 1, 3, 2),
    "input and forget gate swapped": reading_gates("LSTM", 2, 0, 3, 1),
    "gru gates taken as r, z, n": reading_gates("GRU", 1, 0, 2),
    "quantised lstm's gates taken as i, f, g, o": reading_gates("com.microsoft.DynamicQuantizeLSTM", 0, 1, 2, 3),
    "bias dropped": reading(lambda layer: {"bias": None}),
    "recurrent bias dropped": recurrent_bias_dropped,
    "peepholes left as i, o, f": peepholes(0, 2, 1),
    "input and output peephole swapped": peepholes(2, 1, 0),
    "peepholes dropped": reading(lambda layer: {"peepholes": None}),
    "clip dropped": reading(lambda layer: {"clip": None}),
    "coupled gates ignored": reading(lambda layer: {"coupled": False}),
    "activations ignored": reading(lambda layer: {"activations": ()}),
    "alpha ignored": reading(lambda layer: {"activations": tuple(SIXTH_AS_FIFTH.get(each, each) for each in layer.activations)}),
    "activations of the first direction in both": reading_levels(
        lambda level: tuple(layer.replace(activations=level[0].activations) for layer in level)
    ),
    "linear_before_reset lost": reading(reset_before),
    "linear_before_reset taken for granted": reading(lambda layer: {"reset_after": True}),
    "candidate's recurrent bias folded": reading(folded),
    "candidate's recurrent bias dropped": reading(lambda layer: {"candidate_bias": None}),
    "weights of the directions swapped": reading_levels(weights_swapped),
    "layers of the directions swapped": reading_levels(lambda level: level[::-1]),
    "both directions with the first one's recurrent weights": reading_levels(
        lambda level: tuple(layer.replace(recurrent_kernel=level[0].recurrent_kernel) for layer in level)
    ),
    "reverse ignored": reading(lambda layer: {"reverse": False}),
    "zero point ignored": reading_constants("_zero_point", np.zeros_like),
    "scales of the directions swapped": reading_constants("_scale", lambda scale: scale[::-1]),
    "X of layout 1 not turned": turning("_TIME_FIRST", "X", 0, 1, 2),
    "Y of layout 1 not turned": turning("_BATCH_FIRST", "Y", 0, 2, 1, 3),
    "reverse inputs not turned round": handing_over(lambda task: {"x": task.x[::-1]} if task.layer.reverse else {}),
    "initial hidden state dropped": handing_over(lambda task: {"hidden": np.zeros_like(task.hidden)}),
    "initial cell dropped": handing_over(lambda task: {} if task.cell is None else {"cell": np.zeros_like(task.cell)}),
    "initial h and c swapped": handing_over(lambda task: {} if task.cell is None else {"hidden": task.cell, "cell": task.hidden}),
    "initial states of the directions swapped": running(inputs=lambda level, given: {5: given[5][::-1]}),
    "initial states of the elements swapped": running(inputs=lambda level, given: {5: given[5][:, ::-1]}),
    "lengths ignored": running(inputs=lambda level, given: {4: np.full_like(LENGTHS, SIZE)}),
    "lengths of the elements swapped": running(inputs=lambda level, given: {4: LENGTHS[::-1].copy()}),
    "reverse begins at the last step": running(inputs=last_rows),
    "steps and batch of X swapped": running(inputs=lambda level, given: {0: given[0].swapaxes(0, 1)}),
    "reverse outputs not turned back": running(result=lambda task, result: {"y": result.y[::-1]} if task.layer.reverse else {}),
    "last state is that of the step before": running(result=lambda task, result: {"hidden": result.y[-2:][0]}),
    "last h and c swapped": running(outputs=lambda y, last, given: (y, *last[::-1])),
    "last step for the last valid one": running(outputs=lambda y, last, given: (y, y[-1], *last[1:])),
    "reverse state taken at the end of Y": running(outputs=reverse_state_at_the_end_of_y),
    "rows past the length repeat the last state": running(outputs=rows_past_the_length),
    "initial state kept where no step is valid": running(outputs=state_without_steps),
    "directions of Y swapped": running(outputs=lambda y, last, given: (y[:, ::-1], *last)),
    "directions of the last states swapped": running(outputs=lambda y, last, given: (y, *(state[::-1] for state in last))),
    "Y (T, D, N, H) taken as (T, N, D, H)": running(outputs=lambda y, last, given: (y.swapaxes(1, 2).reshape(y.shape), *last)),
}


def test_without_a_fault_every_model_equals_onnxruntime(cases, tmp_path):
    assert not wrong_models(cases, tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_shows(cases, tmp_path, monkeypatch, fault):
    FAULTS[fault](monkeypatch)
    assert wrong_models(cases, tmp_path)
