"""Which text conditions which denoiser call. Today one text holds for all; prompt editing comes here."""

from __future__ import annotations

from clearway.prompt.grammar import parse
from clearway.types import Plan, Span


def plan(prompt: str, negative_prompt: str) -> Plan:
    """The plan of a request's two texts. Never raises: any text is a prompt."""
    return Plan(positive=(Span(parse(prompt)),), negative=(Span(parse(negative_prompt)),))
