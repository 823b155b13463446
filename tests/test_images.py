"""The images: every matrix entry, bias, peephole and state lies once where it is read, and streamed weights in the order of reading."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sharp.model.arithmetic import Activation
from sharp.model.layer import GATES, Layer, LayerShape
from sharp.model.machine import load_machine
from sharp.model.planner import plan
from sharp.model.program import Operand, Post, Source, Tile
from small_layers import cases, shape_and_steps, stream_cases, with_weight_words


def coded(shape: LayerShape) -> Layer:
    """A layer whose matrix entries are float16 values of their own in each matrix, and whose biases tell their rows."""

    def matrix(rows, columns):
        return (1 + np.arange(rows * columns) % 31743).astype(np.uint16).view(np.float16).reshape(rows, columns).astype(np.float32)

    rows = GATES[shape.cell] * shape.hidden
    candidate_bias = np.arange(rows + 1, rows + shape.hidden + 1, dtype=np.float32)
    return Layer(
        name="coded",
        cell=shape.cell,
        input_kernel=matrix(rows, shape.inputs),
        recurrent_kernel=matrix(rows, shape.outputs),
        bias=np.arange(1, rows + 1, dtype=np.float32),
        candidate_bias=candidate_bias if shape.cell == "gru" and shape.reset_after else None,
        projection=None if shape.projected is None else matrix(shape.projected, shape.hidden),
        peepholes=np.ones((3, shape.hidden), np.float32) if shape.peepholes else None,
        reset_after=shape.reset_after,
        activations=shape.activations,
    )


def packed(case):
    """Compile and load a case of one stream; return its plan, program and layer."""
    planned, (shape, _) = case.plan(), shape_and_steps(case)
    layer = coded(dataclasses.replace(shape, coupled=False, clip=None))
    states = np.arange(1, shape.outputs + 1, dtype=np.float32), np.arange(shape.hidden, dtype=np.float32) + 0.5
    return planned, planned.loaded([layer], [states]), layer


@settings(deadline=None)
@given(cases())
def test_pieces_hold_every_matrix_entry_once_and_zeros_elsewhere(case):
    planned, program, layer = packed(case)
    machine, least = case.machine, case.machine.tile_rows.min
    (image,) = planned.compiled.layers
    kernels = {"input": layer.input_kernel, "hidden": layer.recurrent_kernel, "projection": layer.projection}
    found = {name: np.zeros(kernel.shape) for name, kernel in kernels.items() if kernel is not None}
    times = {name: np.zeros(kernel.shape, int) for name, kernel in found.items()}
    used = {False: np.zeros(len(program.weights), bool), True: np.zeros(len(program.memory), bool)}
    for piece in image.step.pieces:
        words = program.memory if piece.streamed else program.weights
        region = piece.region
        height, width = machine.tile_shape(region.tap)
        blocks, column_tiles = -(-region.rows // height), -(-region.columns // width)
        for index in range(blocks * column_tiles):
            column, block = divmod(index, blocks)
            word = piece.weight + index
            assert not used[piece.streamed][word]
            used[piece.streamed][word] = True
            # A slice holds `least` rows of one column; neighbouring slices are neighbouring columns, then the next rows.
            for part in range(machine.slices):
                at_rows = block * height + part // width * least + np.arange(least)
                at_column = column * width + part % width
                values = words[word, part].view(np.float16)
                inside = (at_rows < region.rows) & (at_column < region.columns)
                assert not values[~inside].any()
                rows = piece.band.matrix_rows[region.row + at_rows[inside]]
                assert not values[inside][rows < 0].any(), "a row that the matrix does not have is zero"
                place = rows[rows >= 0], np.full((rows >= 0).sum(), region.column + at_column)
                found[piece.matrix][place] = values[inside][rows >= 0]
                times[piece.matrix][place] += 1
    assert used[False].all() and used[True].all()
    for name, values in found.items():
        assert (times[name] == 1).all() and np.array_equal(values, kernels[name].astype(np.float16)), name


@settings(deadline=None)
@given(cases())
def test_image_holds_every_bias_and_state_once(case):
    planned, program, layer = packed(case)
    (image,), (stream,) = planned.compiled.layers, planned.compiled.streams
    frame = program.accumulators[image.biases :][: image.step.packing.rows]
    biases = len(layer.bias) + (0 if layer.candidate_bias is None else layer.hidden)
    assert sorted(frame[frame != 0]) == list(range(1, biases + 1))
    start = stream.hidden * case.machine.vector_row_elements
    assert np.array_equal(program.hidden[start : start + layer.outputs], np.arange(1, layer.outputs + 1))
    assert np.count_nonzero(program.hidden) == layer.outputs
    state = program.cell[stream.cell * case.machine.lanes :][: layer.hidden]
    expected = {"lstm": np.arange(layer.hidden) + 0.5, "gru": np.arange(1, layer.hidden + 1), "rnn": np.arange(layer.hidden) + 0.5}
    assert np.array_equal(state, expected[layer.cell])
    # The first step reads the vector that the second step writes.
    executed = (each for each in program.executed() if isinstance(each, Tile))
    first = next(tile for tile in executed if tile.operand is Operand.HIDDEN and not tile.wait)
    assert first.vector == stream.hidden


def test_negative_zero_of_a_bias_is_made_positive():
    kernel = np.zeros((4, 1), np.float32)
    layer = Layer(name="", cell="lstm", input_kernel=kernel, recurrent_kernel=kernel, bias=np.full(4, -0.0, np.float32))
    planned = plan(load_machine("sharp-64"), layer.shape, steps=1, schedule="unfolded", tile=8)
    assert not np.signbit(planned.loaded([layer], [(np.zeros(1), np.zeros(1))]).accumulators).any()


@pytest.mark.parametrize("activation", [Activation.SIGMOID, Activation.HARD_SIGMOID_FIFTH])
def test_rows_of_a_coupled_forget_gate_are_those_of_the_input_gate_negated(activation):
    generator = np.random.default_rng(1)

    def draw(*size):
        return generator.standard_normal(size).astype(np.float32)

    tensors = dict(input_kernel=draw(12, 2), recurrent_kernel=draw(12, 3), bias=draw(12), peepholes=draw(3, 3))
    functions = (activation, Activation.TANH, Activation.TANH)
    coupled = Layer(name="", cell="lstm", coupled=True, activations=functions, **tensors)
    negated = {name: tensors[name].copy() for name in tensors}
    for name in ("input_kernel", "recurrent_kernel", "bias"):
        negated[name][3:6] = -tensors[name][:3]
    negated["peepholes"][1] = -tensors["peepholes"][0]
    plain = Layer(name="", cell="lstm", activations=functions, **negated)
    images = []
    for layer in (coupled, plain):
        planned = plan(load_machine("sharp-64"), layer.shape, steps=1, schedule="unfolded", tile=8)
        images.append(planned.loaded([layer], [(np.zeros(3), np.zeros(3))]))
    for name in ("weights", "accumulators"):
        assert np.array_equal(getattr(images[0], name), getattr(images[1], name))


@pytest.mark.parametrize("coupled", [False, True])
def test_peepholes_lie_apart_in_the_order_of_the_gates(coupled):
    machine, hidden = load_machine("sharp-64"), 37  # in rows of 32
    kernel = np.zeros((4 * hidden, 1), np.float32)
    peepholes = np.arange(1, 3 * hidden + 1, dtype=np.float32).reshape(3, hidden)
    kernels = dict(input_kernel=kernel, recurrent_kernel=np.zeros((4 * hidden, hidden), np.float32))
    layer = Layer(name="", cell="lstm", **kernels, peepholes=peepholes, coupled=coupled)
    planned = plan(machine, layer.shape, steps=1, schedule="unfolded", tile=8)
    rows = planned.loaded([layer], [(np.zeros(hidden), np.zeros(hidden))]).accumulators
    (image,) = planned.compiled.layers
    for index, expected in enumerate((peepholes[0], -peepholes[0] if coupled else peepholes[1], peepholes[2])):
        vector = rows[image.peepholes + 64 * index :][:64]
        assert np.array_equal(vector[:hidden], expected) and not vector[hidden:].any()
    assert len(rows) == image.peepholes + 3 * 64
    posts = [each for each in planned.program.executed() if isinstance(each, Post)]
    addresses = {each.slot: each.accumulator for each in posts if each.source is Source.CONSTANT}
    assert addresses == {slot: image.peepholes + 64 * index for index, slot in enumerate((0, 1, 3))}


def test_matrices_and_hidden_states_are_rounded_to_float16_and_biases_and_cell_states_are_not():
    value = np.float32(1 + 2**-14)  # no float16: it is rounded to 1
    kernels = dict(input_kernel=np.full((4, 1), value), recurrent_kernel=np.full((4, 1), value))
    layer = Layer(name="", cell="lstm", bias=np.full(4, value), **kernels)
    program = plan(load_machine("sharp-64"), layer.shape, steps=1, schedule="unfolded", tile=8).loaded([layer], [(np.full(1, value),) * 2])
    ones = np.float16(1).view(np.uint16)
    assert set(program.weights[program.weights != 0].tolist()) == {ones} and set(program.hidden.tolist()) == {0, 1}
    assert set(program.accumulators.tolist()) == set(program.cell.tolist()) | {0} == {0, value}


def test_state_of_a_gru_is_the_hidden_state_that_its_matrices_see():
    value = np.float32(1 + 2**-14)
    layer = Layer(name="", cell="gru", input_kernel=np.zeros((3, 1), np.float32), recurrent_kernel=np.zeros((3, 1), np.float32))
    program = plan(load_machine("sharp-64"), layer.shape, steps=1, schedule="unfolded", tile=8).loaded([layer], [(np.full(1, value), None)])
    assert program.cell[0] == 1 == program.hidden.max()


@settings(deadline=None)
@given(stream_cases())
def test_pieces_of_all_layers_share_the_words_of_the_image_without_a_gap(case):
    compiled = case.plan().compiled
    words = {False: [], True: []}
    for image in compiled.layers:
        for piece in image.step.pieces:
            words[piece.streamed] += range(piece.weight, piece.weight + piece.count(case.machine))
    assert sorted(words[False]) == list(range(compiled.weight_words)) and sorted(words[True]) == list(range(compiled.memory_words))


@settings(deadline=None)
@given(cases(), st.integers(2, 40))
def test_memory_sends_words_in_the_order_in_which_every_step_takes_them(case, words):
    planned = with_weight_words(case, words).plan()
    streamed = [piece for piece in planned.compiled.layers[0].step.pieces if piece.streamed]
    assume(streamed)
    taken = [each for each in planned.program.executed() if isinstance(each, Tile) and each.streamed]
    assert len(taken) == len(streamed) * case.streams[0].steps
    word = 0
    for index, tile in enumerate(taken):
        piece = streamed[index % len(streamed)]
        region = piece.region
        assert piece.weight == word % planned.compiled.memory_words
        assert (tile.tap, tile.rows, tile.column, tile.columns) == (region.tap, region.rows, region.column, region.columns)
        assert (tile.operand is Operand.INPUT) == (piece.matrix == "input")
        word += piece.count(case.machine)
    assert word == planned.compiled.memory_words * case.streams[0].steps
