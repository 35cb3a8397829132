"""What Apple's compiler rejects and a host compiler takes: a sample, where address spaces vanish."""

from __future__ import annotations

from .lexer import ADDRESS_SPACES, Token, beside, closing, lex, split

_NOT_FUNCTIONS = {
    *("if", "for", "while", "switch", "return", "sizeof", "decltype", "alignof", "static_assert"),
    "__attribute__",
}


def lint(source: str) -> list[str]:
    """Sentences: double, if constexpr, signs outside ASCII, pointers and references of no address space."""
    tokens = lex(source)
    found = []
    if not source.isascii():
        found.append("the source has signs outside ASCII, which torch.mps.compile_shader cannot encode")
    if any(token.kind == "word" and token.text == "double" for token in tokens):
        found.append("double is not an MSL type")
    for at, token in enumerate(tokens):
        if token.text == "constexpr" and tokens[beside(tokens, at, -1)].text == "if":
            found.append("if constexpr is C++17; Metal before 4 is C++14")
        opening = beside(tokens, at, 1)
        if token.kind != "word" or token.text in _NOT_FUNCTIONS or opening >= len(tokens):
            continue
        if tokens[opening].text == "(" and _defines(tokens, at, opening):
            found += _spaceless(token.text, tokens[opening + 1 : closing(tokens, opening, "(", ")")])
    return found


def _defines(tokens: list[Token], name: int, opening: int) -> bool:
    after = beside(tokens, closing(tokens, opening, "(", ")"), 1)
    before = beside(tokens, name, -1)
    if after >= len(tokens) or tokens[after].text != "{" or before < 0:
        return False
    return tokens[before].text not in ("return", "else", "operator") and (
        tokens[before].kind == "word" or tokens[before].text in ("*", "&", ">")
    )


def _spaceless(name: str, parameters: list[Token]) -> list[str]:
    found = []
    for parameter in split([token for token in parameters if not token.blank and token.kind != "attribute"]):
        words = [token.text for token in parameter]
        if {"*", "&"} & set(words) and "(" not in words and not ADDRESS_SPACES & set(words):
            found.append(f"{name}: parameter '{' '.join(words)}' has no address space")
    return found
