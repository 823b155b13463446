"""Fills a compiled program's memories with the values of layers and states."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .compiler import Compiled, LayerImage
from .layer import GATES, Layer
from .machine import Machine
from .packing import constant_rows, round_up
from .program import Program
from .steps import Piece


@lru_cache(maxsize=4)
def load_layers(compiled: Compiled, layers: tuple[Layer, ...]) -> Program:
    """Return the program with weights, biases and peepholes of `layers`, which stand in the order of the compiled shapes."""
    program = compiled.program
    machine = program.machine
    weights = np.zeros((compiled.weight_words, machine.slices, machine.tile_rows.min), np.uint16)
    memory = np.zeros((compiled.memory_words, machine.slices, machine.tile_rows.min), np.uint16)
    accumulators = np.zeros(compiled.constants, np.float32)
    for image, layer in zip(compiled.layers, layers, strict=True):
        _load_layer(machine, image, layer, weights, memory, accumulators)
    return program.replace(weights=weights, memory=memory, accumulators=accumulators)


def load_states(
    compiled: Compiled, program: Program, layers: Sequence[Layer], states: Sequence[tuple[np.ndarray, np.ndarray | None]]
) -> Program:
    """Return `program` with `states`, float32[P] and float32[H] or None: h and c of each stream before its first step."""
    machine = program.machine
    row, lanes = machine.vector_row_elements, machine.lanes
    pairs = list(zip(compiled.streams, states, strict=True))
    hiddens = np.zeros(round_up(max(image.hidden * row + len(hidden) for image, (hidden, _) in pairs), row), np.float16)
    cells = np.zeros(max(image.cell * lanes + round_up(layers[image.layer].hidden, lanes) for image, _ in pairs), np.float32)
    for image, (hidden, cell) in pairs:
        hiddens[image.hidden * row :][: len(hidden)] = quantise(hidden)
        # The state of a GRU is h itself: what the matrices see of it.
        state = quantise(hidden) if layers[image.layer].cell == "gru" else cell
        if state is not None:
            cells[image.cell * lanes :][: len(state)] = state
    return program.replace(hidden=hiddens, cell=cells)


def quantise(values: np.ndarray) -> np.ndarray:
    """Return `values` rounded to float16, the operands of the multipliers."""
    return np.asarray(values, np.float32).astype(np.float16)


def _load_layer(machine: Machine, image: LayerImage, layer: Layer, weights: np.ndarray, memory: np.ndarray, rows: np.ndarray) -> None:
    """Write a layer's weights, biases and peepholes into their memories."""
    hidden = layer.hidden
    kernels = {
        "input": _coupled(layer, layer.input_kernel),
        "hidden": _coupled(layer, layer.recurrent_kernel),
        "projection": layer.projection,
    }
    # Row -1 of a matrix is a row of zeros.
    kernels = {name: np.pad(quantise(kernel), ((0, 1), (0, 0))) for name, kernel in kernels.items() if kernel is not None}
    for piece in image.step.pieces:
        target = memory if piece.streamed else weights
        target[piece.weight :][: piece.count(machine)] = _tile(machine, piece, kernels[piece.matrix])
    bias = np.zeros(GATES[layer.cell] * hidden, np.float32) if layer.bias is None else layer.bias
    candidate = np.zeros(hidden, np.float32) if layer.candidate_bias is None else layer.candidate_bias
    # A bias of -0 would let the sign of a zero sum depend on padding; adding +0 makes it +0.
    values = np.concatenate([_coupled(layer, bias), candidate, [0]]).astype(np.float32) + np.float32(0)
    rows[image.biases :][: image.step.packing.rows] = values[image.step.packing.biases]
    if layer.peepholes is not None:
        peepholes = layer.peepholes.copy()
        if layer.coupled:
            peepholes[1] = -peepholes[0]
        size = constant_rows(machine, image.shape)
        for index, values in enumerate(peepholes):
            rows[image.peepholes + index * size :][:hidden] = values


def _coupled(layer: Layer, rows: np.ndarray) -> np.ndarray:
    """Return rows of the gates in which those of a coupled forget gate are what makes it 1 - i: phi(-s) = 1 - phi(s)."""
    if not layer.coupled:
        return rows
    split = rows.reshape(4, layer.hidden, *rows.shape[1:]).copy()
    split[1] = -split[0]
    return split.reshape(rows.shape)


def _tile(machine: Machine, piece: Piece, kernel: np.ndarray) -> np.ndarray:
    """Return uint16[tiles, slices, tile_rows.min]: the piece's weights, zero-padded, in issue order (columns outer)."""
    region = piece.region
    blocks, column_tiles = region.tiles(machine)
    height, width = machine.tile_shape(region.tap)
    padded = np.zeros((blocks * height, column_tiles * width), np.float16)
    rows = piece.band.matrix_rows[region.row : region.row + region.rows]
    padded[: region.rows, : region.columns] = kernel[rows, region.column : region.column + region.columns]
    split = padded.view(np.uint16).reshape(blocks, 1 << region.tap, machine.tile_rows.min, column_tiles, width)
    return split.transpose(3, 0, 1, 4, 2).reshape(blocks * column_tiles, machine.slices, machine.tile_rows.min)
