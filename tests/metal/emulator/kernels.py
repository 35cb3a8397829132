"""The kernels of a source: their host names, how C++ names them, and where each argument comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .lexer import Declaration, Token, closing, declarations, erase, split

# The number of each is `Source` in cpp/msl/entry.h.
BUFFER, GROUP_BUFFER = 0, 1
SOURCES = {
    "thread_position_in_grid": 2,
    "thread_position_in_threadgroup": 3,
    "threadgroup_position_in_grid": 4,
    "threads_per_threadgroup": 5,
    "dispatch_threads_per_threadgroup": 6,
    "threads_per_grid": 7,
    "threadgroups_per_grid": 8,
    "thread_index_in_simdgroup": 9,
    "simdgroup_index_in_threadgroup": 10,
    "thread_index_in_threadgroup": 11,
    "simdgroups_per_threadgroup": 12,
    "dispatch_simdgroups_per_threadgroup": 12,
    "threads_per_simdgroup": 13,
    "thread_execution_width": 13,
}
Binding = tuple[int, int]  # source, and for buffers its index


@dataclass(frozen=True, slots=True)
class Kernel:
    """`expression` is the function in C++, template arguments and namespaces included."""

    host_name: str
    expression: str
    bindings: tuple[Binding, ...]


def find(tokens: list[Token]) -> list[Kernel]:
    """The kernels, in order of the source; explicit instantiations are taken out of `tokens`.

    Known forms: `kernel void f(...)`, with or without [[host_name]]; `template [[host_name("x")]] kernel void
    f<T>(...)`; `template [[host_name("x")]] kernel decltype(f<T>) f<T>`; `[[kernel]]` for `kernel`.
    """
    templates: dict[str, tuple[Binding, ...]] = {}
    found: list[tuple[str, str, str, tuple[Binding, ...] | None]] = []
    for declaration in declarations(tokens):
        words = declaration.words
        marked = "kernel" in words or re.search(r"\bkernel\b", re.sub(r'"[^"]*"', "", declaration.attributes))
        if not marked or words[0] == "struct":
            continue
        instantiation = words[0] == "template" and words[1] != "<"
        if instantiation and "decltype" in words:
            name, bindings = _named_by_decltype(declaration), None
        else:
            name, bindings = _named_by_signature(declaration, instantiation)
        base = re.match(r"[\w:]+", name)
        assert base is not None
        if words[0] == "template" and not instantiation:
            assert bindings is not None
            templates[name] = bindings
            continue
        scoped = "::".join((*declaration.namespaces, name))
        found.append((_host_name(declaration) or name, scoped, base.group(), bindings))
        if instantiation:
            erase(tokens, declaration.first, declaration.end)  # and so declaration.tokens
    return [
        Kernel(host, scoped, bindings if bindings is not None else templates[base])
        for host, scoped, base, bindings in found
    ]


def _host_name(declaration: Declaration) -> str | None:
    found = re.search(r"host_name\s*\(((?:\s*\"[^\"]*\")+)\s*\)", declaration.attributes)
    return "".join(re.findall(r'"([^"]*)"', found.group(1))) if found else None


def _join(tokens: Sequence[Token]) -> str:
    return "".join(f" {token.text}" if token.kind == "word" else token.text for token in tokens).strip()


def _named_by_decltype(declaration: Declaration) -> str:
    tokens = [token for token in declaration.tokens if token.kind != "attribute"]
    start = next(i for i, token in enumerate(tokens) if token.text == "decltype") + 1
    return _join(tokens[start + 1 : closing(tokens, start, "(", ")")])


def _named_by_signature(declaration: Declaration, instantiation: bool) -> tuple[str, tuple[Binding, ...]]:
    """The name after the `void` of the return type, and the bindings of the parameters after it."""
    tokens = declaration.tokens
    after = ("(", "<") if not instantiation else ("(", "<", "::")
    start = next(
        i + 1
        for i, token in enumerate(tokens[:-2])
        if token.text == "void" and tokens[i + 1].kind == "word" and tokens[i + 2].text in after
    )
    angles, at = 0, start
    while tokens[at].text != "(" or angles:
        angles += (tokens[at].text == "<") - (tokens[at].text == ">")
        at += 1
    parameters = split(tokens[at + 1 : closing(tokens, at, "(", ")")])
    return _join(tokens[start:at]), _bindings(parameters)


def _bindings(parameters: list[list[Token]]) -> tuple[Binding, ...]:
    bindings: list[Binding] = []
    next_buffer = 0
    for parameter in parameters:
        attributes = " ".join(token.text for token in parameter if token.kind == "attribute")
        placed = re.search(r"\b(buffer|threadgroup|texture)\s*\(\s*(\d+)\s*\)", attributes)
        known = [name for name in re.findall(r"[A-Za-z_]\w*", attributes) if name in SOURCES]
        if placed and placed.group(1) == "texture":
            raise SyntaxError("the emulator has no textures")
        if placed and placed.group(1) == "threadgroup":
            bindings.append((GROUP_BUFFER, int(placed.group(2))))
        elif placed or not known:
            index = int(placed.group(2)) if placed else next_buffer
            next_buffer = max(next_buffer, index + 1)
            bindings.append((BUFFER, index))
        else:
            bindings.append((SOURCES[known[0]], 0))
    return tuple(bindings)
