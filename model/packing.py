"""Where the rows of a layer's matrices lie among the accumulators.

A band is what one part of a gate's sum walks at once; the two bands of a pair, input and hidden part, meet in the same
accumulators. Interleaved, the gates of a few neurons lie side by side, so that a block of rows yields whole neurons: an LSTM
has the four gates of a bundle in turn, a GRU that resets after its product G neurons each of U_n, z, r and W_n, of which each part
walks three and skips one. Gate by gate, every gate has rows of its own.
"""

from dataclasses import dataclass

import numpy as np

from .layer import LayerShape
from .machine import Machine

# Gate slots of the lanes (`Update`) and the gates, by their place in the layer's matrices, that lie in them.
LSTM_SLOTS = (0, 1, 2, 3)  # i, f, g, o
GRU_RECURRENT_CANDIDATE, GRU_UPDATE, GRU_RESET, GRU_CANDIDATE = range(4)


@dataclass(frozen=True, eq=False)
class Band:
    """Rows of one part, in the order in which they are walked.

    first : accumulator row of the first one, from the frame's start
    run, gap : after `run` rows, `gap` accumulator rows are left out; 0 where there are no gaps
    own : the rows of each run that the other part does not have, as (first, last + 1)
    matrix_rows : int[rows], row of the part's matrix, -1 for a row of zeros
    alone : the other part has none of these rows
    tallest : largest height of a tile
    """

    first: int
    matrix_rows: np.ndarray
    tallest: int
    run: int = 0
    gap: int = 0
    own: tuple[int, int] = (0, 0)
    alone: bool = False

    @property
    def rows(self) -> int:
        return len(self.matrix_rows)

    def place(self, row: int) -> int:
        """Return the accumulator row, from the frame's start, of a row of the band."""
        return self.first + row + (row // self.run * self.gap if self.run else 0)


@dataclass(frozen=True, eq=False)
class Group:
    """Neurons that one post instruction takes: their first, how many, the rows that lie together, and the first of those."""

    neuron: int
    neurons: int
    bundle: int
    row: int


@dataclass(frozen=True, eq=False)
class Pair:
    """The input and the hidden band that meet in the same accumulators; either may be missing."""

    input: Band | None
    hidden: Band | None
    groups: tuple[Group, ...]
    slot: int = 0


@dataclass(frozen=True, eq=False)
class Packing:
    """A layer's accumulator frame.

    pairs : in the order in which they are walked; interleaved : each holds all gates of its neurons
    rows : size of the frame, a multiple of tile_rows.max
    biases : int[rows], element of the layer's bias, followed by its candidate bias, that a row starts from, -1 for none
    """

    interleaved: bool
    pairs: tuple[Pair, ...]
    rows: int
    biases: np.ndarray


def pack(machine: Machine, shape: LayerShape, *, interleaved: bool, bundle: int) -> Packing:
    """Lay out the rows of a layer; `bundle` : neurons of an interleaved LSTM whose gates lie together, up to the lanes."""
    hidden = shape.hidden
    if shape.cell == "rnn":
        return _gates(machine, hidden, [(0, 0, 0, 0)])
    if shape.cell == "lstm":
        if interleaved:
            return _interleaved_lstm(machine, hidden, bundle)
        return _gates(machine, hidden, [(slot, slot, slot, slot) for slot in LSTM_SLOTS])
    if not shape.reset_after:
        # The candidate's hidden part reads r h', so that it is a part of its own.
        return _gates(machine, hidden, [(GRU_RESET, 1, 1, 1), (GRU_UPDATE, 0, 0, 0), (GRU_CANDIDATE, 2, 2, 2)])
    if interleaved:
        return _interleaved_gru(machine, hidden)
    gates = [(GRU_RECURRENT_CANDIDATE, None, 2, 3), (GRU_UPDATE, 0, 0, 0), (GRU_RESET, 1, 1, 1), (GRU_CANDIDATE, 2, None, 2)]
    return _gates(machine, hidden, gates)


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def constant_rows(machine: Machine, shape: LayerShape) -> int:
    """Return the accumulator rows that one peephole's vector takes."""
    return round_up(shape.hidden, machine.tile_rows.max)


def arrivals(machine: Machine, shape: LayerShape, bundle: int) -> tuple[tuple[int, int], ...]:
    """Return (rows, elements): when the first `rows` rows of a layer's one band are finished, the first `elements` of h follow."""
    rows = 4 if shape.cell == "lstm" else 1
    size = bundle if shape.cell == "lstm" else machine.lanes
    return tuple((rows * (first + count), first + count) for first, count in lane_groups(size, 0, shape.hidden))


def lane_groups(bundle: int, first: int, neurons: int) -> list[tuple[int, int]]:
    """Split neurons into groups of `bundle`, then powers of two, so that no row of a group is empty: (first, neurons) each."""
    groups, end = [], first + neurons
    while first < end:
        size = min(bundle, 1 << ((end - first).bit_length() - 1))
        groups.append((first, size))
        first += size
    return groups


def _gates(machine: Machine, hidden: int, gates: list[tuple[int, int | None, int | None, int]]) -> Packing:
    """Return a frame of one gate after another, each (slot, gate of W, gate of U, gate of the bias)."""
    padded = round_up(hidden, machine.tile_rows.max)
    neurons = np.arange(hidden)
    biases = np.full(len(gates) * padded, -1)
    pairs = []
    for index, (slot, of_input, of_hidden, of_bias) in enumerate(gates):
        base = index * padded
        biases[base : base + hidden] = of_bias * hidden + neurons
        alone = of_input is None or of_hidden is None
        bands = [
            None if gate is None else Band(base, gate * hidden + neurons, machine.tile_rows.max, alone=alone)
            for gate in (of_input, of_hidden)
        ]
        pairs.append(Pair(*bands, (Group(0, hidden, machine.lanes, base),), slot))
    return Packing(False, tuple(pairs), len(gates) * padded, biases)


def _interleaved_lstm(machine: Machine, hidden: int, bundle: int) -> Packing:
    groups = lane_groups(bundle, 0, hidden)
    rows = np.concatenate([slot * hidden + np.arange(first, first + size) for first, size in groups for slot in LSTM_SLOTS])
    padded = round_up(4 * hidden, machine.tile_rows.max)
    biases = np.full(padded, -1)
    biases[: len(rows)] = rows
    band = Band(0, rows, machine.tile_rows.max)
    return Packing(True, (Pair(band, band, _post_groups(groups)),), padded, biases)


def _post_groups(groups: list[tuple[int, int]], row: int = 0) -> tuple[Group, ...]:
    """Return post groups of interleaved lane groups that lie from `row` on; the largest, which come first, together."""
    bundle = groups[0][1]
    whole = [group for group in groups if group[1] == bundle]
    taken = [Group(whole[0][0], len(whole) * bundle, bundle, row)]
    row += 4 * taken[0].neurons
    for first, size in groups[len(whole) :]:
        taken.append(Group(first, size, size, row))
        row += 4 * size
    return tuple(taken)


def _interleaved_gru(machine: Machine, hidden: int) -> Packing:
    """Return bundles of which each part skips a gate, and the neurons left over with rows of zeros in place of that gate."""
    pairs, rows, first = [], [], 0
    for bundle in dict.fromkeys((machine.bundle, machine.lanes)):
        count = (hidden - first) // bundle
        if count and bundle >= machine.tile_rows.min:
            pairs.append(_gru_bundles(machine, hidden, first, count, bundle, 4 * first))
            rows.append(_gru_rows(hidden, [(first + index * bundle, bundle) for index in range(count)]))
            first += count * bundle
    if first < hidden:
        groups = lane_groups(machine.lanes, first, hidden - first)
        edge = _gru_rows(hidden, groups)
        slots = np.concatenate([np.repeat(np.arange(4), size) for _, size in groups])
        # A tile starts at a multiple of its height.
        tallest = min(machine.tile_rows.max, 4 * first & -(4 * first)) if first else machine.tile_rows.max
        of_hidden = np.where(slots == GRU_CANDIDATE, -1, np.where(slots == GRU_RECURRENT_CANDIDATE, edge - hidden, edge))
        of_input = np.where(slots == GRU_RECURRENT_CANDIDATE, -1, edge)
        bands = [Band(4 * first, matrix_rows, tallest) for matrix_rows in (of_input, of_hidden)]
        pairs.append(Pair(*bands, _post_groups(groups, 4 * first)))
        rows.append(edge)
    padded = round_up(4 * hidden, machine.tile_rows.max)
    biases = np.full(padded, -1)
    biases[: 4 * hidden] = np.concatenate(rows)
    return Packing(True, tuple(pairs), padded, biases)


def _gru_rows(hidden: int, groups: list[tuple[int, int]]) -> np.ndarray:
    """Return the elements of the biases [z, r, b_n, d_n] in the order of rows: d_n, z, r, b_n of each group."""
    return np.concatenate([gate * hidden + np.arange(first, first + size) for first, size in groups for gate in (3, 0, 1, 2)])


def _gru_bundles(machine: Machine, hidden: int, first: int, count: int, bundle: int, row: int) -> Pair:
    starts = first + bundle * np.arange(count)[:, None]
    neurons = starts + np.arange(bundle)

    def rows(gates: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([gate * hidden + neurons for gate in gates], axis=1).reshape(-1)

    runs = dict(tallest=bundle, run=3 * bundle, gap=bundle)
    of_hidden = Band(row, rows((2, 0, 1)), own=(0, bundle), **runs)
    of_input = Band(row + bundle, rows((0, 1, 2)), own=(2 * bundle, 3 * bundle), **runs)
    return Pair(of_input, of_hidden, (Group(first, count * bundle, bundle, row),))
