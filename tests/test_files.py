"""Writing results: a file is there whole or not at all, and what cannot be written is one line."""

import io
import resource
from pathlib import Path

import numpy as np
import pytest

from sharp.model.errors import ConfigError
from sharp.sim.files import npz, require_writable, write_whole


@pytest.fixture
def full_disk():
    """Let no file grow beyond 1,000 bytes, as a disk does that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_file_that_does_not_fit_the_disk_leaves_the_old_one_and_nothing_else(tmp_path, full_disk):
    path = tmp_path / "result.json"
    write_whole(path, b"old")
    full_disk()
    with pytest.raises(ConfigError, match=r"result\.json: cannot be written: File too large$"):
        write_whole(path, bytes(5000))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_missing_folder_is_named():
    with pytest.raises(ConfigError, match=r"^/nowhere/file: cannot be written: No such file or directory$"):
        write_whole(Path("/nowhere/file"), b"x")


def test_folder_is_made_with_its_parents_and_left_empty(tmp_path):
    require_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_folder_under_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"output folder .*file/sub must be writable: Not a directory"):
        require_writable(tmp_path / "file" / "sub")


def test_npz_keeps_names_that_numpy_would_take_for_options():
    arrays = {"file": np.arange(3.0), "allow_pickle": np.ones((1, 2), np.float16), "/layer/out:0": np.array(7)}
    content = npz(arrays)
    read = np.load(io.BytesIO(content))
    assert set(read.files) == set(arrays)
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype and np.array_equal(read[name], array)
    assert npz(arrays) == content
