"""Plans a layer on a machine: chooses the tile by the exact timing model and states the bound that cycles are held against."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from .compiler import GATES, INTERLEAVED, Layout, Part, Region, compile_layer, cover, load
from .errors import NetworkError
from .machine import Machine
from .network import LayerShape, LstmLayer
from .program import Program, Tiling
from .timing import Contract, Timing, predict

# A choice between tilings is settled after this many steps: what follows repeats.
TRIAL_STEPS = 12
# A step with this many times L cycles of work hides its recurrence whatever the tiling: then only tiles count.
COMPUTE_BOUND = 6
# Tails are tried where cycles exceed the bound by more than this factor.
SLACK = 1.01
TAIL_COLUMNS, TAIL_BLOCKS = (1, 2, 3, 4, 6, 8), (1, 2, 4)


@dataclass(frozen=True)
class Plan:
    """A layer's program on a machine for a number of steps, without weights, and its predicted timing."""

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

    Raises as `compile_layer`.
    """
    if tile is not None:
        return _plan(machine, shape, steps, schedule, tile)
    trial_steps = min(steps, TRIAL_STEPS)
    best = _best(machine, shape, trial_steps, schedule, _heights(machine, shape))
    if schedule in INTERLEAVED and best.timing.cycles > SLACK * best.bound_cycles:
        near = [Tiling(best.program.tiling.input_rows, height) for height in machine.tile_heights]
        tails = [replace(each, tail_columns=columns, tail_blocks=blocks) for each in near for columns in TAIL_COLUMNS for blocks in TAIL_BLOCKS]
        best = _best(machine, shape, trial_steps, schedule, [best.program.tiling, *tails])
    return best if best.steps == steps else _plan(machine, shape, steps, schedule, best.program.tiling)


def _heights(machine: Machine, shape: LayerShape) -> list[Tiling]:
    """Return the pairs of heights worth a trial: all where the recurrence may be the limit, else those with the fewest tiles."""
    heights = machine.tile_heights
    rows = GATES * shape.hidden
    if shape.weights < COMPUTE_BOUND * machine.macs * Contract(machine).recurrence_cycles:
        return [Tiling(first, second) for first in heights for second in heights]

    def fewest(part: Part, columns: int) -> list[int]:
        tiles = [sum(map(prod, (each.tiles(machine) for each in cover(machine, part, 0, rows, columns, tap)))) for tap in range(len(heights))]
        return [height for _, height in sorted(zip(tiles, heights, strict=True))][:2]

    return [Tiling(first, second) for first in fewest("input", shape.inputs) for second in fewest("hidden", shape.hidden)]


def _best(machine: Machine, shape: LayerShape, steps: int, schedule: str, tilings: Iterable[Tiling]) -> Plan:
    """Return the plan with the fewest cycles; a tiling that does not fit is left out, unless none fits."""
    best, refusal = None, None
    for tiling in tilings:
        try:
            trial = _plan(machine, shape, steps, schedule, tiling)
        except NetworkError as error:
            refusal = error
        else:
            best = trial if best is None or trial.timing.cycles < best.timing.cycles else best
    if best is None:
        raise refusal
    return best


def _plan(machine: Machine, shape: LayerShape, steps: int, schedule: str, tile: int | Tiling) -> Plan:
    program, regions, layout = compile_layer(machine, inputs=shape.inputs, hidden=shape.hidden, steps=steps, schedule=schedule, tile=tile)
    return Plan(machine, shape, steps, program, tuple(regions), layout)
