"""Plans a layer on a machine: chooses the tile by the exact timing model and states the bound that cycles are held against."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from .compiler import GATES, INTERLEAVED, Layout, Part, Region, compile_layer, cover, load
from .errors import NetworkError
from .machine import Machine
from .network import LayerShape, LstmLayer
from .program import Program, Tiling
from .timing import Contract, Timing, predict

# A run has settled after this many steps: buffers alternate by step, and what follows repeats in pairs.
TRIAL_STEPS = 12
# A step with this many times L cycles of work hides its recurrence whatever the tiling: then only tiles count.
COMPUTE_BOUND = 6
# Tails are tried where cycles exceed the bound by more than this factor.
SLACK = 1.01
TAIL_COLUMNS, TAIL_BLOCKS = (1, 2, 3, 4, 6, 8), (1, 2, 4)


@dataclass(frozen=True)
class Plan:
    """A layer's program on a machine for a number of steps, without weights, and its predicted timing.

    `shape` has no name and no direction: neither makes a difference here.
    """

    machine: Machine
    shape: LayerShape
    steps: int
    program: Program
    regions: tuple[Region, ...]
    layout: Layout

    @cached_property
    def timing(self) -> Timing:
        return predict(self.program)

    @property
    def bound_cycles_per_step(self) -> int:
        """Cycles that no single stream can go below on this machine: all multipliers busy, or the recurrence's latency L."""
        return max(-(-self.shape.weights // self.machine.macs), Contract(self.machine).recurrence_cycles)

    @property
    def bound_cycles(self) -> int:
        return self.steps * self.bound_cycles_per_step

    def loaded(self, layer: LstmLayer, hidden: np.ndarray, cell: np.ndarray) -> Program:
        """Return the program with the memory images of `layer`, starting from `hidden` and `cell` : float32[H]."""
        return load(
            self.program,
            list(self.regions),
            self.layout,
            input_kernel=layer.input_kernel,
            recurrent_kernel=layer.recurrent_kernel,
            bias=layer.bias,
            hidden=hidden,
            cell=cell,
        )


def plan(machine: Machine, shape: LayerShape, *, steps: int, schedule: str, tile: int | Tiling | None) -> Plan:
    """Compile `shape` for `machine`; a `tile` of None takes the tiling with the fewest predicted cycles.

    Layers that differ in name and direction alone share one plan, also between calls. Raises as `compile_layer`.
    """
    return _planned(machine, replace(shape, name="", reverse=False), steps, schedule, tile)


@lru_cache(maxsize=64)
def _planned(machine: Machine, shape: LayerShape, steps: int, schedule: str, tile: int | Tiling | None) -> Plan:
    if tile is not None:
        return _plan(machine, shape, steps, schedule, tile)
    best = _best(machine, shape, steps, schedule, _heights(machine, shape))
    if schedule in INTERLEAVED and best.timing.cycles > SLACK * best.bound_cycles:
        near = [Tiling(best.program.tiling.input_rows, height) for height in machine.tile_heights]
        sizes = [(columns, blocks) for columns in TAIL_COLUMNS for blocks in TAIL_BLOCKS]
        tails = [replace(each, tail_columns=columns, tail_blocks=blocks) for each in near for columns, blocks in sizes]
        best = _best(machine, shape, steps, schedule, [best.program.tiling, *tails])
    return best if best.steps == steps else _plan(machine, shape, steps, schedule, best.program.tiling)


def _heights(machine: Machine, shape: LayerShape) -> list[Tiling]:
    """Return the pairs of heights worth a trial: all where the recurrence may be the limit, else equal ones and fewest tiles."""
    heights = machine.tile_heights
    rows = GATES * shape.hidden
    if shape.weights < COMPUTE_BOUND * machine.macs * Contract(machine).recurrence_cycles:
        return [Tiling(first, second) for first in heights for second in heights]

    def fewest(part: Part, columns: int) -> list[int]:
        covers = [cover(machine, part, 0, rows, columns, tap) for tap in range(len(heights))]
        tiles = [sum(region.count(machine) for region in regions) for regions in covers]
        return [height for _, height in sorted(zip(tiles, heights, strict=True))][:2]

    pairs = [(first, second) for first in fewest("input", shape.inputs) for second in fewest("hidden", shape.hidden)]
    return [Tiling(first, second) for first, second in dict.fromkeys([*pairs, *zip(heights, heights, strict=True)])]


def _best(machine: Machine, shape: LayerShape, steps: int, schedule: str, tilings: Iterable[Tiling]) -> Plan:
    """Return a trial of the tiling with the fewest cycles in `steps` steps; one that does not fit is left out, unless none fits."""
    best, refusal = None, None
    for tiling in tilings:
        try:
            trial = _plan(machine, shape, min(steps, TRIAL_STEPS), schedule, tiling)
        except NetworkError as error:
            refusal = error
        else:
            best = trial if best is None or _cycles(trial, steps) < _cycles(best, steps) else best
    if best is None:
        raise refusal
    return best


def _cycles(trial: Plan, steps: int) -> int:
    """Return the cycles of `steps` steps, of which `trial` has run the first: further pairs of steps take as long as its last."""
    timing = trial.timing
    if steps == trial.steps:
        return timing.cycles
    state_beats = -(-trial.shape.hidden // trial.machine.lanes)
    beats = (len(timing.output_cycles) - state_beats) // trial.steps
    ends = timing.output_cycles[beats - 1 : trial.steps * beats : beats]
    pairs, odd = divmod(steps - trial.steps, 2)
    return int(timing.cycles + pairs * (ends[-1] - ends[-3]) + odd * (ends[-2] - ends[-3]))


def _plan(machine: Machine, shape: LayerShape, steps: int, schedule: str, tile: int | Tiling) -> Plan:
    program, regions, layout = compile_layer(machine, inputs=shape.inputs, hidden=shape.hidden, steps=steps, schedule=schedule, tile=tile)
    return Plan(machine, shape, steps, program, tuple(regions), layout)
