"""Plans of today: one text for every call."""

import pytest

from clearway.prompt import plan, unbuilt
from clearway.types import Piece


def test_both_texts_hold_to_the_end() -> None:
    made = plan("a (red:1.2) apple", "blur")
    assert [(span.until, span.pieces) for span in made.positive] == [
        (None, (Piece("a "), Piece("red", 1.2), Piece(" apple")))
    ]
    assert made.negative[0].pieces == (Piece("blur"),)


@pytest.mark.parametrize(
    ("prompt", "forms"),
    [
        ("a (red:1.2) apple, [weak] BREAK and more", ()),
        ("<lora:foo:1> cat", ("<lora:…>",)),
        ("a cat AND a dog", ("AND",)),
        ("a [cat:dog:0.5]", ("[a:b:0.5]",)),
        ("[cat|dog]", ("[a|b]",)),
    ],
)
def test_forms_that_are_not_built_are_named(prompt: str, forms: tuple[str, ...]) -> None:
    assert unbuilt(prompt) == forms
