"""The errors that a user can cause, each one line that names the place, what is allowed and what was got."""


class ConfigError(Exception):
    """A machine or network description, or an option, is wrong. The command line exits with 2."""


class NetworkError(Exception):
    """A network, its weights or its inputs cannot be read or run. The command line exits with 2."""
