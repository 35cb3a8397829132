"""Every exception Clearway raises on purpose. Anything else is a bug and keeps its traceback.

An error is one sentence: what was asked, what was found, what would work.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ClearwayError(Exception):
    """Base of all errors that are a sentence for the user; `exit_code` is the command line's."""

    exit_code = 1


class RequestError(ClearwayError):
    """The user asked for something that is not valid (exit 2, HTTP 422)."""

    exit_code = 2


class UnavailableError(ClearwayError):
    """The request is valid, and this machine or installation cannot do it (exit 3, HTTP 503)."""

    exit_code = 3


class Cancelled(ClearwayError):
    """The user stopped a generation after a whole step; nothing half-written is left (exit 130)."""

    exit_code = 130


def one_line(error: BaseException) -> str:
    """The first line of a foreign library's message, for use inside a sentence of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")


def nearest(value: str, choices: Iterable[str], count: int = 3) -> str:
    """The choices most like `value`, quoted and joined with commas; all of them where none is like it."""
    names = list(choices)
    lowered = {name.lower(): name for name in names}
    found = difflib.get_close_matches(value.lower(), list(lowered), n=count, cutoff=0.4)
    return ", ".join(repr(lowered[name]) for name in found) or ", ".join(repr(name) for name in names)
