"""Strict YAML: what is a number, what is refused, and that each refusal is one line naming file, field, allowed and got."""

import pytest

from sharp.model.config import Schema, parse_yaml, read_yaml, validate
from sharp.model.errors import ConfigError


class Part(Schema):
    depth: int
    gain: float = 1.0


class Whole(Schema):
    name: str
    part: Part
    rows: list[int] = []


def refusal(action, *arguments):
    """Return the message of the ConfigError that `action` raises, checked to be one line."""
    with pytest.raises(ConfigError) as raised:
        action(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-12", 1e-12),
        ("1E6", 1e6),
        ("500.0e6", 500e6),
        (".5", 0.5),
        ("-2.", -2.0),
        ("-12", -12),
        ("+7", 7),
        ("0", 0),
        ("75_497_472", 75497472),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
    ],
)
def test_numbers_and_constants_are_what_they_look_like(text, value):
    found = parse_yaml(f"x: {text}", "file")["x"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    "text", ["010", "0x10", "0b1", "0o7", "on", "off", "yes", "No", "True", "1:30", "2024-01-01", "1.2.3", "fp16", "e5", "1e", "+-1", "1_e"]
)
def test_what_is_not_plainly_a_number_or_truth_stays_text(text):
    assert parse_yaml(f"x: {text}", "file") == {"x": text}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "file: line 3: key 'a' is given twice"),
        ("a: 1\n'a': 1\n", "file: line 2: key 'a' is given twice"),
        ("outer:\n  inner: {x: 1, y: 2, x: 1}\n", "file: line 2: key 'x' is given twice"),
        ("- x: 1\n- {y: 1, y: 1}\n", "file: line 2: key 'y' is given twice"),
        ("1: one\n", "file: line 1: a key must be text, not 1"),
        ("a: 0\n[1, 2]: one\n", "file: line 2: a key must be text, not [1, 2]"),
        ("? \n: one\n", "file: line 1: a key must be text, not nothing"),
        ("a: &x 1\n", "file: line 1: an anchor or alias must not be used, not 'x'"),
        ("a: 1\nb: *x\n", "file: line 2: an anchor or alias must not be used, not 'x'"),
        ("&a [*a]\n", "file: line 1: an anchor or alias must not be used, not 'a'"),
        ("a: !!python/object:os.system {}\n", "file: line 1: a tag must not be used, not 'tag:yaml.org,2002:python/object:os.system'"),
        ("a: !!bool maybe\n", "file: line 1: a tag must not be used, not 'tag:yaml.org,2002:bool'"),
        ("a: [1, 2\n", "file: line 2: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n---\nb: 2\n", "file: line 2: not YAML: but found another document"),
        ("a: \0\n", "file: not YAML: unacceptable character #x0000: special characters are not allowed"),
        (f"a: {'9' * 5000}\n", "file: a number cannot be read: Exceeds the limit"),
        ("[" * 5000, "file: nested too deeply"),
    ],
)
def test_text_that_means_other_than_it_shows_is_refused(text, message):
    assert refusal(parse_yaml, text, "file").startswith(message)


def test_many_aliases_cannot_make_a_small_file_large():
    levels = "\n".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 30))
    assert "line 1: an anchor or alias must not be used" in refusal(parse_yaml, f"a0: &a0 [x]\n{levels}", "file")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"name: \xff\n", "cannot be read: 'utf-8' codec can't decode byte 0xff in position 6"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_file_that_cannot_be_read_is_named(content, problem, tmp_path):
    path = tmp_path / "some.yaml"
    if content is not None:
        path.write_bytes(content)
    assert refusal(read_yaml, path).startswith(f"{path}: {problem}")


def test_folder_in_place_of_a_file_is_refused(tmp_path):
    assert refusal(read_yaml, tmp_path) == f"{tmp_path}: cannot be read: Is a directory"


def test_error_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text("a: 1\na: 1\n")
    assert refusal(read_yaml, path) == f"{path}: line 2: key 'a' is given twice"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "file: must be a mapping with the keys name, part, rows, not nothing"),
        ([1], "file: must be a mapping with the keys name, part, rows, not [1]"),
        ({"part": {"depth": 1}}, "file: name: missing"),
        ({"name": "n", "part": {}}, "file: part.depth: missing"),
        ({"nam": "n", "part": {"depth": 1}}, "file: nam: unknown key; known keys are name, part, rows"),
        ({"name": "n", "part": {"depth": 1, "width": 2}}, "file: part.width: unknown key; known keys are depth, gain"),
        ({"name": "n", "part": {"depth": "1"}}, "file: part.depth: input should be a valid integer, not '1'"),
        ({"name": "n", "part": {"depth": 1.0}}, "file: part.depth: input should be a valid integer, not 1.0"),
        ({"name": "n", "part": {"depth": True}}, "file: part.depth: input should be a valid integer, not True"),
        ({"name": "n", "part": {"depth": None}}, "file: part.depth: input should be a valid integer, not nothing"),
        ({"name": "n", "part": {"depth": 1, "gain": True}}, "file: part.gain: input should be a valid number, not True"),
        ({"name": "n", "part": {"depth": 1, "gain": float("nan")}}, "file: part.gain: input should be a finite number, not nan"),
        ({"name": "n", "part": {"depth": 1, "gain": float("inf")}}, "file: part.gain: input should be a finite number, not inf"),
        ({"name": 5, "part": {"depth": 1}}, "file: name: input should be a valid string, not 5"),
        ({"name": "n", "part": {"depth": 1}, "rows": [1, "x"]}, "file: rows.1: input should be a valid integer, not 'x'"),
        ({"name": "n", "part": 3}, "file: part: input should be a valid dictionary or instance of Part, not 3"),
    ],
)
def test_wrong_data_is_one_line_of_file_field_allowed_and_got(data, message):
    assert refusal(validate, Whole, data, "file") == message


def test_long_values_are_cut_in_errors():
    message = refusal(validate, Whole, {"name": "n", "part": {"depth": "x" * 10_000}}, "file")
    assert message.endswith("xxx...") and len(message) < 200


def test_whole_number_is_good_where_a_fraction_may_stand():
    assert validate(Part, {"depth": 1, "gain": 2}, "file").gain == 2.0


def test_objects_are_frozen():
    part = validate(Part, {"depth": 1}, "file")
    with pytest.raises(ValueError, match="frozen"):
        part.depth = 2


def test_replace_leaves_the_original_and_refuses_what_a_file_may_not_say():
    part = validate(Part, {"depth": 1}, "file")
    assert (part.replace(depth=2).depth, part.depth) == (2, 1)
    assert refusal(lambda: part.replace(depth="2")) == "Part: depth: input should be a valid integer, not '2'"
    assert refusal(lambda: part.replace(width=2)) == "Part: width: unknown key; known keys are depth, gain"
