"""Drops overloads that differ only by address space: on a host, which has one, they would be the same.

Our own kernels have none; PyTorch's and MLX's do, and those showed how faithful the emulator's prototype was.
"""

from __future__ import annotations

from .lexer import ADDRESS_SPACES, Token, closing, declarations, erase

_STATEMENTS = {"if", "for", "while", "switch", "else", "do", "return"}


def drop_overloads(tokens: list[Token]) -> None:
    """Erases all but the first of such free functions and of such members."""
    _drop_functions(tokens)
    _drop_members(tokens)


def _drop_functions(tokens: list[Token]) -> None:
    seen = set()
    for declaration in declarations(tokens):
        words = declaration.words
        body = tokens[declaration.head].text == "{"
        if "kernel" in words or not (body or (words[0] == "template" and words[1] != "<")):
            continue
        plain = " ".join(
            token.text
            for token in declaration.tokens
            if token.text not in ADDRESS_SPACES and token.kind != "attribute"
        )
        key = (declaration.namespaces, plain)
        if key in seen and any(word in ADDRESS_SPACES for word in words):
            erase(tokens, declaration.first, declaration.end)
        seen.add(key)


def _drop_members(tokens: list[Token]) -> None:
    """Members may also differ by the address space of *this*, written after the parameters."""
    seen: set[tuple[int, str, bool]] = set()
    scopes = [0]
    start: int | None = None
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token.blank:
            at += 1
            continue
        if start is None:
            start = at
        if token.text == "{":
            key = _member_key(tokens[start:at], scopes[-1])
            if key in seen:
                end = closing(tokens, at, "{", "}")
                erase(tokens, start, end + 1)
                start, at = None, end + 1
                continue
            if key:
                seen.add(key)
            scopes.append(at)
            start = None
        elif token.text == "}":
            if len(scopes) > 1:
                scopes.pop()
            start = None
        elif token.text == ";":
            start = None
        elif token.text == ":":
            words = [token.text for token in tokens[start:at] if not token.blank]
            if words in (["public"], ["private"], ["protected"]):
                start = None
        at += 1


def _member_key(head: list[Token], scope: int) -> tuple[int, str, bool] | None:
    """What two such members have in common; None for what is no function with an address space."""
    words = [token.text for token in head if not token.blank and token.kind != "attribute"]
    if ")" not in words or words[0] in _STATEMENTS or not any(word in ADDRESS_SPACES for word in words):
        return None
    end = words.index(":") if ":" in words else len(words) - words[::-1].index(")")
    plain = " ".join(word for word in words[:end] if word not in ADDRESS_SPACES)
    return scope, plain, ":" not in words and "const" in words[end:]
