"""Names that strangers gave (tensors, files, titles) as text that a terminal or a file can hold.

A file's header may name a tensor with line ends or a terminal's control sequences, and a file name need not
be text at all; what cannot be printed is written as Python writes it (`\\x1b`, `\\udc80`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from clearway.errors import ClearwayError

NAME_LENGTH = 120


def escaped(text: str) -> str:
    """`text` with everything in it that is not printable written as an escape."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text
    )


def shown(name: str) -> str:
    """A name inside a sentence: escaped, and its middle left out where it is longer than 120 signs."""
    found = escaped(name)
    half = NAME_LENGTH // 2
    return found if len(found) <= NAME_LENGTH else f"{found[:half]}…{found[-half:]}"


@contextlib.contextmanager
def escaped_errors() -> Iterator[None]:
    """Within it the sentences of Clearway's errors are escaped, whatever they quote."""
    try:
        yield
    except ClearwayError as error:
        sentence = escaped(str(error))
        if sentence == str(error):
            raise
        raise type(error)(sentence) from error
