"""Plans of today: one text for every call."""

from clearway.prompt import plan
from clearway.types import Piece


def test_both_texts_hold_to_the_end() -> None:
    made = plan("a (red:1.2) apple", "blur")
    assert [(span.until, span.pieces) for span in made.positive] == [
        (None, (Piece("a "), Piece("red", 1.2), Piece(" apple")))
    ]
    assert made.negative[0].pieces == (Piece("blur"),)
