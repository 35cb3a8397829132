"""What `accelerate` was asked for, made exact: ops, executor and layout, by where the networks lie.

On a CPU recorded calls (`flat`) are what is quick, and they stand for layers as Diffusers has them. So where
there is nothing but a CPU, and for a Model on one, no op is put in place unless named. Beside a GPU a
pipeline that lies on the CPU is taken for one that will be moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from clearway.device import absent, pick
from clearway.errors import RequestError, nearest
from clearway.models import _executors, chosen
from clearway.models.model import Model
from clearway.types import Choices

AUTO, FLAT, GRAPHS = _executors.AUTO, "flat", "cuda_graph"
LAYOUTS = ("contiguous", "channels_last")
NEEDS = {
    "convolution": "residual_add",
    "cross_kv": "attention",
    "residual_add": "group_norm_silu",
    "time_embedding": "group_norm_silu",
}
"""Ops that are put in place by another's doing."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be put in place, and what whoever asked should know of it."""

    ops: tuple[str, ...]
    executor: str
    layout: str | None
    notes: tuple[str, ...] = ()


def exact(
    target: Any,
    parts: Sequence[nn.Module],
    every: tuple[str, ...],
    ops: Iterable[str] | None,
    executor: str,
    layout: str | None,
    packed_qkv: bool | None,
) -> Asked:
    """accelerate's arguments for `parts` of a target; RequestError for one that is not valid."""
    names = None if ops is None else _names(ops, every)
    if layout not in (None, AUTO, *LAYOUTS):
        raise RequestError(f"layout {layout!r} is not known; it is one of {AUTO}, {', '.join(LAYOUTS)}")
    if executor not in _executors.CHOICES:
        raise RequestError(
            f"executor {executor!r} is not known; it is one of {', '.join(_executors.CHOICES)}"
        )
    if packed_qkv is not None and not isinstance(packed_qkv, bool):
        raise RequestError(f"packed_qkv {packed_qkv!r} is not known; it is True, False or None")
    whole = isinstance(target, Model)
    if whole and executor != AUTO:
        raise RequestError(
            f"executor {executor!r} was asked for and a Model is run as its choices say; "
            "a Diffusers pipeline or a module takes it"
        )
    recorded = executor == FLAT or (executor == AUTO and recorded_here(target, parts))
    notes = [
        f"{op} comes with {NEEDS[op]}, which ops do not name"
        for op in names or ()
        if op in NEEDS and NEEDS[op] not in (names or ())
    ]
    if recorded and names is None and whole:
        notes.append(
            "nothing was put in place: it runs by recorded calls (flat) unless something else was selected, "
            "and ops would prevent that; those that are named are put in place all the same"
        )
    elif recorded and names:
        notes.append(
            "on a CPU recorded calls (flat) are usually quicker, and most ops in place prevent them; "
            "ops=() leaves ops out"
        )
    if executor == GRAPHS and (why := absent("cuda")):
        notes.append(f"no graph can be captured here: {why}")
    wanted = names if names is not None else () if recorded else every
    plain = recorded and not wanted
    return Asked(
        wanted,
        FLAT if plain and not whole else executor,
        (None if plain else "channels_last") if layout == AUTO else layout,
        tuple(notes),
    )


def recorded_here(target: Any, parts: Sequence[nn.Module]) -> bool:
    """Whether recorded calls are what runs best where the target lies and will lie, or how a Model runs."""
    if isinstance(target, Model):
        named = target.choices != Choices()
        return (target.choices if named else chosen.default(target.device.kind)).executor == FLAT
    best = pick().kind
    places = {one.device.type for part in parts for one in part.parameters()}
    return places == {best} and chosen.DEFAULTS.get(best, {}).get("executor") == FLAT


def _names(ops: Iterable[str], every: tuple[str, ...]) -> tuple[str, ...]:
    try:
        names = (ops,) if isinstance(ops, str) else tuple(ops)
    except TypeError:
        raise RequestError(
            f"ops {ops!r} are no names of ops; a list of some of {', '.join(every)} would do"
        ) from None
    for name in names:
        if not isinstance(name, str) or name not in every:
            raise RequestError(f"op {name!r} cannot be put in place; nearest: {nearest(str(name), every)}")
    return names
