"""The command line: run, verify, verilog, doctor.

Exit codes: 0 good, 1 a comparison failed or a simulation broke, 2 the user's input. Tables and progress go to the
terminal; with `--json` standard output carries the JSON alone.
"""

import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sharp.model.compiler import SCHEDULES
from sharp.model.errors import ConfigError, NetworkError
from sharp.model.machine import load_machine, machine_names
from sharp.model.network import load_network, network_names

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="SHARP: a tiled accelerator for recurrent networks. Its model predicts every bit, cycle and event of its RTL.",
)
out = Console()
err = Console(stderr=True)

MachineOption = Annotated[
    str,
    typer.Option("--machine", "-m", metavar="NAME|FILE", help=f"Machine: {', '.join(machine_names())}, or a YAML file."),
]


def main() -> None:
    """Run the command line and turn what a user can set right into one line and exit code 2."""
    try:
        app(standalone_mode=False)
    except (ConfigError, NetworkError) as error:
        _fail(str(error), 2)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except typer.Abort:
        _fail("interrupted", 130)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except _usage_errors() as error:
        _fail(error.format_message(), 2)
    except _simulation_errors() as error:
        _fail(str(error), 1)


def _usage_errors() -> type[Exception]:
    return typer.BadParameter.__mro__[2]


def _simulation_errors() -> type[Exception]:
    # Imported when needed: the simulator's libraries take longer to load than most commands to run.
    from .verilator import SimulationError

    return SimulationError


def _fail(message: str, code: int) -> None:
    err.print(f"[bold red]sharp: error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(code)


@contextmanager
def _phases(title: str, total: int | None = None) -> Iterator:
    """Show progress on standard error; yield a function that takes a phase and, optionally, how much has been done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
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
    schedule: Annotated[str, typer.Option(help=f"Order of the work in a step: {' or '.join(SCHEDULES)}.")] = "unfolded",
    tile: Annotated[str, typer.Option(metavar="auto|K", help="Rows of a tile; auto takes the height with the fewest predicted cycles.")] = "auto",
    inputs: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Inputs by name. Default: a synthesised sound, or seeded random vectors.")
    ] = None,
    rtl: Annotated[bool, typer.Option("--rtl", help="Execute on the RTL in Verilator too, and compare bits, cycles and events.")] = False,
    out_folder: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write result.json, outputs.npz, timeline.json and timeline.png here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json alone on standard output.")] = False,
) -> None:
    """Run a network on a machine: predict its cycles, compute its values, compare with RTL and reference.

    [bold]Examples[/]

      sharp run silero-vad --rtl --out out/demo

      sharp run deepbench-lstm-1024-t25 --machine sharp-4k --schedule sequential

      sharp run model.onnx --inputs inputs.npz --tile 64 --json
    """
    chosen = load_machine(machine)
    height = _tile(tile)
    loaded = load_network(network)
    given = None if inputs is None else _read_inputs(inputs)
    if out_folder is not None:
        _require_writable(out_folder)

    from .execution import execute
    from .report import print_run, write_run

    with _phases("loading", total=len(loaded.shapes)) as report:
        execution = execute(loaded, chosen, schedule=schedule, tile=height, inputs=given, rtl=rtl, progress=report)
        if out_folder is not None:
            report("writing results")
            write_run(execution, out_folder)
    if as_json:
        sys.stdout.write(json.dumps(execution.result(), indent=2) + "\n")
    else:
        print_run(execution, out)
        if out_folder is not None:
            out.print(f"Written to {escape(str(out_folder))}: result.json, outputs.npz, timeline.json (open in Perfetto), timeline.png")
    if rtl and not execution.matches:
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
    _require_writable(out_folder)

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
                    err.print(f"[red]mismatch[/] {escape(outcome.case.name)}: {escape(outcome.mismatch)}; written to {escape(str(path))}", soft_wrap=True)
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
    _require_writable(output.parent)

    from sharp.rtl.top import convert

    with _phases(f"converting {chosen.name}") as report:
        report(f"converting {chosen.name}")
        files = convert(chosen)
    write_whole(output, "\n".join(files.values()).encode())
    lines = sum(text.count("\n") for text in files.values())
    out.print(f"{escape(str(output))}: top module sharp_top, {lines} lines, machine {chosen.name} {chosen.hash}", highlight=False)


@app.command()
def machines() -> None:
    """List the ready-made machines and what their recurrence costs."""
    from sharp.model.timing import Contract

    table = Table("machine", "MACs", "tile rows", "lanes", "format", "L cycles", "hash", title="Ready-made machines")
    for name in machine_names():
        each = load_machine(name)
        rows = f"{each.tile_rows.min} to {each.tile_rows.max}"
        table.add_row(name, f"{each.macs:,}", rows, str(each.lanes), each.format, str(Contract(each).recurrence_cycles), each.hash)
    out.print(table)
    out.print("L: cycles from the last tile of a step to the first tile that needs its h")


@app.command()
def doctor() -> None:
    """Say which tools are there, which are missing, and how to get them."""
    from .doctor import print_report

    if not print_report(out):
        raise typer.Exit(2)


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
        with np.load(path, allow_pickle=False) as arrays:
            if not hasattr(arrays, "files"):
                raise NetworkError(f"{path}: must be an .npz file with arrays by input name, not a single array")
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise NetworkError(f"{path}: cannot be read as .npz: {reason}") from None


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"output folder {folder} must be writable: {error.strerror}") from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; ConfigError names the file where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
