"""The planner: the tile chosen is the best by the exact model, and the bound is the one of the machine."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_layers import cases

from sharp.model import planner
from sharp.model.compiler import Recurrence
from sharp.model.errors import ConfigError, NetworkError
from sharp.model.layer import CELLS, Layer, LayerShape
from sharp.model.machine import load_machine
from sharp.model.planner import TRIAL_STEPS, plan, plan_streams
from sharp.model.program import Tiling
from sharp.model.timing import LSTM, Contract
from sharp.sim.verification import random_case, random_machine


def lstm_shape(inputs, hidden):
    return LayerShape(name="layer", cell="lstm", inputs=inputs, hidden=hidden)


def planned(inputs=13, hidden=21, *, machine="sharp-64", steps=3, schedule="unfolded", tile=None):
    return plan(load_machine(machine), lstm_shape(inputs, hidden), steps=steps, schedule=schedule, tile=tile)


def assert_best(case, steps):
    shape = case.layers[0].shape

    def cycles(tile):
        return plan(case.machine, shape, steps=steps, schedule=case.schedule, tile=tile).timing.cycles

    assert cycles(None) <= min(cycles(height) for height in case.machine.tile_heights)


@settings(deadline=None, max_examples=40)
@given(cases(), st.sampled_from([1, 2, 5, TRIAL_STEPS, TRIAL_STEPS + 1, 60, 61]))
def test_best_tile_is_no_slower_than_any_single_height(case, steps):
    assert_best(case, steps)


@pytest.mark.parametrize("seed", [3070, 3866])
def test_tile_that_is_best_in_the_first_steps_alone_is_not_taken(seed):
    generator = np.random.default_rng(seed)
    assert_best(random_case(generator, random_machine(generator, 0)), 60)


@settings(deadline=None, max_examples=40)
@given(cases(), st.sampled_from([TRIAL_STEPS + 1, 60, 61]))
def test_run_goes_on_as_its_trial_ends(case, steps):
    (stream,) = case.streams
    trial, whole = (case.replace(streams=(stream.replace(steps=number),)).plan() for number in (TRIAL_STEPS, steps))
    # Groups that wait for a short output queue take long to settle.
    assert abs(planner._cycles(trial, steps) - whole.timing.cycles) <= max(1, 0.001 * whole.timing.cycles)


@pytest.mark.parametrize("steps", [1, TRIAL_STEPS, TRIAL_STEPS + 1, 100])
def test_plan_is_for_all_of_its_steps(steps):
    best = planned(steps=steps)
    assert best.steps == best.program.streams[0].steps == len(best.timing.input_spans) == steps


def test_height_asked_for_is_the_height_taken():
    for height in load_machine("sharp-64").tile_heights:
        assert planned(tile=height).program.tile == height


def test_tile_or_size_that_the_machine_cannot_have_is_refused():
    with pytest.raises(ConfigError, match="^tile must be auto or a height of machine sharp-64"):
        planned(tile=4)
    for tile in (None, 8):
        with pytest.raises(NetworkError, match="does not fit machine sharp-64"):
            planned(hidden=9000, tile=tile)


def test_bound_is_the_work_of_a_step_or_the_recurrence():
    machine = load_machine("sharp-64")
    work = planned(13, 21, steps=7)
    assert work.bound_cycles_per_step() == 45  # 4 x 21 x (13 + 21) = 2,856 products, 64 a cycle, rounded up
    assert work.bound_cycles == 7 * 45
    latency = planned(3, 5, steps=7)  # 160 products: 3 cycles
    assert latency.bound_cycles_per_step() == Contract(machine).recurrence_cycles(LSTM) == 29
    assert latency.bound_cycles == 7 * 29


def test_reachable_is_half_of_the_hidden_tiles_but_one_after_the_latency():
    assert planned(3, 5).reachable_cycles_per_step() == 29 + (2 - 1) / 2  # 4 x 5 x 5 = 100 products: 2 tiles
    assert planned(3, 21).reachable_cycles_per_step() == 29 + (28 - 1) / 2  # 4 x 21 x 21 = 1,764 products: 28 tiles
    assert planned(13, 21).reachable_cycles_per_step() == 45  # the work of both parts takes longer


@settings(deadline=None, max_examples=60)
@given(cases(plain=True, schedule="unfolded", steps=16))
def test_no_order_of_tiles_is_faster_than_reachable(case):
    layer = case.plan()
    assert layer.settled_cycles_per_step >= layer.reachable_cycles_per_step()


@pytest.mark.parametrize(
    ("machine", "hidden", "most"),
    [("sharp-1k", 68, 47), ("sharp-4k", 128, 47), ("sharp-16k", 248, 49), ("sharp-64k", 512, 53), ("sharp-64k", 764, 72)],
)
def test_best_tile_comes_near_to_what_is_reachable(machine, hidden, most):
    best = planned(hidden, hidden, machine=machine, steps=TRIAL_STEPS)
    assert best.reachable_cycles_per_step() <= best.settled_cycles_per_step <= most


def test_settled_step_is_one_before_the_last():
    layer = planned(13, 21, steps=40)
    ends = layer.step_ends
    assert len(ends) == 40 and ends[-1] < layer.timing.cycles
    assert layer.settled_cycles_per_step == (ends[-2] - ends[-4]) / 2 == (ends[-12] - ends[-14]) / 2
    short = planned(13, 21, steps=2)
    assert short.settled_cycles_per_step == short.timing.cycles / 2


def test_bundle_that_the_lanes_cannot_take_is_refused():
    for bundle in (3, 8):
        with pytest.raises(ConfigError, match=f"^bundle must be a power of two up to the 4 lanes of machine sharp-64, not {bundle}$"):
            planned(tile=Tiling(8, 8, bundle=bundle))


def test_loaded_program_differs_from_the_plan_in_its_images_alone():
    bare = planned(steps=2)
    generator = np.random.default_rng(1)
    kernels = dict(input_kernel=generator.standard_normal((84, 13)), recurrent_kernel=generator.standard_normal((84, 21)))
    kernels = {name: kernel.astype(np.float32) for name, kernel in kernels.items()}
    layer = Layer(name="layer", cell="lstm", bias=np.ones(84, np.float32), **kernels)
    loaded = bare.loaded([layer], [(np.zeros(21), np.ones(21))])
    images = {"weights", "memory", "accumulators", "hidden", "cell"}
    for field in dataclasses.fields(loaded):
        same = getattr(loaded, field.name) is getattr(bare.program, field.name)
        assert same != (field.name in images)
    assert loaded.weights.any() and loaded.accumulators.any() and loaded.cell.any()


@pytest.mark.parametrize("cell", CELLS)
def test_no_streams_are_faster_than_their_bound(cell):
    machine = load_machine("sharp-1k")
    shape = LayerShape(name="", cell=cell, inputs=40, hidden=72)
    for lengths in ((9,), (9, 9), (9, 4, 7, 1)):
        together = plan_streams(machine, [shape], [Recurrence(0, steps) for steps in lengths], schedule="unfolded")
        work = sum(lengths) * -(-shape.weights // machine.macs)
        longest = max(lengths) * max(-(-shape.weights // machine.macs), Contract(machine).recurrence_cycles(shape))
        assert together.timing.cycles >= together.bound_cycles == max(work, longest)


def test_bound_of_streamed_weights_is_the_time_that_memory_takes():
    machine = load_machine("sharp-64")
    small = machine.replace(buffers=machine.buffers.replace(weight_bytes=128 * 16).model_dump())
    streamed = plan(small, lstm_shape(13, 21), steps=9, schedule="unfolded", tile=8)
    assert streamed.bound_cycles_per_step() == streamed.compiled.memory_words * machine.memory_beats > planned().bound_cycles_per_step()
    assert 1 <= streamed.timing.cycles / streamed.bound_cycles < 1.05
