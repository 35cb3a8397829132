"""Runs Triton kernels under Triton's interpreter, in a process of its own: python -m ops.interpreted JOB.

JOB "cases": every Triton implementation on every small case and dtype through selftest.problem, slow ones in
float16 alone, then with values that are not finite; "mutants": each planted fault until a case catches it;
"far": rows that begin beyond 2^31 elements. One JSON line a check.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from clearway.ops import group_norm_rows_triton, selftest
from clearway.ops._implementation import Case, changed, refused
from clearway.ops._triton import Kernel
from clearway.ops.attention import inputs
from clearway.ops.contract import OPS, Op
from ops.mutants import MUTANTS
from ops.registry import PRODUCTS, TRITON_TOO, in_dtype, named, outputs, small, with_implementation

NAME = "triton"
BESIDE = {
    "attention_gemm": ("attention", "gemm"),
    "attention_tiled": ("attention", "tiled"),
    "group_norm_rows_triton": ("group_norm_silu", NAME),
}
"""Sources of implementations of other names: their op and name."""

SLOW = {"upsample_conv": 2**20}
"""FLOPs from which a case of an op takes the interpreter seconds: such cases run in float16 alone."""

group_norm_rows_triton.CHUNKS = 3  # so that small cases have chunks of several tiles
group_norm_rows_triton.MERGED = 2  # and more of them than are merged at once


def repair_interpreter() -> None:
    """Triton 3.6's interpreter takes int() of arrays of one element, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def check_cases() -> Iterator[dict[str, Any]]:
    for name in with_implementation(NAME):
        op = OPS[name]
        for case, given in small(op):
            for dtype in selftest.DTYPES:
                if name in PRODUCTS and dtype == torch.bfloat16:
                    continue  # the interpreter multiplies the bits of bfloat16 as integers
                if dtype != torch.float16 and slow(op, given):
                    continue  # what differs between dtypes small cases show
                yield checked(op, case, in_dtype(given, dtype), dtype)
        for case, args in spoilt(op):
            yield checked(op, case, args, torch.float32)


def slow(op: Op, given: Case) -> bool:
    """Whether a case takes the interpreter seconds."""
    return op.name in SLOW and op.flops is not None and op.flops(*op._bound(given, {})) > SLOW[op.name]


def check_others() -> Iterator[dict[str, Any]]:
    """Implementations of other names, where they do not refuse."""
    for name, other in TRITON_TOO:
        for case, given in (*small(OPS[name]), *scaled(name)):
            for dtype in selftest.DTYPES:
                if other == "tiled" and dtype == torch.bfloat16:
                    continue  # as above
                args = in_dtype(given, dtype)
                if refused(named(OPS[name], other), args) is None:
                    problem = selftest.problem(OPS[name], named(OPS[name], other), args)
                    yield {"op": name, "implementation": other, "case": case, "problem": problem}


def scaled(name: str) -> Iterator[tuple[str, Case]]:
    """Attention with scales that no network has: what is masked must stay so."""
    if name == "attention":
        for scale in (-0.3, 0.0):
            yield f"scale {scale}", inputs(1, 2, 7, 13, 40, scale=scale)


def spoilt(op: Op) -> Iterator[tuple[str, Case]]:
    """The first three cases with NaN or an infinity in the middle of the first argument."""
    for case, args in list(small(op))[:3]:
        for value in ("nan", "inf", "-inf"):
            first = args[0].clone()
            first[tuple(size // 2 for size in first.shape)] = float(value)
            yield f"{case}, with {value}", (first, *args[1:])


def checked(op: Op, case: str, args: Case, dtype: torch.dtype) -> dict[str, Any]:
    implementation = named(op, NAME)
    began = time.perf_counter()
    problem = refused(implementation, args) or selftest.problem(op, implementation, args)
    problem = problem or against_contiguous(op, args)
    seconds = round(time.perf_counter() - began, 3)
    return {"op": op.name, "case": case, "dtype": str(dtype), "problem": problem, "seconds": seconds}


def against_contiguous(op: Op, args: Case) -> str:
    """Holds it to what PyTorch manages on contiguous inputs: its GroupNorm for channels last is worse."""
    if args[0].is_contiguous():
        return ""
    plain = tuple(changed(arg, torch.Tensor.contiguous) for arg in args)
    exact = outputs(op.reference.run(*in_dtype(plain, torch.float64)))
    eager, found = outputs(op.reference.run(*plain)), outputs(named(op, NAME).run(*args))
    problems = (selftest._difference(op, *three) for three in zip(found, eager, exact, strict=True))
    return next((f"held to contiguous inputs: {problem}" for problem in problems if problem), "")


def check_mutants(folder: Path) -> Iterator[dict[str, Any]]:
    for number, (stem, old, new) in enumerate(MUTANTS):
        text = (Path(selftest.__file__).parent / f"{stem}.py").read_text(encoding="utf-8")
        assert text.count(old) >= 1, f"{stem}: {old!r} is no longer there"
        path = folder / f"mutant{number}.py"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        name, implementation = BESIDE.get(stem, (stem.removesuffix("_triton"), NAME))
        before = OPS[name]
        module = loaded(path)
        if stem.endswith("_triton") and stem not in BESIDE:
            home = sys.modules[f"clearway.ops.{name}"]
            original, home.__dict__[stem] = home.__dict__[stem], module
            yield {"mutant": [stem, old, new], "caught": first_problem(OPS[name])}
            home.__dict__[stem] = original
        elif stem in BESIDE:  # registered by another file: its kernels alone are planted
            home = sys.modules[f"clearway.ops.{stem}"]
            kernels = {key: value for key, value in vars(home).items() if isinstance(value, Kernel)}
            home.__dict__.update({key: module.__dict__[key] for key in kernels})
            yield {"mutant": [stem, old, new], "caught": first_problem(OPS[name], implementation)}
            home.__dict__.update(kernels)
        else:
            yield {"mutant": [stem, old, new], "caught": first_problem(OPS[name])}
        OPS[name] = before


def first_problem(op: Op, name: str = NAME) -> str:
    for case, args in (*small(op), *scaled(op.name)):
        if name != NAME and refused(named(op, name), args):
            continue
        found = selftest.problem(op, named(op, name), args)
        found = found or (against_contiguous(op, args) if name == NAME else "")
        if found:
            return f"{case}: {found}"
    return ""


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def check_far(folder: Path) -> Iterator[dict[str, Any]]:
    """The second row or image of the first argument begins 2^31 + 16 elements after the first."""
    away = 2**31 + 16
    for name in with_implementation(NAME):
        op = OPS[name]
        implementation = named(op, NAME)
        given = next(args for _, args in small(op) if args[0].is_contiguous() and args[0].shape[0] >= 2)
        for cut in (None, 1):  # rows of one stride: only one row an image
            near, *rest = in_dtype(tuple(cut_to(arg, given[0], cut) for arg in given), torch.float16)
            size = away + near[0].numel()
            file = torch.from_file(str(folder / name), shared=True, size=size, dtype=near.dtype)
            far = file.as_strided(near.shape, (away, *near.stride()[1:]))
            far.copy_(near)
            problem = refused(implementation, (far, *rest))
            if problem is None:
                break
        if problem is None:
            found = outputs(implementation.run(far, *rest))
            expected = outputs(implementation.run(near, *rest))
            same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            problem = "" if same else "it reads elsewhere"
        yield {"op": name, "case": "far", "problem": problem}


def cut_to(arg: Any, first: torch.Tensor, rows: int | None) -> Any:
    """An argument for two images, of the shape of the first also to `rows` rows."""
    if not isinstance(arg, torch.Tensor) or arg.dim() < 2 or arg.shape[0] != first.shape[0]:
        return arg
    return arg[:2, :rows].clone() if arg.shape == first.shape else arg[:2]


def main(job: str) -> None:
    warnings.simplefilter("ignore")
    assert os.environ.get("TRITON_INTERPRET") == "1"
    repair_interpreter()
    with tempfile.TemporaryDirectory() as folder:
        jobs = {
            "cases": check_cases,
            "others": check_others,
            "mutants": lambda: check_mutants(Path(folder)),
            "far": lambda: check_far(Path(folder)),
        }
        for line in jobs[job]():
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
