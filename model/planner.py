"""Plans a layer on a machine: chooses the tile by the exact timing model and states the bound that cycles are held against."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .compiler import Layout, Region, compile_layer, load
from .machine import Machine
from .network import LayerShape, LstmLayer
from .program import Program
from .timing import Contract, Timing, predict

# A choice between tiles is settled after this many steps: what follows repeats.
TRIAL_STEPS = 12


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


def plan(machine: Machine, shape: LayerShape, *, steps: int, schedule: str, tile: int | None) -> Plan:
    """Compile `shape` for `machine`; a `tile` of None takes the height with the fewest predicted cycles.

    Raises as `compile_layer`.
    """
    if tile is not None:
        return _plan(machine, shape, steps, schedule, tile)
    trials = [_plan(machine, shape, min(steps, TRIAL_STEPS), schedule, height) for height in machine.tile_heights]
    best = min(trials, key=lambda trial: trial.timing.cycles)
    return best if best.steps == steps else _plan(machine, shape, steps, schedule, best.program.tile)


def _plan(machine: Machine, shape: LayerShape, steps: int, schedule: str, tile: int) -> Plan:
    program, regions, layout = compile_layer(machine, inputs=shape.inputs, hidden=shape.hidden, steps=steps, schedule=schedule, tile=tile)
    return Plan(machine, shape, steps, program, tuple(regions), layout)
