"""The compiler: tiles cover each weight once, images hold what the program reads, loops change nothing, and refusals show their arithmetic."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from sharp.model import compiler
from sharp.model.compiler import SCHEDULES, compile_layer, cover, load
from sharp.model.errors import ConfigError, NetworkError
from sharp.model.machine import load_machine
from sharp.model.program import End, Init, Loop, Operand, Tile
from sharp.sim.verification import random_case, random_machine

SEEDS = st.integers(0, 2**32 - 1)
INPUTS, HIDDEN = 13, 21


def tiles_of(machine, regions) -> int:
    return sum(prod(region.tiles(machine)) for region in regions)


@st.composite
def covers(draw):
    machine = random_machine(np.random.default_rng(draw(SEEDS)), 0)
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
    program, regions, layout = compile_layer(
        case.machine, inputs=case.inputs, hidden=case.hidden, steps=case.steps, schedule=case.schedule, tile=case.tile
    )
    rows = 4 * case.hidden

    def kernel(columns):
        return (1 + np.arange(rows * columns) % 31743).astype(np.uint16).view(np.float16).reshape(rows, columns)

    kernels = kernel(case.inputs), kernel(case.hidden)
    states = dict(hidden=np.arange(case.hidden), cell=np.arange(case.hidden) + 0.5)
    bias = np.arange(1, rows + 1)
    return load(program, regions, layout, input_kernel=kernels[0], recurrent_kernel=kernels[1], bias=bias, **states), kernels


@st.composite
def random_cases(draw):
    generator = np.random.default_rng(draw(SEEDS))
    case = random_case(generator, random_machine(generator, 0))
    note(case.name)
    return case


@settings(deadline=None)
@given(random_cases())
def test_image_holds_every_weight_once_and_zeros_elsewhere(case):
    program, kernels = packed(case)
    machine, least = case.machine, case.machine.tile_rows.min
    # The biases tell which row of the matrices lies in which accumulator row.
    matrix_rows = program.accumulators.astype(int) - 1
    biases = {id_: 0 for id_ in range(4 * case.hidden)}
    found = {Operand.INPUT: np.zeros_like(kernels[0]), Operand.HIDDEN: np.zeros_like(kernels[1])}
    times = {operand: np.zeros(kernel.shape, int) for operand, kernel in found.items()}
    used = np.zeros(program.weights.shape[:1], bool)
    first_step = {tile.weight: tile for tile in program.executed() if isinstance(tile, Tile)}
    base = {}
    for tile in first_step.values():
        # The rows of a layer lie side by side; where they start is the same for all tiles of a step.
        base.setdefault(tile.accumulator * least // len(program.accumulators), len(base))
    for tile in first_step.values():
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
                to = matrix_rows[row + at_rows[inside]], tile.column + at_column
                found[tile.operand][to] = values[inside]
                times[tile.operand][to] += 1
    assert used.all()
    for operand, kernel in zip((Operand.INPUT, Operand.HIDDEN), kernels, strict=True):
        assert (times[operand] == 1).all() and np.array_equal(found[operand], kernel)
