"""The order of a step: sums begin and end once, groups take rows that are finished, vectors are done with once."""

import dataclasses

import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from small_layers import cases, shape_and_steps

from sharp.model.layer import CELLS, LayerShape
from sharp.model.machine import load_machine
from sharp.model.program import Source, Tiling
from sharp.model.steps import SCHEDULES, Piece, Walk, Groups, build_step, can_dispatch
from sharp.model.walk import Region

ROWS_OF_GROUP = {Source.INTERLEAVED: 4, Source.GATE: 1}  # sums of a neuron that finished rows give


@st.composite
def steps(draw):
    """A machine, and the step of a layer on it."""
    case = draw(cases())
    shape, _ = shape_and_steps(case)
    cyclic = draw(st.booleans())
    note(f"cyclic: {cyclic}")
    return case.machine, build_step(case.machine, shape, case.schedule, case.layers[0].tiling, cyclic=cyclic)


def executed(step) -> list[Walk | Groups]:
    """What belongs to one step of a layer, in order: input parts that ran ahead in the step before come first."""
    if not step.ahead:
        return list(step.items)
    inputs = [item for item in step.items if isinstance(item, Walk) and item.part == "input"]
    return inputs + [item for item in step.items if item not in inputs]


def frame_of(piece: Piece) -> str:
    return "projection" if piece.matrix == "projection" else "sums"


def rows_of(machine, piece: Piece) -> list[int]:
    """Rows of the frame that a piece adds to, block after block."""
    return [piece.band.place(row) for row in range(piece.region.row, piece.region.row + piece.region.rows)]


def columns_of(step) -> dict[tuple[str, int], int]:
    """Columns that every row of the frames sums over, of both parts."""
    shape, columns = step.shape, {}
    for pair in step.packing.pairs:
        for band, size in ((pair.input, shape.inputs), (pair.hidden, shape.outputs)):
            for row in range(band.rows if band else 0):
                place = "sums", band.place(row)
                columns[place] = columns.get(place, 0) + size
    return columns | {("projection", row): shape.hidden for row in range(shape.projected or 0)}


class Sums:
    """The frames of a step as its pieces are walked: columns added to every row, and rows in the order in which they are counted."""

    def __init__(self, machine, step):
        self.machine, self.columns = machine, columns_of(step)
        self.added: dict[tuple[str, int], int] = {}
        self.counted: list[tuple[str, int]] = []

    def walk(self, piece: Piece) -> None:
        places = [(frame_of(piece), row) for row in rows_of(self.machine, piece)]
        for place in places:
            assert (place not in self.added) if piece.fresh else (place in self.added), "a row starts once, before anything is added"
            self.added[place] = self.added.get(place, 0) + piece.region.columns
        if piece.ends:
            assert all(map(self.full, places))
            self.counted += places

    def full(self, place) -> bool:
        return self.added.get(place) == self.columns[place]


@settings(deadline=None)
@given(steps())
def test_every_sum_starts_once_and_is_counted_at_most_once_when_all_has_been_added(drawn):
    machine, step = drawn
    sums = Sums(machine, step)
    for item in executed(step):
        for piece in item.pieces if isinstance(item, Walk) else ():
            sums.walk(piece)
    assert sums.added == sums.columns and len(set(sums.counted)) == len(sums.counted)
    # Rows that only one part of a GRU has may be full before the other part, which is counted.
    own = set(sums.columns) - set(sums.counted)
    assert not own or step.shape.cell == "gru" and len(own) <= 2 * step.shape.hidden


def assert_groups_take_what_is_there(machine, step) -> None:
    sums, taken = Sums(machine, step), 0
    counted = {(frame_of(piece), row) for piece in step.pieces if piece.ends for row in rows_of(machine, piece)}
    for item in executed(step):
        if isinstance(item, Walk):
            for piece in item.pieces:
                sums.walk(piece)
        elif item.source in ROWS_OF_GROUP:
            for group in item.groups:
                size = min(group.bundle, machine.lanes)
                for first in range(0, group.neurons, size):
                    count = min(size, group.neurons - first)
                    rows = [group.row + first + each for each in range(count)]
                    if item.source is Source.INTERLEAVED:
                        bundle, place = divmod(first, group.bundle)
                        start = group.row + 4 * bundle * group.bundle + place
                        rows = [start + slot * group.bundle + each for slot in range(4) for each in range(count)]
                        taken += 0 if place else (item.runs - 1) * group.bundle
                    taken += count
                    places = {(item.rows, row) for row in rows}
                    assert taken <= len(sums.counted) and places & counted <= set(sums.counted[:taken])
                    assert all(map(sums.full, places))
    assert taken == len(sums.counted)


@settings(deadline=None)
@given(steps())
def test_groups_take_sums_that_have_been_counted_or_were_full_before(drawn):
    assert_groups_take_what_is_there(*drawn)


@pytest.mark.parametrize(
    ("schedule", "inputs", "hidden"), [("intergate", 5, 32), ("intergate", 9, 32), ("unfolded", 5, 8), ("unfolded", 5, 16)]
)
def test_rows_that_one_part_of_a_gru_has_are_counted_unless_one_column_of_tiles_is_all(schedule, inputs, hidden):
    # Tiles of 8 columns: the last part to add has one column of them, or more.
    machine = load_machine("sharp-64")
    step = build_step(machine, LayerShape(name="", cell="gru", inputs=inputs, hidden=hidden), schedule, Tiling(8, 8))
    (work,) = (item for item in step.items if isinstance(item, Groups))
    assert work.runs == (2 if (inputs if schedule == "intergate" else hidden) <= 8 else 3)
    assert_groups_take_what_is_there(machine, step)


@settings(deadline=None)
@given(steps())
def test_every_vector_is_done_with_once_after_its_last_tile(drawn):
    _, step = drawn
    walks = [item for item in executed(step) if isinstance(item, Walk)]
    auxiliary = step.shape.projected is not None or not step.shape.reset_after
    for part in ("input", "hidden", *(["auxiliary"] if auxiliary else [])):
        consumes = [walk.consume for walk in walks if walk.part == part]
        assert consumes == [False] * (len(consumes) - 1) + [True]
    assert all(walk.pieces for walk in walks) and {walk.part for walk in walks} <= {"input", "hidden", "auxiliary"}
    assert step.pieces == tuple(piece for walk in walks for piece in walk.pieces)


@settings(deadline=None)
@given(cases(), st.booleans())
def test_half_of_the_input_part_fills_the_first_of_two_waits(case, cyclic):
    shape, _ = shape_and_steps(case)
    step = build_step(case.machine, shape, "unfolded", case.layers[0].tiling, cyclic=cyclic)
    walks = [item for item in step.items if isinstance(item, Walk) and item.part == "input"]
    counts = [sum(piece.count(case.machine) for piece in walk.pieces) for walk in walks]
    waits = 1 + (shape.projected is not None) + (not shape.reset_after)
    if cyclic or waits == 1:
        assert len(counts) == 1, "pieces that are sent again and again keep their order"
    else:
        early, late = (0, *counts)[-2:]
        tallest = max(piece.region.tiles(case.machine)[0] for piece in step.pieces)  # no column of tiles is cut
        assert 0 <= late - early <= 2 * tallest + 1


@settings(deadline=None)
@given(cases())
def test_only_unfolded_runs_the_input_part_ahead(case):
    shape, _ = shape_and_steps(case)
    step = build_step(case.machine, shape, case.schedule, case.layers[0].tiling)
    assert step.ahead == (case.schedule == "unfolded")
    first = next(item.part for item in step.items if isinstance(item, Walk))
    assert first == "hidden", "the newest h is waited for first, and the input part is there already or fills the wait"


KEEPS, PEEPHOLES = ["KEEP"], ["PEEPHOLE 0", "PEEPHOLE 1", "LSTM", "PEEPHOLE 3", "OUTPUT"]
GATES_KEPT = ["KEEP 0", "KEEP 1", "KEEP 2", "KEEP 3"]
UPDATES = [
    (dict(cell="rnn"), ["HIDDEN 0"], ["HIDDEN 0"]),
    (dict(cell="lstm"), ["LSTM"], [*GATES_KEPT, "LSTM"]),
    (dict(cell="lstm", peepholes=True), [*KEEPS, *PEEPHOLES], [*GATES_KEPT, *PEEPHOLES]),
    (dict(cell="lstm", projected=2), ["LSTM", "HIDDEN 0"], [*GATES_KEPT, "LSTM", "HIDDEN 0"]),
    (dict(cell="gru"), ["GRU"], [*GATES_KEPT, "GRU"]),
    (dict(cell="gru", reset_after=False), ["RESET 2", "KEEP 1", "CANDIDATE 3"], ["RESET 2", "KEEP 1", "CANDIDATE 3"]),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("kind", "whole_neurons", "gate_by_gate"), UPDATES)
def test_updates_of_every_cell_come_in_their_order(kind, whole_neurons, gate_by_gate, schedule):
    # Four neurons are one bundle, so that a cell whose gates are interleaved has one update of them.
    step = build_step(load_machine("sharp-64"), LayerShape(name="", inputs=3, hidden=32, **kind), schedule, Tiling(8, 8))
    works = [item for item in step.items if isinstance(item, Groups)]
    one_gate = {Source.GATE, Source.CONSTANT}
    got = [f"{work.update.name} {work.slot}" if work.source in one_gate else work.update.name for work in works]
    assert got == (whole_neurons if schedule in ("intergate", "unfolded") else gate_by_gate)
    assert [work.update for work in works if work.target == "hidden"] == [works[-1].update], "h is written once, last"


@settings(deadline=None)
@given(steps(), st.data())
def test_split_piece_is_its_two_halves(drawn, data):
    machine, step = drawn
    piece = data.draw(st.sampled_from(step.pieces))
    blocks, columns = piece.region.tiles(machine)
    assume(columns > 1)
    taken = data.draw(st.integers(1, columns - 1))
    left, right = piece.split(machine, taken)
    assert (left.fresh, left.ends, right.fresh, right.ends) == (piece.fresh, False, False, piece.ends)
    assert (left.count(machine), right.count(machine)) == (blocks * taken, blocks * (columns - taken))
    assert dataclasses.replace(left.region, columns=piece.region.columns) == piece.region
    assert left.region.columns + right.region.columns == piece.region.columns
    assert right.region == Region(
        piece.region.row, piece.region.rows, left.region.column + left.region.columns, right.region.columns, piece.region.tap
    )


@pytest.mark.parametrize("cell", CELLS)
def test_only_a_cell_whose_h_follows_its_sums_at_once_is_dispatched(cell):
    def shape(**changes):
        return LayerShape(name="", cell=cell, inputs=1, hidden=1, **changes)

    assert can_dispatch(shape()) == (cell != "gru")
    if cell == "lstm":
        assert not can_dispatch(shape(peepholes=True)) and not can_dispatch(shape(projected=1))
