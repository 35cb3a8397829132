"""Metal source as tokens: enough of C++'s lexical rules to find declarations and move text about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ADDRESS_SPACES = frozenset({"device", "constant", "thread", "threadgroup"})
_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<line>^\#[^\n]*$)
    |(?P<attribute>\[\[\s*[A-Za-z_][^\[\]]*\]\])
    |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<word>[A-Za-z_]\w*)
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
    |(?P<sign>::|->|<<=|>>=|<=|>=|==|!=|&&|\|\||.)""",
    re.M | re.S | re.X,
)


@dataclass(slots=True)
class Token:
    """`kind` is a group of _TOKEN, or "statement" for text that a pass wrote."""

    kind: str
    text: str

    @property
    def blank(self) -> bool:
        return self.kind in ("space", "line")


def lex(text: str) -> list[Token]:
    """The tokens of preprocessed source; joined they are the text again."""
    return [Token(found.lastgroup or "", found.group()) for found in _TOKEN.finditer(text)]


def beside(tokens: Sequence[Token], at: int, step: int) -> int:
    """The index of the next token in direction `step` that is not blank; -1 or len() past the ends."""
    at += step
    while 0 <= at < len(tokens) and tokens[at].blank:
        at += step
    return at


def closing(tokens: Sequence[Token], at: int, opened: str, closed: str) -> int:
    """The index of the `closed` that matches the first `opened` at or after `at`."""
    depth = 0
    for index in range(at, len(tokens)):
        if tokens[index].text == opened:
            depth += 1
        elif tokens[index].text == closed:
            depth -= 1
            if depth == 0:
                return index
    raise SyntaxError(f"the source has a {opened} that nothing closes")


def split(tokens: Sequence[Token]) -> list[list[Token]]:
    """`tokens` at the commas that no bracket holds (nor <>)."""
    parts: list[list[Token]] = [[]]
    brackets = angles = 0
    for token in tokens:
        if token.kind == "sign":
            brackets += (token.text in "([{") - (token.text in ")]}")
            angles = max(0, angles + (token.text == "<") - (token.text == ">"))
        if token.text == "," and brackets == 0 and angles == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if any(not token.blank for token in part)]


def erase(tokens: Sequence[Token], first: int, end: int) -> None:
    """Makes [first, end) blank; line breaks stay, so that later lines keep their numbers."""
    for token in tokens[first:end]:
        if token.kind != "line":
            token.kind, token.text = "space", "\n" * token.text.count("\n") or " "


@dataclass(slots=True)
class Declaration:
    """A declaration at namespace scope: [first, head) up to its ; or {, and [first, end) with its body."""

    first: int
    head: int
    end: int
    namespaces: tuple[str, ...]
    tokens: list[Token]  # of the head, without blanks

    @property
    def words(self) -> list[str]:
        return [token.text for token in self.tokens]

    @property
    def attributes(self) -> str:
        return " ".join(token.text for token in self.tokens if token.kind == "attribute")


def declarations(tokens: list[Token]) -> Iterator[Declaration]:
    """Every declaration at namespace scope, in order; the caller may change what has been yielded."""
    namespaces: list[str] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token.blank or token.text == ";":
            at += 1
            continue
        if token.text == "}":
            if namespaces:
                namespaces.pop()
            at += 1
            continue
        head, depth = at, 0
        while head < len(tokens):
            text = tokens[head].text
            if tokens[head].kind == "sign":
                depth += (text in "([") - (text in ")]")
                if depth == 0 and text in ";{":
                    break
            head += 1
        if head >= len(tokens):
            return
        found = [token for token in tokens[at:head] if not token.blank]
        words = [token.text for token in found]
        if words[0] in ("namespace", "extern") or words[:2] == ["inline", "namespace"]:
            if tokens[head].text == "{":
                namespaces.append("" if words[-1] == "namespace" or words[0] == "extern" else words[-1])
            at = head + 1
            continue
        end = closing(tokens, head, "{", "}") if tokens[head].text == "{" else head
        yield Declaration(at, head, end + 1, tuple(name for name in namespaces if name), found)
        at = end + 1
