"""Emphasis: text -> pieces with weights.

`(x)` multiplies by 1.1, `[x]` divides by 1.1, `(x:w)` multiplies by w; they nest. `\\(` and the like are the
signs themselves, any other backslash is dropped. Brackets never closed run to the end, closing ones never
opened are text, and so is a colon that introduces no weight. BREAK between words ends a window of 75 tokens.
Source: the behaviour of the AUTOMATIC1111 WebUI 1.10 (`parse_prompt_attention`). Two of its faults are not
kept: BREAK inside brackets breaks like any other, and `(x:1.2.3)` is text, not a ValueError.
"""

from __future__ import annotations

import math
import re

from clearway.types import Piece

ROUND = 1.1
SQUARE = 1 / 1.1

_WEIGHT = re.compile(r":\s*([+-]?[.\d]+)\s*\)")
_TEXT = re.compile(r"[^\\()\[\]:]+")
_BREAK = re.compile(r"\s*\bBREAK\b\s*")


def parse(text: str) -> tuple[Piece, ...]:
    """The pieces of `text` in order, neighbours of equal weight joined; at least one. Never raises."""
    pieces: list[Piece] = []
    round_open: list[int] = []
    square_open: list[int] = []
    position = 0
    while position < len(text):
        sign = text[position]
        weight = _weight_at(text, position) if sign == ":" else None
        plain = _TEXT.match(text, position)
        if plain:
            _append_text(pieces, plain.group())
            position = plain.end()
            continue
        if sign == "\\":
            escaped = text[position + 1 : position + 2]
            literal = escaped if escaped and escaped in "()[]\\" else ""
            pieces.append(Piece(literal))
            position += 1 + len(literal)
            continue
        if weight is not None and round_open:
            value, position = weight
            _multiply(pieces, round_open.pop(), value)
            continue
        if sign == "(":
            round_open.append(len(pieces))
        elif sign == "[":
            square_open.append(len(pieces))
        elif sign == ")" and round_open:
            _multiply(pieces, round_open.pop(), ROUND)
        elif sign == "]" and square_open:
            _multiply(pieces, square_open.pop(), SQUARE)
        else:
            pieces.append(Piece(sign))
        position += 1
    for start in round_open:
        _multiply(pieces, start, ROUND)
    for start in square_open:
        _multiply(pieces, start, SQUARE)
    return _joined(pieces)


def _weight_at(text: str, position: int) -> tuple[float, int] | None:
    """The weight that `:w)` at `position` gives, with the position behind it."""
    match = _WEIGHT.match(text, position)
    if not match:
        return None
    try:
        value = float(match.group(1))
    except ValueError:
        return None
    return (value, match.end()) if math.isfinite(value) else None


def _append_text(pieces: list[Piece], text: str) -> None:
    for index, part in enumerate(_BREAK.split(text)):
        if index:
            pieces.append(Piece("BREAK", is_break=True))
        pieces.append(Piece(part))


def _multiply(pieces: list[Piece], start: int, factor: float) -> None:
    for index in range(start, len(pieces)):
        if not pieces[index].is_break:
            pieces[index] = Piece(pieces[index].text, pieces[index].weight * factor)


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and not piece.is_break and not last.is_break and last.weight == piece.weight:
            joined[-1] = Piece(last.text + piece.text, last.weight)
        else:
            joined.append(piece)
    return tuple(joined) or (Piece(""),)
