"""Machines and layers that several tests share: the random ones of `sharp verify`, drawn by Hypothesis, and a tiny machine."""

import dataclasses

import numpy as np
from hypothesis import note
from hypothesis import strategies as st

from sharp.model.machine import Machine, load_machine
from sharp.model.program import Program, Tile
from sharp.sim.verification import random_case, random_machine

SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def machines(draw):
    return random_machine(np.random.default_rng(draw(SEEDS)), 0)


@st.composite
def cases(draw, **changes):
    """A case, with `changes` made to it; a failure names it."""
    generator = np.random.default_rng(draw(SEEDS))
    case = random_case(generator, random_machine(generator, 0)).replace(**changes)
    note(case.name)
    return case


def tiny_machine() -> Machine:
    """16 MACs as tiles of 4 x 4 or 8 x 2 and one lane, with the latencies and queues of sharp-64: quick to build."""
    machine = load_machine("sharp-64")
    sizes = dict(weight_bytes=32 << 10, accumulator_rows=512, input_elements=64, hidden_elements=64, cell_elements=32)
    buffers = machine.buffers.replace(**sizes).model_dump()
    return machine.replace(name="tiny", macs=16, lanes=1, tile_rows={"min": 4, "max": 8}, buffers=buffers)


def by_rows(program: Program) -> Program:
    """The same program with all columns of a block of rows before the next block, and its weights in that order."""
    machine, weights, code = program.machine, program.weights.copy(), []
    for each in program.instructions:
        if isinstance(each, Tile):
            blocks, columns = each.blocks(machine), each.column_tiles(machine)
            words = slice(each.weight, each.weight + blocks * columns)
            by_columns = program.weights[words]
            weights[words] = by_columns.reshape(columns, blocks, *by_columns.shape[1:]).swapaxes(0, 1).reshape(by_columns.shape)
            each = dataclasses.replace(each, columns_outer=False)
        code.append(each)
    return program.replace(instructions=tuple(code), weights=weights)
