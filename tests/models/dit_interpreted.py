"""Runs accelerated tiny transformers with Triton's kernels interpreted: python -m models.dit_interpreted.

On a CPU the ops would take their references; here each call goes to the kernel where that does not refuse
what it is given, so that what a GPU will be given is what the kernels take. One JSON line a model and dtype.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from clearway.models import _dit, _dit_attention
from clearway.models.accelerate import EVERY, accelerate
from clearway.ops._implementation import refused
from clearway.ops.contract import OPS
from dit_builders import inputs, tiny_flux, tiny_sd3, tiny_sd35
from ops.interpreted import repair_interpreter
from ops.registry import named


def through_the_kernel(name: str, taken: Counter[str], reasons: Counter[str]) -> Any:
    """The op, by its Triton implementation wherever that can."""
    op, kernel = OPS[name], named(OPS[name], "triton")

    def call(*args: Any) -> Any:
        reason = refused(kernel, args)
        if reason is not None:
            reasons[f"{name}: {reason}"] += 1
            return op.reference.run(*args)
        taken[name] += 1
        return kernel.run(*args)

    return call


def checked(name: str, maker: Any, dtype: torch.dtype, batch: int) -> dict[str, Any]:
    taken, reasons = Counter[str](), Counter[str]()
    model = maker().to(dtype)
    given = inputs(model, batch, 3, 4)
    with torch.no_grad():
        eager = model(**given)[0]
        wide = tree_map_only(torch.Tensor, lambda x: x.double(), given)
        exact = copy.deepcopy(model).double()(**wide)[0]
        if name == "flux, fused":
            model.fuse_qkv_projections()
        accelerate(model, EVERY)
        for op in ("adaln_modulate", "rms_norm"):
            setattr(_dit, op, through_the_kernel(op, taken, reasons))
        _dit_attention.rope = through_the_kernel("rope", taken, reasons)
        found = model(**given)[0]
    return {
        "model": name,
        "dtype": str(dtype),
        "batch": batch,
        "error": (found - exact).abs().max().item(),
        "eager_error": (eager - exact).abs().max().item(),
        "taken": taken,
        "refused": reasons,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    assert os.environ.get("TRITON_INTERPRET") == "1"
    repair_interpreter()
    makers = {"flux": tiny_flux, "flux, fused": tiny_flux, "sd3": tiny_sd3, "sd35": tiny_sd35}
    for name, maker in makers.items():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for batch in (1, 2):
                print(json.dumps(checked(name, maker, dtype, batch)), flush=True)


if __name__ == "__main__":
    main()
