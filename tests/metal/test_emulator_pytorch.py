"""Code that is not ours: Metal headers that the installed torch carries, unchanged, against PyTorch's CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from metal.emulator import compile_shader

INCLUDE = Path(torch.__file__).parent / "include"
PREFILL = "ATen/native/mps/kernels/PrefillAttention.h"
HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
MODES = {"in order": {}, "shuffled": {"seed": 1}, "checked": {"checked": True}}


def carried(name: str) -> None:
    if not (INCLUDE / name).exists():
        pytest.skip(f"torch {torch.__version__} does not carry {name}")


@pytest.mark.parametrize("mode", MODES)
def test_reductions(emulator: None, mode: str) -> None:
    carried("c10/metal/reduction_utils.h")
    source = """#include <c10/metal/reduction_utils.h>
        kernel void k(device const float* x, device float* y, uint t [[thread_index_in_threadgroup]],
                      uint n [[threads_per_threadgroup]]) {
          threadgroup float shared[32], other[32];  // of one, checked mode says: written while still read
          const float sum = c10::metal::threadgroup_sum(shared, x[t], t, n);
          const float highest = c10::metal::threadgroup_max(other, x[t], t, n);
          if (t == 0) y[0] = sum, y[1] = highest;
        }"""
    x, y = torch.randn(200), torch.zeros(2)
    report = compile_shader(HEAD + source, **MODES[mode]).k(x, y, threads=200, group_size=200)
    torch.testing.assert_close(y, torch.stack([x.sum(), x.max()]))
    assert report.faults == ()


@pytest.mark.parametrize("mode", MODES)
def test_prefill_attention(emulator: None, mode: str) -> None:
    """PyTorch's own MPS attention, head size 80, ragged: it relies on the same fragment layout as ours."""
    carried(PREFILL)
    library = compile_shader(f"{HEAD}#include <c10/metal/utils.h>\n#include <{PREFILL}>\n", **MODES[mode])
    batch, heads, queries, keys, size = 1, 2, 35, 45, 80
    q, k, v = (
        torch.randn(batch, heads, length, size, generator=torch.Generator().manual_seed(length)).half()
        for length in (queries, keys, keys)
    )
    out = torch.full_like(q, float("nan"))
    scale = torch.tensor([size**-0.5, 1.0]).view(torch.int32)
    strides = [stride for tensor in (q, k, v, out) for stride in tensor.stride()[:3]]
    params = torch.tensor([batch, heads, size, queries, keys, 1, *scale, *strides], dtype=torch.int32)
    kernel = library.prefill_attention_float16_bq32_bk32_bd80_wm4_wn1_hm0_dc0_maskfloat16
    mask = torch.zeros(4).half()
    groups = -(-queries // 32)
    report = kernel(
        *(q, k, v, out, params, torch.zeros(4, dtype=torch.int32), mask),
        threads=(groups * 128, heads, batch),
        group_size=(128, 1, 1),
    )
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert (out.double() - exact).abs().max().item() < 1.5e-3
    assert report.faults == ()
    assert report.divergent == 0
