"""The cycle model: every cycle has one cause, the counts fit each other, and a small program is right cycle by cycle."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_layers import cases, shape_and_steps, stream_cases, tiny_machine, with_weight_words

from sharp.model import timing
from sharp.model.machine import load_machine, machine_names
from sharp.model.layer import GATES, LayerShape
from sharp.model.planner import plan
from sharp.model.program import WORK, Halt, Init, Input, Operand, Post, Source, Tile, Update, Weights
from sharp.model.steps import SCHEDULES
from sharp.model.timing import IDLE_REASONS, LSTM, Contract, predict

LATENCIES = tuple(type(load_machine("sharp-64").latencies).model_fields)


def tiny_program(*, hidden=1, steps=2, schedule="unfolded", **queues):
    """An LSTM of 4 inputs and, if not said otherwise, 1 neuron on the tiny machine: one tile a part and one group a step."""
    machine = tiny_machine()
    machine = machine.replace(queues=machine.queues.replace(**queues).model_dump())
    return plan(machine, LayerShape(name="tiny", cell="lstm", inputs=4, hidden=hidden), steps=steps, schedule=schedule, tile=4).program


@settings(deadline=None)
@given(cases())
def test_every_cycle_issues_a_tile_or_is_idle_for_one_reason(case):
    predicted = case.plan().timing
    assert predicted.counts["tiles"] + sum(predicted.idle.values()) == predicted.cycles
    assert min(predicted.counts.values()) >= 0 and tuple(predicted.idle) == IDLE_REASONS


@settings(deadline=None)
@given(cases())
def test_no_run_is_shorter_than_its_bound(case):
    planned = case.plan()
    assert planned.timing.cycles >= planned.bound_cycles


@settings(deadline=None)
@given(cases())
def test_counts_are_those_of_the_layer(case):
    planned, (shape, steps) = case.plan(), shape_and_steps(case)
    counts, executed = planned.timing.counts, list(planned.program.executed())
    posts = [each for each in executed if isinstance(each, Post)]
    neurons = steps * shape.hidden
    assert counts["active_macs"] >= steps * shape.weights and counts["active_macs"] <= counts["tiles"] * case.machine.macs
    if shape.cell != "gru" or not shape.reset_after or planned.program.schedule not in ("intergate", "unfolded"):
        assert counts["active_macs"] == steps * shape.weights
    assert counts["input_writes"] == steps * shape.inputs and counts["instructions"] == len(executed)
    states = {"lstm": 1, "gru": 1, "rnn": 0}[shape.cell]
    assert counts["cell_updates"] == states * neurons
    assert counts["outputs"] == steps * shape.outputs + (shape.hidden if shape.cell == "lstm" else 0)
    auxiliary = shape.projected is not None or not shape.reset_after
    assert counts["hidden_writes"] == steps * (shape.outputs + auxiliary * shape.hidden)
    for name in ("multiplications", "additions"):
        assert counts[f"lane_{name}"] == sum(each.neurons * getattr(WORK[each.update], name) for each in posts)
    assert counts["cell_reads"] == sum(each.neurons * WORK[each.update].state_reads for each in posts)
    live = {Source.INTERLEAVED: 4, Source.GATE: 1, Source.CONSTANT: 1, Source.BUFFER: 0}
    assert counts["drained_rows"] == sum(each.neurons * live[each.source] for each in posts)
    kept = [each for each in posts if each.update is Update.KEEP]
    peeps = [each for each in posts if each.update is Update.PEEPHOLE]
    assert counts["gate_writes"] == sum(each.neurons * live[each.source] for each in kept) + sum(each.neurons for each in peeps)
    gates = (GATES[shape.cell] + (shape.cell == "gru" and shape.reset_after)) * neurons
    assert counts["drained_rows"] == gates + steps * ((shape.projected or 0) + 3 * shape.hidden * shape.peepholes)
    assert counts["weight_writes"] == steps * planned.compiled.memory_words
    assert counts["saturations"] == 0  # a matter of values


# Of a neuron in a step: products and sums of the lanes outside of activations, reads of its state, functions of it or of a sum.
LANE_WORK = [
    (dict(cell="rnn"), 0, 0, 0, 0),  # the function is a gate's
    (dict(cell="lstm"), 3, 1, 1, 1),  # f c + i g, o phi(c)
    (dict(cell="lstm", coupled=True), 3, 1, 1, 1),
    # Three times phi(p c + s); f c + i g and, for no taker, a product with c; o phi(c).
    (dict(cell="lstm", peepholes=True), 3 + 3 + 1, 3 + 1, 3 + 1 + 1, 3 + 1),
    (dict(cell="gru"), 3, 3, 1, 1),  # r u + w, 1 - z, (1 - z) n + z h
    (dict(cell="gru", reset_after=False), 1 + 2, 2, 1 + 1, 1),  # r h; 1 - z, (1 - z) n + z h
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("kind", "products", "sums", "reads", "functions"), LANE_WORK)
def test_lanes_work_as_the_formulas_of_the_cell_say(kind, products, sums, reads, functions, schedule):
    steps, hidden = 3, 7
    shape = LayerShape(name="", inputs=5, hidden=hidden, **kind)
    counts = plan(load_machine("sharp-64"), shape, steps=steps, schedule=schedule, tile=8).timing.counts
    final = hidden * (shape.cell == "lstm")  # the state that is sent out at the end
    assert counts["lane_multiplications"] == steps * hidden * products and counts["lane_additions"] == steps * hidden * sums
    assert counts["cell_reads"] == steps * hidden * reads + final and counts["cell_activations"] == steps * hidden * functions


@settings(deadline=None)
@given(cases())
def test_reads_follow_from_the_tiles(case):
    planned = case.plan()
    counts, machine = planned.timing.counts, case.machine
    tiles = [each for each in planned.program.executed() if isinstance(each, Tile)]
    numbers = [tile.blocks(machine) * tile.column_tiles(machine) for tile in tiles]
    rows = [number * tile.height(machine) for tile, number in zip(tiles, numbers, strict=True)]
    assert counts["tiles"] == sum(numbers)
    zeroed = sum(tile.blocks(machine) * tile.height(machine) for tile in tiles if tile.init is Init.ZERO)
    assert counts["tile_rows"] == sum(rows) == counts["accumulator_reads"] + zeroed
    for operand in ("input", "hidden"):
        reads = (number * tile.width(machine) for tile, number in zip(tiles, numbers, strict=True) if tile.operand.name.lower() == operand)
        assert counts[f"{operand}_reads"] == sum(reads)
    shape, steps = shape_and_steps(case)
    assert steps * GATES[shape.cell] * shape.hidden <= counts["bias_reads"] <= counts["accumulator_reads"]


@settings(deadline=None)
@given(cases())
def test_spans_hold_all_that_is_issued_in_program_order(case):
    planned = case.plan()
    predicted, executed = planned.timing, list(planned.program.executed())
    for spans, kind in ((predicted.tile_spans, Tile), (predicted.post_spans, Post)):
        first, last, issues, index = spans.T
        assert (issues <= last - first + 1).all() and (first[1:] > last[:-1]).all()
        assert [executed[each] for each in index] == [each for each in executed if isinstance(each, kind)]
    assert predicted.tile_spans[:, 2].sum() == predicted.counts["tiles"]
    assert len(predicted.input_spans) == case.streams[0].steps and (predicted.input_spans[1:, 0] > predicted.input_spans[:-1, 1]).all()
    assert (np.diff(predicted.output_cycles) > 0).all() and predicted.output_cycles[-1] < predicted.cycles


@settings(deadline=None)
@given(stream_cases())
def test_counts_of_streams_are_those_of_all_their_steps(case):
    planned = case.plan()
    counts, streams = planned.timing.counts, planned.program.streams
    shapes = [planned.shapes[stream.layer] for stream in streams]
    pairs = list(zip(streams, shapes, strict=True))
    assert counts["tiles"] + sum(planned.timing.idle.values()) == planned.timing.cycles
    assert counts["outputs"] == sum(stream.steps * shape.outputs + shape.hidden * (shape.cell == "lstm") for stream, shape in pairs)
    assert counts["cell_updates"] == sum(stream.steps * shape.hidden for stream, shape in pairs if shape.cell != "rnn")
    # Vectors of the input stream are as long as the longest.
    vectors = sum(stream.steps for stream in streams if stream.source is None)
    assert counts["input_writes"] == vectors * planned.program.input_elements
    work = sum(stream.steps * shape.weights for stream, shape in pairs)
    zeros = counts["active_macs"] - work
    assert zeros == 0 or zeros > 0 and any(shape.cell == "gru" and shape.reset_after for shape in shapes)
    assert planned.timing.cycles >= planned.bound_cycles


def accumulator_rows(machine, tile) -> np.ndarray:
    height, blocks = tile.height(machine), np.arange(tile.blocks(machine))
    starts = (tile.accumulator + (blocks // tile.run * tile.gap if tile.run else 0)) * machine.tile_rows.min + blocks * height
    return (starts[:, None] + np.arange(height)).reshape(-1)


@settings(deadline=None)
@given(stream_cases())
def test_nothing_is_read_before_it_is_written_nor_written_over_before_it_is_read(case):
    planned, machine = case.plan(), case.machine
    predicted, contract = planned.timing, Contract(machine)
    spans = {int(index): (int(first), int(last)) for first, last, _, index in (*predicted.tile_spans, *predicted.post_spans)}
    summed, drained = (np.full(machine.buffers.accumulator_rows, -1) for _ in range(2))
    written, read = (np.full(machine.buffers.hidden_elements, -1) for _ in range(2))
    vector, beats = 0, iter(predicted.output_cycles)
    for index, each in enumerate(planned.program.executed()):
        if isinstance(each, Tile):
            first, last = spans[index]
            rows = accumulator_rows(machine, each)
            assert (first + contract.sum_cycles > drained[rows]).all()
            # Of all blocks but the last it is known how early their last tile may be issued: no two in one cycle.
            blocks = each.blocks(machine)
            issues = np.append(first + blocks * (each.column_tiles(machine) - 1) + np.arange(blocks - 1), last)
            summed[rows] = np.repeat(issues, each.height(machine)) + contract.complete_cycles
            if each.operand is Operand.HIDDEN:
                start = each.vector * machine.vector_row_elements + each.column
                elements = slice(start, start + each.columns)
                assert (last >= written[elements]).all()
                read[elements] = last
            else:
                begins, ends = predicted.input_spans[vector]
                assert last > (ends if each.column + each.columns == planned.program.input_elements else begins)
                later = predicted.input_spans[vector + 2 * len(set(planned.program.input_order[:, 0].tolist())) :, 0]
                assert (later > last).all()
                vector += bool(each.advance)
        elif isinstance(each, Post):
            first, last = spans[index]
            if each.source in (Source.INTERLEAVED, Source.GATE):
                rows = slice(each.accumulator, each.accumulator + (4 if each.source is Source.INTERLEAVED else 1) * each.neurons)
                assert (last >= summed[rows]).all() and (summed[rows] >= 0).all()
                drained[rows] = last
            groups, size = each.groups(machine), min(machine.lanes, 1 << each.stride)
            # An output beat leaves in the cycle in which its values can be read; of other groups, no two are in one cycle.
            cycles = [next(beats) if each.emit else first + contract.update_cycles(each.update) + group for group in range(groups)]
            if each.signal:
                start = each.vector * machine.vector_row_elements + each.neuron
                elements = slice(start, start + each.neurons)
                assert (cycles[0] > read[elements]).all() and cycles[-1] <= last + contract.update_cycles(each.update)
                written[elements] = np.repeat(cycles, size)[: each.neurons]
    assert next(beats, None) is None


@settings(deadline=None)
@given(cases(), st.integers(2, 40))
def test_ring_of_streamed_weights_is_never_overrun_and_never_read_ahead_of_memory(case, words):
    planned = with_weight_words(case, words).plan()
    assume(planned.compiled.memory_words)
    machine, predicted, executed = case.machine, planned.timing, list(planned.program.executed())
    (weights,) = (each for each in executed if isinstance(each, Weights))
    sent = predicted.word_cycles
    assert len(sent) == weights.words == predicted.counts["weight_writes"] and (np.diff(sent) >= machine.memory_beats).all()
    taken = []
    for first, last, issues, index in predicted.tile_spans:
        if executed[index].streamed:
            # The words of one instruction, no faster than one a cycle.
            taken += [(first + each, last - (issues - 1 - each)) for each in range(issues)]
    earliest, latest = np.array(taken).T
    assert (latest >= sent).all() and len(taken) == len(sent)
    freed = earliest[: -weights.ring] if weights.ring < len(sent) else earliest[:0]
    # A word takes its place beat by beat once the word before it there has been taken.
    assert (sent[weights.ring :] - machine.memory_beats > freed).all()
    assert planned.timing.counts["idle_weights"] >= 0 and weights.ring <= machine.weight_words - planned.compiled.weight_words


@settings(deadline=None, max_examples=20)
@given(cases(steps=3))
def test_compiled_walk_is_the_python_that_is_written(case):
    planned = case.plan()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_walk", timing._walk.py_func)
        plain = predict(planned.program)
    for field in dataclasses.fields(plain):
        one, other = getattr(plain, field.name), getattr(planned.timing, field.name)
        assert one == other if field.name == "counts" else np.array_equal(one, other), field.name


def test_small_program_is_right_cycle_by_cycle():
    # The tiny machine adds up a tile in operand 2 + multiply 2 + two levels of add 2 = 8 cycles and stores the sums 2 later; a
    # post group's hidden value is there drain 2 + activate 4 + multiply 2 + add 2 + activate 4 + multiply 2 + write 1 = 17 later.
    contract = Contract(tiny_machine())
    assert (contract.sum_cycles, contract.complete_cycles, contract.update_cycles(Update.LSTM)) == (8, 10, 17)
    table = [
        (0, "fetch", "input: the receiver takes elements from the next cycle on, one a cycle"),
        (1, "x0", "first element of the first vector"),
        (4, "x0", "its last element"),
        (5, "tile 0", "input part of step 0: fetched at 1, taken up at 2, all of x0 is there at 5"),
        (5, "x1", "the second slot of the ring is free from the start"),
        (7, "tile 1", "hidden part of step 0: taken up with tile 0's issue, needs its sums, 2 cycles later"),
        (8, "x1", "last element of the second vector"),
        (9, "tile 2", "input part of step 1: into other rows, waits for x1"),
        (17, "post 0", "step 0's sums are complete 10 cycles after tile 1"),
        (34, "tile 3", "hidden part of step 1: h0 is there 17 cycles after post 0"),
        (34, "beat 0", "and leaves in the same cycle"),
        (44, "post 1", "10 cycles after tile 3"),
        (61, "beat 1", "17 cycles after post 1"),
        (61, "post 2", "the cell state: another update, so the group before has been written"),
        (68, "beat 2", "drain 2 + activate 4 + write 1 after post 2"),
        (69, "end", "the queue is empty one cycle after its last beat; this cycle still counts"),
    ]
    predicted = predict(tiny_program())
    got = [(0, "fetch"), (int(predicted.cycles) - 1, "end")]
    for name, spans in (("tile", predicted.tile_spans), ("post", predicted.post_spans)):
        got += [(int(first), f"{name} {index}") for index, (first, *_) in enumerate(spans)]
    got += [(int(cycle), f"x{index}") for index, span in enumerate(predicted.input_spans) for cycle in span]
    got += [(int(cycle), f"beat {index}") for index, cycle in enumerate(predicted.output_cycles)]
    assert sorted(got) == sorted((cycle, what) for cycle, what, _ in table)
    assert predicted.idle == {
        "program": 3,  # 0 to 2: the first tile is not taken up before cycle 2, and issues a cycle later at the earliest
        "input": 2 + 1,  # 3 and 4 for x0, 8 for x1
        "accumulator": 1,  # 6, for tile 0's sums
        "hidden": 24,  # 10 to 33, for h0
        "weights": 0,
        "drained": 35,  # 35 to 69, after the last tile
    }


@pytest.mark.parametrize(
    ("depth", "issues"),
    [
        (2, [3, 4, 5, 6]),  # taken up with the issue of the one before
        # A place is free in the cycle after a tile is taken up, filled in the next and taken up in the one after that.
        (1, [3, 5, 7, 9]),
    ],
)
def test_full_tile_queue_holds_the_fetch_back(depth, issues):
    # The hidden parts of four gates, which in step 0 wait for nothing; the first is fetched in cycle 1.
    assert predict(tiny_program(schedule="batch", steps=1, tile=depth)).tile_spans[:4, 0].tolist() == issues


@pytest.mark.parametrize(
    ("depth", "issues"),
    [
        (4, [3, 5, 6, 8, 9, 11, 12, 14]),  # sums are 2 cycles old before the input part adds to them
        # Gate 0's sums are complete 10 cycles after its input part, in 15. Then gate 1's group is taken up, gate 2's is fetched
        # in 16, the fourth gate's first tile in 17, and taken up in 18.
        (1, [3, 5, 6, 8, 9, 11, 19, 21]),
    ],
)
def test_full_post_queue_holds_the_tiles_behind_it_back(depth, issues):
    assert predict(tiny_program(schedule="sequential", steps=1, post=depth)).tile_spans[:, 0].tolist() == issues


def test_full_output_queue_holds_the_groups_back():
    beats = predict(tiny_program(hidden=3, steps=1, output=2)).output_cycles
    # The third group takes the first one's place, in the cycle after it left, and is there itself 17 cycles later.
    assert np.diff(beats)[:2].tolist() == [1, 17]


def test_step_follows_a_step_after_the_recurrence():
    first, second = predict(tiny_program()).tile_spans[[1, 3], 0]
    assert second - first == Contract(tiny_machine()).recurrence_cycles(LSTM) == 27


@pytest.mark.parametrize(
    ("shape", "cycles"),
    [
        # On the tiny machine: complete 10; gates 6, product and sum 4, phi 4, product 2, write 1, last sum 2.
        (dict(cell="rnn"), 10 + 6 + 1),
        (dict(cell="gru"), 10 + 6 + 4 + 4 + 2 + 2 + 1),
        (dict(cell="gru", reset_after=False), 10 + 17 + 10 + 19),
        (dict(cell="lstm", projected=1), 10 + 17 + 10 + 7),
        # KEEP, two peepholes of 6 + 4 + 4 cycles a cycle apart, state, a third peephole, output.
        (dict(cell="lstm", peepholes=True), 10 + 1 + 1 + 14 + 17 + 14 + 17),
    ],
)
def test_recurrence_of_every_cell_is_the_way_of_its_updates(shape, cycles):
    machine = tiny_machine()
    drawn = LayerShape(name="", inputs=4, hidden=1, **shape)
    assert Contract(machine).recurrence_cycles(drawn) == cycles
    planned = plan(machine, drawn, steps=3, schedule="unfolded", tile=4)
    executed = list(planned.program.executed())
    starts = [first for first, _, _, index in planned.timing.tile_spans if executed[index].operand is Operand.HIDDEN]
    # One step of the first to the next: nothing else is between them but the wait for h.
    per_step = len(starts) // 3
    ends = [last for _, last, _, index in planned.timing.tile_spans if executed[index].operand is Operand.HIDDEN]
    assert starts[2 * per_step] - starts[per_step] - (ends[per_step + per_step - 1] - starts[per_step]) <= cycles


L_CYCLES = {"sharp-64": 29, "sharp-256": 31, "sharp-1k": 35, "sharp-4k": 39, "sharp-16k": 41, "sharp-64k": 45}


def test_recurrence_of_the_ready_made_machines():
    assert {name: Contract(load_machine(name)).recurrence_cycles(LSTM) for name in machine_names()} == L_CYCLES


@pytest.mark.parametrize("name", LATENCIES)
def test_latency_moves_the_recurrence_by_how_often_it_is_passed(name):
    machine = load_machine("sharp-1k")
    times = {"add": machine.tree_levels, "activate": 2, "lane_multiply": 2}.get(name, 1)
    before = Contract(machine).recurrence_cycles(LSTM)
    longer = machine.replace(latencies=machine.latencies.replace(**{name: getattr(machine.latencies, name) + 1}).model_dump())
    assert Contract(longer).recurrence_cycles(LSTM) == before + times


@settings(deadline=None)
@given(cases(), st.lists(st.integers(0, 4), min_size=len(LATENCIES), max_size=len(LATENCIES)))
def test_longer_latencies_never_make_a_run_shorter(case, more):
    old = case.machine.latencies.model_dump()
    latencies = {name: old[name] + extra for name, extra in zip(LATENCIES, more, strict=True)}
    longer = case.replace(machine=case.machine.replace(latencies=latencies).model_dump())
    assert longer.plan().timing.cycles >= case.plan().timing.cycles


@settings(deadline=None)
@given(cases(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_deeper_queues_never_make_a_run_longer(case, tile, post, output):
    old = case.machine.queues
    queues = {"tile": old.tile + tile, "post": old.post + post, "output": old.output + output}
    deeper = case.replace(machine=case.machine.replace(queues=queues).model_dump())
    assert deeper.plan().timing.cycles <= case.plan().timing.cycles


def altered(program, kind, number, **changes):
    """A program with fields of its `number`-th instruction of a kind changed."""
    place = [index for index, each in enumerate(program.instructions) if isinstance(each, kind)][number]
    code = list(program.instructions)
    code[place] = dataclasses.replace(code[place], **changes)
    return program.replace(instructions=tuple(code))


def with_one_slot_that_is_not_freed(program):
    """A second vector has no place, since no tile is done with the first; the second step's tile asks for its elements."""
    return altered(altered(altered(program, Input, 0, slots=1), Tile, 0, advance=0), Tile, 2, column=4)


@pytest.mark.parametrize(
    "alter",
    [
        lambda program: altered(program, Tile, 1, wait=True),  # of step 0, whose h no step before it wrote
        lambda program: altered(program, Post, 0, signal=False),  # nobody counts the h that step 1 needs
        lambda program: altered(program, Input, 0, count=1),
        with_one_slot_that_is_not_freed,
        lambda program: altered(program, Tile, 1, complete=False),
        lambda program: altered(program, Post, 0, neurons=2),  # of which one has sums
    ],
    ids=["hidden value too early", "hidden value not counted", "too few vectors", "slot not freed", "rows not finished", "too many rows"],
)
def test_program_that_would_wait_for_ever_is_refused(alter):
    with pytest.raises(ValueError, match="^the program waits for something that no earlier instruction produces$"):
        predict(alter(tiny_program()))


def test_single_slot_makes_the_second_vector_wait_for_the_first():
    first, second = predict(altered(tiny_program(), Input, 0, slots=1)).input_spans
    # Tile 0, the last to read the first vector, issues in cycle 5.
    assert (first.tolist(), second.tolist()) == ([1, 4], [6, 9])


def test_program_without_tiles_waits_for_none():
    predicted = predict(tiny_program().replace(instructions=(Halt(),)))
    assert predicted.counts["instructions"] == 1 and predicted.counts["tiles"] == 0 and predicted.cycles == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cycles_of_a_long_run_grow_by_the_same_number_each_pair_of_steps(schedule):
    cycles = [predict(tiny_program(steps=steps, schedule=schedule)).cycles for steps in (20, 22, 24, 1000)]
    assert cycles[1] - cycles[0] == cycles[2] - cycles[1] == (cycles[3] - cycles[2]) / 488
