"""The compiler: images hold what is read, loops change nothing, streams share nothing, refusals show their arithmetic."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_layers import cases, shape_and_steps

from sharp.model import compiler
from sharp.model.arithmetic import Activation
from sharp.model.compiler import Recurrence, compile_streams
from sharp.model.errors import ConfigError, NetworkError
from sharp.model.layer import GATES, Layer, LayerShape
from sharp.model.machine import load_machine
from sharp.model.planner import plan, plan_streams
from sharp.model.program import End, Init, Loop, Operand, Post, Tile, Tiling
from sharp.model.steps import SCHEDULES

INPUTS, HIDDEN = 13, 21


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


def tiles(program) -> list[Tile]:
    return [each for each in program.executed() if isinstance(each, Tile)]


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
    first = next(tile for tile in tiles(program) if tile.operand is Operand.HIDDEN and not tile.wait)
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


@settings(deadline=None)
@given(cases())
def test_sums_lie_beside_the_constants_and_those_of_the_step_before(case):
    planned, program, _ = packed(case)
    machine, padded = case.machine, planned.compiled.layers[0].step.packing.rows
    constants, completed = len(program.accumulators), 0
    for tile in tiles(program):
        height = machine.tile_heights[tile.tap]
        starts = tile.accumulator * machine.tile_rows.min + np.arange(tile.blocks(machine)) * height
        if tile.run:
            starts += np.arange(tile.blocks(machine)) // tile.run * tile.gap * machine.tile_rows.min
        assert (starts % height == 0).all() and constants <= starts[0] and starts[-1] + height <= machine.buffers.accumulator_rows
        frame = min(2, (starts[0] - constants) // padded)  # two of sums, and what follows is a projection's
        assert frame == 2 or (starts[-1] + height - 1 - constants) // padded == frame
        if tile.init is Init.SOURCE:
            assert tile.source * machine.tile_rows.min - planned.compiled.layers[0].biases == (starts[0] - constants) % padded
        completed += tile.rows * tile.complete
    consumed = 0
    for post in (each for each in program.executed() if isinstance(each, Post)):
        consumed += {0: 4, 1: 1}.get(int(post.source), 0) * post.neurons
        if post.source == 0:
            consumed -= (4 - post.runs) * post.neurons
    assert completed == consumed


@settings(deadline=None)
@given(cases(), st.integers(1, 12))
def test_rolled_program_executes_what_the_unrolled_one_does(case, steps):
    buffers = case.machine.buffers.replace(program_words=65536).model_dump()
    shape, _ = shape_and_steps(case)
    arguments = dict(schedule=case.schedule, tilings=[case.layers[0].tiling])

    def executed(roll):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "_roll", roll)
            made = compile_streams(case.machine.replace(buffers=buffers), [shape], [Recurrence(0, steps)], **arguments)
        return [each for each in made.program.executed() if not isinstance(each, Loop | End)]

    unrolled = executed(lambda rounds, emit: [each for key in rounds for each in emit(key)])
    assert executed(compiler._roll) == unrolled


@pytest.mark.parametrize("streams", [1, 3])
def test_length_of_a_program_does_not_depend_on_the_number_of_steps(streams):
    lengths = [len(compiled(steps=steps, streams=streams).program.instructions) for steps in (20, 100, 10_000)]
    assert lengths[0] == lengths[1] == lengths[2]


def test_streams_share_weights_and_biases_and_nothing_else():
    one, three = compiled(), compiled(streams=3)
    assert three.weight_words == one.weight_words and three.layers[0].biases == one.layers[0].biases
    frames = {}
    for tile in tiles(three.program):
        if tile.operand is Operand.HIDDEN:
            frames.setdefault(tile.channel, set()).add((tile.accumulator, tile.vector))
    assert len(frames) == 3
    used = [places for stream in frames.values() for places in (set(a for a, _ in stream), set(("v", v) for _, v in stream))]
    assert sum(map(len, used)) == len(set().union(*used)), "no two streams have an accumulator or a vector in common"
    assert len({image.cell for image in three.streams}) == len({image.hidden for image in three.streams}) == 3


def test_streams_of_different_length_take_turns_until_each_has_ended():
    made = compile_streams(
        load_machine("sharp-64"), [SHAPE], [Recurrence(0, steps) for steps in (3, 1, 2)], schedule="unfolded", tilings=[Tiling(8, 8)]
    )
    order = [(int(stream), int(step)) for stream, step in made.program.input_order]
    assert order == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]
    outputs = [each.stream for each in made.program.executed() if isinstance(each, Post) and each.emit and each.signal]
    assert [stream for index, stream in enumerate(outputs) if index == 0 or outputs[index - 1] != stream] == [0, 1, 2, 0, 2, 0]


def test_a_stream_alone_takes_no_longer_where_more_could_run():
    machine = load_machine("sharp-64")
    for schedule in SCHEDULES:
        alone, of_four = (
            plan_streams(each, [SHAPE], [Recurrence(0, 9)], schedule=schedule).timing.cycles
            for each in (machine.replace(streams=1), machine)
        )
        assert alone == of_four


def test_streams_hide_the_latency_of_each_other():
    machine = load_machine("sharp-64k")
    shape = dataclasses.replace(SHAPE, inputs=256, hidden=256)
    alone = plan_streams(machine, [shape], [Recurrence(0, 40)], schedule="unfolded").timing.cycles
    four = plan_streams(machine, [shape], [Recurrence(0, 40)] * 4, schedule="unfolded").timing.cycles
    assert four < 1.3 * alone


SHAPE = LayerShape(name="layer", cell="lstm", inputs=INPUTS, hidden=HIDDEN)


def compiled(machine=None, *, steps=3, streams=1, schedule="unfolded", tile=8, **changes):
    machine = machine or load_machine("sharp-64")
    shape = dataclasses.replace(SHAPE, **changes)
    return compile_streams(machine, [shape], [Recurrence(0, steps)] * streams, schedule=schedule, tilings=[Tiling(tile, tile)])


# Of an LSTM of 13 inputs and 21 hidden in tiles of 8 rows on sharp-64 (rows of 8 vector elements, 4 lanes): the least that
# each buffer must hold, one unit less, and where the number comes from. 84 rows of the four gates are padded to 96.
LEAST = [
    ("accumulator_rows", 288, 256, "biases, and the sums of two steps of a stream, in units of 32 rows"),
    ("input_elements", 32, 24, "2 vectors of 13 elements in rows of 8"),
    ("hidden_elements", 48, 40, "two vectors of h of a stream in rows of 8"),
    ("cell_elements", 24, 20, "the neurons of a stream in rows of 4"),
]  # fmt: skip


def with_buffer(name, value):
    machine = load_machine("sharp-64")
    return machine.replace(buffers=machine.buffers.replace(**{name: value}))


@pytest.mark.parametrize(("name", "need", "less", "how"), LEAST)
def test_layer_that_does_not_fit_a_buffer_is_refused_with_the_arithmetic(name, need, less, how):
    compiled(with_buffer(name, need))
    with pytest.raises(NetworkError) as raised:
        compiled(with_buffer(name, less))
    what = "a layer of 13 inputs and 21 hidden does not fit machine sharp-64"
    assert str(raised.value) == f"{what}: buffers.{name} must be at least {need} (= {how}), not {less}"


def test_weights_beyond_the_buffer_are_streamed_and_those_that_fit_stay():
    whole = compiled()
    words = whole.weight_words
    part = compiled(with_buffer("weight_bytes", (words - 8) * 128))
    assert part.memory_words > 0 and part.weight_words + part.memory_words == words
    instruction = part.program.instructions[0]
    assert (instruction.weight, instruction.words) == (part.weight_words, 3 * part.memory_words)
    assert instruction.weight + instruction.ring <= words - 8, "the ring lies behind the words that stay"
    streamed = [each for each in tiles(part.program) if each.streamed]
    assert sum(each.blocks(part.program.machine) * each.column_tiles(part.program.machine) for each in streamed) == 3 * part.memory_words


def test_streams_whose_weights_do_not_fit_are_refused_with_the_arithmetic():
    words = compiled(streams=2).weight_words
    need = words * 128
    compiled(with_buffer("weight_bytes", need), streams=2)
    with pytest.raises(NetworkError) as raised:
        compiled(with_buffer("weight_bytes", need - 128), streams=2)
    what = "streams run together on machine sharp-64 with all weights in its buffer"
    assert str(raised.value) == f"{what}: buffers.weight_bytes must be at least {need} (= {words} words of 128 bytes), not {need - 128}"


def test_program_that_is_too_long_is_refused_with_its_length():
    words = len(compiled(steps=9).program.instructions)
    compiled(with_buffer("program_words", words), steps=9)
    with pytest.raises(NetworkError) as raised:
        compiled(with_buffer("program_words", words - 1), steps=9)
    assert str(raised.value) == f"the program needs {words} words; machine sharp-64 has buffers.program_words {words - 1}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "fastest"}, f"schedule must be one of {', '.join(SCHEDULES)}, not 'fastest'"),
        ({"tile": 4}, "tile must be auto or a height of machine sharp-64 (8, 16, 32), not 4"),
        ({"tile": 24}, "tile must be auto or a height of machine sharp-64 (8, 16, 32), not 24"),
        ({"tile": 64}, "tile must be auto or a height of machine sharp-64 (8, 16, 32), not 64"),
    ],
)
def test_option_that_the_machine_does_not_have_is_refused(changes, message):
    with pytest.raises(ConfigError) as raised:
        compiled(**changes)
    assert str(raised.value) == message


def test_more_streams_than_the_machine_has_are_refused():
    with pytest.raises(NetworkError, match="^machine sharp-64 runs 1 to 4 streams together, not 5$"):
        compiled(streams=5)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", ["inputs", "hidden", "projected"])
def test_size_below_one_is_refused(name, size):
    with pytest.raises(NetworkError, match=f"^layer layer: {name} must be at least 1, not {size}$"):
        compiled(**{name: size})


def test_stream_of_no_steps_is_refused():
    with pytest.raises(NetworkError, match="^layer layer: steps must be at least 1, not 0$"):
        compiled(steps=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["sharp-64", "sharp-1k", "sharp-64k"])
def test_largest_layer_of_a_machine_encodes(name, schedule):
    machine = load_machine(name)
    for tile in machine.tile_heights:
        program = compiled(machine, inputs=2048, hidden=2048, steps=1000, schedule=schedule, tile=tile).program
        assert len(program.words) <= machine.buffers.program_words
