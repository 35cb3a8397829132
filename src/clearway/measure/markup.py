"""HTML and SVG from nested calls. What is not markup is escaped, so no record's text becomes any."""

from __future__ import annotations

import html
import re
from typing import Any

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST = 600


class Markup(str):
    """Text that is markup already; only `tag`, `join` and our own constants make it."""

    __slots__ = ()


def shown(value: Any) -> str:
    """Any value as text fit for print: control signs, direction signs and lone surrogates become U+FFFD."""
    text = _UNSAFE.sub("\ufffd", value if isinstance(value, str) else str(value))
    return text if len(text) <= _LONGEST else _words(text[: _LONGEST - 2]) + " …"


def escape(value: Any) -> Markup:
    """The value as it stands where it is markup, else its text with every special sign escaped."""
    return value if isinstance(value, Markup) else Markup(html.escape(shown(value), quote=True))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """One element. Children that are None and attributes that are None are left out.

    An underscore in an attribute's name stands for a hyphen, one at its end for none: class_, stroke_width.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in ("img", "meta", "br"):
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Any) -> Markup:
    """The children one after another, each escaped where need be; None is nothing."""
    return Markup("".join(escape(child) for child in children if child is not None))


def _number(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def _words(text: str) -> str:
    """Without its last word, which may have been cut; whole where it is one."""
    kept, _, last = text.rpartition(" ")
    return kept or last
