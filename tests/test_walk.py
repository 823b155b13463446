"""The walk: tiles cover each entry once, rows begin and end as the machine needs it, and dispatch comes near to the best order."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from small_layers import cases, machines

from sharp.model.machine import load_machine
from sharp.model.layer import LayerShape
from sharp.model.packing import arrivals
from sharp.model.planner import LEANS, plan
from sharp.model.program import Tile, Tiling
from sharp.model.timing import LSTM, Contract
from sharp.model.walk import DISPATCHED_TILES, Wait, cover, cover_halves, dispatch, issue_cycles, single_tiles, walk


def tiles_of(machine, regions) -> int:
    return sum(region.count(machine) for region in regions)


@st.composite
def rectangles(draw):
    """A machine, rows and columns of a part, and a height of tiles."""
    machine = draw(machines())
    rows, columns = draw(st.integers(1, 330)), draw(st.integers(1, 90))
    height = draw(st.sampled_from(machine.tile_heights))
    note(f"macs {machine.macs}, heights {machine.tile_heights}: {rows} x {columns}, height {height}")
    return machine, rows, columns, height


@st.composite
def drawn_walks(draw):
    """A machine, rows, columns, and the regions of a walk of any kind over them."""
    machine, rows, columns, height = draw(rectangles())
    arrivals = ((rows // 2, columns // 2), (rows, columns)) if rows > 1 and columns > 1 else ((rows, columns),)
    choices = dict(
        last_rows=draw(st.sampled_from((0, *machine.tile_heights))),
        last_columns=draw(st.integers(0, 100)),
        trim=draw(st.booleans()),
        lean=draw(st.sampled_from((None, *LEANS))),
        wait=draw(st.sampled_from((None, Wait(arrivals, draw(st.integers(0, 20)), Contract(machine).recurrence_cycles(LSTM))))),
        tallest=draw(st.sampled_from(machine.tile_heights)),
    )
    note(str(choices))
    return machine, rows, columns, walk(machine, rows=rows, columns=columns, height=height, **choices), choices


@settings(deadline=None)
@given(drawn_walks())
def test_regions_cover_each_entry_once_and_nothing_else(drawn):
    machine, rows, columns, regions, _ = drawn
    covered = np.zeros((rows, columns), int)
    for region in regions:
        assert 0 <= region.row and region.row + region.rows <= rows and 0 <= region.column and region.column + region.columns <= columns
        covered[region.row : region.row + region.rows, region.column : region.column + region.columns] += 1
    assert (covered == 1).all()


@settings(deadline=None)
@given(drawn_walks())
def test_regions_start_where_the_machine_can_place_their_tiles(drawn):
    machine, _, _, regions, choices = drawn
    for region in regions:
        height = machine.tile_heights[region.tap]
        assert region.row % height == 0 and region.column % machine.columns(height) == 0 and height <= choices["tallest"]


@settings(deadline=None)
@given(drawn_walks())
def test_rows_begin_with_column_0_and_end_with_the_last_in_rising_order_where_they_wait(drawn):
    machine, rows, columns, regions, choices = drawn
    columns_done = np.zeros(rows, int)
    finished = 0
    for row, end_row, column, end_column, _ in single_tiles(machine, regions):
        assert column == 0 or columns_done[row:end_row].all()
        columns_done[row:end_row] += end_column - column
        if end_column == columns:
            assert (columns_done[row:end_row] == columns).all()
            assert row == finished or not choices["wait"]
            finished = end_row
    assert (columns_done == columns).all()


@given(rectangles())
def test_cover_never_takes_more_tiles_than_its_one_shape(drawn):
    machine, rows, columns, height = drawn
    width = machine.columns(height)
    assert tiles_of(machine, cover(machine, rows, columns, height, machine.tile_rows.max)) <= -(-rows // height) * -(-columns // width)


@given(rectangles(), st.data())
def test_every_row_of_a_cover_meets_its_columns_from_left_to_right(drawn, data):
    machine, rows, columns, height = drawn
    tallest = data.draw(st.sampled_from([each for each in machine.tile_heights if each >= height]))
    reached, finished = np.zeros(rows, int), 0
    for region in cover(machine, rows, columns, height, tallest, trim=data.draw(st.booleans())):
        taken = slice(region.row, region.row + region.rows)
        assert (reached[taken] == region.column).all()
        reached[taken] += region.columns
        if region.column + region.columns == columns:
            assert region.row == finished, "rows are completed in rising order"
            finished += region.rows
    assert finished == rows


def test_leftover_rows_get_the_shape_that_needs_fewest_tiles():
    machine = load_machine("sharp-64")  # heights 8, 16, 32 with 8, 4, 2 columns
    # 36 rows by 8 columns: 4 tiles of 32 x 2, and one of 8 x 8 for the 4 rows left over, where one shape takes 8 tiles.
    assert tiles_of(machine, cover(machine, 36, 8, 32, 32)) == 5


@pytest.mark.parametrize(("trim", "tiles"), [(True, 5), (False, 8)])
def test_leftover_columns_get_a_shape_of_their_own_when_trimmed(trim, tiles):
    machine = load_machine("sharp-64")
    # 32 rows by 9 columns: a tile of 32 x 2 for the last column, or one more of 8 x 8 for each 8 rows, of which there are 4.
    assert tiles_of(machine, cover(machine, 32, 9, 8, 32, trim=trim)) == tiles


@settings(deadline=None)
@given(rectangles(), st.integers(1, 100), st.data())
def test_last_columns_have_tiles_of_their_height(drawn, last_columns, data):
    machine, rows, columns, height = drawn
    last_rows = data.draw(st.sampled_from(machine.tile_heights))
    regions = cover_halves(machine, rows, columns, height, last_rows, last_columns, False, machine.tile_rows.max)
    first = (columns - last_columns) // machine.columns(last_rows) * machine.columns(last_rows)
    if first > 0:
        whole = rows - rows % last_rows
        for region in regions:
            if region.column >= first and region.row < whole:
                assert machine.tile_heights[region.tap] == last_rows


@settings(deadline=None)
@given(machines(), st.integers(1, 6), st.integers(1, 20), st.sampled_from(LEANS))
def test_dispatched_regions_that_leave_a_run_cover_whole_runs(machine, runs, columns, lean):
    tallest = machine.tile_heights[len(machine.tile_heights) // 2]
    run = 3 * tallest
    parts = dict(rows=runs * run, columns=columns, height=tallest, tallest=tallest, run=run)
    wait = Wait(((runs * run, columns),), 1, Contract(machine).recurrence_cycles(LSTM))
    regions = walk(machine, **parts, lean=lean, wait=wait)
    if tiles_of(machine, regions) <= DISPATCHED_TILES:
        for region in regions:
            inside = region.row // run == (region.row + region.rows - 1) // run
            assert inside or region.row % run == 0 and region.rows % run == 0


def test_runs_that_are_walked_together_are_one_region():
    machine = load_machine("sharp-64")
    parts = dict(rows=48, columns=16, height=8, tallest=8, run=24)
    joined = walk(machine, **parts, lean=100.0, wait=Wait(((48, 8), (48, 16)), 40, Contract(machine).recurrence_cycles(LSTM)))
    assert [(region.row, region.rows, region.columns) for region in joined] == [(0, 48, 16)]


def test_column_0_comes_first_and_the_last_column_last_whatever_the_priority():
    machine = load_machine("sharp-64")
    machine = machine.replace(latencies=machine.latencies.replace(accumulate=1))
    # Two tiles of 16 x 4, and over them two of 32 x 2, whose row is the smaller one.
    tiles = np.array([(0, 32, 6, 8, 2), (0, 32, 4, 6, 2), (16, 32, 0, 4, 1), (0, 16, 0, 4, 1)])
    order, cycles = dispatch(machine, tiles, Wait(((32, 8),), 0, Contract(machine).recurrence_cycles(LSTM)), 0.0)
    assert order.tolist() == [3, 2, 1, 0] and cycles == Contract(machine).recurrence_cycles(LSTM) + 3


def test_parts_of_many_tiles_are_walked_region_by_region():
    machine = load_machine("sharp-64")
    wait = Wait(((320, 80),), 1, Contract(machine).recurrence_cycles(LSTM))
    for rows in (96, 320):
        arguments = dict(rows=rows, columns=80, height=8)
        plain, dispatched = walk(machine, **arguments), walk(machine, **arguments, lean=0.0, wait=wait)
        assert (tiles_of(machine, plain) > DISPATCHED_TILES) == (rows == 320) == (plain == dispatched)


def test_part_that_waits_for_nothing_is_dispatched_only_where_its_order_stalls():
    machine = load_machine("sharp-64")  # sums are back after 2 cycles: one block of rows waits a cycle between two of its tiles
    assert walk(machine, rows=64, columns=8, height=32, lean=0.0) == walk(machine, rows=64, columns=8, height=32)
    stalling = walk(machine, rows=56, columns=8, height=32)
    better = walk(machine, rows=56, columns=8, height=32, lean=0.0)
    assert issue_cycles(machine, better) == tiles_of(machine, better) == tiles_of(machine, stalling) < issue_cycles(machine, stalling)


@pytest.mark.parametrize("hidden", [28, 36, 40])
@pytest.mark.parametrize("between", [0, 4, 12])
def test_dispatch_is_within_a_cycle_of_the_best_of_all_orders(hidden, between):
    machine = load_machine("sharp-1k")
    rows, arrivals = 4 * hidden, ((64, 16), (4 * hidden, hidden))
    tiles = single_tiles(machine, cover(machine, rows, hidden, 64, 256))
    assert 4 <= len(tiles) <= 8
    wait = Wait(arrivals, between, Contract(machine).recurrence_cycles(LSTM))
    found = min(dispatch(machine, tiles, wait, lean)[1] for lean in LEANS)
    best = min(cycles_of(machine, tiles, order, arrivals, between) for order in permutations(range(len(tiles))) if legal(tiles, order))
    assert best <= found <= best + 1


def legal(tiles, order) -> bool:
    columns, done, finished = tiles[:, 3].max(), np.zeros(tiles[:, 1].max(), int), 0
    for row, end_row, column, end_column, _ in tiles[list(order)]:
        done[row:end_row] += end_column - column
        if end_column == columns:
            if row != finished or (done[row:end_row] < columns).any():
                return False
            finished = end_row
    return True


def cycles_of(machine, tiles, order, arrivals, between, steps=9) -> float:
    """Cycles per step of an order, one event after another."""
    contract, accumulate = Contract(machine), machine.latencies.accumulate
    ready, busy, cycle, post, ends = [0] * len(arrivals), {}, 0, 0, []
    for _ in range(steps):
        finished, written = 0, []
        for row, end_row, _, end_column, tap in tiles[list(order)].tolist():
            arrival = next(at for (_, elements), at in zip(arrivals, ready, strict=True) if elements >= end_column)
            sums = range(row // machine.tile_rows.min, row // machine.tile_rows.min + (1 << tap))
            cycle = max(cycle + 1, arrival, *(busy.get(each, 0) + accumulate for each in sums))
            busy |= dict.fromkeys(sums, cycle)
            finished = end_row if end_column == tiles[:, 3].max() else finished
            while len(written) < len(arrivals) and arrivals[len(written)][0] <= finished:
                post = max(post + 1, cycle + contract.complete_cycles)
                written.append(post + contract.recurrence_cycles(LSTM) - contract.complete_cycles)
        ready = written
        ends.append(cycle)
        cycle += between
    return (ends[-1] - ends[-5]) / 4


@pytest.mark.parametrize(
    ("name", "hidden", "tiling"),
    [
        ("sharp-64k", 536, Tiling(128, 256, lean=0.5, bundle=256)),
        ("sharp-64k", 284, Tiling(256, 256, lean=0.0)),
        ("sharp-64k", 512, Tiling(128, 512, last_rows=256, last_columns=256, lean=1.0, bundle=128)),
        ("sharp-16k", 272, Tiling(64, 256, last_rows=256, last_columns=16, lean=0.0, bundle=64)),
        ("sharp-4k", 128, Tiling(32, 128, last_rows=64, last_columns=64, lean=0.5, bundle=32)),
        ("sharp-1k", 68, Tiling(16, 64, lean=0.0, trim=False)),
    ],
)
def test_cycles_of_a_dispatch_are_those_of_the_exact_model(name, hidden, tiling):
    machine = load_machine(name)
    shape = LayerShape(name="", cell="lstm", inputs=hidden, hidden=hidden)
    layer = plan(machine, shape, steps=20, schedule="unfolded", tile=tiling)
    tiles = single_tiles(
        machine,
        cover_halves(
            machine, 4 * hidden, hidden, tiling.hidden_rows, tiling.last_rows, tiling.last_columns, tiling.trim, machine.tile_rows.max
        ),
    )
    pieces = layer.compiled.layers[0].step.pieces
    between = sum(piece.count(machine) for piece in pieces if piece.matrix == "input")
    wait = Wait(arrivals(machine, shape, tiling.bundle or machine.lanes), between, Contract(machine).recurrence_cycles(LSTM))
    assert dispatch(machine, tiles, wait, tiling.lean)[1] == layer.settled_cycles_per_step


@settings(deadline=None)
@given(cases(plain=True, schedule="unfolded"))
def test_program_issues_the_tiles_of_the_walk_in_its_order(case):
    program, step = case.plan().program, case.plan().compiled.layers[0].step
    regions = {(piece.weight, piece.streamed): piece.region for piece in step.pieces}
    issued = [each for each in program.executed() if isinstance(each, Tile)]
    resident = [piece.weight for piece in step.pieces if not piece.streamed]
    assert [each.weight for each in issued[: len(step.pieces)] if not each.streamed] == resident
    for each in issued:
        if each.streamed:
            continue
        region = regions[each.weight, False]
        assert (each.rows, each.column, each.columns, each.tap) == (region.rows, region.column, region.columns, region.tap)
