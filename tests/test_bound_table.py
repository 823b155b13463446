"""The bound's tables: no machine beats it, and the unfolded schedule comes close where the work is larger than the latency."""

import io

import numpy as np
import pytest
from rich.console import Console

from sharp.model.machine import load_machine
from sharp.model.timing import LSTM, Contract
from sharp.sim.bound_table import MACHINES, SIZES, bound_table, print_size_table, size_table


@pytest.fixture(scope="module")
def table():
    return bound_table(tuple(map(load_machine, MACHINES)))


def test_no_machine_is_faster_than_its_bound(table):
    assert len(table.entries) == 15 * len(MACHINES)
    assert all(0.5 < entry.ratio <= 1 for entry in table.entries)


@pytest.mark.parametrize("machine", ["sharp-1k", "sharp-4k"])
def test_deepbench_points_are_within_five_percent_of_the_bound(table, machine):
    ratios = {entry.network: entry.ratio for entry in table.entries if entry.group == "DeepBench" and entry.machine == machine}
    single = ratios.pop("deepbench-gru-512-t1")  # one step has nothing to hide its latency behind
    assert len(ratios) == 10 and min(ratios.values()) >= 0.95 and single >= 0.85


def test_bound_of_one_layer_is_work_over_multipliers_or_latency(table):
    cycles = {entry.machine: entry.bound_cycles for entry in table.entries if entry.network == "deepbench-lstm-256-t150"}
    for name in MACHINES:
        machine = load_machine(name)
        work = 4 * 256 * (256 + 256) // machine.macs
        assert cycles[name] == 150 * max(work, Contract(machine).recurrence_cycles(LSTM))


def test_layers_of_a_network_add_up(table):
    (entry,) = (entry for entry in table.entries if (entry.network, entry.machine) == ("gmat", "sharp-1k"))
    assert entry.bound_cycles == 17 * 50 * (4 * 1024 * 2048 // 1024)


def test_geometric_mean_is_that_of_its_group(table):
    ratios = [entry.ratio for entry in table.entries if entry.group == "SHARP paper" and entry.machine == "sharp-1k"]
    assert table.geometric_mean("SHARP paper", "sharp-1k") == pytest.approx(np.prod(ratios) ** (1 / len(ratios)))


LEAST = {"sharp-1k": (0.99, 0.78), "sharp-4k": (0.98, 0.76), "sharp-16k": (0.97, 0.77), "sharp-64k": (0.94, 0.76)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_geometric_mean_over_all_sizes_comes_near_to_what_order_can_reach(name):
    machine = load_machine(name)
    summary = size_table((machine,)).summary(machine)
    mean, least = LEAST[name]
    assert summary["geometric_mean"] >= max(mean, 0.965 * summary["reachable_geometric_mean"]) and summary["least"] >= least


@pytest.fixture(scope="module")
def sizes():
    return size_table((load_machine("sharp-1k"), load_machine("sharp-64k")), (32, 68, 320))


def test_sizes_are_those_from_32_to_2048_in_steps_of_12():
    assert (SIZES[0], SIZES[1], SIZES[-1], len(SIZES)) == (32, 44, 2048, 169)


def test_no_size_is_faster_than_reachable_or_reachable_than_the_bound(sizes):
    for entries in sizes.entries.values():
        assert [entry.hidden for entry in entries] == [32, 68, 320]
        assert all(entry.cycles_per_step >= entry.reachable_cycles_per_step >= entry.bound_cycles_per_step for entry in entries)
        assert all(entry.ratio <= entry.reachable <= 1 for entry in entries)


def test_summary_of_sizes_is_their_geometric_mean_and_least(sizes):
    machine = load_machine("sharp-1k")
    summary, ratios = sizes.summary(machine), [entry.ratio for entry in sizes.entries[machine]]
    assert summary["geometric_mean"] == pytest.approx(np.prod(ratios) ** (1 / 3))
    assert (summary["least"], summary["least_hidden"]) == (min(ratios), 68) and summary["least"] < summary["reachable_least"] < 1


def test_size_table_prints_what_its_result_holds(sizes):
    console = Console(file=io.StringIO(), width=200)
    print_size_table(sizes, console)
    printed = console.file.getvalue()
    for machine in sizes.result()["machines"]:
        assert machine["name"] in printed and len(machine["sizes"]) == 3
        for key in ("geometric_mean", "reachable_geometric_mean", "least", "reachable_least"):
            assert f"{machine[key]:.4f}" in printed
