"""Compiles Triton kernels for GPUs that are not here, in a process of its own: python -m ops.compiled sample.

Each implementation runs on its cases as tensors without storage, with launches recorded instead of run; so
what is compiled, with Triton's own specialisation, is what those cases would launch. "sample" takes each
kernel once in float16, at a real shape, "all" every distinct launch: float16 for all targets, other dtypes
for sm_90; what is in Gluon for sm_90 alone. One JSON line a kernel and target.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from clearway.ops import _triton, selftest
from clearway.ops._described import Described
from clearway.ops._gluon import GluonKernel
from clearway.ops.contract import OPS
from ops.registry import GLUON, TRITON_TOO, named, refused, with_implementation

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""Shared memory a block may have, by compute capability (CUDA C++ Programming Guide)."""

Launch = tuple[str, str, str, torch.dtype, Any, tuple[Any, ...], dict[str, Any]]


def launches(every: bool) -> list[Launch]:
    """(op, implementation, case, dtype, kernel, arguments, constants) of distinct launches."""
    found: dict[object, Launch] = {}
    recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    _triton.Kernel.launch = lambda self, grid, *args, **constants: recorded.append((self, args, constants))  # type: ignore[method-assign]
    chosen = [*((name, "triton") for name in with_implementation("triton")), *TRITON_TOO, *GLUON]
    for name, implementation in chosen:
        op = OPS[name]
        with torch.device("meta"):
            cases = [
                (case, selftest.made(op, given)) for case, given in op.cases() if every or callable(given)
            ]
        for case, given in cases:
            for dtype in selftest.DTYPES if every else (torch.float16,):
                args = selftest._on(given, "meta", dtype)
                recorded.clear()
                if refused(named(op, implementation), args) is not None:
                    continue
                named(op, implementation).run(*args)
                for kernel, arguments, constants in recorded:
                    key: object = (name, implementation, kernel.function.__module__, kernel.name)
                    if every:
                        key = (key, tuple(map(kind, arguments)), tuple(constants.items()))
                    launch = (name, implementation, case, dtype, kernel, arguments, constants)
                    found.setdefault(key, launch)
    return list(found.values())


def kind(argument: Any) -> str:
    """What Triton specialises an argument on."""
    if isinstance(argument, torch.Tensor):
        return str(argument.dtype)
    if isinstance(argument, Described):
        return str(argument.sign())
    if isinstance(argument, int):
        return "1" if argument == 1 else f"{'16' if argument % 16 == 0 else ''} {argument >= 2**31}"
    return "float"


def compiled(found: list[Launch], capability: int) -> Iterator[dict[str, Any]]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.compiler import compile as build
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    for name, implementation, case, dtype, kernel, arguments, constants in found:
        gluon = isinstance(kernel, GluonKernel)
        if (name, implementation) in GLUON and capability != 90:
            continue
        jit, arguments = kernel.built(), kernel.prepared(arguments)
        options = {**constants, "debug": False, "instrumentation_mode": ""}
        bind = create_function_from_signature(jit.signature, jit.params, backend)
        bound, specialised, _ = bind(*arguments, **options)
        packed, signature, values, attributes = jit._pack_args(backend, options, bound, specialised, _)
        source = (GluonASTSource if gluon else ASTSource)(jit, signature, values, attributes)
        line = {
            "op": name,
            "implementation": implementation,
            "kernel": kernel.name,
            "case": case,
            "dtype": str(dtype),
            "sm": capability,
            "gluon": gluon,
        }
        try:
            made = build(source, target=target, options=packed.__dict__)
        except Exception as error:  # ptxas and Triton have many; each is this kernel's problem
            yield {**line, "problem": f"{type(error).__name__}: {error}"[:1000]}
            continue
        limit = SHARED_KIB[capability] * 1024
        wide = "b128" in made.asm["ptx"] or ".v4" in made.asm["ptx"]
        problem = (
            "" if made.metadata.shared <= limit else f"{made.metadata.shared} bytes shared, {limit} there"
        )
        problem = problem or ("" if made.asm["cubin"] else "there is no machine code")
        yield {**line, "problem": problem, "shared_bytes": made.metadata.shared, "vectors": wide}


def main(which: str) -> None:
    found = launches(which == "all")
    for capability in SHARED_KIB:
        chosen = found if capability == 90 else [one for one in found if one[3] == torch.float16]
        for line in compiled(chosen, capability):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
