"""Names from strangers: what cannot be printed is escaped, what is long is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearway.errors import RequestError, UnavailableError
from clearway.models.escape import NAME_LENGTH, escaped, escaped_errors, shown

ANY = st.text(st.characters(exclude_categories=()))  # surrogates too


@given(ANY)
def test_what_is_escaped_can_be_printed_and_stored(text: str) -> None:
    found = escaped(text)
    assert found.isprintable() and found.encode("utf-8").decode("utf-8") == found
    assert escaped(found) == found and len(shown(text)) <= NAME_LENGTH + 1
    if text.isprintable():
        assert found == text


def test_as_python_writes_it() -> None:
    assert escaped("a\x1b[31m\n\udc80 é 猫") == r"a\x1b[31m\n\udc80 é 猫"
    assert escaped("\u202egnp.exe") == r"\u202egnp.exe"  # would be read from right to left
    assert shown("a" * 500 + "b") == "a" * 60 + "…" + "a" * 59 + "b"


def test_errors_keep_their_kind() -> None:
    with pytest.raises(UnavailableError, match=r"^a\\nb$"), escaped_errors():
        raise UnavailableError("a\nb")
    with pytest.raises(RequestError, match=r"^plain$") as error, escaped_errors():
        raise RequestError("plain")
    assert error.value.__cause__ is None
    with pytest.raises(ZeroDivisionError), escaped_errors():
        1 / 0  # noqa: B018
