"""The errors that a user can cause, each one line that names the place, what is allowed and what was got."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(Exception):
    """A machine or network description, or an option, is wrong. The command line exits with 2."""


class NetworkError(Exception):
    """A network, its weights or its inputs cannot be read or run. The command line exits with 2."""


@contextmanager
def one_line_errors(where: str) -> Iterator[None]:
    """Turn what libraries raise about a damaged file, which has no common base class, into `NetworkError`."""
    try:
        yield
    except NetworkError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise NetworkError(f"{where}: {text if len(text) <= 240 else text[:237] + '...'}") from error
