"""The contract: the RTL has the bits, the cycles and the counters that the model predicts, and the comparison can fail.

Random machines and layers are those of `sharp verify`; a failure prints the command that repeats it. Whatever else is
asked of the RTL is asked of one tiny machine, which is built once.
"""

import dataclasses

import numpy as np
import pytest
from small_cases import layer_case
from small_layers import by_rows, tiny_machine

from sharp.model import numerics
from sharp.model.compiler import Recurrence
from sharp.model.layer import CELLS, LayerShape
from sharp.model.planner import plan, plan_streams
from sharp.model.program import Halt, Init, Post, Tile, Tiling, Update
from sharp.model.steps import SCHEDULES
from sharp.model.timing import Contract, Count, predict
from sharp.sim import bench
from sharp.sim.verification import Case, check, random_cases

QUICK = dict(machines=3, cases=60, seed=264)
PAPER = dict(machines=10, cases=400, seed=1)


def assert_no_mismatch(options, index):
    group = random_cases(**options)[index]
    print("sharp verify", *(f"--{name} {value}" for name, value in options.items()), f"# machine {index + 1}: {group[0].machine}")
    mismatches = [f"{outcome.case.name}: {outcome.mismatch}" for outcome in check(group) if outcome.mismatch is not None]
    assert not mismatches, "\n".join(mismatches)


@pytest.mark.parametrize("index", range(QUICK["machines"]))
def test_rtl_is_the_model_on_random_layers_of_a_machine(index):
    assert_no_mismatch(QUICK, index)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(PAPER["machines"]))
def test_rtl_is_the_model_on_many_machines(index):
    assert_no_mismatch(PAPER, index)


def test_quick_machines_and_layers_differ_in_what_matters():
    groups = random_cases(**QUICK)
    cases = [case for group in groups for case in group]
    machines = [group[0].machine for group in groups]
    timed = [case for case in cases if case.stall_seed is None]
    layers = [layer for case in timed for layer in case.layers]
    assert {case.schedule for case in timed} == set(SCHEDULES) and len(timed) < len(cases)
    assert {layer.cell for layer in layers} == set(CELLS)
    assert {layer.reset_after for layer in layers if layer.cell == "gru"} == {True, False}
    for what in ("peepholes", "coupled", "projected", "clip", "large_cell"):
        assert any(getattr(layer, what) for layer in layers), what
    assert {len(case.streams) for case in timed} >= {1, 2} and any(len(case.layers) == 1 < len(case.streams) for case in timed)
    assert any(stream.source is not None for case in timed for stream in case.streams)
    assert any(case.plan().compiled.memory_words for case in timed)
    assert len({machine.lanes for machine in machines}) > 1 and len({machine.macs for machine in machines}) > 1
    assert max(machine.latencies.accumulate for machine in machines) > 2 > min(machine.latencies.add for machine in machines)


# One tiny machine.

SEED = 6  # of a layer of small weights, whose gates are neither open nor shut: every bit counts


def tiny_case(*, steps=(5,), schedule="unfolded", inputs=11, hidden=21, seed=SEED, **changes) -> Case:
    shape = dict(inputs=inputs, hidden=hidden, tiling=Tiling(8, 4, 8, 5, lean=0.5, bundle=1))
    return layer_case(tiny_machine(), **shape, steps=steps, schedule=schedule, seed=seed, **changes)


def run_of(case, alter=lambda program: program) -> bench.Run:
    program, inputs = case.loaded(case.plan())
    program = alter(program)
    return bench.Run(program, inputs, predict(program), case.stall_seed)


def simulate(*runs: bench.Run) -> list[bench.Trace]:
    return bench.simulate(tiny_machine(), runs)


def same_bits(one, other) -> bool:
    """Whether outputs and states of two runs, or of a run and its prediction, are the same."""
    pairs = zip((*one.outputs, *one.states), (*other.outputs, *other.states), strict=True)
    return all(left.tobytes() == right.tobytes() for left, right in pairs)


def assert_as_predicted(run: bench.Run, trace: bench.Trace) -> None:
    values = numerics.execute(run.program, run.inputs)
    assert same_bits(trace, values)
    assert trace.output_cycles.tolist() == run.timing.output_cycles.tolist()
    assert trace.counts == run.timing.counts | {"saturations": values.saturations}


def same(one: bench.Trace, other: bench.Trace) -> bool:
    """Whether two runs are the same but for the wall time."""
    return one.counts == other.counts and same_bits(one, other) and one.output_cycles.tobytes() == other.output_cycles.tobytes()


def test_small_program_of_the_timing_table_takes_its_cycles():
    # The table itself stands in test_timing.
    program = plan(tiny_machine(), LayerShape(name="tiny", cell="lstm", inputs=4, hidden=1), steps=2, schedule="unfolded", tile=4).program
    images = dict(weights=np.zeros((2, 4, 4), np.uint16), accumulators=np.zeros(8, np.float32))
    states = dict(hidden=np.zeros(8, np.float16), cell=np.zeros(1, np.float32))
    run = bench.Run(program.replace(**images, **states), np.zeros((2, 4), np.float16), predict(program))
    (trace,) = simulate(run)
    assert (trace.output_cycles.tolist(), trace.counts["cycles"]) == ([34, 61, 68], 70)
    assert_as_predicted(run, trace)


def test_nothing_is_left_over_from_one_run_to_the_next():
    first, other = tiny_case(), tiny_case(inputs=17, hidden=30, schedule="sequential", seed=8, large_cell=True)
    one, between, again = simulate(run_of(first), run_of(other), run_of(first))
    assert same(one, again) and not same(one, between)
    (alone,) = simulate(run_of(other))
    assert same(alone, between)


def test_stalls_of_the_host_change_cycles_and_never_values():
    case = tiny_case()
    free, *stalled = simulate(run_of(case), *(run_of(case.replace(stall_seed=seed)) for seed in range(4)))
    assert_as_predicted(run_of(case), free)
    for trace in stalled:
        assert same_bits(trace, free)
        assert trace.counts["cycles"] > free.counts["cycles"]
        # What is counted is work, but for the cycles and the reasons to be idle.
        work = [count.name for count in Count if count is not Count.cycles and not count.name.startswith("idle_")]
        assert [trace.counts[name] for name in work] == [free.counts[name] for name in work]
    assert len({trace.counts["cycles"] for trace in stalled}) > 1


def from_zero(program):
    """The same program without biases: sums start from zero."""

    def started(each):
        zero = isinstance(each, Tile) and each.init is Init.SOURCE
        return dataclasses.replace(each, init=Init.ZERO) if zero else each

    return program.replace(instructions=tuple(map(started, program.instructions)))


def without_tiles(program):
    """Only the cell state is sent."""
    (state,) = (each for each in program.instructions if isinstance(each, Post) and each.update is Update.STATE)
    (stream,) = program.streams
    return program.replace(instructions=(state, Halt()), streams=(dataclasses.replace(stream, steps=0),))


def test_what_no_schedule_uses_yet_keeps_the_contract_too():
    alterations = (by_rows, from_zero, lambda program: by_rows(from_zero(program)))
    runs = [run_of(tiny_case(schedule=schedule), alter) for schedule in SCHEDULES for alter in alterations]
    for run, trace in zip(runs, simulate(*runs), strict=True):
        assert_as_predicted(run, trace)


def test_program_without_tiles_ends_when_its_last_beat_has_left():
    run = run_of(tiny_case(), without_tiles)
    (trace,) = simulate(dataclasses.replace(run, inputs=run.inputs[:0]))
    assert trace.states[0].tobytes() == run.program.cell[:21].tobytes()
    assert (trace.output_cycles.tolist(), trace.counts) == (run.timing.output_cycles.tolist(), run.timing.counts)


def with_more_tiles(program, *changes):
    """The program with tile instructions after everything else, which wait for nothing and whose sums nobody reads."""
    last = [each for each in program.instructions if isinstance(each, Tile)][-1]
    free = dataclasses.replace(last, init=Init.ACCUMULATE, column=0, weight=0, wait=False, advance=0, complete=False)
    more = [dataclasses.replace(free, **each) for each in changes]
    return program.replace(instructions=(*program.instructions[:-1], *more, Halt()))


def test_tiles_of_different_heights_wait_for_sums_that_they_share():
    # On groups 2 and 3 together, on 3, on both, on 2, on 3: all but the first and the last start on sums of the cycle before.
    pair, upper, lower = dict(tap=1, rows=8, columns=2, accumulator=2), dict(tap=0, accumulator=3), dict(tap=0, accumulator=2)
    one = dict(rows=4, columns=4)
    plain = run_of(tiny_case())
    run = run_of(tiny_case(), lambda program: with_more_tiles(program, pair, upper | one, pair, lower | one, upper | one))
    assert run.timing.counts["idle_accumulator"] == plain.timing.counts["idle_accumulator"] + 3
    (trace,) = simulate(run)
    assert_as_predicted(run, trace)


def test_what_lies_beyond_a_vector_is_not_multiplied():
    # 11 elements end within a tile; behind them lies what an earlier run left, and a weight of zero times infinity is no number.
    longer, case = run_of(tiny_case(inputs=17)), tiny_case(inputs=11)
    _, trace = simulate(dataclasses.replace(longer, inputs=np.full_like(longer.inputs, np.inf)), run_of(case))
    assert_as_predicted(run_of(case), trace)


def test_run_ends_when_the_last_sums_are_stored():
    # 84 rows by 20 columns take more cycles than a cell state needs to leave.
    run = run_of(tiny_case(), lambda program: with_more_tiles(program, dict(rows=84, columns=20)))
    assert run.timing.counts["idle_drained"] == Contract(tiny_machine()).complete_cycles
    (trace,) = simulate(run)
    assert_as_predicted(run, trace)


# Streams.


def streams_case(**changes) -> Case:
    return tiny_case(**{"steps": (5, 3, 5), "inputs": 9, "hidden": 13} | changes)


@pytest.mark.parametrize("cell", CELLS)
def test_streams_do_not_touch_each_other(cell):
    together = streams_case(cell=cell)
    program, inputs = together.loaded(together.plan())
    sequences = [inputs[program.input_order[:, 0] == index] for index in range(3)]
    runs = [bench.Run(program, inputs, together.plan().timing)]
    alone = tiny_case(cell=cell, steps=(5,), inputs=9, hidden=13).plan()
    stride = alone.compiled.streams[0].hidden
    for index, sequence in enumerate(sequences):
        single = plan_streams(
            tiny_machine(), alone.shapes, [Recurrence(0, len(sequence))], schedule="unfolded", tilings=[together.layers[0].tiling]
        )
        image = together.plan().compiled.streams[index]
        row, lanes = tiny_machine().vector_row_elements, tiny_machine().lanes
        hidden = np.zeros((stride + image.hidden + 1) * row, np.float16)
        hidden[stride * row : stride * row + 13] = program.hidden[image.hidden * row : image.hidden * row + 13]
        cell_state = program.cell[image.cell * lanes : image.cell * lanes + 13]
        images = dict(weights=program.weights, accumulators=program.accumulators, hidden=hidden[: (stride + 4) * row], cell=cell_state)
        own = single.program.replace(**images)
        runs.append(bench.Run(own, sequence, predict(own)))
    trace, *singles = simulate(*runs)
    assert_as_predicted(runs[0], trace)
    for index, single in enumerate(singles):
        assert_as_predicted(runs[index + 1], single)
        assert trace.outputs[index].tobytes() == single.outputs[0].tobytes()
        assert trace.states[index].tobytes() == single.states[0].tobytes()


# The comparison can fail: the RTL runs something else than was predicted.


def with_sign(values: np.ndarray) -> np.ndarray:
    """A copy in which one bit is wrong: the sign of the largest value. Weights are float16 in integers."""
    copy = values.copy()
    numbers = copy.view({2: np.float16, 4: np.float32}[copy.itemsize]).reshape(-1)
    numbers[np.argmax(np.abs(numbers))] *= -1
    return copy


def with_image(name):
    return lambda run: dataclasses.replace(run, program=run.program.replace(**{name: with_sign(getattr(run.program, name))}))


ALTERATIONS = {
    **{name: (with_image(name), "hidden values of stream 0 differ") for name in ("weights", "accumulators", "hidden", "cell")},
    "inputs": (lambda run: dataclasses.replace(run, inputs=with_sign(run.inputs)), "hidden values of stream 0 differ"),
    # The same values in other cycles.
    "walk": (lambda run: dataclasses.replace(run, program=by_rows(run.program)), "output beats differ in cycle"),
}


def test_anything_wrong_in_the_rtl_is_a_mismatch(monkeypatch):
    simulate_runs = bench.simulate
    alterations = [alter for alter, _ in ALTERATIONS.values()]

    def simulate_altered(machine, runs, progress):
        return simulate_runs(machine, [alter(run) for alter, run in zip(alterations, runs, strict=True)])

    monkeypatch.setattr(bench, "simulate", simulate_altered)
    outcomes = check([tiny_case()] * len(alterations))
    for (what, (_, message)), outcome in zip(ALTERATIONS.items(), outcomes, strict=True):
        assert outcome.mismatch is not None and message in outcome.mismatch, what


def test_any_prediction_that_is_off_by_one_is_a_mismatch(monkeypatch):
    case = tiny_case()
    (trace,) = simulate(run_of(case))
    monkeypatch.setattr(bench, "simulate", lambda machine, runs, progress: [trace])
    assert [outcome.mismatch for outcome in check([case])] == [None]
    timing = case.plan().timing
    late = timing.output_cycles + (np.arange(len(timing.output_cycles)) == 7)
    # Saturations are predicted by the numerics.
    names = [count.name for count in Count if count is not Count.saturations]
    wrong = {name: dataclasses.replace(timing, counts=timing.counts | {name: timing.counts[name] + 1}) for name in names}
    make_plan = Case.plan
    for name, prediction in {**wrong, "beat": dataclasses.replace(timing, output_cycles=late)}.items():

        def plan_with(case, prediction=prediction):
            planned = make_plan(case)
            planned.__dict__["timing"] = prediction  # where the cached property keeps it
            return planned

        monkeypatch.setattr(Case, "plan", plan_with)
        (outcome,) = check([case])
        assert outcome.mismatch is not None, name
