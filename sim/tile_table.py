"""What the best tile gains: cycles of the ready-made recurrent networks with every single tile height over those with the best tiling.

Unfolded schedule, one sequence; a network's cycles are the sum over its layers, of which each has its best tiling.
"""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from sharp.model.machine import Machine
from sharp.model.network import Network, load_network
from sharp.model.planner import plan

from .bound_table import GROUPS, SCHEDULE, geometric_mean


@dataclass(frozen=True)
class TileEntry:
    """A network's cycles with its best tilings, and with one height K for all of its tiles but those left over."""

    group: str
    network: str
    cycles: int
    cycles_by_rows: dict[int, int]

    def gain(self, rows: int) -> float:
        """Return how many times as long the run with tiles of `rows` rows takes."""
        return self.cycles_by_rows[rows] / self.cycles


@dataclass(frozen=True)
class TileTable:
    """Entries of a machine by network."""

    machine: Machine
    entries: tuple[TileEntry, ...]

    def geometric_mean(self, group: str, rows: int) -> float:
        return geometric_mean([entry.gain(rows) for entry in self.entries if entry.group == group])

    def result(self) -> dict:
        """Return what `sharp bench tiles --json` prints."""
        heights = self.machine.tile_heights
        return {
            "schedule": SCHEDULE,
            "machine": {"name": self.machine.name, "hash": self.machine.hash},
            "networks": [
                {"group": entry.group, "network": entry.network, "cycles": entry.cycles, "cycles_by_tile_rows": entry.cycles_by_rows}
                for entry in self.entries
            ],
            "geometric_mean_gains": {group: {rows: self.geometric_mean(group, rows) for rows in heights} for group in GROUPS},
        }


def tile_table(machine: Machine) -> TileTable:
    """Plan every network of GROUPS on a machine with every tile height and with the best tilings."""
    entries = [_entry(group, load_network(name), machine) for group, names in GROUPS.items() for name in names]
    return TileTable(machine, tuple(entries))


def _entry(group: str, network: Network, machine: Machine) -> TileEntry:
    def cycles(tile: int | None) -> int:
        runs = (plan(machine, shape, steps=network.steps, schedule=SCHEDULE, tile=tile) for shape in network.shapes)
        return sum(run.timing.cycles for run in runs)

    return TileEntry(group, network.name, cycles(None), {rows: cycles(rows) for rows in machine.tile_heights})


def print_tile_table(table: TileTable, console: Console) -> None:
    """Print how many times as long each single height takes, a row for each network."""
    title = f"{table.machine.name}: cycles with tiles of K rows over those with the best tiles"
    shown = Table("network", title=title, title_justify="left")
    shown.columns[0].no_wrap = True
    for rows in table.machine.tile_heights:
        shown.add_column(f"{rows}", justify="right")
    for group in GROUPS:
        for entry in table.entries:
            if entry.group == group:
                gains = (f"{entry.gain(rows):.3f}" for rows in table.machine.tile_heights)
                shown.add_row(entry.network, *gains)
        means = (f"[bold]{table.geometric_mean(group, rows):.3f}[/]" for rows in table.machine.tile_heights)
        shown.add_row(f"[bold]{group}, geometric mean[/]", *means)
        shown.add_section()
    console.print(shown, highlight=False)
    console.print("Rows and columns left over have tiles of other heights in every column.", highlight=False)
