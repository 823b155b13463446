"""Random verification: a case repeats itself from its file, and every difference between RTL and model is found and named."""

import dataclasses
import re

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from small_cases import layer_case
from small_layers import tiny_machine

from sharp.model import numerics
from sharp.model.errors import ConfigError
from sharp.model.layer import CELLS
from sharp.model.program import Tiling
from sharp.model.steps import SCHEDULES
from sharp.sim import bench
from sharp.sim.bench_driver import Trace
from sharp.sim.verification import LARGEST_SIZE, SMALL_BUFFER_WORDS, Case, check, random_cases, read_case, write_case


def tiny_case(*, schedule="unfolded", **changes) -> Case:
    shape = dict(inputs=5, hidden=7, tiling=Tiling(4, 8, 4, 3, lean=0.5, bundle=1))
    return layer_case(tiny_machine(), **shape, steps=(3,), schedule=schedule, seed=2, **changes)


@pytest.fixture
def rtl(monkeypatch):
    """Stand the model, with its trace changed by the given function, in the RTL's place."""

    def trace_of(run: bench.Run) -> Trace:
        values = numerics.execute(run.program, run.inputs)
        counts = run.timing.counts | {"saturations": values.saturations}
        return Trace(values.outputs, values.states, run.timing.output_cycles.copy(), counts, seconds=1.0)

    def stand_in(change=lambda trace: trace):
        monkeypatch.setattr(bench, "simulate", lambda machine, runs, progress=None: [change(trace_of(run)) for run in runs])

    return stand_in


def with_bit(trace, name, index):
    (values,) = getattr(trace, name)
    values = values.copy()
    values.view(np.uint16 if values.dtype == np.float16 else np.uint32)[index] ^= 1
    return dataclasses.replace(trace, **{name: (values,)})


def with_count(trace, name, more):
    return dataclasses.replace(trace, counts=trace.counts | {name: trace.counts[name] + more})


def with_late_beat(trace):
    trace.output_cycles[4] += 1
    return trace


DIFFERENCES = [
    (
        lambda trace: with_bit(trace, "outputs", (1, 3)),
        r"1 hidden values of stream 0 differ, the first at step 1, neuron 3: model \S+, RTL \S+",
    ),
    (lambda trace: with_bit(trace, "states", 6), "final cell states differ"),
    (with_late_beat, r"1 output beats differ in cycle, the first is beat 4: model (\d+), RTL \d+"),
    (lambda trace: dataclasses.replace(trace, output_cycles=trace.output_cycles[:-1]), "output beats: model 28, RTL 27"),
    (lambda trace: with_count(trace, "cycles", 1), r"cycles: model \d+, RTL \d+"),
    (lambda trace: with_count(trace, "tiles", -1), r"counters \(model, RTL\): tiles \(\d+, \d+\)"),
    (lambda trace: with_count(with_count(trace, "saturations", 1), "idle_hidden", 1), r"counters .*saturations \(0, 1\), idle_hidden \(.*"),
]
NAMES = ["hidden value", "cell state", "beat's cycle", "number of beats", "cycles", "counter", "two counters"]


def test_equal_run_is_no_mismatch(rtl):
    rtl()
    assert [outcome.mismatch for outcome in check([tiny_case(), tiny_case(large_cell=True, schedule="batch")])] == [None, None]


@pytest.mark.parametrize(("change", "message"), DIFFERENCES, ids=NAMES)
def test_every_difference_is_named(rtl, change, message):
    rtl(change)
    (outcome,) = check([tiny_case()])
    assert outcome.case == tiny_case() and re.fullmatch(message, outcome.mismatch)


def test_zeros_of_different_sign_differ(rtl, monkeypatch):
    zeros = numerics.Values((np.zeros((3, 7), np.float16),), (np.zeros(7, np.float32),), 0)
    monkeypatch.setattr(numerics, "execute", lambda program, inputs: zeros)
    for name in ("outputs", "states"):
        rtl(lambda trace, name=name: dataclasses.replace(trace, **{name: (-getattr(trace, name)[0],)}))
        (outcome,) = check([tiny_case()])
        assert "differ" in outcome.mismatch


@pytest.mark.parametrize(("change", "message"), DIFFERENCES, ids=NAMES)
def test_under_stalls_only_values_count(rtl, change, message):
    rtl(change)
    (outcome,) = check([tiny_case(stall_seed=1)])
    assert (outcome.mismatch is not None) == ("hidden values" in message or "cell states" in message)


@pytest.mark.parametrize("seed", range(8))
def test_case_of_a_file_is_the_case_written(seed, tmp_path):
    ((case,),) = random_cases(1, 1, seed)
    write_case(case, tmp_path / "case.yaml")
    again = read_case(tmp_path / "case.yaml")
    assert again == case
    (program, inputs), (program_again, inputs_again) = (each.loaded(each.plan()) for each in (case, again))
    assert inputs_again.tobytes() == inputs.tobytes() and program_again.instructions == program.instructions
    for image in ("weights", "memory", "accumulators", "hidden", "cell"):
        assert getattr(program_again, image).tobytes() == getattr(program, image).tobytes()
    assert again.plan().timing.counts == case.plan().timing.counts


def test_case_of_a_file_has_the_same_outcome(rtl, tmp_path):
    rtl(lambda trace: with_bit(trace, "outputs", (2, 0)))
    (outcome,) = check([tiny_case()])
    write_case(outcome.case, tmp_path / "case.yaml")
    (again,) = check([read_case(tmp_path / "case.yaml")])
    assert (again.case, again.mismatch) == (outcome.case, outcome.mismatch) and outcome.mismatch is not None


def test_case_file_says_what_it_runs(tmp_path):
    path = tmp_path / "case.yaml"
    write_case(tiny_case(), path)
    data = yaml.safe_load(path.read_text())
    (layer,) = data["layers"]
    assert (data["machine"]["macs"], layer["cell"], layer["inputs"], layer["hidden"], data["schedule"]) == (16, "lstm", 5, 7, "unfolded")
    assert data["streams"] == [{"layer": 0, "steps": 3, "source": None}]


def of_layer(**changes):
    """Change the one layer of the tiny case's file."""
    (layer,) = tiny_case().model_dump()["layers"]
    return {"layers": [layer | changes]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedul": "unfolded"}, "schedul: unknown key; known keys are machine, layers, streams, schedule, seed, stall_seed"),
        ({"schedule": "fastest"}, f"schedule: input should be .*{SCHEDULES[-1]}.*, not 'fastest'$"),
        (of_layer(inputs="5"), r"layers.0.inputs: input should be a valid integer, not '5'$"),
        (of_layer(hidden=0), r"layers.0.hidden: input should be greater than or equal to 1, not 0$"),
        (of_layer(cell="lstn"), r"layers.0.cell: input should be .*'rnn'.*, not 'lstn'$"),
        ({"machine": {"macs": 16}}, "machine.name: missing$"),
        (of_layer(large_cell="maybe"), r"layers.0.large_cell: input should be a valid boolean, not 'maybe'$"),
    ],
)
def test_case_file_with_a_mistake_is_refused_with_its_field(tmp_path, change, message):
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(tiny_case().model_dump() | change, sort_keys=False))
    with pytest.raises(ConfigError, match=f"^{path}: {message}"):
        read_case(path)


def test_case_file_that_lacks_a_field_is_refused(tmp_path):
    path = tmp_path / "case.yaml"
    data = tiny_case().model_dump()
    del data["seed"]
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match=f"^{path}: seed: missing$"):
        read_case(path)


def test_cases_follow_from_the_seed_and_spread_over_the_machines():
    groups = random_cases(3, 10, 7)
    assert groups == random_cases(3, 10, 7) != random_cases(3, 10, 8)
    assert [len(group) for group in groups] == [4, 3, 3]
    assert all(case.machine == group[0].machine for group in groups for case in group)
    assert len({group[0].machine.hash for group in groups}) == 3


def test_random_machines_and_layers_reach_all_corners():
    groups = random_cases(40, 2000, 1)
    machines, drawn = [group[0].machine for group in groups], [case for group in groups for case in group]
    layers = [layer for case in drawn for layer in case.layers]
    assert {machine.macs for machine in machines} == {16, 32, 64, 128, 256} and {machine.streams for machine in machines} == {1, 2, 3, 4}
    for name in type(machines[0].latencies).model_fields:
        assert {getattr(machine.latencies, name) for machine in machines} == {1, 2, 3, 4}
    assert {case.schedule for case in drawn} == set(SCHEDULES)
    for machine in machines:
        rows = [(layer.input_rows, layer.hidden_rows) for case in drawn if case.machine == machine for layer in case.layers]
        assert [set(each) for each in zip(*rows, strict=True)] == [set(machine.tile_heights)] * 2
    for name in ("inputs", "hidden"):
        sizes = {getattr(layer, name) for layer in layers}
        assert min(sizes) == 1 and max(sizes) == LARGEST_SIZE and len(sizes) > 70
    assert {layer.cell for layer in layers} == set(CELLS)
    for what in ("peepholes", "coupled", "projected", "clip", "large_cell"):
        assert any(getattr(layer, what) for layer in layers), what
    assert {len(case.streams) for case in drawn} == {1, 2, 3, 4} and any(case.stall_seed is not None for case in drawn)
    assert any(len(case.layers) == len(case.streams) > 1 for case in drawn)
    assert any(stream.source is not None for case in drawn for stream in case.streams)
    assert any(machine.weight_words == SMALL_BUFFER_WORDS for machine in machines)


@given(st.integers(1, 20), st.integers(1, 20))
def test_no_case_is_lost_between_machines(machines, cases):
    assert sum(map(len, random_cases(machines, cases, 1))) == cases


def test_random_cases_fit_their_machines():
    for group in random_cases(30, 300, 2):
        for case in group:
            case.plan()


def test_large_cells_saturate():
    case = tiny_case(large_cell=True)
    assert numerics.execute(*case.loaded(case.plan())).saturations > 0
