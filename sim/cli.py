"""The command line: run, verify, verilog, bench, machines, doctor.

Exit codes: 0 good, 1 a comparison failed or a simulation broke, 2 the user's input (one line on standard error). With
`--json` standard output carries the JSON alone. Libraries that take long to load are imported by the commands that use
them, after the input has been checked.
"""

import json
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sharp.model.errors import ConfigError, NetworkError
from sharp.model.machine import Machine, load_machine, machine_names
from sharp.model.network import Network, load_network, network_names
from sharp.model.steps import SCHEDULES

from .files import require_writable, write_whole

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="SHARP: a tiled accelerator for recurrent networks. Its model predicts every bit, cycle and event of its RTL.",
)
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Tables over the ready-made networks and machines.")
app.add_typer(bench_app, name="bench")
out = Console()
err = Console(stderr=True)

INTERRUPTED = 130
ALL_SCHEDULES = "all"

MachineOption = Annotated[
    str,
    typer.Option("--machine", "-m", metavar="NAME|FILE", help=f"Machine: {', '.join(machine_names())}, or a YAML file."),
]


def main() -> None:
    """Run the command line and turn what a user can set right into one line and exit code 2."""
    try:
        code = app(prog_name="sharp", standalone_mode=False)
        sys.stdout.flush()
    except (ConfigError, NetworkError) as error:
        _fail(str(error), 2)
    except typer.Abort:
        code = INTERRUPTED
    except _usage_errors() as error:
        message = error.format_message()
        if not message:  # no command was given, and the help has been printed
            sys.exit(2)
        _fail(message, 2)
    except BrokenPipeError:  # whoever read the output has seen enough
        _drop_output()
        sys.exit(1)
    except OSError as error:
        _drop_output()
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
    except MemoryError as error:
        _fail(f"out of memory: {error}", 2)
    except _simulation_errors() as error:
        _fail(str(error), 1)
    if code == INTERRUPTED:
        _fail("interrupted", INTERRUPTED)
    sys.exit(code or 0)


def _drop_output() -> None:
    """Let the interpreter's last flush go nowhere, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_errors() -> type[Exception]:
    return typer.BadParameter.__mro__[2]


def _simulation_errors() -> type[Exception]:
    # Imported when needed: the simulator's libraries take longer to load than most commands to run.
    from .verilator import SimulationError

    return SimulationError


def _fail(message: str, code: int) -> None:
    if code == 2:
        message = " ".join(message.splitlines())
    err.print(f"[bold red]sharp: error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(code)


@contextmanager
def _phases(title: str, total: int | None = None) -> Iterator:
    """Show progress on standard error; yield a function that takes a phase and, optionally, how much has been done."""
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    if total is not None:
        columns.insert(3, MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(escape(title), total=total)

        def report(phase: str, done: int | None = None) -> None:
            progress.update(task, description=escape(phase), **({} if done is None else {"completed": done}))

        yield report


@app.command()
def run(
    network: Annotated[
        str, typer.Argument(metavar="NETWORK", help=f"An .onnx file, a YAML file, or a name: {', '.join(network_names())}.")
    ],
    machine: MachineOption = "sharp-1k",
    schedule: Annotated[
        str, typer.Option(metavar="|".join((*SCHEDULES, ALL_SCHEDULES)), help="Order of the work in a step; all compares.")
    ] = "unfolded",
    tile: Annotated[
        str, typer.Option(metavar="auto|K", help="Rows of a tile; auto takes what needs the fewest predicted cycles.")
    ] = "auto",
    streams: Annotated[
        int | None, typer.Option(help="Most recurrences that run together; default: as many as the machine has.")
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Inputs by name. Default: a synthesised sound, or seeded random vectors.")
    ] = None,
    rtl: Annotated[bool, typer.Option("--rtl", help="Execute on the RTL in Verilator too, and compare bits, cycles and events.")] = False,
    out_folder: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write result.json, outputs.npz, timeline.json, timeline.png here; all schedules: a folder each."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print result.json alone on standard output; of all schedules, one by name each.")
    ] = False,
) -> None:
    """Run a network on a machine: predict its cycles, compute its values, compare with RTL and reference.

    [bold]Examples[/]

      sharp run silero-vad --rtl --out out/demo

      sharp run deepbench-lstm-1024-t25 --machine sharp-4k --schedule sequential

      sharp run model.onnx --inputs inputs.npz --tile 64 --json
    """
    chosen = load_machine(machine)
    schedules = _schedules(schedule)
    height = _tile(tile)
    folders = {} if out_folder is None else {each: out_folder / each if len(schedules) > 1 else out_folder for each in schedules}
    loaded = load_network(network)
    given = None if inputs is None else _read_inputs(inputs)
    for folder in folders.values():
        require_writable(folder)
    if rtl:
        _require_tools()
    _require_fit(loaded, chosen, schedules, height)

    from .execution import execute
    from .report import RESULT_FILES, print_runs, result_json, write_run

    executions = []
    with _phases("loading") as report:
        for each in schedules:
            options = dict(schedule=each, tile=height, inputs=given, streams=streams, rtl=rtl, progress=report)
            executions.append(execute(loaded, chosen, **options))
            if not executions[-1].runs:
                raise NetworkError(f"network {loaded.name}: no recurrent node runs for these inputs")
            if folders:
                report("writing results")
                write_run(executions[-1], folders[each])
    if as_json:
        results = {execution.schedule: execution.result() for execution in executions}
        sys.stdout.write(result_json(results if len(executions) > 1 else results[schedule]).decode())
    else:
        print_runs(executions, out)
        for folder in folders.values():
            out.print(f"{escape(str(folder))}: {', '.join(RESULT_FILES)} (open timeline.json in Perfetto)", highlight=False, soft_wrap=True)
    if rtl and not all(execution.matches for execution in executions):
        raise typer.Exit(1)


@app.command()
def verify(
    machines: Annotated[int, typer.Option(min=1, help="Random machines; each is built once.")] = 3,
    cases: Annotated[int, typer.Option(min=1, help="Random layers, spread over the machines.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Seed of machines and layers.")] = 1,
    case: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Repeat one case instead, as written for a mismatch.")] = None,
    out_folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the YAML file of a mismatch.")] = Path("."),
) -> None:
    """Compare RTL and model on random machines and layers: every value, every step's cycle, every counter.

    A mismatch is written as one YAML file that --case takes; the exit code is then 1.
    """
    require_writable(out_folder)
    _require_tools()

    from .verification import check, random_cases, read_case, write_case

    groups = [[read_case(case)]] if case is not None else random_cases(machines, cases, seed)
    groups = [group for group in groups if group]
    total, mismatches = 0, 0
    with _phases("verifying", total=sum(map(len, groups))) as report:
        for index, group in enumerate(groups):
            where = f"machine {index + 1} of {len(groups)}"
            for outcome in check(group, lambda phase, where=where: report(f"{where}: {phase}")):
                total += 1
                report(f"{where}: comparing", total)
                if outcome.mismatch is not None:
                    mismatches += 1
                    path = out_folder / f"mismatch-{seed}-{total}.yaml"
                    write_case(outcome.case, path)
                    text = f"{outcome.case.name}: {outcome.mismatch}; written to {path}"
                    err.print(f"[red]mismatch[/] {escape(text)}", soft_wrap=True, highlight=False)
    out.print(f"{len(groups)} machines, {total} cases, {mismatches} mismatches", highlight=False)
    if mismatches:
        raise typer.Exit(1)


@app.command()
def verilog(
    machine: MachineOption = "sharp-1k",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Verilog file to write.")] = Path("sharp.v"),
) -> None:
    """Write a machine as Verilog: one self-contained file, the same bytes for the same machine."""
    chosen = load_machine(machine)
    if output.is_dir():
        raise ConfigError(f"--output must be a file, not the folder {output}")
    require_writable(output.parent)

    from sharp.rtl.top import convert

    with _phases(f"converting {chosen.name}") as report:
        report(f"converting {chosen.name}")
        files = convert(chosen)
    write_whole(output, "\n".join(files.values()).encode())
    lines = sum(text.count("\n") for text in files.values())
    out.print(f"{escape(str(output))}: top module sharp_top, {lines} lines, machine {chosen.name} {chosen.hash}", highlight=False)


@bench_app.command("bound")
def bench_bound(
    sizes: Annotated[
        bool, typer.Option("--sizes", help="LSTMs of every hidden size 32, 44, ... 2048 instead: a settled step, and what is reachable.")
    ] = False,
    streams: Annotated[int, typer.Option(help="Equal sequences that run together; of more than one, the utilisation is printed.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON alone on standard output.")] = False,
) -> None:
    """Print bound / cycles for the DeepBench points and the paper's networks over the ready-made machines.

    The bound of a step is the larger of its multiplications over the machine's MACs and the recurrence's latency L.
    """
    from .bound_table import MACHINES, bound_table, print_bound_table, print_size_table, size_table

    chosen = tuple(map(load_machine, MACHINES))
    with _phases("planning") as report:
        table = size_table(chosen, progress=report) if sizes else bound_table(chosen, streams)
    if as_json:
        sys.stdout.write(json.dumps(table.result(), indent=2) + "\n")
    elif sizes:
        print_size_table(table, out)
    else:
        print_bound_table(table, out)


@bench_app.command("tiles")
def bench_tiles(
    machine: MachineOption = "sharp-4k",
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON alone on standard output.")] = False,
) -> None:
    """Print what the best tiles gain over every single tile height, for the DeepBench points and the paper's networks."""
    chosen = load_machine(machine)

    from .tile_table import print_tile_table, tile_table

    with _phases("planning"):
        table = tile_table(chosen)
    if as_json:
        sys.stdout.write(json.dumps(table.result(), indent=2) + "\n")
    else:
        print_tile_table(table, out)


@bench_app.command("rtl")
def bench_rtl(
    machine: Annotated[
        list[str], typer.Option("--machine", "-m", metavar="NAME|FILE", help="Machine, may be given several times.")
    ] = ["sharp-1k"],  # noqa: B006 (Typer copies it)
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON alone on standard output.")] = False,
) -> None:
    """Measure how long the RTL takes to convert and to build from nothing, and how many cycles a second it then simulates."""
    chosen = [load_machine(each) for each in machine]
    _require_tools()

    from .rtl_speed import measure, print_speeds, result

    with _phases("measuring") as report:
        speeds = [measure(each, lambda phase, each=each: report(f"{each.name}: {phase}")) for each in chosen]
    if as_json:
        sys.stdout.write(json.dumps(result(speeds), indent=2) + "\n")
    else:
        print_speeds(speeds, out)
    if any(speed.mismatch for speed in speeds):
        raise typer.Exit(1)


@app.command()
def machines() -> None:
    """List the ready-made machines and what their recurrence costs."""
    from sharp.model.timing import LSTM, Contract

    table = Table("machine", "MACs", "K", "lanes", "streams", "format", "L", "hash", title="Ready-made machines")
    for name in machine_names():
        each = load_machine(name)
        rows = f"{each.tile_rows.min}-{each.tile_rows.max}"
        recurrence = Contract(each).recurrence_cycles(LSTM)
        table.add_row(name, f"{each.macs:,}", rows, str(each.lanes), str(each.streams), each.format, str(recurrence), each.hash)
    out.print(table)
    out.print("K: tile rows; L: cycles from the last tile of an LSTM's step to a tile that needs its h")


@app.command()
def doctor() -> None:
    """Say which tools are there, which are missing, and how to get them."""
    from .doctor import print_report

    if not print_report(out):
        raise typer.Exit(2)


def _schedules(text: str) -> tuple[str, ...]:
    if text == ALL_SCHEDULES:
        return SCHEDULES
    if text not in SCHEDULES:
        raise ConfigError(f"--schedule must be {', '.join(SCHEDULES)} or {ALL_SCHEDULES}, not {text!r}")
    return (text,)


def _require_tools() -> None:
    """Find now what a build would miss minutes later."""
    from .toolchain import find_python_library, find_toolchain
    from .verilator import cache_folder

    find_toolchain()
    find_python_library()
    cache_folder()


def _require_fit(network: Network, machine: Machine, schedules: Sequence[str], height: int | None) -> None:
    """Refuse a layer that the machine cannot hold before its weights are made or other nodes run."""
    from sharp.model.planner import plan

    for shape, schedule in product(network.shapes, schedules):
        plan(machine, shape, steps=1, schedule=schedule, tile=height)


def _tile(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        height = int(text)
    except ValueError:
        raise ConfigError(f"--tile must be auto or a number of rows, not {text!r}") from None
    if height < 1 or height & (height - 1):
        raise ConfigError(f"--tile must be auto or a power of two, not {text}")
    return height


def _read_inputs(path: Path) -> dict[str, np.ndarray]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise NetworkError(f"{path}: must be an .npz file with arrays by input name, not a single array")
        with loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise NetworkError(f"{path}: cannot be read as .npz: {reason}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise NetworkError(f"{path}: {name!r} must be an array (.npy), not another file")
    return arrays
