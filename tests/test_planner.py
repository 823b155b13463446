"""The planner: the tile chosen is the best by the exact model, and the bound is the one of the machine."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_layers import cases

from sharp.model import planner
from sharp.model.errors import ConfigError, NetworkError
from sharp.model.machine import load_machine
from sharp.model.network import LayerShape, LstmLayer
from sharp.model.planner import TRIAL_STEPS, plan
from sharp.model.timing import Contract
from sharp.sim.verification import random_case, random_machine


def lstm_shape(inputs, hidden):
    return LayerShape(name="layer", cell="lstm", inputs=inputs, hidden=hidden)


def planned(inputs=13, hidden=21, *, machine="sharp-64", steps=3, schedule="unfolded", tile=None):
    return plan(load_machine(machine), lstm_shape(inputs, hidden), steps=steps, schedule=schedule, tile=tile)


def assert_best(case, steps):
    def cycles(tile):
        shape = lstm_shape(case.inputs, case.hidden)
        return plan(case.machine, shape, steps=steps, schedule=case.schedule, tile=tile).timing.cycles

    assert cycles(None) <= min(cycles(height) for height in case.machine.tile_heights)


@settings(deadline=None, max_examples=40)
@given(cases(), st.sampled_from([1, 2, 5, TRIAL_STEPS, TRIAL_STEPS + 1, 60, 61]))
def test_best_tile_is_no_slower_than_any_single_height(case, steps):
    assert_best(case, steps)


@pytest.mark.parametrize("seed", [1109923754, 4033771051, 60513023, 1836048450])
def test_tile_that_is_best_in_the_first_steps_alone_is_not_taken(seed):
    generator = np.random.default_rng(seed)
    assert_best(random_case(generator, random_machine(generator, 0)), 60)


@settings(deadline=None, max_examples=40)
@given(cases(), st.sampled_from([TRIAL_STEPS + 1, 60, 61]))
def test_run_goes_on_as_its_trial_ends(case, steps):
    trial, whole = (case.replace(steps=number).plan() for number in (TRIAL_STEPS, steps))
    assert abs(planner._cycles(trial, steps) - whole.timing.cycles) <= 1


@pytest.mark.parametrize("steps", [1, TRIAL_STEPS, TRIAL_STEPS + 1, 100])
def test_plan_is_for_all_of_its_steps(steps):
    best = planned(steps=steps)
    assert best.steps == best.program.steps == len(best.timing.input_spans) == steps


def test_height_asked_for_is_the_height_taken():
    for height in load_machine("sharp-64").tile_heights:
        assert planned(tile=height).program.tile == height


def test_tile_or_size_that_the_machine_cannot_have_is_refused():
    with pytest.raises(ConfigError, match="^tile must be auto or a height of machine sharp-64"):
        planned(tile=4)
    for tile in (None, 8):
        with pytest.raises(NetworkError, match="does not fit machine sharp-64"):
            planned(hidden=4096, tile=tile)


def test_bound_is_the_work_of_a_step_or_the_recurrence():
    machine = load_machine("sharp-64")
    work = planned(13, 21, steps=7)
    assert work.bound_cycles_per_step == 45  # 4 x 21 x (13 + 21) = 2,856 products, 64 a cycle, rounded up
    assert work.bound_cycles == 7 * 45
    latency = planned(3, 5, steps=7)  # 160 products: 3 cycles
    assert latency.bound_cycles_per_step == Contract(machine).recurrence_cycles == 29
    assert latency.bound_cycles == 7 * 29


def test_loaded_program_differs_from_the_plan_in_its_images_alone():
    bare = planned(steps=2)
    generator = np.random.default_rng(1)
    kernels = dict(input_kernel=generator.standard_normal((84, 13)), recurrent_kernel=generator.standard_normal((84, 21)))
    layer = LstmLayer(name="layer", bias=np.ones(84, np.float32), **{name: kernel.astype(np.float32) for name, kernel in kernels.items()})
    loaded = bare.loaded(layer, np.zeros(21), np.ones(21))
    images = {"weights", "accumulators", "hidden", "cell"}
    for field in dataclasses.fields(loaded):
        same = getattr(loaded, field.name) is getattr(bare.program, field.name)
        assert same != (field.name in images)
    assert loaded.weights.any() and loaded.accumulators.any() and loaded.cell.any()
