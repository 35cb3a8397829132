"""Attention that a module asks PyTorch itself for, by what the op `attention` takes for such arguments.

A model's own attention calls PyTorch's function, past every implementation of the op. In a recorded call it
is one step, which is exchanged where the op routes to `native`; every other route stays PyTorch's function.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from clearway.errors import UnavailableError
from clearway.execution.recorded import Program, Step, aten
from clearway.ops import attention_native, contract, state
from clearway.ops.attention import attention

_AXES = 4
ROUTE = "attention/native"


def routed(program: Program, routes: dict[str, int]) -> Program:
    """The program with such steps; those are counted in `routes` as calls of the op would be."""
    steps = []
    for step in program.steps:
        made = _native(step)
        if made is not None:
            routes[ROUTE] = routes.get(ROUTE, 0) + 1
        steps.append(made or step)
    return Program(program.inputs, steps, program.output, program.contiguous)


def _native(step: Step) -> Step | None:
    """What stands for a step; None where that stays."""
    if step.run is not aten.scaled_dot_product_attention.default:
        return None
    given = _given(step)
    q, k, v = (given[name] for name in ("query", "key", "value"))
    if given["attn_mask"] is not None or given["dropout_p"] or given["is_causal"] or given["enable_gqa"]:
        return None
    if any(len(one.shape) != _AXES for one in (q, k, v)):
        return None
    scale: float | None = given["scale"]
    # on the CPU, unlike on "meta", memory that nobody touches costs nothing, and the op reads no values
    like = [torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in (q, k, v)]
    try:
        chosen = attention.route(*like, scale)
    except UnavailableError:  # one was named that does not take these: the step was never the op's
        return None
    if chosen.name != "native":
        return None
    try:
        attention_native.ready()
    except state.BuildError as error:
        if contract.chosen_by_name().get(attention.name) == "native":
            raise UnavailableError(f"attention=native was asked for and {error}") from error
        state.disable(attention.name, "native", str(error), q.dtype)
        return None
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return Step(torch.ops.clearway.attention_native.default, (q, k, v, factor), {}, step.outs)


def _given(step: Step) -> dict[str, Any]:
    """Its arguments by name, with what they are by default."""
    named = {one.name: one.default_value for one in step.run._schema.arguments}  # type: ignore[attr-defined]
    for name, value in zip(named, step.args, strict=False):
        named[name] = value
    return {**named, **step.kwargs}
