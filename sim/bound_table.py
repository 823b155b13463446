"""How close cycles come to the bound: the ready-made recurrent networks, and LSTMs of every size, over the ready-made machines.

Bound and cycles of a network are sums over its layers with the unfolded schedule, each layer with its best tile. 1 is the
physical limit of a machine for one sequence, or for several equal ones that run together as streams. Sizes compare the cycles
of a settled step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from sharp.model.compiler import Recurrence
from sharp.model.errors import NetworkError
from sharp.model.layer import LayerShape
from sharp.model.machine import Machine
from sharp.model.network import Network, load_network, network_names
from sharp.model.planner import TRIAL_STEPS, Plan, plan, plan_streams
from sharp.model.timing import LSTM, Contract

SCHEDULE = "unfolded"
MACHINES = ("sharp-1k", "sharp-4k", "sharp-16k", "sharp-64k")
SIZES = range(32, 2049, 12)
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
    utilisation: float
    tile_rows: tuple[int, ...]

    @property
    def ratio(self) -> float:
        return self.bound_cycles / self.cycles


@dataclass(frozen=True)
class BoundTable:
    """Entries by network, then machine, for `streams` sequences that run together."""

    machines: tuple[Machine, ...]
    entries: tuple[Entry, ...]
    streams: int = 1

    def geometric_mean(self, group: str, machine: str, figure: str = "ratio") -> float:
        """Return that of the ratios, or of the `utilisation`, of a group on a machine."""
        return geometric_mean([getattr(entry, figure) for entry in self.entries if (entry.group, entry.machine) == (group, machine)])

    def result(self) -> dict:
        """Return what `sharp bench bound --json` prints."""
        return {
            "schedule": SCHEDULE,
            "streams": self.streams,
            "machines": [
                {
                    "name": machine.name,
                    "hash": machine.hash,
                    "macs": machine.macs,
                    "recurrence_cycles": Contract(machine).recurrence_cycles(LSTM),
                }
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
                    "utilisation": entry.utilisation,
                    "tile_rows": entry.tile_rows,
                }
                for entry in self.entries
            ],
            "geometric_means": {
                group: {machine.name: self.geometric_mean(group, machine.name) for machine in self.machines} for group in GROUPS
            },
        }


@dataclass(frozen=True)
class SizeEntry:
    """An LSTM with as many inputs as hidden neurons on a machine: cycles of a settled step, their bound, and what order can reach."""

    hidden: int
    cycles_per_step: float
    bound_cycles_per_step: int
    reachable_cycles_per_step: float

    @property
    def ratio(self) -> float:
        return self.bound_cycles_per_step / self.cycles_per_step

    @property
    def reachable(self) -> float:
        return self.bound_cycles_per_step / self.reachable_cycles_per_step


@dataclass(frozen=True)
class SizeTable:
    """Entries by machine."""

    entries: dict[Machine, tuple[SizeEntry, ...]]

    def summary(self, machine: Machine) -> dict:
        """Return geometric mean and least ratio over the sizes, as they are and as far as any order of tiles can reach."""
        entries = self.entries[machine]
        least = min(entries, key=lambda entry: entry.ratio)
        return {
            "geometric_mean": geometric_mean([entry.ratio for entry in entries]),
            "reachable_geometric_mean": geometric_mean([entry.reachable for entry in entries]),
            "least": least.ratio,
            "least_hidden": least.hidden,
            "reachable_least": min(entry.reachable for entry in entries),
        }

    def result(self) -> dict:
        """Return what `sharp bench bound --sizes --json` prints."""
        return {
            "schedule": SCHEDULE,
            "machines": [
                {
                    "name": machine.name,
                    "hash": machine.hash,
                    "macs": machine.macs,
                    "recurrence_cycles": Contract(machine).recurrence_cycles(LSTM),
                    **self.summary(machine),
                    "sizes": [
                        {
                            "hidden": entry.hidden,
                            "cycles_per_step": entry.cycles_per_step,
                            "bound_cycles_per_step": entry.bound_cycles_per_step,
                            "bound_ratio": entry.ratio,
                            "reachable": entry.reachable,
                        }
                        for entry in entries
                    ],
                }
                for machine, entries in self.entries.items()
            ],
        }


def size_table(
    machines: tuple[Machine, ...], sizes: Sequence[int] = SIZES, progress: Callable[[str], None] = lambda phase: None
) -> SizeTable:
    """Plan an LSTM of every size on every machine."""
    entries = {}
    for machine in machines:
        progress(f"planning {len(sizes)} sizes on {machine.name}")
        entries[machine] = tuple(_size_entry(machine, hidden) for hidden in sizes)
    return SizeTable(entries)


def _size_entry(machine: Machine, hidden: int) -> SizeEntry:
    shape = LayerShape(name="", cell="lstm", inputs=hidden, hidden=hidden)
    layer = plan(machine, shape, steps=TRIAL_STEPS, schedule=SCHEDULE, tile=None)
    return SizeEntry(hidden, layer.settled_cycles_per_step, layer.bound_cycles_per_step(), layer.reachable_cycles_per_step())


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(ratios))))


def bound_table(machines: tuple[Machine, ...], streams: int = 1) -> BoundTable:
    """Plan every network of GROUPS on every machine; `ConfigError` where a machine does not have so many streams."""
    for machine in machines:
        machine.require_streams(streams)
    entries = [
        _entry(group, network, machine, streams)
        for group, names in GROUPS.items()
        for network in map(load_network, names)
        for machine in machines
    ]
    return BoundTable(machines, tuple(entries), streams)


def _entry(group: str, network: Network, machine: Machine, streams: int) -> Entry:
    runs = [run for shape in network.shapes for run in _runs(machine, shape, network.steps, streams)]
    cycles = sum(run.timing.cycles for run in runs)
    return Entry(
        group=group,
        network=network.name,
        machine=machine.name,
        cycles=cycles,
        bound_cycles=sum(run.bound_cycles for run in runs),
        utilisation=streams * network.macs / (machine.macs * cycles),
        tile_rows=tuple(dict.fromkeys(run.program.tile for run in runs)),
    )


def _runs(machine: Machine, shape: LayerShape, steps: int, streams: int) -> list[Plan]:
    """Return the run of all streams together or, where their weights do not fit the machine, one after another."""
    try:
        return [plan_streams(machine, [shape], [Recurrence(0, steps)] * streams, schedule=SCHEDULE)]
    except NetworkError:
        return [plan(machine, shape, steps=steps, schedule=SCHEDULE, tile=None)] * streams


def print_bound_table(table: BoundTable, console: Console) -> None:
    """Print bound / cycles, or of several streams the utilisation, a row for each network, a column for each machine."""
    figure, what = "ratio", "bound / cycles"
    if table.streams > 1:
        figure, what = "utilisation", f"utilisation with {table.streams} streams"
    shown = Table("network", title=f"{what}, {SCHEDULE} schedule, best tile", title_justify="left")
    for machine in table.machines:
        shown.add_column(f"{machine.name}\nL = {Contract(machine).recurrence_cycles(LSTM)}", justify="right")
    for group in GROUPS:
        rows: dict[str, list[float]] = {}
        for entry in table.entries:
            if entry.group == group:
                rows.setdefault(entry.network, []).append(getattr(entry, figure))
        for network, row in rows.items():
            shown.add_row(network, *(f"{value:.4f}" for value in row))
        means = (table.geometric_mean(group, machine.name, figure) for machine in table.machines)
        shown.add_row(f"[bold]{group}, geometric mean[/]", *(f"[bold]{mean:.4f}[/]" for mean in means))
        shown.add_section()
    console.print(shown, highlight=False)
    console.print("L: cycles from the last tile of an LSTM's step to a tile that needs its h", highlight=False)


def print_size_table(table: SizeTable, console: Console) -> None:
    """Print geometric mean and least bound / cycles over the sizes, a row for each machine."""
    sizes = [entry.hidden for entry in next(iter(table.entries.values()))]
    title = f"bound / cycles of a settled step, {SCHEDULE} schedule, best tile: {len(sizes)} LSTMs of {sizes[0]} to {sizes[-1]} neurons"
    shown = Table("machine", title=title, title_justify="left")
    for column in ("L", "geometric mean", "reachable", "least", "at", "reachable"):
        shown.add_column(column, justify="right")
    for machine in table.entries:
        summary = table.summary(machine)
        shown.add_row(
            machine.name,
            f"{Contract(machine).recurrence_cycles(LSTM)}",
            f"[bold]{summary['geometric_mean']:.4f}[/]",
            f"{summary['reachable_geometric_mean']:.4f}",
            f"{summary['least']:.4f}",
            f"{summary['least_hidden']}",
            f"{summary['reachable_least']:.4f}",
        )
    console.print(shown, highlight=False)
    console.print("reachable: a step takes at least L cycles and half of the hidden part's tiles but one, in any order", highlight=False)
