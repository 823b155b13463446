"""What a layer does in one step: which pieces of its matrices are walked, and which updates follow, in which order.

This is where a cell and a schedule become tiles and post groups; buffers and addresses of a stream are filled in by the
compiler. Pieces of the input part stand apart where they run a step ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from .arithmetic import Activation
from .layer import LayerShape
from .machine import Machine
from .packing import GRU_CANDIDATE, GRU_RESET, Band, Group, Packing, Pair, arrivals, pack
from .program import Source, Tiling, Update
from .timing import Contract
from .walk import Region, Wait, cover, issue_cycles, walk

Part = Literal["input", "hidden", "auxiliary"]
Matrix = Literal["input", "hidden", "projection"]

INTERLEAVED = ("intergate", "unfolded")
SCHEDULES = ("sequential", "batch", *INTERLEAVED)
PEEPHOLE_SLOTS = (0, 1, 3)  # of i, f and o


@dataclass(frozen=True, eq=False)
class Piece:
    """What one tile instruction walks: a region of a band of a matrix.

    fresh : its first column starts from the biases, or from zero in a projection; ends : its last column completes rows
    weight : first word in the weight buffer, or of the words that are streamed in a step
    """

    matrix: Matrix
    band: Band
    region: Region
    fresh: bool
    ends: bool
    weight: int = 0
    streamed: bool = False

    def count(self, machine: Machine) -> int:
        """Return the number of tiles, which is that of weight words."""
        return self.region.count(machine)

    def split(self, machine: Machine, columns: int) -> tuple["Piece", "Piece"]:
        """Return the first `columns` columns of tiles, and the others."""
        region, done = self.region, columns * machine.tile_shape(self.region.tap)[1]
        left = replace(self, region=replace(region, columns=done), ends=False)
        right = replace(region, column=region.column + done, columns=region.columns - done)
        return left, replace(self, region=right, fresh=False)


@dataclass(frozen=True, eq=False)
class Walk:
    """Pieces of one part, one after another; with `consume` its vector is done with."""

    part: Part
    pieces: tuple[Piece, ...]
    consume: bool = True


@dataclass(frozen=True, eq=False)
class Groups:
    """A post instruction for each of `groups`.

    rows : accumulator frame that group rows count from; target : vector that takes the results, None for none
    """

    source: Source
    update: Update
    groups: tuple[Group, ...]
    functions: tuple[Activation, ...] = (Activation.IDENTITY,) * 4
    cell_function: Activation = Activation.IDENTITY
    slot: int = 0
    runs: int = 0
    rows: Literal["sums", "projection", "constants"] = "sums"
    target: Literal["hidden", "auxiliary"] | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """A step of a layer: `items` in their order, on the accumulator frame `packing`; `ahead` : input walks serve the next step."""

    shape: LayerShape
    packing: Packing
    ahead: bool
    items: tuple[Walk | Groups, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, in the order in which a stream walks them over and over."""
        walks = [item for item in self.items if isinstance(item, Walk)]
        if self.ahead:
            walks.sort(key=lambda walk: walk.part != "input")
        return tuple(piece for walk in walks for piece in walk.pieces)

    def with_pieces(self, pieces: Sequence[Sequence[Piece]]) -> "Step":
        """Return the step with each piece replaced by some."""
        replaced = dict(zip(map(id, self.pieces), pieces, strict=True))
        items = [
            replace(item, pieces=tuple(new for piece in item.pieces for new in replaced[id(piece)])) if isinstance(item, Walk) else item
            for item in self.items
        ]
        return replace(self, items=tuple(items))


def can_dispatch(shape: LayerShape) -> bool:
    """Return whether a layer's tiles may be dispatched as its h arrives: an RNN, or an LSTM whose update follows its sums at once."""
    return shape.cell == "rnn" or shape.cell == "lstm" and not shape.peepholes and shape.projected is None


def build_step(machine: Machine, shape: LayerShape, schedule: str, tiling: Tiling, *, cyclic: bool = False) -> Step:
    """Lay out a layer and order its step; `cyclic` : so that all steps together walk the same pieces over and over."""
    return _Builder(machine, shape, schedule, tiling, cyclic).step()


class _Builder:
    def __init__(self, machine: Machine, shape: LayerShape, schedule: str, tiling: Tiling, cyclic: bool):
        self.machine, self.shape, self.schedule, self.tiling, self.cyclic = machine, shape, schedule, tiling, cyclic
        self.bundle = tiling.bundle or machine.lanes
        self.packing = pack(machine, shape, interleaved=schedule in INTERLEAVED, bundle=self.bundle)
        self.ahead = schedule == "unfolded"
        self.all_neurons = (Group(0, shape.hidden, machine.lanes, 0),)

    def step(self) -> Step:
        if self.shape.cell == "gru" and not self.shape.reset_after:
            items = self.reset_before()
        elif self.packing.interleaved or self.shape.cell == "rnn":
            items = self.joint()
        else:
            items = self.gate_by_gate()
        return Step(self.shape, self.packing, self.ahead, tuple(items))

    def pieces(self, part: Literal["input", "hidden"], band: Band | None, *, starts: bool) -> tuple[Piece, ...]:
        """Cut a band into pieces. The part that `starts` adds to the biases, and the other completes the rows."""
        if band is None:
            return ()
        columns = self.shape.inputs if part == "input" else self.shape.outputs
        regions = self.input_regions(band) if part == "input" else self.hidden_regions(band)
        first, last = starts or band.alone, not starts or band.alone
        pieces = []
        for region in regions:
            ends = last and region.column + region.columns == columns
            if not first and region.column == 0 and band.run:
                pieces += self.with_own_rows(part, band, region, ends)
            else:
                pieces.append(Piece(part, band, region, first and region.column == 0, ends))
        return tuple(pieces)

    @property
    def lean(self) -> float | None:
        """That of a dispatched order, which is for layers whose rows are finished neuron by neuron in one band."""
        return self.tiling.lean if self.ahead and can_dispatch(self.shape) else None

    def input_regions(self, band: Band) -> list[Region]:
        common = dict(rows=band.rows, columns=self.shape.inputs, tallest=band.tallest, run=band.run)
        return walk(self.machine, **common, height=self.tiling.input_rows, lean=self.lean)

    def hidden_regions(self, band: Band) -> list[Region]:
        tiling, wait, last = self.tiling, None, {}
        if self.lean is not None:
            between = issue_cycles(self.machine, self.input_regions(self.packing.pairs[0].input))
            latency = Contract(self.machine).recurrence_cycles(self.shape)
            wait = Wait(arrivals(self.machine, self.shape, self.bundle), between, latency)
        if self.ahead:
            last = dict(last_rows=tiling.last_rows, last_columns=tiling.last_columns, trim=tiling.trim)
        common = dict(rows=band.rows, columns=self.shape.outputs, tallest=band.tallest, run=band.run)
        return walk(self.machine, **common, height=tiling.hidden_rows, **last, lean=self.lean, wait=wait)

    def with_own_rows(self, matrix: Matrix, band: Band, region: Region, ends: bool) -> list[Piece]:
        """Split off the first column of tiles, and of that the rows that the other part has not begun."""
        width = self.machine.tile_shape(region.tap)[1]
        column = replace(region, columns=min(width, region.columns))
        single = column.columns == region.columns
        low, high = band.own
        rest = (0, low) if low else (high, band.run)
        pieces = []
        for (start, stop), fresh in (((low, high), True), (rest, False)):
            size = stop - start
            rows = band.matrix_rows.reshape(-1, band.run)[:, start:stop].reshape(-1)
            part = replace(band, first=band.first + start, matrix_rows=rows, run=size, gap=band.gap + band.run - size)
            runs = replace(column, row=column.row // band.run * size, rows=column.rows // band.run * size)
            pieces.append(Piece(matrix, part, runs, fresh, ends and single and not fresh))
        if not single:
            right = replace(region, column=region.column + width, columns=region.columns - width)
            pieces.append(Piece(matrix, band, right, False, ends))
        return pieces

    def projection(self) -> tuple[Piece, ...]:
        rows, columns = self.shape.projected, self.shape.hidden
        band = Band(0, np.arange(rows), self.machine.tile_rows.max)
        covers = [cover(self.machine, rows, columns, height, band.tallest) for height in self.machine.tile_heights]
        regions = min(covers, key=lambda regions: sum(region.count(self.machine) for region in regions))
        return tuple(Piece("projection", band, each, each.column == 0, each.column + each.columns == columns) for each in regions)

    def joint(self) -> list[Walk | Groups]:
        """All hidden parts, all input parts, then the updates of whole neurons."""
        inputs = [self.pieces("input", pair.input, starts=self.ahead) for pair in self.packing.pairs]
        hiddens = [self.pieces("hidden", pair.hidden, starts=not self.ahead) for pair in self.packing.pairs]
        input_walk = Walk("input", tuple(piece for pieces in inputs for piece in pieces))
        hidden_walk = Walk("hidden", tuple(piece for pieces in hiddens for piece in pieces))
        updates = []
        for pair, completing in zip(self.packing.pairs, hiddens if self.ahead else inputs, strict=True):
            updates += self.update_pair(pair, completing)
        updates += self.peephole_updates()
        body = [hidden_walk, *updates] if self.ahead else [hidden_walk, input_walk, *updates]
        return self.with_projection(body, input_walk)

    def update_pair(self, pair: Pair, completing: tuple[Piece, ...]) -> list[Groups]:
        shape = self.shape
        if shape.cell == "rnn":
            functions = (shape.activations[0],) * 4
            return [Groups(Source.GATE, Update.HIDDEN, pair.groups, functions, slot=pair.slot, target="hidden")]
        runs = 4
        if pair.hidden.run:
            # Rows that only this part has and that its first column of tiles completes are done before all others.
            ends_split = any(piece.ends and piece.band.run < pair.hidden.run for piece in completing)
            runs = 2 if ends_split else 3
        work = self.final_update(Source.INTERLEAVED)
        if shape.peepholes:
            work = Groups(Source.INTERLEAVED, Update.KEEP, (), self.gate_functions())
        return [replace(work, groups=pair.groups, runs=runs)]

    def gate_by_gate(self) -> list[Walk | Groups]:
        """One gate after another, or with `batch` all gates before the first activation."""
        pairs = self.packing.pairs
        hiddens = [Walk("hidden", self.pieces("hidden", pair.hidden, starts=True), pair is _last(pairs, "hidden")) for pair in pairs]
        inputs = [Walk("input", self.pieces("input", pair.input, starts=False), pair is _last(pairs, "input")) for pair in pairs]
        keeps = [self.keep(pair) for pair in pairs]
        by_gate = [item for gate in zip(hiddens, inputs, keeps, strict=True) for item in gate]
        items = by_gate if self.schedule == "sequential" else [*hiddens, *inputs, *keeps]
        items = [item for item in items if not isinstance(item, Walk) or item.pieces]
        updates = self.peephole_updates() or [replace(self.final_update(Source.BUFFER), groups=self.all_neurons)]
        return self.with_projection(items + updates, None)

    def reset_before(self) -> list[Walk | Groups]:
        """A GRU whose candidate reads r h': reset gate, update gate, then the candidate's hidden part."""
        reset, update, candidate = self.packing.pairs
        starts = not self.ahead
        hiddens = [self.pieces("hidden", pair.hidden, starts=starts) for pair in (reset, update)]
        inputs = [self.pieces("input", pair.input, starts=not starts) for pair in (reset, update)]
        inputs.append(self.pieces("input", candidate.input, starts=True))
        gate = (self.shape.activations[0],) * 4
        reset_work = Groups(Source.GATE, Update.RESET, reset.groups, gate, slot=GRU_RESET, target="auxiliary")
        keep = self.keep(update)
        end = [
            Walk("auxiliary", self.pieces("hidden", candidate.hidden, starts=False)),
            Groups(
                Source.GATE,
                Update.CANDIDATE,
                candidate.groups,
                cell_function=self.shape.activations[1],
                slot=GRU_CANDIDATE,
                target="hidden",
            ),
        ]
        hidden_walks = [Walk("hidden", hiddens[0], consume=False), Walk("hidden", hiddens[1])]
        if self.ahead:
            walk = Walk("input", tuple(piece for pieces in inputs for piece in pieces))
            early, late = self.halves(walk)
            return [*hidden_walks, reset_work, keep, *early, *end, *late]
        input_walks = [Walk("input", pieces, consume=pieces is inputs[-1]) for pieces in inputs]
        if self.schedule == "sequential":
            return [hidden_walks[0], input_walks[0], reset_work, hidden_walks[1], input_walks[1], keep, input_walks[2], *end]
        return [*hidden_walks, *input_walks, reset_work, keep, *end]

    def with_projection(self, body: list[Walk | Groups], next_input: Walk | None) -> list[Walk | Groups]:
        """Append the projection, and in the time of its wait and of that for h the input part of the next step."""
        early, late = ([], []) if next_input is None or not self.ahead else self.halves(next_input)
        if self.shape.projected is None:
            return [*body, *early, *late]
        groups = (Group(0, self.shape.projected, self.machine.lanes, 0),)
        project = [Walk("auxiliary", self.projection()), Groups(Source.GATE, Update.HIDDEN, groups, rows="projection", target="hidden")]
        return [*body, *early, *project, *late]

    def halves(self, walk: Walk) -> tuple[list[Walk], list[Walk]]:
        """Split a walk in two for a step with two waits; for one with a single wait it stays whole, as the second."""
        if self.cyclic or (self.shape.projected is None and self.shape.reset_after):
            return [], [walk]
        left = sum(piece.count(self.machine) for piece in walk.pieces) // 2
        early, late = [], []
        for piece in walk.pieces:
            blocks, columns = piece.region.tiles(self.machine)
            # Nothing overtakes what has been left for later, so that sums keep their order.
            taken = 0 if late else min(columns, left // blocks)
            left -= blocks * taken
            if taken == columns:
                early.append(piece)
            elif taken:
                first, rest = piece.split(self.machine, taken)
                early.append(first)
                late.append(rest)
            else:
                late.append(piece)
        walks = [replace(walk, pieces=tuple(early), consume=False)] if early else []
        return walks, [replace(walk, pieces=tuple(late))]

    def gate_functions(self) -> tuple[Activation, ...]:
        """Return the functions of the four slots."""
        identity = Activation.IDENTITY
        gate, candidate = self.shape.activations[:2]
        if self.shape.cell == "gru":
            return identity, gate, gate, identity
        return (identity, identity, candidate, identity) if self.shape.peepholes else (gate, gate, candidate, gate)

    def keep(self, pair: Pair) -> Groups:
        return Groups(Source.GATE, Update.KEEP, pair.groups, (self.gate_functions()[pair.slot],) * 4, slot=pair.slot)

    def final_update(self, source: Source) -> Groups:
        """Return the update of neurons whose four gates are there, for no groups yet."""
        target = "hidden" if self.shape.projected is None else "auxiliary"
        update = Update.GRU if self.shape.cell == "gru" else Update.LSTM
        functions = self.gate_functions() if source is Source.INTERLEAVED else (Activation.IDENTITY,) * 4
        return Groups(source, update, (), functions, self.shape.activations[-1], target=target)

    def peephole_updates(self) -> list[Groups]:
        """Return the updates of an LSTM with peepholes whose sums are kept, none for another layer."""
        if not self.shape.peepholes:
            return []
        final = replace(self.final_update(Source.BUFFER), groups=self.all_neurons)
        peep = Groups(Source.CONSTANT, Update.PEEPHOLE, self.all_neurons, cell_function=self.shape.activations[0], rows="constants")
        enter, forget, leave = (replace(peep, slot=slot) for slot in PEEPHOLE_SLOTS)
        state = replace(final, cell_function=Activation.IDENTITY, target=None)
        return [enter, forget, state, leave, replace(final, update=Update.OUTPUT)]


def _last(pairs: tuple[Pair, ...], part: str) -> Pair:
    """Return the last pair that has a band of the part."""
    return [pair for pair in pairs if getattr(pair, part) is not None][-1]
