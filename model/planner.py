"""Plans recurrences on a machine: chooses tiles by the exact timing model and states the bound that cycles are held against."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from .compiler import Compiled, Recurrence, compile_streams
from .errors import NetworkError
from .images import load_layers, load_states
from .layer import GATES, Layer, LayerShape
from .machine import Machine
from .packing import arrivals
from .program import Program, Tiling
from .steps import can_dispatch
from .timing import Contract, Timing, predict
from .walk import DISPATCHED_TILES, Region, Wait, cover, cover_halves, dispatch, issue_cycles, single_tiles, walk

# A run has settled after this many steps: buffers alternate by step, and what follows repeats in pairs.
TRIAL_STEPS = 12
# A step with this many times L cycles of work hides its recurrence whatever the tiling: then only tiles count.
COMPUTE_BOUND = 6
# Dispatch is tried with so many widths of the last columns, and these leans;
WIDTHS, LEANS = 12, (0.0, 0.5, 1.0, 2.0, 100.0)
# the best of them by their estimate are tried by the exact model.
TRIALS = 8


@dataclass(frozen=True, eq=False)
class Plan:
    """Recurrences' program on a machine, without its memory images, and its predicted timing.

    `shapes` have no names and no directions: neither makes a difference here.
    """

    machine: Machine
    shapes: tuple[LayerShape, ...]
    recurrences: tuple[Recurrence, ...]
    compiled: Compiled

    @property
    def program(self) -> Program:
        return self.compiled.program

    @cached_property
    def timing(self) -> Timing:
        return predict(self.program)

    @property
    def shape(self) -> LayerShape:
        """The first stream's layer."""
        return self.shapes[self.recurrences[0].layer]

    @property
    def steps(self) -> int:
        """Steps of the longest stream."""
        return max(each.steps for each in self.recurrences)

    def work_cycles_per_step(self, layer: int) -> int:
        """Cycles of a step of a layer with all multipliers busy, or with all of the memory's bandwidth for its streamed weights."""
        return max(-(-self.shapes[layer].weights // self.machine.macs), self.compiled.memory_words * self.machine.memory_beats)

    def bound_cycles_per_step(self, layer: int = 0) -> int:
        """Cycles that a single stream cannot go below on this machine: its work, or the recurrence's latency L."""
        return max(self.work_cycles_per_step(layer), Contract(self.machine).recurrence_cycles(self.shapes[layer]))

    @property
    def bound_cycles(self) -> int:
        """Cycles that the run cannot go below: the work of all streams, or the longest stream by itself."""
        work = sum(each.steps * self.work_cycles_per_step(each.layer) for each in self.recurrences)
        return max(work, *(each.steps * self.bound_cycles_per_step(each.layer) for each in self.recurrences))

    def reachable_cycles_per_step(self, layer: int = 0) -> float:
        """Cycles of a single stream that no order of tiles can go below: L and half of the hidden part's tiles but one, or the bound.

        Of two steps, the first row finished in the second one needs the last h of the first: L after the last tile of the
        first. And the last tile of the second comes after all its other T - 1 tiles, which need the first h of the first:
        T - 1 + L after the tile that finished it. Summed over the steps, two of them take 2 L + T - 1 at least.
        """
        shape = self.shapes[layer]
        tiles = -(-GATES[shape.cell] * shape.hidden * shape.outputs // self.machine.macs)
        return max(self.bound_cycles_per_step(layer), Contract(self.machine).recurrence_cycles(shape) + (tiles - 1) / 2)

    @cached_property
    def step_ends(self) -> np.ndarray:
        """int64[steps], the cycle of the last output beat of every step of a single stream."""
        (stream,) = self.program.streams
        state_beats = -(-stream.states // self.machine.lanes)
        beats = (len(self.timing.output_cycles) - state_beats) // self.steps
        return self.timing.output_cycles[beats - 1 : self.steps * beats : beats]

    @property
    def settled_cycles_per_step(self) -> float:
        """Cycles per step before the last step, which no input part follows, where the run repeats in pairs; of a short run, of all."""
        ends = self.step_ends
        return float(ends[-2] - ends[-4]) / 2 if self.steps > 3 else self.timing.cycles / self.steps

    def loaded(self, layers: Sequence[Layer], states: Sequence[tuple[np.ndarray, np.ndarray | None]]) -> Program:
        """Return the program with the memory images of `layers`, its streams starting from `states` (`images.load_states`)."""
        return load_states(self.compiled, load_layers(self.compiled, tuple(layers)), layers, states)


def plan(machine: Machine, shape: LayerShape, *, steps: int, schedule: str, tile: int | Tiling | None) -> Plan:
    """Compile one stream of `shape` for `machine`; a `tile` of None takes the tiling with the fewest predicted cycles.

    Layers that differ in name and direction alone share one plan, also between calls. Raises as `compile_streams`.
    """
    tiling = tile if tile is None or isinstance(tile, Tiling) else Tiling(tile, tile)
    return plan_streams(machine, [shape], [Recurrence(0, steps)], schedule=schedule, tilings=None if tiling is None else [tiling])


def plan_streams(
    machine: Machine,
    shapes: Sequence[LayerShape],
    recurrences: Sequence[Recurrence],
    *,
    schedule: str,
    tilings: Sequence[Tiling] | None = None,
) -> Plan:
    """Compile recurrences that run together, with the tiling of each layer or the best ones; as `plan` otherwise."""
    nameless = tuple(replace(shape, name="", reverse=False) for shape in shapes)
    return _planned(machine, nameless, tuple(recurrences), schedule, None if tilings is None else tuple(tilings))


@lru_cache(maxsize=64)
def _planned(
    machine: Machine,
    shapes: tuple[LayerShape, ...],
    recurrences: tuple[Recurrence, ...],
    schedule: str,
    tilings: tuple[Tiling, ...] | None,
) -> Plan:
    if tilings is not None:
        return _plan(machine, shapes, recurrences, schedule, tilings)
    longest = [max((each.steps for each in recurrences if each.layer == layer), default=1) for layer in range(len(shapes))]
    alone = [_tiling(machine, shape, steps, schedule) for shape, steps in zip(shapes, longest, strict=True)]
    if len(recurrences) == 1:
        return _plan(machine, shapes, recurrences, schedule, alone)
    # Streams hide each other's waits, so that the tiling with fewest tiles or instructions may do better than the best one alone.
    choices = [tuple(alone), tuple(_fewest_tiles(machine, shape) for shape in shapes)]
    if len(set(shapes)) == 1:
        choices += [(each,) * len(shapes) for each in _heights(machine, shapes[0])]
    trials = tuple(replace(each, steps=min(each.steps, TRIAL_STEPS)) for each in recurrences)
    best = min(dict.fromkeys(choices), key=lambda tilings: _plan(machine, shapes, trials, schedule, tilings).timing.cycles)
    return _plan(machine, shapes, recurrences, schedule, best)


@lru_cache(maxsize=1024)
def _tiling(machine: Machine, shape: LayerShape, steps: int, schedule: str) -> Tiling:
    """Return the tiling with which one stream takes the fewest cycles."""
    best = _best(machine, shape, steps, schedule, _heights(machine, shape))
    if schedule == "unfolded" and can_dispatch(shape):
        best = _best(machine, shape, steps, schedule, [best.program.tilings[0], *_dispatched(best)])
    return best.program.tilings[0]


def _fewest(machine: Machine, shape: LayerShape, columns: int) -> list[tuple[int, int]]:
    """Return (tiles, height), fewest tiles first, of a part of `columns` columns for each height."""
    rows, tallest = GATES[shape.cell] * shape.hidden, machine.tile_rows.max
    return sorted((_tiles(machine, cover(machine, rows, columns, height, tallest)), height) for height in machine.tile_heights)


def _fewest_tiles(machine: Machine, shape: LayerShape) -> Tiling:
    (_, input_rows), *_ = _fewest(machine, shape, shape.inputs)
    (_, hidden_rows), *_ = _fewest(machine, shape, shape.outputs)
    return Tiling(input_rows, hidden_rows)


def _heights(machine: Machine, shape: LayerShape) -> list[Tiling]:
    """Return the pairs of heights worth a trial: all where the recurrence may be the limit, else equal ones and fewest tiles."""
    heights = machine.tile_heights
    if shape.weights < COMPUTE_BOUND * machine.macs * Contract(machine).recurrence_cycles(shape):
        return [Tiling(first, second) for first in heights for second in heights]
    inputs, outputs = _fewest(machine, shape, shape.inputs)[:2], _fewest(machine, shape, shape.outputs)[:2]
    pairs = [(first, second) for _, first in inputs for _, second in outputs]
    return [Tiling(first, second) for first, second in dict.fromkeys([*pairs, *zip(heights, heights, strict=True)])]


def _dispatched(trial: Plan) -> list[Tiling]:
    """Return the tilings with an order by dispatch that take fewest cycles a step by estimate; none where `trial` cannot be bettered.

    Covers come in the order of the cycles that their tiles take at least; none is looked at whose least is more than the best.
    """
    machine, shape = trial.machine, trial.shape
    inputs, hidden = shape.inputs, shape.hidden
    heights, rows = machine.tile_heights, GATES[shape.cell] * hidden
    fewest = [_fewest(machine, shape, columns)[0][0] for columns in (inputs, hidden)]
    if max(fewest) > DISPATCHED_TILES or trial.settled_cycles_per_step <= max(trial.bound_cycles_per_step(), sum(fewest)):
        return []
    input_walks = {height: walk(machine, rows=rows, columns=inputs, height=height, lean=LEANS[0]) for height in heights}
    between, _, input_rows = min((issue_cycles(machine, regions), len(regions), height) for height, regions in input_walks.items())
    bundles = [machine.lanes >> shift for shift in range(machine.lanes.bit_length())]
    bundles = [bundle for bundle in bundles if shape.cell == "lstm" and 4 * bundle >= machine.tile_rows.min] or [machine.lanes]
    latency = Contract(machine).recurrence_cycles(shape)
    waits = {bundle: Wait(arrivals(machine, shape, bundle), between, latency) for bundle in bundles}

    def least_cycles(regions: tuple[Region, ...]) -> float:
        tiles = _tiles(machine, regions)
        return max(between + tiles, latency + (tiles - 1) / 2)

    covers = _covers(machine, rows, hidden)
    ranked: list[tuple[float, int, Tiling]] = []
    for regions in sorted(covers, key=least_cycles):
        if len(ranked) >= TRIALS and least_cycles(regions) >= ranked[TRIALS - 1][0] or _tiles(machine, regions) > DISPATCHED_TILES:
            break
        tiles = single_tiles(machine, regions)
        for lean, (bundle, wait) in product(LEANS, waits.items()):
            _, cycles = dispatch(machine, tiles, wait, lean)
            tiling = replace(covers[regions], input_rows=input_rows, lean=lean, bundle=bundle)
            ranked.append((cycles, len(wait.arrivals), tiling))
        ranked.sort(key=lambda each: each[:2])
    return [tiling for *_, tiling in ranked[:TRIALS]]


def _covers(machine: Machine, rows: int, columns: int) -> dict[tuple[Region, ...], Tiling]:
    """Return covers of a hidden part and their tilings: one height for most tiles, or another one for some of the last columns."""
    heights, tallest = machine.tile_heights, machine.tile_rows.max
    lasts = [(0, 0)]
    for height in heights:
        width = machine.columns(height)
        widths = range(columns - (columns - 1) // width * width, columns, width)
        spread = [*widths[:3], *widths[3 :: max(1, len(widths) // WIDTHS)]]
        lasts += [(height, last_columns) for last_columns in spread]
    covers: dict[tuple[Region, ...], Tiling] = {}
    for height, (last_rows, last_columns), trim in product(heights, lasts, (True, False)):
        regions = cover_halves(machine, rows, columns, height, last_rows, last_columns, trim, tallest)
        covers.setdefault(regions, Tiling(height, height, last_rows, last_columns, trim=trim))
    return covers


def _tiles(machine: Machine, regions: Iterable[Region]) -> int:
    return sum(region.count(machine) for region in regions)


def _best(machine: Machine, shape: LayerShape, steps: int, schedule: str, tilings: Iterable[Tiling]) -> Plan:
    """Return a trial of the tiling with the fewest cycles in `steps` steps; one that does not fit is left out, unless none fits."""
    best, refusal = None, None
    for tiling in tilings:
        try:
            trial = _plan(machine, (shape,), (Recurrence(0, min(steps, TRIAL_STEPS)),), schedule, [tiling])
        except NetworkError as error:
            refusal = error
        else:
            best = trial if best is None or _cycles(trial, steps) < _cycles(best, steps) else best
    if best is None:
        raise refusal
    return best


def _cycles(trial: Plan, steps: int) -> int:
    """Return the cycles of `steps` steps, of which `trial` has run the first: further steps take as long as those before its last."""
    timing = trial.timing
    if steps == trial.steps:
        return timing.cycles
    ends = trial.step_ends
    pairs, odd = divmod(steps - trial.steps, 2)
    return int(timing.cycles + pairs * (ends[-2] - ends[-4]) + odd * (ends[-2] - ends[-3]))


def _plan(
    machine: Machine, shapes: tuple[LayerShape, ...], recurrences: tuple[Recurrence, ...], schedule: str, tilings: Sequence[Tiling]
) -> Plan:
    compiled = compile_streams(machine, shapes, recurrences, schedule=schedule, tilings=tilings)
    return Plan(machine, shapes, recurrences, compiled)
