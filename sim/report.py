"""Shows what came of a run: tables for the terminal, and a folder of results.

Two rules. Every number is one of `Execution.result()`; nothing is computed here but ratios of two of them. Runs of the same
network stand side by side, a column each.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .execution import Execution, MachineRun
from .files import npz, require_writable, write_whole
from .timeline import figure, trace_events

RESULT_FILES = ("result.json", "outputs.npz", "timeline.json", "timeline.png")

IDLE_MEANINGS = {
    "program": "no instruction",
    "input": "wait for x",
    "hidden": "wait for h",
    "weights": "wait for weights",
    "accumulator": "wait for a sum",
    "drained": "after last tile",
}
EVENT_UNITS = {
    "tiles": "tiles of K x N",
    "tile_rows": "row sums of the tree",
    "active_macs": "products of matrix entries",
    "padded_macs": "products of padding",
    "multiplications": "products",
    "tree_additions": "fp32 additions",
    "accumulations": "fp32 additions",
    "weight_word_reads": "words, a weight per MAC",
    "weight_writes": "words from memory",
    "input_reads": "x elements",
    "input_writes": "x elements",
    "hidden_reads": "h elements",
    "hidden_writes": "h elements",
    "accumulator_reads": "sums",
    "bias_reads": "biases among the sums",
    "drained_rows": "sums to the lanes",
    "gate_activations": "gates",
    "cell_activations": "neurons",
    "lane_multiplications": "products",
    "lane_additions": "additions",
    "gate_writes": "gates",
    "gate_reads": "gates",
    "cell_updates": "neurons",
    "cell_reads": "cell states",
    "outputs": "h and c elements",
    "saturations": "cell states at their limit",
    "instructions": "words fetched",
}


def print_runs(executions: Sequence[Execution], console: Console) -> None:
    """Print runs of one network on one machine, side by side: what was run, its cycles and where they went, its events."""
    first = executions[0]
    machine = first.machine
    results = [execution.result() for execution in executions]
    title = f"[bold]{escape(first.network.name)}[/] on {escape(machine.name)} ({machine.hash}): {machine.macs:,} MACs, {machine.format}"
    table = Table("schedule", *(execution.schedule for execution in executions))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, cell: Callable[[dict], str]) -> None:
        table.add_row(name, *(cell(result) for result in results))

    groups = [_groups(execution.runs) for execution in executions]
    table.add_row("layers", *("\n".join(shape for shape, _ in each) for each in groups))
    table.add_row("tile rows K", *("\n".join(str(tile) for _, tile in each) for each in groups))
    row("steps", lambda result: f"{result['steps']:,}")
    row("cycles", lambda result: f"[bold]{result['cycles']:,}[/]")
    row("cycles per step", lambda result: f"{result['cycles_per_step']:,.2f}")
    row("bound, cycles", lambda result: f"{result['bound_cycles']:,}")
    row("bound / cycles", lambda result: f"[bold]{result['bound_ratio']:.4f}[/]")
    row("utilisation", lambda result: _percent(result["utilisation"]))
    row(f"time at {machine.clock_hz / 1e6:g} MHz", lambda result: _time(result["seconds"]))
    table.add_section()
    row("idle cycles", lambda result: f"{sum(result['idle'].values()):,}")
    row("  of all cycles", lambda result: _percent(sum(result["idle"].values()) / result["cycles"]))
    for reason, meaning in IDLE_MEANINGS.items():
        row(f"  {meaning}", lambda result, reason=reason: f"{result['idle'][reason]:,}")
    table.add_section()
    if first.simulated:
        for what in ("values", "cycles", "events"):
            row(f"RTL {what}", lambda result, what=what: _match(result["rtl"][f"{what}_match"]))
        row("RTL speed", lambda result: f"{result['rtl']['cycles_per_second']:,.0f} /s")
    else:
        row("RTL", lambda result: "not run")
    if first.reference is not None:
        table.add_section()
        for name in first.reference:
            row(f"error of {escape(name)}", lambda result, name=name: f"{result['reference']['max_abs_error'][name]:.2e}")
    if first.score is not None:
        table.add_section()
        row(first.score.measure, lambda result: f"{result['score']['value']:.4g}")
        row("  in float64", lambda result: f"{result['score']['reference']:.4g}")
        row("  alike", lambda result: _percent(result["score"]["agreement"]))
    console.print(title, highlight=False)
    console.print(table, highlight=False)
    if first.reference is not None:
        console.print(f"error: the largest absolute difference from {results[0]['reference']['engine']}", highlight=False)
    console.print(_events(executions, results), highlight=False)


def _events(executions: Sequence[Execution], results: Sequence[dict]) -> Table:
    # More columns do not fit a terminal.
    with_units = len(executions) <= 2
    table = Table("event", *(["unit"] if with_units else []))
    for execution in executions:
        table.add_column(execution.schedule, justify="right")
    for name, unit in EVENT_UNITS.items():
        table.add_row(name, *([unit] if with_units else []), *(f"{result['events'][name]:,}" for result in results))
    return table


def _groups(runs: Sequence[MachineRun]) -> list[tuple[str, int]]:
    """Return streams and tile rows of the runs, once for those of the same kind."""
    kinds = Counter((_streams(run), run.plan.program.tile) for run in runs)
    return [(f"{'' if count == 1 else f'{count} x '}{streams}", tile) for (streams, tile), count in kinds.items()]


def _streams(run: MachineRun) -> str:
    """Return the layers of a run's streams, ` | ` between those that run together."""
    shapes = [run.plan.shapes[each.layer] for each in run.plan.recurrences]
    names = [f"{shape.cell.upper()} {shape.inputs} -> {shape.hidden}" for shape in shapes]
    groups = [(name, len(list(group))) for name, group in groupby(names)]
    return " | ".join(name if count == 1 else f"({name}) x {count}" for name, count in groups)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _match(equal: bool) -> str:
    return "[green]equal[/]" if equal else "[bold red]NOT equal[/]"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:,.4g} {unit}"
    return f"{seconds * 1e9:,.4g} ns"


def write_run(execution: Execution, folder: Path) -> None:
    """Write RESULT_FILES to `folder`, which is made; ConfigError if it cannot be written.

    The picture is that of the run with the most cycles.
    """
    plans = [(run.name, run.plan) for run in execution.runs]
    name, slowest = max(plans, key=lambda named: named[1].timing.cycles)
    where = execution.network.name if len(plans) == 1 else f"{execution.network.name}, layer {name},"
    title = f"{where} on {execution.machine.name}, {execution.schedule}, tile K = {slowest.program.tile}"
    contents = (
        result_json(execution.result()),
        npz(execution.outputs),
        trace_events(plans),
        figure(slowest, title),
    )
    require_writable(folder)
    for file, content in zip(RESULT_FILES, contents, strict=True):
        write_whole(folder / file, content)


def result_json(result: dict) -> bytes:
    """Return a result, or several by schedule, as it is written and printed."""
    return (json.dumps(result, indent=2) + "\n").encode()
