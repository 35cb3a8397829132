"""Windows of 75 tokens. The tokenizer here gives one token a word, the comma being 0."""

from hypothesis import given
from hypothesis import strategies as st

from clearway.prompt import windows
from clearway.prompt.chunks import COMMA_BACKTRACK, LENGTH
from clearway.types import Piece

COMMA = 0


def tokenize(text: str) -> list[int]:
    return [COMMA if word == "," else int(word) for word in text.split()]


def words(count: int, start: int = 1) -> str:
    return " ".join(str(number) for number in range(start, start + count))


def cut(text: str, comma: int | None = COMMA) -> list[tuple[int, ...]]:
    return [window.tokens for window in windows([Piece(text)], tokenize, comma)]


@given(st.lists(st.integers(0, 9), max_size=400))
def test_nothing_is_lost_or_reordered(tokens: list[int]) -> None:
    found = cut(" ".join("," if token == COMMA else str(token) for token in tokens))
    assert [token for window in found for token in window] == tokens
    assert all(len(window) <= LENGTH for window in found)


@given(st.lists(st.tuples(st.integers(1, 90), st.floats(0.5, 2)), min_size=1, max_size=5))
def test_each_token_keeps_its_weight(pieces: list[tuple[int, float]]) -> None:
    made = windows([Piece(words(count), weight) for count, weight in pieces], tokenize, COMMA)
    assert [w for window in made for w in window.weights] == [w for count, w in pieces for _ in range(count)]


def test_no_text_is_one_empty_window() -> None:
    assert cut("") == [()]


def test_75_tokens_fill_one_window_and_76_open_another() -> None:
    assert [len(window) for window in cut(words(75))] == [75]
    assert [len(window) for window in cut(words(76))] == [75, 1]


def test_a_phrase_moves_whole_when_its_comma_is_near() -> None:
    text = f"{words(60)} , {words(14, 100)} 999"  # the comma is token 60, 15 back from the end
    assert [len(window) for window in cut(text)] == [61, 15]
    assert [len(window) for window in cut(text, comma=None)] == [75, 1]


def test_the_comma_may_lie_20_back_and_no_further() -> None:
    at_limit = f"{words(LENGTH - COMMA_BACKTRACK)} , {words(COMMA_BACKTRACK, 100)}"
    assert [len(window) for window in cut(at_limit)] == [56, 20]
    beyond = f"{words(LENGTH - COMMA_BACKTRACK - 1)} , {words(COMMA_BACKTRACK + 1, 100)}"
    assert [len(window) for window in cut(beyond)] == [75, 1]


def test_break_ends_a_window_even_an_empty_one() -> None:
    stop = Piece("BREAK", is_break=True)
    made = windows([Piece("1 2"), stop, Piece(""), stop, Piece("3")], tokenize, COMMA)
    assert [window.tokens for window in made] == [(1, 2), (), (3,)]
    assert [window.tokens for window in windows([stop, Piece("1")], tokenize, COMMA)] == [(), (1,)]
