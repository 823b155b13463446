"""Writes results: whole or not at all, and with one line for what the user can set right.

Two rules. A file appears under its name when all of its bytes are on the disk, never before. A folder that cannot be
written is found before the work, not after.
"""

import io
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from sharp.model.errors import ConfigError

ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same arrays make the same bytes


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn an error of writing `path` into ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; ConfigError names the file where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with written(path):
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def require_writable(folder: Path) -> None:
    """Make `folder` if it is not there; ConfigError if a file cannot be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"output folder {folder} must be writable: {error.strerror}") from None


def npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of an .npz file. `numpy.savez` takes names as keywords, and so not an output called `file`."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy", ZIP_EPOCH), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    return content.getvalue()
