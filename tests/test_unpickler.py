"""Pickles read without running them."""

import io
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.model.errors import NetworkError
from sharp.model.unpickler import read_pickle

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.binary()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner) | st.tuples(inner, inner, inner, inner)
)


@given(value=VALUES, protocol=st.integers(2, 4))
def test_plain_values_are_read_as_pickle_reads_them(value, protocol):
    # Protocol 2 has no bytes of its own: it calls a codec.
    known = {"_codecs.encode": lambda text, codec: text.encode(codec), "__builtin__.bytes": bytes}
    assert read_pickle(io.BytesIO(pickle.dumps(value, protocol)), known) == value


def test_only_one_pickle_of_a_stream_is_taken():
    stream = io.BytesIO(pickle.dumps({"one": 1}) + pickle.dumps([2]) + b"rest")
    assert read_pickle(stream, {}) == {"one": 1}
    assert read_pickle(stream, {}) == [2]
    assert stream.read() == b"rest"


class Command:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_function_is_refused_by_name_and_not_run(tmp_path, protocol):
    data = pickle.dumps({"weights": [Command(tmp_path / "made")]}, protocol)
    with pytest.raises(NetworkError, match=r"holds (posix|nt)\.mkdir, and making it would run code"):
        read_pickle(io.BytesIO(data), {})
    assert not (tmp_path / "made").exists()
    pickle.loads(data)
    assert (tmp_path / "made").exists(), "the pickle does what it should not be allowed to"


def test_only_known_functions_are_called_even_if_the_pickle_finds_others():
    # REDUCE on a value, and on what a known function returned.
    known = {"a.b": lambda: print}
    with pytest.raises(ValueError, match="calls builtin_function"):
        read_pickle(io.BytesIO(b"\x80\x02ca\nb\n)RX\x02\x00\x00\x00hi\x85R."), known)
    with pytest.raises(ValueError, match="calls str"):
        read_pickle(io.BytesIO(b"\x80\x02X\x02\x00\x00\x00hi)R."), known)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02}(X\x01\x00\x00\x00au.", "argument 2 is shorter"),  # a key without a value
        (b"\x80\x02}]K\x01s.", "key of kind list"),
        (b"\x80\x02K\x01K\x02a.", "adds items to int"),
        (b"\x80\x02(lp0\n.", "instruction LIST"),
        (b"\x80\x02K\x01Q.", "instruction BINPERSID"),
        (b"\x80\x02r\xff\xff\xff\x7f.", "index out of range"),  # a memo of two billion entries
        (b"\x80\x02}", "exhausted"),
    ],
)
def test_a_damaged_pickle_ends_in_an_error(data, message):
    with pytest.raises((ValueError, IndexError), match=message):
        read_pickle(io.BytesIO(data), {})


@given(st.binary(max_size=60), st.integers(0, 60))
def test_any_bytes_end_in_a_value_or_an_exception(noise, place):
    data = pickle.dumps({"a": [1, 2.5, "x" * 9], "b": (None, True)}, 2)
    try:
        read_pickle(io.BytesIO(data[:place] + noise + data[place:]), {"numpy.ndarray": np.ndarray})
    except Exception as error:
        assert not isinstance(error, MemoryError)
