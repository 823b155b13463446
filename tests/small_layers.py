"""Machines and layers that several tests share: the random ones of `sharp verify`, drawn by Hypothesis, and a tiny machine."""

import dataclasses

import numpy as np
from hypothesis import note
from hypothesis import strategies as st
from sharp.model.layer import STANDARD_ACTIVATIONS, LayerShape
from sharp.model.machine import Machine, load_machine
from sharp.model.program import Program, Tile
from sharp.sim.verification import random_case, random_machine

SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def machines(draw):
    return random_machine(np.random.default_rng(draw(SEEDS)), 0)


@st.composite
def cases(draw, *, plain=False, **changes):
    """A case of one stream, with `changes` made to it, its layer or its stream; a failure names it.

    With `plain` the layer is an LSTM without anything that the first LSTMs did not have.
    """
    generator = np.random.default_rng(draw(SEEDS))
    case = random_case(generator, random_machine(generator, 0))
    (layer, *_), (stream, *_) = case.layers, case.streams
    if plain:
        lstm = dict(cell="lstm", projected=None, peepholes=False, coupled=False, reset_after=True, clip=None)
        layer = layer.replace(**lstm, activations=tuple(each.name for each in STANDARD_ACTIVATIONS["lstm"]))
    of_layer = {name: changes.pop(name) for name in list(changes) if name in type(layer).model_fields}
    of_stream = {name: changes.pop(name) for name in list(changes) if name in type(stream).model_fields}
    case = case.replace(layers=(layer.replace(**of_layer),), streams=(stream.replace(**of_stream),), **changes)
    note(case.name)
    return case


@st.composite
def stream_cases(draw):
    """A case of one or more streams: elements of a batch, networks side by side, or layers in a chain; a failure names it."""
    generator = np.random.default_rng(draw(SEEDS))
    case = random_case(generator, random_machine(generator, 0))
    note(case.name)
    return case


def shape_and_steps(case) -> tuple[LayerShape, int]:
    """The shape of a case's one layer, and the steps of its one stream."""
    (layer,), (stream,) = case.layers, case.streams
    return layer.shape, stream.steps


def with_weight_words(case, words: int):
    """The case on a machine whose weight buffer holds so many words, all else as it was."""
    buffers = case.machine.buffers.replace(weight_bytes=words * case.machine.weight_word_bytes)
    return case.replace(machine=case.machine.replace(buffers=buffers.model_dump()).model_dump())


def tiny_machine() -> Machine:
    """16 MACs as tiles of 4 x 4 or 8 x 2 and one lane, with the latencies and queues of sharp-64: quick to build."""
    machine = load_machine("sharp-64")
    sizes = dict(weight_bytes=32 << 10, accumulator_rows=2048, input_elements=256, hidden_elements=256, cell_elements=128)
    buffers = machine.buffers.replace(**sizes).model_dump()
    return machine.replace(name="tiny", macs=16, lanes=1, tile_rows={"min": 4, "max": 8}, memory_bytes_per_cycle=16, buffers=buffers)


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
