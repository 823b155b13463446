"""The compiler: every value has a place of its own, loops change nothing, streams share weights alone, refusals show their arithmetic."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_layers import cases, shape_and_steps, stream_cases

from sharp.model import compiler
from sharp.model.compiler import Recurrence, compile_streams
from sharp.model.errors import ConfigError, NetworkError
from sharp.model.layer import LayerShape
from sharp.model.machine import load_machine
from sharp.model.planner import plan_streams
from sharp.model.program import End, Init, Loop, Operand, Post, Source, Tile, Tiling
from sharp.model.steps import SCHEDULES

INPUTS, HIDDEN = 13, 21


def tiles(program) -> list[Tile]:
    return [each for each in program.executed() if isinstance(each, Tile)]


@settings(deadline=None)
@given(cases())
def test_sums_lie_beside_the_constants_and_those_of_the_step_before(case):
    planned = case.plan()
    program, _ = case.loaded(planned)
    machine, padded = case.machine, planned.compiled.layers[0].step.packing.rows
    constants, completed = len(program.accumulators), 0
    for tile in tiles(program):
        height = machine.tile_heights[tile.tap]
        starts = tile.accumulator * machine.tile_rows.min + np.arange(tile.blocks(machine)) * height
        if tile.run:
            starts += np.arange(tile.blocks(machine)) // tile.run * tile.gap * machine.tile_rows.min
        assert (starts % height == 0).all() and constants <= starts[0] and starts[-1] + height <= machine.buffers.accumulator_rows
        frame = min(2, (starts[0] - constants) // padded)  # two of sums, and what follows is a projection's
        assert frame == 2 or (starts[-1] + height - 1 - constants) // padded == frame
        if tile.init is Init.SOURCE:
            assert tile.source * machine.tile_rows.min - planned.compiled.layers[0].biases == (starts[0] - constants) % padded
        completed += tile.rows * tile.complete
    consumed = 0
    for post in (each for each in program.executed() if isinstance(each, Post)):
        consumed += {0: 4, 1: 1}.get(int(post.source), 0) * post.neurons
        if post.source == 0:
            consumed -= (4 - post.runs) * post.neurons
    assert completed == consumed


def accumulator_rows(machine, tile: Tile, group: int) -> set[int]:
    """Rows of the accumulators that a tile instruction takes from `group` on."""
    height, blocks = tile.height(machine), np.arange(tile.blocks(machine))
    starts = group * machine.tile_rows.min + blocks * height + (blocks // tile.run * tile.gap * machine.tile_rows.min if tile.run else 0)
    return {int(start) + row for start in starts for row in range(height)}


def places_of_streams(program) -> list[dict[str, set[int]]]:
    """What each stream writes of the accumulators, the h buffer and the cell buffer, from the executed instructions."""
    machine, vectors = program.machine, iter(program.input_order)
    places = [{"rows": set(), "elements": set(), "cells": set()} for _ in program.streams]
    reading = next(vectors, None)
    for each in program.executed():
        if isinstance(each, Tile):
            # Cursors are a stream's own but for the first, which all streams move along the input stream in its order.
            stream = (each.cursor - 1) // 3 if each.cursor else int(reading[0])
            places[stream]["rows"] |= accumulator_rows(machine, each, each.accumulator)
            reading = next(vectors, None) if each.operand is Operand.INPUT and each.advance else reading
        elif isinstance(each, Post):
            neurons = range(each.neuron, each.neuron + each.neurons)
            places[each.stream]["cells"] |= {each.cell * machine.lanes + neuron for neuron in neurons}
            if each.signal:
                places[each.stream]["elements"] |= {each.vector * machine.vector_row_elements + neuron for neuron in neurons}
    assert next(vectors, None) is None
    return places


@settings(deadline=None)
@given(stream_cases())
def test_streams_write_no_place_of_another_and_no_constant(case):
    program, _ = case.loaded(case.plan())
    places, buffers, constants = places_of_streams(program), case.machine.buffers, len(program.accumulators)
    for name, first, size in (
        ("rows", constants, buffers.accumulator_rows),
        ("elements", 0, buffers.hidden_elements),
        ("cells", 0, buffers.cell_elements),
    ):
        everything = [place for stream in places for place in stream[name]]
        assert len(set(everything)) == len(everything) and first <= min(everything) and max(everything) < size


@settings(deadline=None)
@given(stream_cases())
def test_streams_read_their_own_sums_and_the_constants_of_their_layer(case):
    planned = case.plan()
    program, machine = planned.program, case.machine
    places = places_of_streams(program)
    for each in program.executed():
        if isinstance(each, Post) and each.source in (Source.INTERLEAVED, Source.GATE):
            rows = (4 if each.source is Source.INTERLEAVED else 1) * each.neurons
            assert set(range(each.accumulator, each.accumulator + rows)) <= places[each.stream]["rows"]
        elif isinstance(each, Post) and each.source is Source.CONSTANT:
            image = planned.compiled.layers[program.streams[each.stream].layer]
            place = image.peepholes // machine.tile_rows.max, each.accumulator // machine.tile_rows.max
            size = -(-image.shape.hidden // machine.tile_rows.max)
            assert place[1] - place[0] == size * min(each.slot, 2) and each.accumulator % machine.tile_rows.max == 0
        elif isinstance(each, Tile) and each.init is Init.SOURCE and each.cursor:
            image = planned.compiled.layers[program.streams[(each.cursor - 1) // 3].layer]
            rows = accumulator_rows(machine, each, each.source)
            assert image.biases <= min(rows) and max(rows) < image.biases + image.step.packing.rows


@settings(deadline=None)
@given(stream_cases())
def test_input_stream_brings_every_step_of_streams_that_have_no_source_once_and_in_order(case):
    order = case.plan().program.input_order
    for index, stream in enumerate(case.streams):
        steps = order[order[:, 0] == index, 1].tolist()
        assert steps == (list(range(stream.steps)) if stream.source is None else [])


@settings(deadline=None)
@given(cases(), st.integers(1, 12))
def test_rolled_program_executes_what_the_unrolled_one_does(case, steps):
    buffers = case.machine.buffers.replace(program_words=65536).model_dump()
    shape, _ = shape_and_steps(case)
    arguments = dict(schedule=case.schedule, tilings=[case.layers[0].tiling])

    def executed(roll):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "_roll", roll)
            made = compile_streams(case.machine.replace(buffers=buffers), [shape], [Recurrence(0, steps)], **arguments)
        return [each for each in made.program.executed() if not isinstance(each, Loop | End)]

    unrolled = executed(lambda rounds, emit: [each for key in rounds for each in emit(key)])
    assert executed(compiler._roll) == unrolled


@pytest.mark.parametrize("streams", [1, 3])
def test_length_of_a_program_does_not_depend_on_the_number_of_steps(streams):
    lengths = [len(compiled(steps=steps, streams=streams).program.instructions) for steps in (20, 100, 10_000)]
    assert lengths[0] == lengths[1] == lengths[2]


def test_streams_share_weights_and_biases_and_nothing_else():
    one, three = compiled(), compiled(streams=3)
    assert three.weight_words == one.weight_words and three.layers[0].biases == one.layers[0].biases
    frames = {}
    for tile in tiles(three.program):
        if tile.operand is Operand.HIDDEN:
            frames.setdefault(tile.channel, set()).add((tile.accumulator, tile.vector))
    assert len(frames) == 3
    used = [places for stream in frames.values() for places in (set(a for a, _ in stream), set(("v", v) for _, v in stream))]
    assert sum(map(len, used)) == len(set().union(*used)), "no two streams have an accumulator or a vector in common"
    assert len({image.cell for image in three.streams}) == len({image.hidden for image in three.streams}) == 3


def test_streams_of_different_length_take_turns_until_each_has_ended():
    made = compile_streams(
        load_machine("sharp-64"), [SHAPE], [Recurrence(0, steps) for steps in (3, 1, 2)], schedule="unfolded", tilings=[Tiling(8, 8)]
    )
    order = [(int(stream), int(step)) for stream, step in made.program.input_order]
    assert order == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]
    outputs = [each.stream for each in made.program.executed() if isinstance(each, Post) and each.emit and each.signal]
    assert [stream for index, stream in enumerate(outputs) if index == 0 or outputs[index - 1] != stream] == [0, 1, 2, 0, 2, 0]


@settings(deadline=None)
@given(cases())
def test_a_stream_alone_takes_the_cycles_that_it_takes_where_no_other_could_run(case):
    single = case.replace(machine=case.machine.replace(streams=1).model_dump())
    one, other = single.plan(), case.plan()
    assert one.program.instructions == other.program.instructions
    assert one.timing.counts == other.timing.counts and np.array_equal(one.timing.output_cycles, other.timing.output_cycles)


def test_streams_hide_the_latency_of_each_other():
    machine = load_machine("sharp-64k")
    shape = dataclasses.replace(SHAPE, inputs=256, hidden=256)
    alone = plan_streams(machine, [shape], [Recurrence(0, 40)], schedule="unfolded").timing.cycles
    four = plan_streams(machine, [shape], [Recurrence(0, 40)] * 4, schedule="unfolded").timing.cycles
    assert four < 1.3 * alone


def test_layers_of_a_chain_hide_the_latency_of_each_other():
    machine, steps = load_machine("sharp-64k"), 40
    shape = dataclasses.replace(SHAPE, inputs=128, hidden=128)
    alone = plan_streams(machine, [shape], [Recurrence(0, steps)], schedule="unfolded").timing.cycles
    chain = [Recurrence(0, steps), Recurrence(1, steps, 0), Recurrence(2, steps, 1)]
    # The third layer begins four rounds after the first: two for each that it follows, so that no x is waited for.
    assert plan_streams(machine, [shape] * 3, chain, schedule="unfolded").timing.cycles < (1 + 4.5 / steps) * alone


SHAPE = LayerShape(name="layer", cell="lstm", inputs=INPUTS, hidden=HIDDEN)


def compiled(machine=None, *, steps=3, streams=1, schedule="unfolded", tile=8, **changes):
    machine = machine or load_machine("sharp-64")
    shape = dataclasses.replace(SHAPE, **changes)
    return compile_streams(machine, [shape], [Recurrence(0, steps)] * streams, schedule=schedule, tilings=[Tiling(tile, tile)])


# Of an LSTM of 13 inputs and 21 hidden in tiles of 8 rows on sharp-64 (rows of 8 vector elements, 4 lanes): the least that
# each buffer must hold, one unit less, and where the number comes from. 84 rows of the four gates are padded to 96.
LEAST = [
    ("accumulator_rows", 288, 256, "biases, and the sums of two steps of a stream, in units of 32 rows"),
    ("input_elements", 32, 24, "2 vectors of 13 elements in rows of 8"),
    ("hidden_elements", 48, 40, "two vectors of h of a stream in rows of 8"),
    ("cell_elements", 24, 20, "the neurons of a stream in rows of 4"),
]  # fmt: skip


def with_buffer(name, value):
    machine = load_machine("sharp-64")
    return machine.replace(buffers=machine.buffers.replace(**{name: value}))


@pytest.mark.parametrize(("name", "need", "less", "how"), LEAST)
def test_layer_that_does_not_fit_a_buffer_is_refused_with_the_arithmetic(name, need, less, how):
    compiled(with_buffer(name, need))
    with pytest.raises(NetworkError) as raised:
        compiled(with_buffer(name, less))
    what = "a layer of 13 inputs and 21 hidden does not fit machine sharp-64"
    assert str(raised.value) == f"{what}: buffers.{name} must be at least {need} (= {how}), not {less}"


def test_weights_beyond_the_buffer_are_streamed_and_those_that_fit_stay():
    whole = compiled()
    words = whole.weight_words
    part = compiled(with_buffer("weight_bytes", (words - 8) * 128))
    assert part.memory_words > 0 and part.weight_words + part.memory_words == words
    instruction = part.program.instructions[0]
    assert (instruction.weight, instruction.words) == (part.weight_words, 3 * part.memory_words)
    assert instruction.weight + instruction.ring <= words - 8, "the ring lies behind the words that stay"
    streamed = [each for each in tiles(part.program) if each.streamed]
    assert sum(each.blocks(part.program.machine) * each.column_tiles(part.program.machine) for each in streamed) == 3 * part.memory_words


def test_streams_whose_weights_do_not_fit_are_refused_with_the_arithmetic():
    words = compiled(streams=2).weight_words
    need = words * 128
    compiled(with_buffer("weight_bytes", need), streams=2)
    with pytest.raises(NetworkError) as raised:
        compiled(with_buffer("weight_bytes", need - 128), streams=2)
    what = "streams run together on machine sharp-64 with all weights in its buffer"
    assert str(raised.value) == f"{what}: buffers.weight_bytes must be at least {need} (= {words} words of 128 bytes), not {need - 128}"


def test_program_that_is_too_long_is_refused_with_its_length():
    words = len(compiled(steps=9).program.instructions)
    compiled(with_buffer("program_words", words), steps=9)
    with pytest.raises(NetworkError) as raised:
        compiled(with_buffer("program_words", words - 1), steps=9)
    assert str(raised.value) == f"the program needs {words} words; machine sharp-64 has buffers.program_words {words - 1}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "fastest"}, f"schedule must be one of {', '.join(SCHEDULES)}, not 'fastest'"),
        ({"tile": 4}, "tile must be auto or a height of machine sharp-64 (8, 16, 32), not 4"),
        ({"tile": 24}, "tile must be auto or a height of machine sharp-64 (8, 16, 32), not 24"),
        ({"tile": 64}, "tile must be auto or a height of machine sharp-64 (8, 16, 32), not 64"),
    ],
)
def test_option_that_the_machine_does_not_have_is_refused(changes, message):
    with pytest.raises(ConfigError) as raised:
        compiled(**changes)
    assert str(raised.value) == message


def test_more_streams_than_the_machine_has_are_refused():
    with pytest.raises(NetworkError, match="^machine sharp-64 runs 1 to 4 streams together, not 5$"):
        compiled(streams=5)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", ["inputs", "hidden", "projected"])
def test_size_below_one_is_refused(name, size):
    with pytest.raises(NetworkError, match=f"^layer layer: {name} must be at least 1, not {size}$"):
        compiled(**{name: size})


def test_stream_of_no_steps_is_refused():
    with pytest.raises(NetworkError, match="^layer layer: steps must be at least 1, not 0$"):
        compiled(steps=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["sharp-64", "sharp-1k", "sharp-64k"])
def test_largest_layer_of_a_machine_encodes(name, schedule):
    machine = load_machine(name)
    for tile in machine.tile_heights:
        program = compiled(machine, inputs=2048, hidden=2048, steps=1000, schedule=schedule, tile=tile).program
        assert len(program.words) <= machine.buffers.program_words
