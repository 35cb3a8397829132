"""Preprocessed Metal source -> C++ source that cpp/msl.h and the host's compiler understand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from . import kernels
from .address_spaces import drop_overloads
from .kernels import Kernel
from .lexer import ADDRESS_SPACES, Token, beside, declarations, erase, lex, split

_FLOAT = re.compile(r"(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?|0[xX][\da-fA-F.]+[pP][+-]?\d+")
_ZEROED = 1 << 20  # ids from here on: variables with an initialiser


@dataclass(frozen=True, slots=True)
class Program:
    """`text` is C++ without entry points; `entry()` adds one for a kernel."""

    text: str
    kernels: tuple[Kernel, ...]

    def entry(self, kernel: Kernel) -> str:
        """C++ for msl_entry (runs one thread) and msl_parameters (describes the arguments)."""
        table = ", ".join(f"{{{source}, {index}}}" for source, index in kernel.bindings)
        return (
            f"static const int msl_bindings[][2] = {{{table}}};\n"
            'extern "C" MSL_UNCHECKED void msl_entry(const msl::Context* msl_c) '
            f"{{ msl::invoke(&{kernel.expression}, *msl_c, msl_bindings); }}\n"
            'extern "C" int msl_parameters(msl::Parameter* msl_out) '
            f"{{ return msl::describe(&{kernel.expression}, msl_out); }}\n"
        )


def transform(text: str, constants: Mapping[int, bool | int | float] | None = None) -> Program:
    """The program of `text`; `constants` are values of function constants by index (absent: 0)."""
    tokens = lex(text)
    found = kernels.find(tokens)
    _fix_function_constants(tokens, constants or {})
    drop_overloads(tokens)
    _place_threadgroup_variables(tokens)
    return Program("".join(_cpp(token) for token in tokens), tuple(found))


def _fix_function_constants(tokens: list[Token], constants: Mapping[int, bool | int | float]) -> None:
    for declaration in declarations(tokens):
        found = re.search(r"function_constant\s*\(\s*(\d+)\s*\)", declaration.attributes)
        if not found or tokens[declaration.head].text != ";":
            continue
        words = [
            token.text
            for token in declaration.tokens
            if token.kind == "word" and token.text not in ADDRESS_SPACES | {"const", "constexpr"}
        ]
        kind, name = " ".join(words[:-1]), words[-1]
        value = constants.get(int(found.group(1)), 0)
        erase(tokens, declaration.first, declaration.end)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        tokens[declaration.first] = Token("statement", f"static constexpr {kind} {name} = ({kind})({text});")


def _place_threadgroup_variables(tokens: list[Token]) -> None:
    """`threadgroup T x[N];` in a body becomes a reference to memory that the threadgroup's threads share."""
    identity = parentheses = 0
    for at, token in enumerate(tokens):
        if token.kind == "sign":
            parentheses += (token.text == "(") - (token.text == ")")
        if token.text != "threadgroup" or token.kind != "word" or parentheses:
            continue
        before = beside(tokens, at, -1)
        starts = before < 0 or tokens[before].kind in ("statement", "attribute")
        if not starts and tokens[before].text not in (";", "{", "}", ":", ")"):
            continue
        end, depth = at, 0
        while tokens[end].text != ";" or depth:
            if tokens[end].kind == "sign":
                depth += (tokens[end].text in "([{") - (tokens[end].text in ")]}")
            end += 1
        declared = [token for token in tokens[at + 1 : end] if not token.blank and token.kind != "attribute"]
        first = _first_name(declared)
        if first is None:
            continue
        kind = " ".join(token.text for token in declared[:first])
        texts = []
        for part in split(declared[first:]):
            name, rest = part[0].text, [token.text for token in part[1:]]
            zeroed = "=" in rest
            extent = " ".join(rest[: rest.index("=")] if zeroed else rest)
            number = identity + _ZEROED * zeroed
            texts.append(
                f"typedef {kind} {name}_type {extent}; {name}_type& {name} = *({name}_type*)"
                f"msl_threadgroup_variable({number}, sizeof({name}_type), alignof({name}_type), "
                f"{int(zeroed)});"
            )
            identity += 1
        erase(tokens, at, end + 1)
        tokens[at] = Token("statement", " ".join(texts))


def _first_name(declared: list[Token]) -> int | None:
    """Where the first declared name is; None for a pointer, a reference or a function."""
    angles = 0
    for at, token in enumerate(declared):
        angles += (token.text == "<") - (token.text == ">")
        if token.text in ("*", "&", "("):
            return None
        after = declared[at + 1].text if at + 1 < len(declared) else ";"
        if token.kind == "word" and angles == 0 and at > 0 and after in ("[", ",", ";", "="):
            return at
    return None


def _cpp(token: Token) -> str:
    text = token.text
    if token.kind == "attribute":
        return "\n" * text.count("\n") or " "
    if token.kind == "word" and text == "kernel":
        return " "
    if token.kind != "number" or (text.startswith(("0x", "0X")) and "p" not in text.lower()):
        return text
    for suffix, kind in (("bf", "bfloat"), ("h", "half")):
        if text.lower().endswith(suffix):
            digits = text[: -len(suffix)]
            return f"(({kind}){digits}{'f' if any(sign in digits for sign in '.eE') else ''})"
    return f"{text}f" if _FLOAT.fullmatch(text) else text  # MSL has no double
