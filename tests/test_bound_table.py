"""The bound's table: no machine beats it, and the unfolded schedule comes close where the work is larger than the latency."""

import numpy as np
import pytest

from sharp.model.machine import load_machine
from sharp.model.timing import Contract
from sharp.sim.bound_table import MACHINES, bound_table


@pytest.fixture(scope="module")
def table():
    return bound_table(tuple(map(load_machine, MACHINES)))


def test_no_machine_is_faster_than_its_bound(table):
    assert len(table.entries) == 9 * len(MACHINES)
    assert all(0.5 < entry.ratio <= 1 for entry in table.entries)


@pytest.mark.parametrize("machine", ["sharp-1k", "sharp-4k"])
def test_deepbench_points_are_within_five_percent_of_the_bound(table, machine):
    ratios = {entry.network: entry.ratio for entry in table.entries if entry.group == "DeepBench" and entry.machine == machine}
    assert len(ratios) == 5 and min(ratios.values()) >= 0.95


def test_bound_of_one_layer_is_work_over_multipliers_or_latency(table):
    cycles = {entry.machine: entry.bound_cycles for entry in table.entries if entry.network == "deepbench-lstm-256-t150"}
    for name in MACHINES:
        machine = load_machine(name)
        work = 4 * 256 * (256 + 256) // machine.macs
        assert cycles[name] == 150 * max(work, Contract(machine).recurrence_cycles)


def test_layers_of_a_network_add_up(table):
    (entry,) = (entry for entry in table.entries if (entry.network, entry.machine) == ("gmat", "sharp-1k"))
    assert entry.bound_cycles == 17 * 50 * (4 * 1024 * 2048 // 1024)


def test_networks_whose_cell_is_not_supported_are_left_out_by_name(table):
    assert len(table.left_out) == 6 and all(name.startswith("deepbench-gru-") for name in table.left_out)


def test_geometric_mean_is_that_of_its_group(table):
    ratios = [entry.ratio for entry in table.entries if entry.group == "SHARP paper" and entry.machine == "sharp-1k"]
    assert table.geometric_mean("SHARP paper", "sharp-1k") == pytest.approx(np.prod(ratios) ** (1 / len(ratios)))
