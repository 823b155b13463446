"""The table of tiles: the best tiles are never slower than any single height, and its figures are the planner's."""

import io

import pytest
from rich.console import Console

from sharp.model.machine import load_machine
from sharp.model.network import load_network
from sharp.model.planner import plan
from sharp.sim.bound_table import GROUPS
from sharp.sim.tile_table import print_tile_table, tile_table


@pytest.fixture(scope="module")
def table():
    return tile_table(load_machine("sharp-4k"))


def test_no_single_height_is_faster_than_the_best_tiles(table):
    assert [entry.network for entry in table.entries] == [name for names in GROUPS.values() for name in names]
    for entry in table.entries:
        assert tuple(entry.cycles_by_rows) == table.machine.tile_heights
        assert all(entry.gain(rows) >= 1 for rows in entry.cycles_by_rows), entry.network


def test_cycles_are_those_of_the_planner(table):
    (entry,) = (entry for entry in table.entries if entry.network == "deepbench-lstm-256-t150")
    (shape,) = load_network(entry.network).shapes
    for rows, cycles in entry.cycles_by_rows.items():
        assert cycles == plan(table.machine, shape, steps=150, schedule="unfolded", tile=rows).timing.cycles


def test_table_prints_what_its_result_holds(table):
    console = Console(file=io.StringIO(), width=200)
    print_tile_table(table, console)
    printed, result = console.file.getvalue(), table.result()
    for entry in result["networks"]:
        assert entry["network"] in printed
    for group, means in result["geometric_mean_gains"].items():
        assert group in printed and all(f"{mean:.3f}" in printed for mean in means.values())
