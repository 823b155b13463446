"""The compiler: tiles cover each weight once, images hold what is read, loops change nothing, refusals show their arithmetic."""

from math import prod

import numpy as np
import pytest
from small_layers import cases, machines
from hypothesis import given, note, settings
from hypothesis import strategies as st

from sharp.model import compiler
from sharp.model.compiler import SCHEDULES, compile_layer, cover, load
from sharp.model.errors import ConfigError, NetworkError
from sharp.model.machine import load_machine
from sharp.model.program import End, Init, Loop, Operand, Tile

INPUTS, HIDDEN = 13, 21


def tiles_of(machine, regions) -> int:
    return sum(prod(region.tiles(machine)) for region in regions)


@st.composite
def covers(draw):
    machine = draw(machines())
    row = machine.tile_rows.max * draw(st.integers(0, 3))
    rows, columns = draw(st.integers(1, 330)), draw(st.integers(1, 90))
    tap = draw(st.integers(0, len(machine.tile_heights) - 1))
    note(f"macs {machine.macs}, heights {machine.tile_heights}: {rows} x {columns} from row {row}, tap {tap}")
    return machine, row, rows, columns, tap


@given(covers())
def test_regions_cover_each_entry_once_and_nothing_else(drawn):
    machine, row, rows, columns, tap = drawn
    covered = np.zeros((rows, columns), int)
    for region in cover(machine, "input", row, rows, columns, tap):
        first = region.row - row
        assert 0 <= first and first + region.rows <= rows and 0 <= region.column and region.column + region.columns <= columns
        covered[first : first + region.rows, region.column : region.column + region.columns] += 1
    assert (covered == 1).all()


@given(covers())
def test_cover_never_takes_more_tiles_than_its_one_shape(drawn):
    machine, row, rows, columns, tap = drawn
    height, width = machine.tile_heights[tap], machine.columns(machine.tile_heights[tap])
    assert tiles_of(machine, cover(machine, "input", row, rows, columns, tap)) <= -(-rows // height) * -(-columns // width)


@given(covers())
def test_regions_start_where_the_machine_can_place_their_tiles(drawn):
    machine, row, rows, columns, tap = drawn
    for region in cover(machine, "input", row, rows, columns, tap):
        height = machine.tile_heights[region.tap]
        assert region.row % height == 0 and region.column % machine.columns(height) == 0


@given(covers())
def test_every_row_meets_its_columns_from_left_to_right(drawn):
    machine, row, rows, columns, tap = drawn
    reached = np.zeros(rows, int)
    finished = 0
    for region in cover(machine, "input", row, rows, columns, tap):
        taken = slice(region.row - row, region.row - row + region.rows)
        assert (reached[taken] == region.column).all()
        reached[taken] += region.columns
        if region.column + region.columns == columns:
            assert region.row - row == finished, "rows are completed in rising order"
            finished += region.rows
    assert finished == rows


def test_leftover_rows_get_the_shape_that_needs_fewest_tiles():
    machine = load_machine("sharp-64")  # heights 8, 16, 32 with 8, 4, 2 columns
    # 36 rows by 8 columns: 4 tiles of 32 x 2, and one of 8 x 8 for the 4 rows left over, where one shape takes 8 tiles.
    assert tiles_of(machine, cover(machine, "input", 0, 36, 8, 2)) == 5


def packed(case):
    """Compile and load a random case with kernels and biases that tell where each of their entries went.

    Returns the program and the kernels; every kernel entry is a float16 of its own, every bias one more than its row.
    """
    planned = case.plan()
    rows = 4 * case.hidden

    def kernel(columns):
        return (1 + np.arange(rows * columns) % 31743).astype(np.uint16).view(np.float16).reshape(rows, columns)

    kernels = kernel(case.inputs), kernel(case.hidden)
    bias = np.arange(1, rows + 1)
    states = dict(hidden=np.arange(case.hidden), cell=np.arange(case.hidden) + 0.5)
    made = planned.program, list(planned.regions), planned.layout
    return load(*made, input_kernel=kernels[0], recurrent_kernel=kernels[1], bias=bias, **states), kernels


def tiles(program) -> list[Tile]:
    return [each for each in program.executed() if isinstance(each, Tile)]


@settings(deadline=None)
@given(cases())
def test_image_holds_every_weight_once_and_zeros_elsewhere(case):
    program, kernels = packed(case)
    machine, least = case.machine, case.machine.tile_rows.min
    # The biases tell which row of the matrices lies in which accumulator row; sums lie in the same order.
    matrix_rows = program.accumulators.astype(int) - 1
    found = {Operand.INPUT: np.zeros_like(kernels[0]), Operand.HIDDEN: np.zeros_like(kernels[1])}
    times = {operand: np.zeros(kernel.shape, int) for operand, kernel in found.items()}
    used = np.zeros(len(program.weights), bool)
    for tile in {tile.weight: tile for tile in tiles(program)}.values():
        height, width = machine.tile_heights[tile.tap], machine.columns(machine.tile_heights[tile.tap])
        blocks, column_tiles = -(-tile.rows // height), -(-tile.columns // width)
        row = tile.accumulator * least % len(program.accumulators)
        for index in range(blocks * column_tiles):
            column, block = divmod(index, blocks) if tile.columns_outer else divmod(index, column_tiles)[::-1]
            word = tile.weight + index
            assert not used[word]
            used[word] = True
            # A slice holds `least` rows of one column; neighbouring slices are neighbouring columns, then the next rows.
            for piece in range(machine.slices):
                at_rows = block * height + piece // width * least + np.arange(least)
                at_column = column * width + piece % width
                values = program.weights[word, piece].view(np.float16)
                inside = (at_rows < tile.rows) & (at_column < tile.columns)
                assert not values[~inside].any()
                place = matrix_rows[row + at_rows[inside]], np.full(inside.sum(), tile.column + at_column)
                found[tile.operand][place] = values[inside]
                times[tile.operand][place] += 1
    assert used.all()
    for operand, kernel in zip((Operand.INPUT, Operand.HIDDEN), kernels, strict=True):
        assert (times[operand] == 1).all() and np.array_equal(found[operand], kernel)


@given(cases())
def test_image_holds_every_bias_and_state_once_and_zeros_elsewhere(case):
    program, _ = packed(case)
    assert sorted(program.accumulators[program.accumulators != 0]) == list(range(1, 4 * case.hidden + 1))
    assert np.array_equal(program.cell[: case.hidden], np.arange(case.hidden) + 0.5) and not program.cell[case.hidden :].any()
    # The first step reads the vector that the second step writes.
    first = next((tile for tile in tiles(program) if tile.operand is Operand.HIDDEN))
    start = first.vector * case.machine.vector_row_elements
    assert np.array_equal(program.hidden[start : start + case.hidden], np.arange(case.hidden))
    assert np.count_nonzero(program.hidden) == case.hidden - 1


def test_negative_zero_of_a_bias_is_made_positive():
    machine = load_machine("sharp-64")
    made = compile_layer(machine, inputs=1, hidden=1, steps=1, schedule="unfolded", tile=8)
    kernel = np.zeros((4, 1))
    program = load(*made, input_kernel=kernel, recurrent_kernel=kernel, bias=np.full(4, -0.0), hidden=np.zeros(1), cell=np.zeros(1))
    assert not np.signbit(program.accumulators).any()


@given(cases())
def test_sums_of_every_step_lie_beside_the_biases_and_those_of_the_step_before(case):
    program, _ = packed(case)
    machine, padded = case.machine, len(program.accumulators)
    completed = 0
    for tile in tiles(program):
        height = machine.tile_heights[tile.tap]
        row, end = tile.accumulator * machine.tile_rows.min, tile.accumulator * machine.tile_rows.min + -(-tile.rows // height) * height
        assert row % height == 0 and padded <= row and row // padded == (end - 1) // padded and end <= machine.buffers.accumulator_rows
        if tile.init is Init.SOURCE:
            assert tile.source * machine.tile_rows.min == row % padded
        completed += tile.rows * tile.complete
    assert completed == 4 * case.hidden * case.steps


@settings(deadline=None)
@given(cases(), st.integers(1, 12))
def test_rolled_program_executes_what_the_unrolled_one_does(case, steps):
    machine = case.machine.replace(buffers=case.machine.buffers.replace(program_words=65536))

    def executed(roll):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "_roll", roll)
            program = case.replace(machine=machine.model_dump(), steps=steps).plan().program
        return [each for each in program.executed() if not isinstance(each, Loop | End)]

    unrolled = executed(lambda emit, steps: [each for step in range(steps) for each in emit(step)])
    assert executed(compiler._roll) == unrolled


def test_length_of_a_program_does_not_depend_on_the_number_of_steps():
    lengths = [len(compiled(steps=steps)[0].instructions) for steps in (4, 100, 1_000_000)]
    assert lengths[0] <= lengths[1] == lengths[2]


def compiled(machine=None, *, inputs=INPUTS, hidden=HIDDEN, steps=3, schedule="unfolded", tile=8):
    machine = machine or load_machine("sharp-64")
    return compile_layer(machine, inputs=inputs, hidden=hidden, steps=steps, schedule=schedule, tile=tile)


# Of an LSTM of 13 inputs and 21 hidden in tiles of 8 rows on sharp-64 (rows of 8 vector elements, 4 lanes): the least that
# each buffer must hold, one unit less, and where the number comes from. 84 rows of the four gates are padded to 96.
LEAST = [
    ("accumulator_rows", 288, 256, "3 x 96 rows: biases and the sums of two steps"),
    ("input_elements", 32, 24, "2 vectors of 13 elements in rows of 8"),
    ("hidden_elements", 48, 40, "2 vectors of 21 elements in rows of 8"),
    ("cell_elements", 24, 20, "21 neurons in rows of 4"),
]  # fmt: skip


def with_buffer(name, value):
    machine = load_machine("sharp-64")
    return machine.replace(buffers=machine.buffers.replace(**{name: value}))


@pytest.mark.parametrize(("name", "need", "less", "how"), LEAST)
def test_layer_that_does_not_fit_a_buffer_is_refused_with_the_arithmetic(name, need, less, how):
    compiled(with_buffer(name, need))
    with pytest.raises(NetworkError) as raised:
        compiled(with_buffer(name, less))
    what = "an LSTM of 13 inputs and 21 hidden does not fit machine sharp-64"
    assert str(raised.value) == f"{what}: buffers.{name} must be at least {need} (= {how}), not {less}"


def test_weights_that_do_not_fit_are_refused_with_the_arithmetic():
    words = len(packed_weights(load_machine("sharp-64")))
    assert words == tiles_of(load_machine("sharp-64"), compiled()[1])
    need = words * 128
    compiled(with_buffer("weight_bytes", need))
    with pytest.raises(NetworkError) as raised:
        compiled(with_buffer("weight_bytes", need - 128))
    what = f"buffers.weight_bytes must be at least {need} (= {words} words of 128 bytes), not {need - 128}"
    assert str(raised.value) == f"an LSTM of 13 inputs and 21 hidden does not fit machine sharp-64: {what}"


def packed_weights(machine):
    kernels = dict(input_kernel=np.ones((4 * HIDDEN, INPUTS)), recurrent_kernel=np.ones((4 * HIDDEN, HIDDEN)))
    return load(*compiled(machine), **kernels, bias=np.zeros(4 * HIDDEN), hidden=np.zeros(HIDDEN), cell=np.zeros(HIDDEN)).weights


def test_program_that_is_too_long_is_refused_with_its_length():
    words = len(compiled(steps=9)[0].instructions)
    compiled(with_buffer("program_words", words), steps=9)
    with pytest.raises(NetworkError) as raised:
        compiled(with_buffer("program_words", words - 1), steps=9)
    assert str(raised.value) == f"the program needs {words} words; machine sharp-64 has {words - 1}"


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


@pytest.mark.parametrize("name", ["inputs", "hidden", "steps"])
def test_size_below_one_is_refused(name):
    with pytest.raises(NetworkError, match=f"^{name} must be at least 1, not 0$"):
        compiled(**{name: 0})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["sharp-64", "sharp-1k", "sharp-64k"])
def test_largest_layer_of_a_machine_encodes(name, schedule):
    machine = load_machine(name)
    for tile in machine.tile_heights:
        program, _, _ = compiled(machine, inputs=2048, hidden=2048, steps=1000, schedule=schedule, tile=tile)
        assert len(program.words) <= machine.buffers.program_words
