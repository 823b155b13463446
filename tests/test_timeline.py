"""Timelines: valid trace events on the machine's clock, every tile and every idle cycle in its place, and a readable figure."""

import io
import itertools
import json

import numpy as np
import pytest
from PIL import Image

from sharp.model.machine import load_machine
from sharp.model.layer import LayerShape
from sharp.model.planner import plan
from sharp.model.steps import SCHEDULES
from sharp.model.timing import Contract
from sharp.sim.timeline import KINDS, Track, figure, spans, trace_events

STEPS = 7


def planned(schedule="unfolded", *, machine="sharp-64", inputs=20, hidden=37, steps=STEPS, tile=None):
    shape = LayerShape(name="layer", cell="lstm", inputs=inputs, hidden=hidden)
    machine = load_machine(machine) if isinstance(machine, str) else machine
    return plan(machine, shape, steps=steps, schedule=schedule, tile=tile)


# The large machines wait for h: one inside its hidden parts, one before them.
PLANS = {
    **{f"small {schedule}": dict(schedule=schedule) for schedule in SCHEDULES},
    **{f"large {schedule}": dict(schedule=schedule, machine="sharp-64k", hidden=256, inputs=256) for schedule in SCHEDULES},
    "uneven": dict(machine="sharp-4k", hidden=77, inputs=130),
    "one step": dict(steps=1),
}


@pytest.fixture(params=PLANS, scope="module")
def some_plan(request):
    return planned(**PLANS[request.param])


def of(found, track):
    return [span for span in found if span.track is track]


def test_tracks_hold_every_tile_group_and_beat_that_the_counters_count(some_plan):
    found, counts = spans(some_plan), some_plan.timing.counts
    assert sum(span.args["tiles"] for span in of(found, Track.TILES)) == counts["tiles"]
    assert sum(span.args["beats"] for span in of(found, Track.OUTPUT)) == len(some_plan.timing.output_cycles)
    assert sum(span.args["neurons"] for span in of(found, Track.UPDATE)) == counts["cell_updates"]
    assert len(of(found, Track.INPUT)) == some_plan.steps


def test_stalls_are_the_idle_cycles_up_to_the_last_tile(some_plan):
    found, timing = spans(some_plan), some_plan.timing
    last = max(span.last for span in of(found, Track.TILES))
    stalled = sum(span.cycles for span in of(found, Track.STALLS)) + sum(span.args["stalled cycles"] for span in of(found, Track.TILES))
    assert stalled == sum(timing.idle.values()) - (timing.cycles - 1 - last)


def test_spans_of_a_track_do_not_overlap_and_lie_in_the_run(some_plan):
    for track in Track:
        ordered = sorted(of(spans(some_plan), track), key=lambda span: span.first)
        assert all(one.last < other.first for one, other in itertools.pairwise(ordered)), track
        assert all(0 <= span.first <= span.last < some_plan.timing.cycles for span in ordered)


def test_no_hidden_part_ends_before_the_h_that_it_reads_is_written(some_plan):
    found = spans(some_plan)
    written = {span.step: span.last for span in found if span.kind == "h"}
    ends = {span.step: span.last for span in found if span.kind == "hidden part"}
    assert set(written) == set(ends) == set(range(some_plan.steps))
    for step in range(1, some_plan.steps):
        assert ends[step] >= written[step - 1]
        assert written[step] - ends[step] >= Contract(some_plan.machine).recurrence_cycles(some_plan.shape)


def test_unfolded_computes_the_next_input_part_between_two_hidden_parts():
    found = of(spans(planned("unfolded")), Track.TILES)
    order = [step_kind for step_kind, _ in itertools.groupby((span.kind, span.step) for span in found)]
    between = [[("hidden part", step), ("input part", step + 1)] for step in range(STEPS)]
    assert order == [("input part", 0), *itertools.chain(*between)][:-1]


def test_step_of_a_sequential_part_is_the_same_for_all_four_gates():
    found = of(spans(planned("sequential", tile=8, hidden=32, inputs=32)), Track.TILES)
    steps = [span.step for span in found]
    assert steps == sorted(steps) and {steps.count(step) for step in range(STEPS)} == {8}


@pytest.fixture(scope="module")
def trace():
    plans = [("first", planned()), ("second", planned("sequential", inputs=37))]
    return plans, json.loads(trace_events(plans))


def test_trace_events_are_valid_and_every_thread_has_a_name(trace):
    _, content = trace
    named = {(event["pid"], event["tid"]) for event in content["traceEvents"] if event["name"] == "thread_name"}
    processes = {event["pid"] for event in content["traceEvents"] if event["name"] == "process_name"}
    assert processes == {1, 2}
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["args"], dict)
        if event["ph"] == "M":
            (value,) = event["args"].values()
            assert value or value == 0
        else:
            assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] > 0
            assert (event["pid"], event["tid"]) in named


def test_trace_times_follow_the_clock_and_layers_follow_each_other(trace):
    plans, content = trace
    clock_hz = plans[0][1].machine.clock_hz
    starts = [0, plans[0][1].timing.cycles]
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            first, last = event["args"]["first cycle"], event["args"]["last cycle"]
            assert event["ts"] == pytest.approx((starts[event["pid"] - 1] + first) / clock_hz * 1e6, abs=1e-6)
            assert event["dur"] == pytest.approx((last - first + 1) / clock_hz * 1e6, abs=1e-6)
    about = content["otherData"]
    assert about["cycles"] == sum(plan.timing.cycles for _, plan in plans)
    assert [layer["steps_shown"] for layer in about["layers"]] == ["all", "all"]
    assert [layer["idle"] for layer in about["layers"]] == [plan.timing.idle for _, plan in plans]


def test_long_run_is_cut_after_whole_steps_of_each_layer_and_says_so():
    plans = [("first", planned(steps=400)), ("second", planned(steps=400, inputs=37))]
    content = json.loads(trace_events(plans, event_limit=1000))
    for process, ((_, each), layer) in enumerate(zip(plans, content["otherData"]["layers"], strict=True), 1):
        shown = [event for event in content["traceEvents"] if event["ph"] == "X" and event["pid"] == process]
        assert 400 < len(shown) <= 500
        steps = {int(event["name"].split()[-1]) for event in shown}
        assert steps == set(range(len(steps))) and layer["steps_shown"] == f"the first {len(steps)}"
        assert len(shown) == sum(span.step < len(steps) for span in spans(each))


def test_every_kind_of_span_has_a_colour_and_a_meaning(some_plan):
    assert {span.kind for span in spans(some_plan)} <= set(KINDS)


@pytest.mark.parametrize("name", ["large sequential", "one step"])
def test_figure_is_the_same_for_the_same_run_and_fine_enough_to_print(name):
    drawn = planned(**PLANS[name])
    content = figure(drawn, "title")
    assert figure(drawn, "title") == content
    picture = Image.open(io.BytesIO(content))
    assert picture.info["dpi"][0] >= 150 and picture.width >= 1500
    assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 10
