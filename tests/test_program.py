"""The program: every instruction encodes by the table of fields alone, refuses what does not fit, and loops expand as written."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.model.layer import LayerShape
from sharp.model.machine import load_machine
from sharp.model.planner import plan
from sharp.model.program import (
    FIELDS, WORD_BITS, WORK, End, Halt, Init, Input, Loop, Opcode, Operand, Post, Program, Source, Tile, Update, Weights,
)  # fmt: skip

KINDS = {
    Opcode.HALT: Halt,
    Opcode.LOOP: Loop,
    Opcode.END: End,
    Opcode.INPUT: Input,
    Opcode.TILE: Tile,
    Opcode.POST: Post,
    Opcode.WEIGHTS: Weights,
}
FIELD_CASES = [(opcode, name, bits) for opcode, fields in FIELDS.items() for name, bits in fields if name != "opcode"]


def decoded(word: int) -> tuple[Opcode, dict[str, int]]:
    """Take a program word apart by the table of fields, as a decoder in hardware does."""
    opcode = Opcode(word & 15)
    values = {}
    for name, bits in FIELDS[opcode]:
        values[name] = word & (1 << bits) - 1
        word >>= bits
    assert word == 0, f"bits beyond the last field of {opcode.name}"
    del values["opcode"]
    return opcode, values


@st.composite
def instructions(draw):
    opcode = draw(st.sampled_from(list(KINDS)))
    least = {"count": 1} if opcode is Opcode.LOOP else {}
    values = {
        name: draw(st.integers(least.get(name, 0), (1 << bits) - 1)) for kind, name, bits in FIELD_CASES if kind is opcode
    }
    return KINDS[opcode](**values), opcode, values


def program(*code) -> Program:
    """A program of these instructions; what it computes does not matter."""
    shape = LayerShape(name="", cell="lstm", inputs=1, hidden=1)
    return plan(load_machine("sharp-64"), shape, steps=1, schedule="unfolded", tile=8).program.replace(instructions=code)


def executed(*code) -> list:
    """The instructions in the order of execution, cut where they would go on for ever."""
    return list(islice(program(*code).executed(), 50))


def numbered(*names: int) -> list[Input]:
    return [Input(vector=name, stride=1, slots=1, elements=1, count=1) for name in names]


@given(instructions())
def test_fields_of_every_instruction_decode_to_what_was_encoded(drawn):
    instruction, opcode, values = drawn
    assert decoded(instruction.encode()) == (opcode, values)


def test_every_opcode_has_an_instruction_and_fits_a_word():
    assert set(FIELDS) == set(Opcode) == set(KINDS)
    for opcode, fields in FIELDS.items():
        assert fields[0] == ("opcode", 4) and KINDS[opcode].__dataclass_fields__.keys() == {name for name, _ in fields[1:]}
        assert sum(bits for _, bits in fields) <= WORD_BITS


def test_no_two_fields_of_an_instruction_share_a_bit():
    for opcode, name, bits in FIELD_CASES:
        least = {"count": 1} if opcode is Opcode.LOOP else {}
        zeros = {other: least.get(other, 0) for kind, other, _ in FIELD_CASES if kind is opcode}
        assert decoded(KINDS[opcode](**zeros | {name: (1 << bits) - 1}).encode()) == (opcode, zeros | {name: (1 << bits) - 1})


@pytest.mark.parametrize(("opcode", "name", "bits"), FIELD_CASES)
def test_value_that_its_field_cannot_hold_is_refused_by_name(opcode, name, bits):
    ones = {other: 1 for kind, other, _ in FIELD_CASES if kind is opcode}
    for value in (1 << bits, -1) if opcode is not Opcode.LOOP else (1 << bits,):  # below 1 a loop is refused as it is made
        with pytest.raises(ValueError) as raised:
            KINDS[opcode](**ones | {name: value}).encode()
        kind = KINDS[opcode].__name__
        assert str(raised.value) == f"{kind}.{name} must fit {bits} bits, not {value}"


def test_enumerations_fit_their_fields():
    bits = {(opcode, name): bits for opcode, name, bits in FIELD_CASES}
    for values, place in ((Init, "init"), (Operand, "operand")):
        assert max(values) < 1 << bits[Opcode.TILE, place]
    for values, place in ((Source, "source"), (Update, "update")):
        assert max(values) < 1 << bits[Opcode.POST, place]


def test_every_update_says_what_it_costs():
    assert set(WORK) == set(Update)
    for update, work in WORK.items():
        assert work.state_writes <= work.state_reads <= 1 and set(work.gates) <= set(range(4)), update


def test_loops_expand_as_written():
    before, first, second, after = numbered(1, 2, 3, 4)
    code = (before, Loop(count=3), first, second, End(), after, Loop(count=1), first, End(), Halt())
    names = {id(each): name for name, each in zip(("before", "first", "second", "after"), (before, first, second, after), strict=True)}
    got = [names.get(id(each), type(each).__name__) for each in executed(*code)]
    turn = ["first", "second", "End"]
    assert got == ["before", "Loop", *turn, *turn, *turn, "after", "Loop", "first", "End", "Halt"]


def test_loop_of_no_turns_is_refused():
    with pytest.raises(ValueError, match="^Loop.count must be at least 1, not 0$"):
        Loop(count=0)


def test_nothing_after_a_halt_is_executed():
    first, second = numbered(1, 2)
    assert [type(each) for each in executed(first, Halt(), second, Halt())] == [Input, Halt]


def test_words_are_the_instructions_as_they_stand():
    code = (*numbered(5), Loop(count=2), *numbered(6), End(), Halt())
    assert program(*code).words == [each.encode() for each in code]
    assert [decoded(word)[0].name for word in program(*code).words] == ["INPUT", "LOOP", "INPUT", "END", "HALT"]
