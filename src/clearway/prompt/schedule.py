"""Which text conditions which denoiser call. Today one text holds for all; prompt editing comes here."""

from __future__ import annotations

import re

from clearway.prompt.grammar import parse
from clearway.types import Plan, Span

_UNBUILT = {
    "<lora:…>": re.compile(r"<\w+:[^>]+>"),
    "AND": re.compile(r"\bAND\b"),
    "[a:b:0.5]": re.compile(r"\[[^\[\]|]*:[^\[\]|]*\]"),
    "[a|b]": re.compile(r"\[[^\[\]]*\|[^\[\]]*\]"),
}


def plan(prompt: str, negative_prompt: str) -> Plan:
    """The plan of a request's two texts. Never raises: any text is a prompt."""
    return Plan(positive=(Span(parse(prompt)),), negative=(Span(parse(negative_prompt)),))


def unbuilt(prompt: str) -> tuple[str, ...]:
    """The WebUI's forms in a prompt that Clearway does not know yet and reads as text."""
    return tuple(form for form, pattern in _UNBUILT.items() if pattern.search(prompt))
