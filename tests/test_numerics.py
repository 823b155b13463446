"""The numerics: close to every cell in float64, sums in the machine's order, saturation instead of wrapping, states in and out."""

import dataclasses

import float_layer
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_layers import by_rows, cases, stream_cases, with_weight_words

from sharp.model import arithmetic, numerics
from sharp.model.arithmetic import CELL_LIMIT, SIGMOID_ERROR_BOUND, TANH_ERROR_BOUND, Activation
from sharp.model.compiler import Recurrence
from sharp.model.layer import Layer, LayerShape
from sharp.model.machine import load_machine
from sharp.model.planner import plan, plan_streams
from sharp.model.program import Tile, Tiling
from sharp.model.sequence import Task
from sharp.model.steps import SCHEDULES
from sharp.sim.verification import LayerCase

MACHINE = load_machine("sharp-64")  # heights 8, 16, 32 with 8, 4, 2 columns
MATRICES = ("input_kernel", "recurrent_kernel", "projection")
FULLY_OPEN = 20.0  # sigmoid and tanh of it are 1, of its negative 0 and -1


@dataclasses.dataclass(frozen=True)
class Values:
    """What a single stream yields."""

    outputs: np.ndarray
    cell: np.ndarray
    saturations: int


def execute(planned, layer, inputs, hidden, cell) -> Values:
    values = numerics.execute(planned.loaded([layer], [(hidden, cell)]), inputs)
    (outputs,), (state,) = values.outputs, values.states
    return Values(outputs, state, values.saturations)


def run(layer, inputs, hidden, cell, *, schedule="unfolded", tile=8) -> Values:
    return execute(plan(MACHINE, layer.shape, steps=len(inputs), schedule=schedule, tile=tile), layer, inputs, hidden, cell)


def drawn(case):
    """Return the layer of a case of one stream, its inputs and the states before the first step."""
    layer = case.layers[0].layer(np.random.default_rng(case.seed))
    plan = case.plan()
    program, inputs = case.loaded(plan)
    image, row = plan.compiled.streams[0], case.machine.vector_row_elements
    hidden = program.hidden[image.hidden * row :][: layer.outputs].astype(np.float32)
    cell = program.cell[image.cell * case.machine.lanes :][: layer.hidden]
    return layer, inputs, hidden, cell if layer.cell == "lstm" else None


def lstm_layer(inputs, hidden, **changes) -> Layer:
    zeros = dict(
        input_kernel=np.zeros((4 * hidden, inputs), np.float32),
        recurrent_kernel=np.zeros((4 * hidden, hidden), np.float32),
        bias=np.zeros(4 * hidden, np.float32),
    )
    return Layer(name="layer", cell="lstm", **zeros | changes)


def float64_step(layer, x, hidden, cell):
    """One step with the float16 kernels in float64; returns h, c and the sum of the magnitudes of the terms of each gate."""
    kernel = np.concatenate([layer.input_kernel, layer.recurrent_kernel], axis=1).astype(np.float16).astype(np.float64)
    vector = np.concatenate([x, hidden]).astype(np.float64)
    sums = kernel @ vector + layer.bias
    enter, forget, candidate, leave = sums.reshape(4, -1)

    def sigmoid(values):
        return 1 / (1 + np.exp(-values))

    cell = sigmoid(forget) * cell + sigmoid(enter) * np.tanh(candidate)
    return sigmoid(leave) * np.tanh(cell), cell, (np.abs(kernel) @ np.abs(vector) + np.abs(layer.bias)).reshape(4, -1).max(axis=0)


@settings(deadline=None)
@given(cases(plain=True, steps=1, large_cell=False))
def test_one_step_of_an_lstm_is_within_its_rounding_of_float64(case):
    layer, inputs, hidden, cell = drawn(case)
    values = execute(case.plan(), layer, inputs, hidden, cell)
    expected_hidden, expected_cell, magnitude = float64_step(layer, inputs[0], hidden.astype(np.float16), cell)
    unit = 2.0**-24  # half of float32's last place of 1
    gate = (layer.inputs + layer.hidden + 1) * unit * magnitude + max(SIGMOID_ERROR_BOUND, TANH_ERROR_BOUND)
    cell_bound = (np.abs(cell) + 2) * (gate + 2 * unit)
    assert (np.abs(values.cell - expected_cell) <= cell_bound).all()
    # The largest hidden value is below 1, where half of float16's last place is 2^-12.
    assert (np.abs(values.outputs[0] - expected_hidden) <= cell_bound + gate + TANH_ERROR_BOUND + 2.0**-12).all()


@settings(deadline=None)
@given(cases(large_cell=False))
def test_every_step_of_a_random_layer_is_near_float64_from_the_h_before_it(case):
    layer, inputs, hidden, cell = drawn(case)
    rounded = {name: getattr(layer, name).astype(np.float16).astype(np.float32) for name in MATRICES if getattr(layer, name) is not None}
    layer, values = layer.replace(**rounded), execute(case.plan(), layer, inputs, hidden, cell)
    # What lies between two matrices of one step is rounded to float16 too, by half of its last place.
    second = layer.projection if layer.projection is not None else None if layer.reset_after else layer.recurrent_kernel[-layer.hidden :]
    between = 0 if second is None else np.abs(second).sum(axis=1).max() * 2.0**-12
    # Large weights make a layer chaotic, so that each step starts from the h of the machine; only c goes on in float64.
    for step, (x, got) in enumerate(zip(inputs.astype(np.float32), values.outputs, strict=True), 1):
        expected = float_layer.run(Task(layer, x[None], hidden, cell))
        # Functions without a limit let values grow past those of float16.
        assume(np.abs(expected.hidden).max() < 4 and (cell is None or np.abs(expected.cell).max() < 4))
        hidden, cell = got.astype(np.float32), expected.cell
        assert np.abs(hidden - expected.hidden).max() <= 0.003 * step + 4 * between


@settings(deadline=None)
@given(stream_cases())
def test_stream_of_several_gives_the_bits_that_it_gives_alone_and_a_chain_those_of_layer_after_layer(case):
    together = case.plan()
    program, inputs = case.loaded(together)
    values = numerics.execute(program, inputs)
    generator = np.random.default_rng(case.seed)
    layers = [layer.layer(generator) for layer in case.layers]
    row, lanes, saturations = case.machine.vector_row_elements, case.machine.lanes, 0
    for index, stream in enumerate(case.streams):
        layer, image = layers[stream.layer], together.compiled.streams[index]
        own = inputs[program.input_order[:, 0] == index, : layer.inputs] if stream.source is None else values.outputs[stream.source]
        hidden = program.hidden[image.hidden * row :][: layer.outputs].astype(np.float32)
        cell = program.cell[image.cell * lanes :][: layer.hidden]
        tilings = [case.layers[stream.layer].tiling]
        single = plan_streams(case.machine, [layer.shape], [Recurrence(0, stream.steps)], schedule=case.schedule, tilings=tilings)
        alone = execute(single, layer, own, hidden, cell)
        assert values.outputs[index].tobytes() == alone.outputs.tobytes() and values.states[index].tobytes() == alone.cell.tobytes()
        saturations += alone.saturations
    assert values.saturations == saturations


@settings(deadline=None)
@given(cases(), st.integers(2, 40))
def test_streamed_weights_give_the_bits_that_a_large_buffer_gives(case, words):
    streamed, whole = with_weight_words(case, words), with_weight_words(case, 1 << 16)
    assume(streamed.plan().compiled.memory_words)
    (one, inputs), (other, _) = (each.loaded(each.plan()) for each in (streamed, whole))
    assert len(one.memory) and not len(other.memory)
    got, expected = numerics.execute(one, inputs), numerics.execute(other, inputs)
    assert got.outputs[0].tobytes() == expected.outputs[0].tobytes() and got.states[0].tobytes() == expected.states[0].tobytes()
    assert got.saturations == expected.saturations


KINDS = {
    "lstm": dict(cell="lstm"),
    "lstm with peepholes": dict(cell="lstm", peepholes=True),
    "lstm with a projection": dict(cell="lstm", projected=19),
    "coupled lstm": dict(cell="lstm", coupled=True),
    "coupled lstm with all": dict(cell="lstm", coupled=True, peepholes=True, projected=19, clip=0.7),
    "gru": dict(cell="gru"),
    "clipped gru": dict(cell="gru", clip=0.5),
    "gru that resets before": dict(cell="gru", reset_after=False),
    "rnn": dict(cell="rnn"),
    "clipped rnn of hard sigmoids": dict(cell="rnn", clip=0.5, activations=(Activation.HARD_SIGMOID_FIFTH,)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_cell_stays_within_a_thousandth_of_float64_over_many_steps(kind, schedule):
    generator = np.random.default_rng(7)
    shape = LayerShape(name="", inputs=21, hidden=37, **KINDS[kind])
    layer = LayerCase.of(shape, Tiling(8, 16)).layer(generator)
    tensors = {name: getattr(layer, name) for name in (*MATRICES, "bias", "candidate_bias", "peepholes")}
    # Weights of the size that networks start from, of which float16 loses nothing.
    tensors = {name: generator.uniform(-1, 1, each.shape) / np.sqrt(37) for name, each in tensors.items() if each is not None}
    layer = layer.replace(**{name: each.astype(np.float16).astype(np.float32) for name, each in tensors.items()})
    inputs = generator.standard_normal((30, 21)).astype(np.float16)
    hidden, cell = (generator.uniform(-1, 1, size).astype(np.float16).astype(np.float32) for size in (layer.outputs, 37))
    expected = float_layer.run(Task(layer, inputs.astype(np.float32), hidden, cell if layer.cell == "lstm" else None))
    values = execute(plan(MACHINE, layer.shape, steps=30, schedule=schedule, tile=Tiling(8, 16)), layer, inputs, hidden, cell)
    assert np.abs(expected.y).max() > 0.05 and np.abs(np.diff(expected.y, axis=0)).max() > 0.01
    assert np.abs(values.outputs - expected.y).max() < 0.001
    assert layer.cell != "lstm" or np.abs(values.cell - expected.cell).max() < 0.001


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tile", MACHINE.tile_heights)
def test_long_sequence_stays_within_half_a_thousandth_of_float64(schedule, tile):
    steps, inputs, hidden = 50, 21, 37
    generator = np.random.default_rng(5)

    def draw(*size):
        return generator.uniform(-1, 1, size).astype(np.float32) / np.float32(np.sqrt(hidden))

    kernels = dict(input_kernel=draw(4 * hidden, inputs), recurrent_kernel=draw(4 * hidden, hidden), bias=draw(4 * hidden))
    layer = lstm_layer(inputs, hidden, **kernels)
    sequence = generator.standard_normal((steps, inputs)).astype(np.float16)
    zeros = np.zeros(hidden)
    values = run(layer, sequence, zeros, zeros, schedule=schedule, tile=tile)
    expected, cell = zeros, zeros
    for x, got in zip(sequence, values.outputs, strict=True):
        expected, cell, _ = float64_step(layer, x, expected, cell)
        assert np.abs(got - expected).max() < 0.0005
    assert np.abs(values.cell - cell).max() < 0.0005


def candidate_sum(products, *, bias=0.0, state_product=0.0, schedule="unfolded", tile=8) -> float:
    """Return the sum of the candidate gate of a layer of one neuron, in units of 1/8; the state's product is h0 x U."""
    columns = len(products)
    input_kernel, recurrent_kernel = np.zeros((4, columns), np.float32), np.zeros((4, 1), np.float32)
    # A product of 2^24 units needs both of its factors.
    large = np.abs(products) > 1000
    input_kernel[2] = np.where(large, np.array(products) / 2**10, products) / 8
    recurrent_kernel[2] = state_product / 2**10 / 8
    biases = np.array([FULLY_OPEN, -FULLY_OPEN, bias / 8, 0], np.float32)
    layer = lstm_layer(columns, 1, input_kernel=input_kernel, recurrent_kernel=recurrent_kernel, bias=biases)
    inputs = np.where(large, 2**10, 1).astype(np.float16)[None]
    cell = run(layer, inputs, np.array([2.0**10]), np.zeros(1), schedule=schedule, tile=tile).cell[0]
    sums = np.arange(-64, 65, dtype=np.float32)
    (found,) = sums[arithmetic.activate(Activation.TANH, sums / 8) == cell]
    return float(found)


BIG = 2.0**24  # float32 holds no odd number above it: BIG + 1 is BIG, and BIG + 3 is BIG + 4


@pytest.mark.parametrize(
    ("tile", "expected"),
    [
        # Eight columns: ((1+1) + (B+1)) + ((1-B) + (3-B)) = (B+2) + (4-2B) = 6-B, onto the bias B.
        (8, 6),
        # Four columns: (B + (B+2)) is 2B, for 2B + 2 is no float32; then 2B + (4-2B).
        (16, 4),
        # Two columns: (((B + 2) + B) + (1-B)) + (3-B): 2B + 2 is 2B, and B + 1 is B.
        (32, 3),
    ],
)
def test_products_are_added_up_the_tree_and_tiles_onto_the_accumulator(tile, expected):
    assert candidate_sum([1, 1, BIG, 1, 1, -BIG, 3, -BIG], bias=BIG, tile=tile) == expected


@pytest.mark.parametrize(("schedule", "expected"), [("unfolded", 0), ("sequential", 1)])
def test_schedule_decides_which_part_is_added_first(schedule, expected):
    # Unfolded adds the input part to the bias first, (1 + B) - B; sequential the hidden part, (1 - B) + B.
    assert candidate_sum([BIG], bias=1, state_product=-BIG, schedule=schedule) == expected


def test_cell_saturates_and_is_counted_and_never_wraps():
    steps, hidden = 5, 3
    bias = np.zeros((4, hidden), np.float32)
    bias[1] = FULLY_OPEN
    bias[0, :2] = FULLY_OPEN
    bias[2] = [FULLY_OPEN, -FULLY_OPEN, 0]  # up, down, and still
    bias[0, 2] = -FULLY_OPEN
    layer = lstm_layer(1, hidden, bias=bias.ravel())
    start = np.array([CELL_LIMIT - 0.5, -(CELL_LIMIT - 0.5), 7], np.float32)
    for schedule in SCHEDULES:
        values = run(layer, np.zeros((steps, 1), np.float16), np.zeros(hidden), start, schedule=schedule)
        assert values.cell.tolist() == [CELL_LIMIT, -CELL_LIMIT, 7]
        assert values.saturations == 2 * steps
        # The output gate's sum is 0: h is half of tanh of the cell state.
        assert values.outputs[:, :2].tolist() == [[0.5, -0.5]] * steps


def test_cell_just_within_its_limit_is_no_saturation():
    layer = lstm_layer(1, 1, bias=np.array([-FULLY_OPEN, FULLY_OPEN, 0, 0], np.float32))
    values = run(layer, np.zeros((3, 1), np.float16), np.zeros(1), np.array([CELL_LIMIT]))
    assert values.cell[0] == CELL_LIMIT and values.saturations == 0


@settings(deadline=None)
@given(cases(plain=True), st.integers(1, 6), st.integers(1, 6))
def test_sequence_in_two_runs_with_carried_states_has_the_same_bits_as_one(case, first, second):
    def of(steps):
        return case.replace(streams=(case.streams[0].replace(steps=steps),))

    layer, inputs, hidden, cell = drawn(of(first + second))
    whole = execute(of(first + second).plan(), layer, inputs, hidden, cell)
    head = execute(of(first).plan(), layer, inputs[:first], hidden, cell)
    tail = execute(of(second).plan(), layer, inputs[first:], head.outputs[-1].astype(np.float32), head.cell)
    assert np.concatenate([head.outputs, tail.outputs]).tobytes() == whole.outputs.tobytes()
    assert tail.cell.tobytes() == whole.cell.tobytes()
    assert head.saturations + tail.saturations == whole.saturations


def test_states_before_the_first_step_count():
    generator = np.random.default_rng(3)
    layer = lstm_layer(4, 5, recurrent_kernel=generator.standard_normal((20, 5)).astype(np.float32))
    inputs = np.zeros((1, 4), np.float16)
    states = generator.standard_normal((2, 5)).astype(np.float32)
    got = run(layer, inputs, *states)
    expected, cell, _ = float64_step(layer, inputs[0], states[0].astype(np.float16), states[1])
    assert np.abs(got.outputs[0] - expected).max() < 1e-3 and np.abs(got.cell - cell).max() < 1e-5
    assert not np.array_equal(got.outputs, run(layer, inputs, np.zeros(5), states[1]).outputs)
    assert not np.array_equal(got.cell, run(layer, inputs, states[0], np.zeros(5)).cell)


def test_results_have_the_types_and_shapes_of_the_ports():
    values = run(lstm_layer(3, 6), np.zeros((4, 3), np.float16), np.zeros(6), np.zeros(6))
    assert (values.outputs.dtype, values.outputs.shape) == (np.float16, (4, 6))
    assert (values.cell.dtype, values.cell.shape) == (np.float32, (6,))


def test_walk_by_rows_computes_what_the_walk_by_columns_does():
    generator = np.random.default_rng(4)
    layer = lstm_layer(19, 23, input_kernel=generator.standard_normal((92, 19)).astype(np.float32))
    inputs, zeros = generator.standard_normal((3, 19)).astype(np.float16), np.zeros(23)
    program = plan(MACHINE, layer.shape, steps=3, schedule="unfolded", tile=8).loaded([layer], [(zeros, zeros)])
    turned = by_rows(program)
    assert not np.array_equal(turned.weights, program.weights)
    assert numerics.execute(turned, inputs).outputs[0].tobytes() == numerics.execute(program, inputs).outputs[0].tobytes()


def test_two_instructions_may_read_the_same_weights():
    generator = np.random.default_rng(6)
    layer = lstm_layer(16, 2, input_kernel=generator.standard_normal((8, 16)).astype(np.float32))
    inputs, zeros = generator.standard_normal((1, 16)).astype(np.float16), np.zeros(2)
    program = plan(MACHINE, layer.shape, steps=1, schedule="unfolded", tile=8).loaded([layer], [(zeros, zeros)])
    expected = numerics.execute(program, inputs)
    place, tile = next((index, each) for index, each in enumerate(program.instructions) if isinstance(each, Tile) and each.weight == 0)
    # The first half of the columns, into rows that nobody reads.
    half = dataclasses.replace(tile, columns=8, accumulator=tile.accumulator + MACHINE.row_groups, advance=0)
    code = (*program.instructions[:place], half, *program.instructions[place:])
    assert numerics.execute(program.replace(instructions=code), inputs).outputs[0].tobytes() == expected.outputs[0].tobytes()
