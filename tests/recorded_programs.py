"""Recording a function and running what became of it, for tests of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearway.execution.generated import generated
from clearway.execution.recorded import Program, record

Pass = Callable[[Program], Program]


class Holding(nn.Module):
    """A module around a function of it and its inputs."""

    def __init__(self, run: Callable[..., Any], **tensors: Tensor) -> None:
        super().__init__()
        self.run = run
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def recorded(module: nn.Module, *inputs: Tensor) -> Program:
    """The program of a module's call."""
    program, _ = record(lambda: module(*inputs), inputs, [*module.parameters(), *module.buffers()])
    return program


def names(program: Program) -> list[str]:
    """What its steps run, without "aten." and overloads."""
    return [getattr(step.run, "__name__", str(step.run)).partition(".")[0] for step in program.steps]


@torch.no_grad()
def ran(program: Program, *inputs: Tensor, lasting: Sequence[int] = ()) -> Any:
    """The program's output as generated code gives it."""
    function = generated(program, lasting)
    return function.run(*inputs, *function.once(*(inputs[number] for number in lasting)))
