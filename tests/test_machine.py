"""Machines: the ready-made ones load, every rule refuses with its own message, and the hash names what matters."""

import math

import pytest

from sharp.configs import ROOT
from sharp.model.errors import ConfigError
from sharp.model.machine import Machine, load_machine, machine_names

SIZES = {"sharp-64": 64, "sharp-256": 256, "sharp-1k": 1024, "sharp-4k": 4096, "sharp-16k": 16384, "sharp-64k": 65536}


@pytest.fixture(scope="module")
def machine():
    return load_machine("sharp-64")


def altered(machine, path, value):
    """Return the machine's data with the field at the dotted `path` set to `value`."""
    data = machine.model_dump()
    *groups, field = path.split(".")
    owner = data
    for group in groups:
        owner = owner[group]
    owner[field] = value
    return data


def test_ready_made_machines_span_64_to_65536_macs_smallest_first():
    assert [(name, load_machine(name).macs) for name in machine_names()] == list(SIZES.items())


@pytest.mark.parametrize("name", SIZES)
def test_ready_made_machine_carries_its_own_name(name):
    assert load_machine(name).name == name


@pytest.mark.parametrize("name", SIZES)
def test_every_tile_height_divides_the_macs_into_whole_columns(name):
    machine = load_machine(name)
    assert machine.tile_heights[0] == machine.tile_rows.min and machine.tile_heights[-1] == machine.tile_rows.max
    for rows in machine.tile_heights:
        assert rows * machine.columns(rows) == machine.macs
    assert 1 << machine.tree_levels == machine.slices
    assert machine.row_groups * machine.tile_rows.min == machine.tile_rows.max
    assert machine.weight_words * machine.weight_word_bytes == machine.buffers.weight_bytes


WEIGHT_WORD = "128 (bytes of one weight word = macs x 2)"
BUFFERS = "weight_bytes, accumulator_rows, input_elements, hidden_elements, cell_elements, program_words"
BANDWIDTH = "from 16 (the weights of a slice) to 128 (a weight word)"
KEYS = "name, macs, tile_rows, format, lanes, streams, memory_bytes_per_cycle, clock_hz, buffers, queues, latencies"
RULES = [
    ("macs", 0, "macs: input should be greater than or equal to 1, not 0"),
    ("macs", -64, "macs: input should be greater than or equal to 1, not -64"),
    ("macs", 48, "macs must be a power of two, not 48"),
    ("macs", "64", "macs: input should be a valid integer, not '64'"),
    ("macs", True, "macs: input should be a valid integer, not True"),
    ("macs", 64.0, "macs: input should be a valid integer, not 64.0"),
    ("tile_rows.min", 0, "tile_rows.min: input should be greater than or equal to 1, not 0"),
    ("tile_rows.min", 6, "tile_rows.min must be a power of two, not 6"),
    ("tile_rows.max", 48, "tile_rows.max must be a power of two, not 48"),
    ("tile_rows.min", 64, "tile_rows must satisfy min <= max <= macs, not 64, 32, 64"),
    ("tile_rows.max", 128, "tile_rows must satisfy min <= max <= macs, not 8, 128, 64"),
    ("tile_rows", {"min": 64, "max": 64}, "tile_rows.min must be below macs (a tree needs two slices), not 64 of 64"),
    ("tile_rows.min", 1, "tile_rows.min must be 2 or more, not 1"),
    ("tile_rows", 8, "tile_rows: input should be a valid dictionary or instance of TileRows, not 8"),
    ("format", "fp8", "format: input should be 'fp16', not 'fp8'"),
    ("lanes", 0, "lanes: input should be greater than or equal to 1, not 0"),
    ("lanes", 3, "lanes must be a power of two, not 3"),
    ("lanes", 16, "lanes must be at most tile_rows.max / 4 = 8 (four gates of a lane are drained at once), not 16"),
    ("clock_hz", 0.0, "clock_hz: input should be greater than 0, not 0.0"),
    ("clock_hz", math.nan, "clock_hz: input should be a finite number, not nan"),
    ("clock_hz", math.inf, "clock_hz: input should be a finite number, not inf"),
    ("clock_hz", "500 MHz", "clock_hz: input should be a valid number, not '500 MHz'"),
    ("clock_hz", False, "clock_hz: input should be a valid number, not False"),
    ("name", "", "name: string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$', not ''"),
    ("name", "../x", "name: string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$', not '../x'"),
    ("buffers.weight_bytes", 1000, f"buffers.weight_bytes must be a multiple of {WEIGHT_WORD}, at least 256, not 1000"),
    ("buffers.weight_bytes", 128, f"buffers.weight_bytes must be a multiple of {WEIGHT_WORD}, at least 256, not 128"),
    ("buffers.accumulator_rows", 40, "buffers.accumulator_rows must be a multiple of 32 (tile_rows.max), at least 64, not 40"),
    ("buffers.input_elements", 12, "buffers.input_elements must be a multiple of 8 (elements of one vector row), at least 16, not 12"),
    ("buffers.hidden_elements", 8, "buffers.hidden_elements must be a multiple of 8 (elements of one vector row), at least 16, not 8"),
    ("buffers.cell_elements", 6, "buffers.cell_elements must be a multiple of 4 (lanes), at least 8, not 6"),
    ("buffers.program_words", 15, "buffers.program_words: input should be greater than or equal to 16, not 15"),
    ("buffers.program_words", 65537, "buffers.program_words: input should be less than or equal to 65536, not 65537"),
    ("buffers.weights", 1, f"buffers.weights: unknown key; known keys are {BUFFERS}"),
    ("queues.tile", 0, "queues.tile: input should be greater than or equal to 1, not 0"),
    ("queues.tile", 65, "queues.tile: input should be less than or equal to 64, not 65"),
    ("queues.post", 65, "queues.post: input should be less than or equal to 64, not 65"),
    ("queues.output", 1, "queues.output: input should be greater than or equal to 2, not 1"),
    ("queues.output", 1025, "queues.output: input should be less than or equal to 1024, not 1025"),
    ("streams", 0, "streams: input should be greater than or equal to 1, not 0"),
    ("streams", 9, "streams: input should be less than or equal to 8, not 9"),
    ("memory_bytes_per_cycle", 0, "memory_bytes_per_cycle: input should be greater than or equal to 1, not 0"),
    *(("memory_bytes_per_cycle", bad, f"memory_bytes_per_cycle must be a power of two {BANDWIDTH}, not {bad}") for bad in (8, 48, 256)),
    ("lane", 4, f"lane: unknown key; known keys are {KEYS}"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message"), RULES)
def test_rule_of_the_machine_refuses_with_its_message(machine, path, value, message):
    with pytest.raises(ConfigError) as raised:
        machine.replace(**altered(machine, path, value))
    assert str(raised.value) == f"Machine: {message}"


LATENCIES = ("operand", "multiply", "add", "accumulate", "drain", "activate", "lane_multiply", "lane_add", "writeback")


@pytest.mark.parametrize("name", LATENCIES)
def test_every_latency_is_1_to_8_cycles(machine, name):
    for good in (1, 8):
        assert getattr(machine.replace(**altered(machine, f"latencies.{name}", good)).latencies, name) == good
    for bad, bound in ((0, "greater than or equal to 1"), (9, "less than or equal to 8")):
        with pytest.raises(ConfigError, match=f"^Machine: latencies.{name}: input should be {bound}, not {bad}$"):
            machine.replace(**altered(machine, f"latencies.{name}", bad))


def test_these_are_all_the_latencies(machine):
    assert tuple(machine.latencies.model_dump()) == LATENCIES


def test_missing_field_is_named(machine):
    data = machine.model_dump()
    del data["queues"]["post"]
    with pytest.raises(ConfigError, match=r"^Machine: queues\.post: missing$"):
        machine.replace(**data)


def test_hash_changes_with_every_field_but_the_name(machine):
    def leaves(data, prefix=""):
        for key, value in data.items():
            yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]

    changed = {"macs": 128, "tile_rows.min": 4, "tile_rows.max": 64, "lanes": 2, "memory_bytes_per_cycle": 64, "clock_hz": 1e9}
    hashes = [machine.hash]
    for path, value in leaves(machine.model_dump()):
        if path in ("name", "format"):  # fp16 is the only format
            continue
        other = changed.get(path, 2 * value if path.startswith("buffers.") else value + 1)
        hashes.append(machine.replace(**altered(machine, path, other)).hash)
    assert len(set(hashes)) == len(hashes)
    assert machine.replace(name="another").hash == machine.hash


def test_hash_is_the_same_for_the_same_machine_read_again(machine):
    assert load_machine("sharp-64").hash == machine.hash
    assert len(machine.hash) == 12


def test_replace_takes_whole_parts_and_leaves_the_original(machine):
    slow = machine.replace(latencies=machine.latencies.replace(add=5))
    assert (slow.latencies.add, slow.latencies.multiply) == (5, machine.latencies.multiply)
    assert machine.latencies.add != 5 and isinstance(slow, Machine)


def test_derived_numbers_follow_a_replacement(machine):
    assert machine.slices == 8
    assert machine.replace(macs=128).slices == 16


def test_machine_is_loaded_from_a_file_by_its_path(machine, tmp_path):
    path = tmp_path / "mine.yaml"
    text = (ROOT / "machines" / "sharp-64.yaml").read_text()
    path.write_text(text.replace("name: sharp-64", "name: mine"))
    assert load_machine(str(path)).hash == machine.hash


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping with the keys name, macs, .*, not nothing"),
        ("name: x\nname: y\n", "line 2: key 'name' is given twice"),
        ("name: x\nmacs: 010\n", "macs: input should be a valid integer, not '010'"),
        ("name: x\nmacs: on\n", "macs: input should be a valid integer, not 'on'"),
        ("name: x\nmacz: 64\n", "macz: unknown key; known keys are name, macs, "),
    ],
)
def test_file_and_field_stand_in_front_of_the_error(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}: {message}"):
        load_machine(str(path))


def test_unknown_machine_lists_the_known_ones():
    with pytest.raises(ConfigError) as raised:
        load_machine("sharp-2k")
    assert str(raised.value) == f"machine 'sharp-2k' is not known; known machines are {', '.join(SIZES)}, or give a .yaml file"
