"""Emphasis: properties, then how the WebUI reads the same texts."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearway.prompt import parse
from clearway.types import Piece

# What the WebUI v1.10.1 makes of 83 texts: recorded by running its parser, results only.
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "emphasis.json").read_text(encoding="utf-8"))

PLAIN = st.text(st.characters(exclude_characters="()[]\\:", exclude_categories=("Cs",)), max_size=30)


def text_of(pieces: tuple[Piece, ...]) -> str:
    return "".join(piece.text for piece in pieces)


@given(st.text(max_size=60))
def test_any_text_is_a_prompt(text: str) -> None:
    pieces = parse(text)
    assert pieces
    assert all(math.isfinite(piece.weight) for piece in pieces)


@given(PLAIN.filter(lambda text: "BREAK" not in text))
def test_plain_text_is_one_piece_of_weight_one(text: str) -> None:
    assert parse(text) == (Piece(text),)


@given(PLAIN.filter(lambda text: "BREAK" not in text and text), st.integers(1, 6))
def test_nested_brackets_multiply(text: str, depth: int) -> None:
    (piece,) = parse("(" * depth + text + ")" * depth)
    assert (piece.text, piece.weight) == (text, pytest.approx(1.1**depth))
    (piece,) = parse("[" * depth + text + "]" * depth)
    assert (piece.text, piece.weight) == (text, pytest.approx(1.1**-depth))


@given(st.floats(-9, 9).map(lambda weight: round(weight, 3)))
def test_explicit_weight_is_the_weight(weight: float) -> None:
    assert parse(f"(x: {weight:.3f} )")[0].weight == pytest.approx(weight)


@given(st.text(alphabet="ab()[]\\:1.", max_size=25))
def test_escaping_every_bracket_leaves_one_plain_piece(text: str) -> None:
    escaped = "".join("\\" + sign if sign in "()[]\\" else sign for sign in text)
    assert parse(escaped) == (Piece(text),)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["prompt"][:40])
def test_reads_as_the_webui_does(case: dict) -> None:
    found = [("BREAK", -1.0) if p.is_break else (p.text, p.weight) for p in parse(case["prompt"])]
    assert [text for text, _ in found] == [text for text, _ in case["emphasis"]]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in case["emphasis"]])


def test_faults_that_are_not_kept() -> None:
    assert [piece.is_break for piece in parse("(a BREAK b)")] == [False, True, False]  # there: text "BREAK"
    assert text_of(parse("(x:1.2.3)")) == "x:1.2.3"  # there: a ValueError
    assert parse("(x:" + "9" * 400 + ")")[0].weight == pytest.approx(1.1)  # an infinite weight is none
