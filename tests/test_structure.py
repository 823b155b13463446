"""What the repository's shape promises: the direction of imports, what a wheel carries, and no address or path of one machine."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("configs", "model", "rtl", "sim", "tests")  # each imports only itself and those before it
PACKAGED = LAYERS[:-1]
FOREIGN_TO_MODEL = {"cocotb", "cocotb_tools", "matplotlib", "amaranth", "torch", "keras", "tensorflow"}
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "rtl", "model", "sim", "tests", "configs", "reports"}
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def tracked_files():
    """The files that git holds; of an export without git, all that stand there but what builds leave."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    tracked = [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    left_by_builds = re.compile(r"(^|/)(\.git|\.venv[^/]*|__pycache__|build|out|[^/]*\.egg-info|\.pytest_cache|\.hypothesis)(/|$)")
    return tracked or [path for path in ROOT.rglob("*") if path.is_file() and not left_by_builds.search(path.relative_to(ROOT).as_posix())]


def imports(path):
    """Yield (line, module) of every import in a file; a relative one as `sharp.<layer>.…`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, ".".join(filter(None, ["sharp", path.relative_to(ROOT).parts[0], node.module]))
            else:
                # `from sharp import rtl` imports sharp.rtl
                modules = [f"sharp.{alias.name}" for alias in node.names] if node.module == "sharp" else [node.module]
                yield from ((node.lineno, module) for module in modules)


def test_imports_run_one_way():
    wrong = []
    for path in SOURCES:
        layer = path.relative_to(ROOT).parts[0]
        allowed = LAYERS[: LAYERS.index(layer) + 1]
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] == "sharp" and (len(parts) < 2 or parts[1] not in allowed):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
            if parts[0] in LAYERS:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module} by a name that is there only in this folder")
            if layer in ("configs", "model") and parts[0] in FOREIGN_TO_MODEL:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_importing_the_whole_model_loads_nothing_of_rtl_or_simulation():
    modules = [f"sharp.model.{path.stem}" for path in sorted((ROOT / "model").glob("*.py")) if path.stem != "__init__"]
    code = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    unwanted = {name for name in loaded if name.split(".")[0] in FOREIGN_TO_MODEL or name.startswith(("sharp.rtl", "sharp.sim"))}
    assert "sharp.model.machine" in loaded and not unwanted


def test_packages_are_flat():
    assert not [path for layer in PACKAGED for path in (ROOT / layer).glob("*/**/*.py")]


def test_wheel_carries_all_modules_and_configurations_and_nothing_else(tmp_path):
    # Built from a copy: setuptools writes its work beside the sources.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for layer in PACKAGED:
        shutil.copytree(ROOT / layer, source / layer)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    built = subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    shipped = [path for layer in PACKAGED for kind in ("*.py", "*.yaml") for path in (ROOT / layer).rglob(kind)]
    assert carried == {f"sharp/{path.relative_to(ROOT).as_posix()}" for path in shipped}
    assert any(name.endswith("machines/sharp-1k.yaml") for name in carried)


def test_top_level_holds_only_what_the_layout_names():
    found = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    assert {name for name in found if not name.startswith(".")} <= TOP_LEVEL


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?<![\w./-])/(?:home|root|work|Users|mnt|data)/[\w.]+",  # a folder of one machine
        r"https?://[^\s\"')]*(?:pypi|pythonhosted|registry|artifactory|nexus|mirror|simple/)",  # a package registry
        r"(?:--(?:extra-)?index-url|--find-links|--trusted-host)\b",  # options that name one
    ],
)
def test_no_file_names_a_place_that_only_one_machine_has(pattern):
    found = []
    for path in tracked_files():
        if path == Path(__file__):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in re.finditer(pattern, text)]
    assert not found


def test_pins_are_exact_and_cover_every_dependency():
    lines = [line for line in (ROOT / "configs" / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {re.fullmatch(r"([\w.-]+)==[\w.]+", line)[1].lower() for line in lines}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    requirements = settings["build-system"]["requires"] + project["dependencies"] + project["optional-dependencies"]["test"]
    needed = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}
    assert needed <= pins and "silero-vad" in pins
