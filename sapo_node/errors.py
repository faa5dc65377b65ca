"""Errors that are their reader's to cure. The command line prints their text, without a traceback, and exits.

Everything else that reaches the command line is a fault of the program and shows its traceback.
"""

from collections.abc import Sequence


class SapoError(Exception):
    """Something a person can act on; the text says what happened, where, and what to do."""

    exit_code = 1


class ConfigError(SapoError):
    """Settings that cannot be used. `problems` holds one line each, every one with its place."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        """`problems` is not empty."""
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class DataDirLocked(SapoError):
    """Another node uses the data directory."""

    exit_code = 4

    def __init__(self, message: str, pid: int | None) -> None:
        """`pid` of the other node, or None where it could not be read."""
        super().__init__(message)
        self.pid = pid
