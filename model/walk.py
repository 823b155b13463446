"""How a part of a layer is cut into tiles, and the order in which they are issued.

Of a row's tiles the one with column 0 is issued first and the one with the last column last; a part that waits for h
finishes its rows in rising order. With D = H a step of one sequence takes at least L + T/2 cycles for T tiles of the hidden
part, whatever the order: the first row finished needs the last h, and all T tiles come after the first h. `dispatch` comes
near to that: in each cycle it issues, of the tiles whose h is there, the one with the smallest sum of its row and `lean`
times its column.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numba import njit

from .machine import Machine
from .timing import Contract

EDGE_DEPTH = 2  # a leftover of rows or columns is itself cut once more
DISPATCHED_TILES = 128  # of a part: a larger one hides its recurrence in any order, and its program would be long
DISPATCH_STEPS = 8  # orders that a dispatch may try until it repeats itself
SETTLED_STEPS, AVERAGED_STEPS = 12, 4


@dataclass(frozen=True)
class Region:
    """A rectangle that tiles of one shape cover, from `row` and `column` of its matrix on."""

    row: int
    rows: int
    column: int
    columns: int
    tap: int

    def tiles(self, machine: Machine) -> tuple[int, int]:
        """Return (blocks of rows, tiles of columns)."""
        height, width = machine.tile_shape(self.tap)
        return -(-self.rows // height), -(-self.columns // width)

    def count(self, machine: Machine) -> int:
        """Return the number of tiles."""
        return prod(self.tiles(machine))


@dataclass(frozen=True)
class Wait:
    """What the hidden part waits for in every step.

    arrivals : (rows, elements): when the first `rows` rows are finished, the first `elements` of the next step's vector follow
    between : tiles of other parts that are issued between two hidden parts
    latency : L, cycles from a row's last tile to the first tile that reads what follows from it
    """

    arrivals: tuple[tuple[int, int], ...]
    between: int
    latency: int


def walk(
    machine: Machine,
    *,
    rows: int,
    columns: int,
    height: int,
    last_rows: int = 0,
    last_columns: int = 0,
    trim: bool = True,
    lean: float | None = None,
    wait: Wait | None = None,
    tallest: int | None = None,
    run: int = 0,
) -> list[Region]:
    """Cut `rows` x `columns` into regions, in the order in which they are issued.

    height : rows of most tiles; last_rows : of those over the last `last_columns` columns
    trim : columns left over get the shapes that need fewest tiles, as rows do; else they stay in the shape before them
    lean : of the order by dispatch, None for region after region, as are parts of more than DISPATCHED_TILES
    wait : what the part waits for, None if for nothing
    tallest : rows that no tile may exceed
    run : where there are runs of so many rows, a dispatched region that leaves one covers whole runs
    """
    regions = cover_halves(machine, rows, columns, height, last_rows, last_columns, trim, tallest or machine.tile_rows.max)
    count = sum(region.count(machine) for region in regions)
    if lean is None or count > DISPATCHED_TILES or not wait and issue_cycles(machine, regions) == count:
        return list(regions)
    tiles = single_tiles(machine, regions)
    order, _ = dispatch(machine, tiles, wait, lean)
    return _joined(tiles[order], run)


@lru_cache(maxsize=4096)
def cover(machine: Machine, rows: int, columns: int, height: int, tallest: int, column: int = 0, trim: bool = True) -> tuple[Region, ...]:
    """Cover `columns` from `column` on with tiles of `height`, and what is left over with the shapes that need fewest tiles.

    Regions come in an order in which every row meets its columns from left to right and rows are finished in rising order.
    """
    taps = [tap for tap, each in enumerate(machine.tile_heights) if each <= tallest]
    known: dict[tuple, tuple[int, tuple[Region, ...]]] = {}

    def tiled(row: int, rows: int, column: int, columns: int, tap: int, depth: int) -> tuple[int, tuple[Region, ...]]:
        """Return the tiles and regions of a rectangle whose upper left corner is tiled with `tap`."""
        key = row, rows, column, columns, tap, depth
        if key not in known:
            tile_rows, tile_columns = machine.tile_shape(tap)
            whole_rows, whole_columns = rows - rows % tile_rows, columns - columns % tile_columns
            full = Region(row, rows, column, columns, tap)
            choices = [(full.count(machine), (full,))]
            for main_rows in {whole_rows, rows} - {0} if depth else ():
                for main_columns in ({whole_columns, columns} if trim else {columns}) - {0}:
                    main = Region(row, main_rows, column, main_columns, tap)
                    right, rights = best(row, main_rows, column + main_columns, columns - main_columns, depth - 1)
                    below, belows = best(row + main_rows, rows - main_rows, column, columns, depth - 1)
                    choices.append((main.count(machine) + right + below, (main, *rights, *belows)))
            known[key] = min(choices, key=lambda choice: (choice[0], len(choice[1])))
        return known[key]

    def best(row: int, rows: int, column: int, columns: int, depth: int) -> tuple[int, tuple[Region, ...]]:
        if not rows or not columns:
            return 0, ()
        shapes = {tap: machine.tile_shape(tap) for tap in taps}
        aligned = [tap for tap, (height, width) in shapes.items() if row % height == 0 and column % width == 0]
        return min((tiled(row, rows, column, columns, tap, depth) for tap in aligned), key=lambda choice: (choice[0], len(choice[1])))

    return tiled(0, rows, column, columns, machine.tile_heights.index(height), EDGE_DEPTH)[1]


@lru_cache(maxsize=4096)
def cover_halves(
    machine: Machine, rows: int, columns: int, height: int, last_rows: int, last_columns: int, trim: bool, tallest: int
) -> tuple[Region, ...]:
    """Cover the last columns with tiles of `last_rows` and those before them with tiles of `height`."""
    height, last_rows = min(height, tallest), min(last_rows or height, tallest)
    first = columns - last_columns
    first -= first % machine.columns(last_rows)
    if first <= 0 or not last_columns:
        return cover(machine, rows, columns, height, tallest, trim=trim)
    return cover(machine, rows, first, height, tallest, 0, trim) + cover(machine, rows, columns - first, last_rows, tallest, first, trim)


def single_tiles(machine: Machine, regions: Sequence[Region]) -> np.ndarray:
    """Return int64[tiles, 5]: first row, end of the rows, first column, end of the columns and tap of every tile."""
    tiles = []
    for region in regions:
        height, width = machine.tile_shape(region.tap)
        end_row, end_column = region.row + region.rows, region.column + region.columns
        for column in range(region.column, end_column, width):
            for row in range(region.row, end_row, height):
                tiles.append((row, min(row + height, end_row), column, min(column + width, end_column), region.tap))
    return np.array(tiles, np.int64)


def dispatch(machine: Machine, tiles: np.ndarray, wait: Wait | None, lean: float) -> tuple[np.ndarray, float]:
    """Return the best order that dispatching `tiles` step after step comes to, and its cycles per step once settled.

    Where they wait for nothing, they keep their order but for those that would stall.
    """
    rows, columns = tiles[:, 1].max(), tiles[:, 3].max()
    rising = wait is not None
    priority = tiles[:, 0] / rows + lean * tiles[:, 2] / columns if rising else np.arange(float(len(tiles)))
    complete_cycles = Contract(machine).complete_cycles
    wait = wait or Wait(((rows, columns),), 0, complete_cycles)
    latencies = np.array([complete_cycles, wait.latency - complete_cycles, machine.latencies.accumulate], np.int64)
    arrivals = np.array(wait.arrivals, np.int64)
    orders = np.empty((DISPATCH_STEPS, len(tiles)), np.int64)
    _issue(tiles, machine.tile_rows.min, arrivals, wait.between, latencies, priority, orders, True, rising)
    tried = {order.tobytes(): order for order in orders[2:]}
    best, best_cycles = None, np.inf
    for order in tried.values():
        fixed = np.tile(order, (SETTLED_STEPS, 1))
        ends = _issue(tiles, machine.tile_rows.min, arrivals, wait.between, latencies, priority, fixed, False, rising)
        cycles = (ends[-1] - ends[-1 - AVERAGED_STEPS]) / AVERAGED_STEPS
        if cycles < best_cycles:
            best, best_cycles = order, cycles
    return best, best_cycles


def issue_cycles(machine: Machine, regions: Sequence[Region]) -> int:
    """Return the cycles that regions take one after another when all that they read is there."""
    tiles = single_tiles(machine, regions)
    order, anything = np.arange(len(tiles))[None], np.array([(tiles[:, 1].max(), tiles[:, 3].max())])
    latencies = np.array([0, 0, machine.latencies.accumulate], np.int64)
    (end,) = _issue(tiles, machine.tile_rows.min, anything, 0, latencies, np.zeros(len(tiles)), order, False, False)
    return int(end)


@njit(cache=True)
def _issue(tiles, least_rows, arrivals, between, latencies, priority, orders, choose, rising):
    """Issue the tiles step after step and return the cycle of each step's last one.

    orders : int64[steps, tiles], the order of each step: taken from there, or with `choose` found and written there, with rows
        finished in rising order if that is to be `rising`
    """
    complete_cycles, update_cycles, accumulate_cycles = latencies
    steps, count = orders.shape
    groups = len(arrivals)
    columns = 0
    for tile in range(count):
        columns = max(columns, tiles[tile, 3])
    group_of = np.zeros(count, np.int64)  # the arrival that a tile waits for
    starts, finishes = tiles[:, 2] == 0, tiles[:, 3] == columns
    chosen_from = count if choose else 0
    before = np.zeros((chosen_from, chosen_from), np.bool_)  # whether one tile comes before another
    for tile in range(count):
        while arrivals[group_of[tile], 1] < tiles[tile, 3]:
            group_of[tile] += 1
        for other in range(chosen_from):
            if tiles[other, 0] < tiles[tile, 1] and tiles[tile, 0] < tiles[other, 1]:
                before[other, tile] = starts[other] and not starts[tile] or finishes[tile] and not finishes[other]
    ready = np.zeros(groups, np.int64)
    next_ready = np.zeros(groups, np.int64)
    ends = np.zeros(steps, np.int64)
    free = np.zeros(-(-tiles[:, 1].max() // least_rows) + (1 << tiles[:, 4].max()), np.int64)  # by accumulator group
    cycle, post = 0, 0
    for step in range(steps):
        issued = np.zeros(count, np.bool_)
        waiting = before.sum(axis=0)
        group, finished = 0, 0
        for place in range(count):
            chosen, chosen_cycle = -1, 0
            for candidate in range(count):
                tile = candidate if choose else orders[step, place]
                if choose and (issued[tile] or waiting[tile] > 0 or rising and finishes[tile] and tiles[tile, 0] != finished):
                    continue
                earliest = max(cycle + 1, ready[group_of[tile]])
                start = tiles[tile, 0] // least_rows
                for accumulator in range(start, start + (1 << tiles[tile, 4])):
                    earliest = max(earliest, free[accumulator])
                if chosen < 0 or earliest < chosen_cycle or earliest == chosen_cycle and priority[tile] < priority[chosen]:
                    chosen, chosen_cycle = tile, earliest
                if not choose:
                    break
            cycle = chosen_cycle
            if choose:
                orders[step, place] = chosen
                waiting -= before[chosen]
            issued[chosen] = True
            start = tiles[chosen, 0] // least_rows
            free[start : start + (1 << tiles[chosen, 4])] = cycle + accumulate_cycles
            if finishes[chosen]:
                finished = tiles[chosen, 1]
            while group < groups and arrivals[group, 0] <= finished:
                post = max(post + 1, cycle + complete_cycles)
                next_ready[group] = post + update_cycles
                group += 1
        ends[step] = cycle
        ready[:] = next_ready
        cycle += between
    return ends


def _joined(tiles: np.ndarray, run: int) -> list[Region]:
    """Join successive tiles into regions that walk them in the same order, all blocks of a column before the next column."""

    def below(one: Region, other: Region) -> bool:
        return (one.row + one.rows, one.column, one.columns, one.tap) == (other.row, other.column, other.columns, other.tap)

    def beside(one: Region, other: Region) -> bool:
        return (one.row, one.rows, one.column + one.columns, one.tap) == (other.row, other.rows, other.column, other.tap)

    def within_run(one: Region, other: Region) -> bool:
        return below(one, other) and (not run or one.row % run + one.rows + other.rows <= run)

    def whole_runs(one: Region, other: Region) -> bool:
        return below(one, other) and not any(each.row % run or each.rows % run for each in (one, other))

    regions = [Region(row, end_row - row, column, end_column - column, tap) for row, end_row, column, end_column, tap in tiles.tolist()]
    for join in (within_run, whole_runs, beside) if run else (within_run, beside):
        joined = regions[:1]
        for region in regions[1:]:
            last = joined[-1]
            if join(last, region):
                rows, columns = (last.rows, last.columns + region.columns) if join is beside else (last.rows + region.rows, last.columns)
                joined[-1] = Region(last.row, rows, last.column, columns, last.tap)
            else:
                joined.append(region)
        regions = joined
    return regions
