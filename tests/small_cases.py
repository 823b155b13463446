"""Cases of one layer, given by the names of what differs."""

from sharp.model.layer import LayerShape
from sharp.model.machine import Machine
from sharp.model.program import Tiling
from sharp.sim.verification import Case, LayerCase, StreamCase


def layer_case(
    machine: Machine,
    *,
    inputs: int,
    hidden: int,
    tiling: Tiling,
    steps: tuple[int, ...],
    schedule: str,
    seed: int,
    stall_seed: int | None = None,
    large_cell: bool = False,
    cell: str = "lstm",
    **shape,
) -> Case:
    """Streams of `steps` each through one layer."""
    layer = LayerCase.of(LayerShape(name="case", cell=cell, inputs=inputs, hidden=hidden, **shape), tiling, large_cell=large_cell)
    streams = tuple(StreamCase(layer=0, steps=each, source=None) for each in steps)
    return Case(machine=machine, layers=(layer,), streams=streams, schedule=schedule, seed=seed, stall_seed=stall_seed)
