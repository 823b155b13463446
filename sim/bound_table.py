"""How close cycles come to the bound: the ready-made recurrent networks over the ready-made machines.

Bound and cycles are sums over a network's layers with the unfolded schedule, each layer with its best tile. 1 is the
physical limit of a machine for one sequence.
"""

from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from sharp.model.machine import Machine
from sharp.model.network import SUPPORTED_CELLS, Network, load_network, network_names
from sharp.model.planner import plan
from sharp.model.timing import Contract

SCHEDULE = "unfolded"
MACHINES = ("sharp-1k", "sharp-4k", "sharp-16k", "sharp-64k")
GROUPS = {
    "DeepBench": tuple(name for name in network_names() if name.startswith("deepbench-")),
    "SHARP paper": ("bysdne", "eesen", "gmat", "rldradspr"),
}


@dataclass(frozen=True)
class Entry:
    """A network on a machine."""

    group: str
    network: str
    machine: str
    cycles: int
    bound_cycles: int
    tile_rows: tuple[int, ...]

    @property
    def ratio(self) -> float:
        return self.bound_cycles / self.cycles


@dataclass(frozen=True)
class BoundTable:
    """Entries by network, then machine, and the networks whose cell is not supported."""

    machines: tuple[Machine, ...]
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...]

    def geometric_mean(self, group: str, machine: str) -> float:
        ratios = [entry.ratio for entry in self.entries if (entry.group, entry.machine) == (group, machine)]
        return float(np.exp(np.mean(np.log(ratios))))

    def result(self) -> dict:
        """Return what `sharp bench bound --json` prints."""
        return {
            "schedule": SCHEDULE,
            "machines": [
                {"name": machine.name, "hash": machine.hash, "macs": machine.macs, "recurrence_cycles": Contract(machine).recurrence_cycles}
                for machine in self.machines
            ],
            "networks": [
                {
                    "group": entry.group,
                    "network": entry.network,
                    "machine": entry.machine,
                    "cycles": entry.cycles,
                    "bound_cycles": entry.bound_cycles,
                    "bound_ratio": entry.ratio,
                    "tile_rows": entry.tile_rows,
                }
                for entry in self.entries
            ],
            "geometric_means": {
                group: {machine.name: self.geometric_mean(group, machine.name) for machine in self.machines} for group in GROUPS
            },
            "left_out": self.left_out,
        }


def bound_table(machines: tuple[Machine, ...]) -> BoundTable:
    """Plan every network of GROUPS on every machine."""
    entries, left_out = [], []
    for group, names in GROUPS.items():
        for network in map(load_network, names):
            if all(shape.cell in SUPPORTED_CELLS for shape in network.shapes):
                entries += [_entry(group, network, machine) for machine in machines]
            else:
                left_out.append(network.name)
    return BoundTable(machines, tuple(entries), tuple(left_out))


def _entry(group: str, network: Network, machine: Machine) -> Entry:
    layers = [plan(machine, shape, steps=network.steps, schedule=SCHEDULE, tile=None) for shape in network.shapes]
    return Entry(
        group=group,
        network=network.name,
        machine=machine.name,
        cycles=sum(layer.timing.cycles for layer in layers),
        bound_cycles=sum(layer.bound_cycles for layer in layers),
        tile_rows=tuple(dict.fromkeys(layer.program.tile for layer in layers)),
    )


def print_bound_table(table: BoundTable, console: Console) -> None:
    """Print bound / cycles, a row for each network, a column for each machine."""
    shown = Table("network", title=f"bound / cycles, {SCHEDULE} schedule, best tile", title_justify="left")
    for machine in table.machines:
        shown.add_column(f"{machine.name}\nL = {Contract(machine).recurrence_cycles}", justify="right")
    for group in GROUPS:
        ratios: dict[str, list[float]] = {}
        for entry in table.entries:
            if entry.group == group:
                ratios.setdefault(entry.network, []).append(entry.ratio)
        for network, row in ratios.items():
            shown.add_row(network, *(f"{ratio:.4f}" for ratio in row))
        means = (table.geometric_mean(group, machine.name) for machine in table.machines)
        shown.add_row(f"[bold]{group}, geometric mean[/]", *(f"[bold]{mean:.4f}[/]" for mean in means))
        shown.add_section()
    console.print(shown, highlight=False)
    console.print("L: cycles from the last tile of a step to the first tile that needs its h", highlight=False)
    if table.left_out:
        console.print(f"Left out, their cell is not supported yet: {', '.join(table.left_out)}", highlight=False, soft_wrap=True)
