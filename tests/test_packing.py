"""The packing: what tiles write is what post groups read, each part's rows lie there once, and tiles can start where rows do."""

import numpy as np
import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from small_layers import machines

from sharp.model.layer import CELLS, GATES, LayerShape
from sharp.model.machine import load_machine
from sharp.model.packing import arrivals, lane_groups, pack
from sharp.model.steps import INTERLEAVED, SCHEDULES

# Slot of the lanes in which each gate's sum is needed, by cell: of a sum of both parts, or of those of W and of U.
SLOTS = {"lstm": {"input": (0, 1, 2, 3), "hidden": (0, 1, 2, 3)}, "rnn": {"input": (0,), "hidden": (0,)}}
RESET_BEFORE = {"input": (1, 2, 3), "hidden": (1, 2, 3)}
RESET_AFTER = {"input": (1, 2, 3), "hidden": (1, 2, 0)}  # the lanes multiply U_n h', in slot 0, by the reset gate


def slots_of(shape) -> dict[str, tuple[int, ...]]:
    if shape.cell == "gru":
        return RESET_AFTER if shape.reset_after else RESET_BEFORE
    return SLOTS[shape.cell]


@st.composite
def packings(draw):
    """A machine, a layer's shape and its packing."""
    machine, schedule = draw(machines()), draw(st.sampled_from(SCHEDULES))
    bundle = draw(st.sampled_from([1 << shift for shift in range(machine.lanes.bit_length())]))
    kind = draw(st.sampled_from([dict(cell=cell) for cell in CELLS] + [dict(cell="gru", reset_after=False)]))
    shape = LayerShape(name="layer", inputs=5, hidden=draw(st.integers(1, 200)), **kind)
    note(f"heights {machine.tile_heights}, {machine.lanes} lanes, {schedule}, bundle {bundle}: {kind} {shape.hidden}")
    return machine, shape, pack(machine, shape, interleaved=schedule in INTERLEAVED, bundle=bundle)


def read_rows(packing) -> dict[tuple[int, int], int]:
    """The accumulator row from which the lanes take the sum of (slot, neuron): what the program says of a post group."""
    rows = {}
    for pair in packing.pairs:
        for group in pair.groups:
            for index in range(group.neurons):
                bundle, place = divmod(index, group.bundle)
                for slot in range(4) if packing.interleaved else (pair.slot,):
                    row = group.row + (4 * bundle + slot) * group.bundle + place if packing.interleaved else group.row + index
                    assert (slot, group.neuron + index) not in rows
                    rows[slot, group.neuron + index] = row
    return rows


def bands(packing, part) -> list:
    return [getattr(pair, part) for pair in packing.pairs if getattr(pair, part) is not None]


@settings(deadline=None)
@given(packings())
def test_every_row_of_both_matrices_is_summed_where_the_lanes_read_it(drawn):
    _, shape, packing = drawn
    read = read_rows(packing)
    for part in ("input", "hidden"):
        slots, met = slots_of(shape)[part], []
        for band in bands(packing, part):
            for row, matrix_row in enumerate(band.matrix_rows):
                if matrix_row >= 0:
                    gate, neuron = divmod(int(matrix_row), shape.hidden)
                    assert band.place(row) == read[slots[gate], neuron]
                    met.append(matrix_row)
        assert sorted(met) == list(range(GATES[shape.cell] * shape.hidden))


@settings(deadline=None)
@given(packings())
def test_no_part_has_two_rows_in_one_accumulator_and_all_lie_in_the_frame(drawn):
    machine, _, packing = drawn
    assert packing.rows % machine.tile_rows.max == 0 and len(packing.biases) == packing.rows
    for part in ("input", "hidden"):
        places = [band.place(row) for band in bands(packing, part) for row in range(band.rows)]
        assert len(set(places)) == len(places) and 0 <= min(places) and max(places) < packing.rows


@settings(deadline=None)
@given(packings())
def test_every_sum_that_the_lanes_read_starts_from_its_own_bias(drawn):
    _, shape, packing = drawn
    read, expected = read_rows(packing), np.full(packing.rows, -1)
    for gate, slot in enumerate(slots_of(shape)["input"]):
        for neuron in range(shape.hidden):
            expected[read[slot, neuron]] = gate * shape.hidden + neuron
    if shape.cell == "gru" and shape.reset_after:
        for neuron in range(shape.hidden):
            expected[read[0, neuron]] = 3 * shape.hidden + neuron  # the candidate's own bias follows those of the gates
    assert np.array_equal(packing.biases, expected)


@settings(deadline=None)
@given(packings())
def test_rows_of_zeros_are_those_of_a_gru_alone_and_fewer_than_a_bundle_of_neurons(drawn):
    machine, shape, packing = drawn
    for part in ("input", "hidden"):
        zeros = sum(int((band.matrix_rows < 0).sum()) for band in bands(packing, part))
        if not (packing.interleaved and shape.cell == "gru"):
            assert zeros == 0
        elif machine.lanes >= machine.tile_rows.min:
            assert zeros < machine.lanes
        elif machine.bundle >= machine.tile_rows.min:
            assert zeros < machine.bundle


@settings(deadline=None)
@given(packings())
def test_tile_of_any_height_that_a_band_allows_starts_at_a_multiple_of_it(drawn):
    machine, _, packing = drawn
    for part in ("input", "hidden"):
        for band in bands(packing, part):
            assert band.tallest in machine.tile_heights
            for height in (each for each in machine.tile_heights if each <= band.tallest):
                for row in range(0, band.rows, height):
                    assert band.place(row) % height == 0
                    # All rows of a tile lie together: gaps lie between tiles.
                    last = min(row + height, band.rows) - 1
                    assert band.place(last) - band.place(row) == last - row
            assert band.run % band.tallest == 0 == band.gap % machine.tile_rows.min if band.run else band.gap == 0


@settings(deadline=None)
@given(packings())
def test_parts_of_a_pair_share_all_rows_but_their_own(drawn):
    _, shape, packing = drawn
    for pair in packing.pairs:
        if pair.input is None or pair.hidden is None:
            assert (pair.input or pair.hidden).alone
            continue
        places = {part: [getattr(pair, part).place(row) for row in range(getattr(pair, part).rows)] for part in ("input", "hidden")}
        for part, other in (("input", "hidden"), ("hidden", "input")):
            band = getattr(pair, part)
            low, high = band.own
            own = [place for row, place in enumerate(places[part]) if band.run and low <= row % band.run < high]
            assert set(places[part]) - set(places[other]) == set(own)
            assert not band.alone and (bool(own) == bool(band.run))


@settings(deadline=None)
@given(packings())
def test_every_neuron_is_taken_once_of_each_slot_in_groups_that_the_lanes_can_take(drawn):
    machine, shape, packing = drawn
    slots = {0, 1, 2, 3} if packing.interleaved else {pair.slot for pair in packing.pairs}
    assert set(read_rows(packing)) == {(slot, neuron) for slot in slots for neuron in range(shape.hidden)}
    for pair in packing.pairs:
        for group in pair.groups:
            # A bundle of more neurons than lanes is taken in several groups, none of which may cross into the next bundle.
            assert group.bundle & (group.bundle - 1) == 0 and (group.bundle <= machine.lanes or group.bundle % machine.lanes == 0)
            assert not packing.interleaved or group.neurons % group.bundle == 0


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 100), st.integers(0, 100))
def test_lane_groups_take_every_neuron_in_order_in_powers_of_two(bundle, first, neurons):
    groups = lane_groups(bundle, first, neurons)
    assert [neuron for start, size in groups for neuron in range(start, start + size)] == list(range(first, first + neurons))
    sizes = [size for _, size in groups]
    assert all(size <= bundle and size & (size - 1) == 0 for size in sizes) and sizes == sorted(sizes, reverse=True)


@settings(deadline=None)
@given(packings())
def test_elements_of_h_follow_the_rows_of_their_neurons(drawn):
    machine, shape, packing = drawn
    assume(shape.cell == "rnn" or shape.cell == "lstm" and packing.interleaved)
    (pair,) = packing.pairs
    lanes = max(group.bundle for group in pair.groups)
    # Only an LSTM has bundles; the gates of an RNN follow each other by lanes.
    found = arrivals(machine, shape, lanes if shape.cell == "lstm" else 1)
    finished = 0
    for rows, elements in found:
        assert rows > finished
        assert {int(row) % shape.hidden for row in pair.hidden.matrix_rows[:rows]} == set(range(elements))
        assert (pair.hidden.matrix_rows[:rows] % shape.hidden < elements).sum() == (GATES[shape.cell] * elements)
        finished = rows
    assert finished == pair.hidden.rows and elements == shape.hidden
    assert len(found) <= shape.hidden // lanes + lanes.bit_length()


def test_gates_of_four_neurons_and_of_the_two_left_over_lie_together():
    machine, shape = load_machine("sharp-64"), LayerShape(name="layer", cell="lstm", inputs=3, hidden=6)
    packing = pack(machine, shape, interleaved=True, bundle=4)
    assert packing.biases[:24].tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21, 4, 5, 10, 11, 16, 17, 22, 23]
    assert packing.rows == 32 and (packing.biases[24:] == -1).all()


@pytest.mark.parametrize(("part", "first", "gates"), [("hidden", 0, (2, 0, 1)), ("input", 8, (0, 1, 2))])
def test_each_part_of_a_gru_leaves_out_the_gate_that_only_the_other_has(part, first, gates):
    # Heights 8, 16, 32: 8 neurons each of U_n, z, r, W_n. U walks the first 24 rows of 32, W the last 24.
    machine, shape = load_machine("sharp-64"), LayerShape(name="layer", cell="gru", inputs=3, hidden=16)
    packing = pack(machine, shape, interleaved=True, bundle=4)
    (pair,) = packing.pairs
    band = getattr(pair, part)
    assert (band.first, band.run, band.gap, band.tallest) == (first, 24, 8, 8)
    assert band.matrix_rows.tolist() == [16 * gate + 8 * bundle + each for bundle in range(2) for gate in gates for each in range(8)]
    assert [band.place(row) for row in (0, 23, 24, 47)] == [first, first + 23, first + 32, first + 55]
    assert packing.biases[:32].tolist() == [*range(48, 56), *range(8), *range(16, 24), *range(32, 40)]


def test_neurons_left_over_after_the_bundles_of_a_gru_take_no_tile_that_cannot_start_there():
    # Bundles of 8 and of 4 neurons come first, 2 are left over: their rows start at 48, a multiple of 16 and not of 32.
    machine = load_machine("sharp-64").replace(tile_rows={"min": 4, "max": 32})
    packing = pack(machine, LayerShape(name="layer", cell="gru", inputs=3, hidden=14), interleaved=True, bundle=4)
    assert [(pair.hidden.first, pair.hidden.run, pair.hidden.tallest) for pair in packing.pairs] == [(0, 24, 8), (32, 12, 4), (48, 0, 16)]
    edge = packing.pairs[2]
    assert edge.hidden.matrix_rows.tolist() == [40, 41, 12, 13, 26, 27, -1, -1]
    assert edge.input.matrix_rows.tolist() == [-1, -1, 12, 13, 26, 27, 40, 41]
