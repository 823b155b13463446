"""The README: its numbers are those that its commands print, and its commands, folders and pictures exist."""

import re
import sys
from pathlib import Path

import pytest

from sharp.model.machine import load_machine
from sharp.model.network import load_network
from sharp.sim.bound_table import GROUPS, MACHINES, bound_table
from sharp.sim.cli import main
from sharp.sim.execution import execute

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_bound_table_holds_what_the_command_prints():
    table = bound_table(tuple(map(load_machine, MACHINES)))
    rows = []
    for group, networks in GROUPS.items():
        for network in networks:
            ratios = [entry.ratio for entry in table.entries if entry.network == network]
            if ratios:
                rows.append(f"| {network} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |")
        means = (table.geometric_mean(group, machine) for machine in MACHINES)
        rows.append(f"| **{group}, geometric mean** | " + " | ".join(f"**{mean:.3f}**" for mean in means) + " |")
    expected = "\n".join([f"| network | {' | '.join(MACHINES)} |", "|---|---:|---:|---:|---:|", *rows])
    assert expected in TEXT, f"the table is now\n{expected}"


def test_predictions_hold_what_the_command_prints():
    run = execute(load_network("silero-vad"), load_machine("sharp-1k"), schedule="unfolded", tile=None)
    result = run.result()
    (machine_run,) = run.runs
    predicted = {
        "cycles": result["cycles"],
        "output beats in their predicted cycle": len(machine_run.plan.timing.output_cycles),
        "h values, bits": machine_run.values.outputs[0].size,
        "products of matrix entries": result["events"]["active_macs"],
        "counters, idle cycles by reason among them": len(machine_run.counts),
    }
    for name, value in predicted.items():
        assert f"| {name} | {value:,} |" in TEXT
    assert f"error against onnxruntime | {result['reference']['max_abs_error']['speech_probs']:.4f} |" in TEXT
    assert f"{run.steps} chunks of sound" in TEXT and f"{result['cycles_per_step']:.2f} cycles a step" in TEXT


def test_commands_and_their_options_exist(monkeypatch, capsys):
    lines = re.findall(r"sharp (?:run|verify|verilog|bench|machines|doctor)\b[^`\n#]*", TEXT)
    assert len(lines) >= 6
    for line in lines:
        words = line.split()
        command = words[: 3 if words[1] == "bench" else 2]
        monkeypatch.setattr(sys, "argv", [*command, "--help"])
        with pytest.raises(SystemExit, match="^0$"):
            main()
        options = capsys.readouterr().out.split()
        assert all(word in options for word in words if word.startswith("-")), line


def test_folders_and_files_that_it_names_exist():
    for name in re.findall(r"^\| `(\w+/)`", TEXT, flags=re.MULTILINE) + re.findall(r"\]\((?!https?:)([^)]+)\)", TEXT):
        assert (ROOT / name).exists(), name
    assert (ROOT / "reports" / "silero-timeline.png").stat().st_size < 200_000
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", TEXT):
        assert f"\n{target}:" in makefile, target
