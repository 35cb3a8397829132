"""Windows: pieces -> runs of at most 75 tokens, the length CLIP's text encoder reads between its two ends.

When a window is full and a comma lies at most 20 tokens back, what follows the comma moves to the next
window, so that a phrase is not cut. Source: the behaviour of the AUTOMATIC1111 WebUI 1.10
(`comma_padding_backtrack` 20).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from clearway.types import Piece

LENGTH = 75
COMMA_BACKTRACK = 20


@dataclass(frozen=True, slots=True)
class Window:
    """At most 75 token ids without the ends and the padding, each with its weight."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]


def windows(
    pieces: Iterable[Piece], tokenize: Callable[[str], list[int]], comma: int | None
) -> tuple[Window, ...]:
    """The windows of `pieces`, at least one (which may be empty).

    `tokenize(text)` gives ids without ends; `comma` is the id of a lone comma (None: never look back).
    """
    done: list[Window] = []
    tokens: list[int] = []
    weights: list[float] = []
    last_comma = -1

    def close(keep: int | None = None) -> None:
        """Ends the window; its tokens from `keep` on open the next one."""
        nonlocal tokens, weights, last_comma
        cut = len(tokens) if keep is None else keep
        done.append(Window(tuple(tokens[:cut]), tuple(weights[:cut])))
        tokens, weights, last_comma = tokens[cut:], weights[cut:], -1

    for piece in pieces:
        if piece.is_break:
            close()
            continue
        for token in tokenize(piece.text):
            if token == comma:
                last_comma = len(tokens)
            elif len(tokens) == LENGTH and last_comma != -1 and LENGTH - last_comma <= COMMA_BACKTRACK:
                close(last_comma + 1)
            if len(tokens) == LENGTH:
                close()
            tokens.append(token)
            weights.append(piece.weight)
    if tokens or not done:
        close()
    return tuple(done)
