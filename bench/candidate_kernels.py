"""Kernels that were tried in the UNets, at the UNets' shapes: parts of candidates_on_device.py."""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from candidates_timed import SETS, Calls, compare, drawn, held, over, triton
from ops_on_device import Run
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearway.ops import _triton, attention_tiled, group_norm_rows_triton, layer_norm, skip_concat
from clearway.ops import group_norm_silu_triton as group_norm
from clearway.ops._triton import kernel, tl
from clearway.ops.geglu import _cumulative, geglu

PRODUCTS = ((2048, 1280, 1280), (2048, 3840, 1280), (2048, 10240, 1280), (2048, 1280, 5120), (8192, 640, 640),
            (8192, 1920, 640), (8192, 5120, 640), (8192, 640, 2560), (8192, 320, 320), (8192, 960, 320),
            (8192, 2560, 320), (8192, 320, 1280), (2048, 640, 640), (2048, 1920, 640), (2048, 5120, 640),
            (2048, 640, 2560), (512, 1280, 1280), (512, 3840, 1280), (512, 10240, 1280), (512, 1280, 5120),
            (128, 1280, 1280), (128, 10240, 1280))  # fmt: skip
PROJECTED = ((2048, 1280), (8192, 640), (8192, 320), (2048, 640), (512, 1280))  # rows, width
ATTENTION = ((20, 1024, 77, 64), (10, 4096, 77, 64), (8, 4096, 77, 40), (8, 1024, 77, 80), (8, 256, 77, 160),
             (20, 1024, 1024, 64), (10, 4096, 4096, 64), (8, 4096, 4096, 40), (8, 1024, 1024, 80),
             (8, 256, 256, 160), (8, 64, 64, 160))  # fmt: skip
CONVOLUTIONS = ((320, 320, 128), (640, 640, 64), (1280, 1280, 32), (2560, 1280, 32), (1280, 640, 64),
                (320, 320, 64), (640, 640, 32), (1280, 1280, 16), (2560, 1280, 16), (1280, 1280, 8),
                (2560, 1280, 8))  # fmt: skip
IMAGES = ((2, 320, 128), (2, 960, 128), (2, 640, 64), (2, 1280, 64), (2, 1280, 32), (2, 2560, 32),
          (2, 320, 64), (2, 640, 32), (1, 512, 128), (1, 512, 256), (1, 256, 512),
          (1, 128, 1024))  # fmt: skip
SKIPS = ((1280, 1280, 32), (1280, 640, 64), (640, 320, 128), (320, 320, 128), (320, 320, 64), (1280, 1280, 8))


@kernel
def _geglu_product(
    x, weight, out, bias, M, N, K, PROGRAMS: tl.constexpr, FLAT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GEGLU of x (M, K) times weight (2N, K): both halves of a tile at once, by tensor descriptors (TMA)."""
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    width = GROUP * columns
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=FLAT):
        first = tile // width * GROUP
        tall = tl.minimum(rows - first, GROUP)
        m = (first + tile % width % tall) * BLOCK_M
        n = tile % width // tall * BLOCK_N
        a = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        b = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            part = x.load([m, k])
            a = tl.dot(part, weight.load([n, k]).T, a)
            b = tl.dot(part, weight.load([n + N, k]).T, b)
        c = n + tl.arange(0, BLOCK_N)
        a += tl.load(bias + c)[None, :].to(tl.float32)
        b += tl.load(bias + N + c)[None, :].to(tl.float32)
        out.store([m, n], (a * (b * _cumulative(b))).to(tl.float16))  # type: ignore[operator]


def geglu_product(x: Tensor, weight: Tensor, bias: Tensor, flat: bool, tile: Sequence[int]) -> Tensor:
    """The kernel above for fp16, as many programs as the device has multiprocessors."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    block_m, block_n, block_k, warps, stages = tile
    (rows, width), columns = x.shape, weight.shape[0] // 2
    out = x.new_empty(rows, columns)
    there = torch.cuda.get_device_properties().multi_processor_count if x.is_cuda else 3
    programs = min(there, -(-rows // block_m) * -(-columns // block_n))
    blocks = (x, [block_m, block_k]), (weight, [block_n, block_k]), (out, [block_m, block_n])
    _geglu_product.launch(
        (programs,),
        *(TensorDescriptor.from_tensor(*one) for one in blocks),
        *(bias, rows, columns, width, programs, flat, block_m, block_n, block_k, 8),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def products(run: Run) -> None:
    """Matrix products as PyTorch does them, alone and with a residual added afterwards."""
    for m, n, k in ((16, 32, 32),) if run.small else PRODUCTS:
        xs = [drawn(run, m, k) for _ in range(SETS)]
        weights = [drawn(run, n, k, fan=k) for _ in range(SETS)]
        bias, residual = drawn(run, n), drawn(run, m, n)
        calls = {
            "linear": over(lambda x, w: F.linear(x, w), xs, weights),
            "linear, then residual": over(lambda x, w, r=residual: F.linear(x, w) + r, xs, weights),
        }
        compare(run, "product", f"{m}x{n}x{k}", calls)
        calls = {"linear": over(lambda x, w, b=bias: F.linear(x, w, b), xs, weights)}
        compare(run, "product", f"{m}x{n}x{k} bias", calls)


def packed_qkv(run: Run) -> None:
    """Self-attention's three projections, each on its own and as one product."""
    for m, k in ((16, 32),) if run.small else PROJECTED:
        xs = [drawn(run, m, k) for _ in range(SETS)]
        weights = [drawn(run, 3 * k, k, fan=k) for _ in range(SETS)]
        calls = {
            "three products": over(lambda x, w: [F.linear(x, part) for part in w.chunk(3)], xs, weights),
            "packed": over(F.linear, xs, weights),
        }
        compare(run, "packed qkv", f"{m}x{k}", calls)


def geglus(run: Run) -> None:
    """GEGLU after its product, and inside it."""
    tile = (16, 16, 16, 4, 2) if run.small else (128, 128, 64, 8, 3)
    for m, k in ((32, 32),) if run.small else PROJECTED:
        n = 4 * k
        xs = [drawn(run, m, k) for _ in range(SETS)]
        weights = [drawn(run, 2 * n, k, fan=k) for _ in range(SETS)]
        bias = drawn(run, 2 * n)
        a, b = F.linear(xs[0].float(), weights[0].float(), bias.float()).chunk(2, -1)
        calls: dict[str, Calls] = {
            "linear": over(lambda x, w, b=bias: F.linear(x, w, b), xs, weights),
            "linear, then geglu": over(lambda x, w, b=bias: geglu(F.linear(x, w, b)), xs, weights),
        }
        for flat in (False, True) if triton(run, "geglu") else ():
            name = f"one kernel by TMA {tile[:3]}, {tile[3]} warps, {tile[4]} stages{', flat' * flat}"
            calls[name] = over(lambda x, w, b=bias, f=flat: geglu_product(x, w, b, f, tile), xs, weights)
        compare(run, "geglu", f"{m}x{n}x{k}", calls, a * F.gelu(b))


def attentions(run: Run) -> None:
    """PyTorch's kernels and ours in several tiles (queries, keys, warps, stages)."""
    backends = {"sdpa": None}
    if run.kind == "cuda":
        backends |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        backends |= {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    for heads, queries, keys, size in ((2, 40, 23, 40), (2, 40, 160, 16)) if run.small else ATTENTION:
        q, k, v = (
            [drawn(run, 2, tokens, heads, size, images=False).transpose(1, 2) for _ in range(SETS)]
            for tokens in (queries, keys, keys)
        )

        def stock(*args: Tensor, backend: SDPBackend | None) -> Tensor:
            with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*args)

        calls: dict[str, Calls] = {
            name: over(lambda *args, b=backend, f=stock: f(*args, backend=b), q, k, v)
            for name, backend in backends.items()
        }
        few = max(_triton.power_of_two(keys), 16)
        tiles = [(64, few, 4, 1), (128, few, 8, 1), (32, few, 4, 1)] if few <= 128 else []
        tiles = tiles or [(64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3)]
        for tile in tiles if triton(run, "attention") else ():
            tiled = held(attention_tiled, attention_tiled.run, tile=lambda q, k, t=tile: t)
            calls[f"tiled {tile}"] = over(lambda *args, f=tiled: f(*args, None, False, None), q, k, v)
        want = F.scaled_dot_product_attention(q[0].float(), k[0].float(), v[0].float())
        compare(run, "attention", f"2x{heads}x{queries}x{keys}x{size}", calls, want)


def convolutions(run: Run) -> None:
    """cuDNN by its own choice and by trial; for small images as a product of copied windows (im2col)."""

    def tried(x: Tensor, w: Tensor, wanted: bool) -> Tensor:
        torch.backends.cudnn.benchmark, before = wanted, torch.backends.cudnn.benchmark
        try:
            return F.conv2d(x, w, padding=1)
        finally:
            torch.backends.cudnn.benchmark = before

    def columns(x: Tensor) -> Tensor:
        windows = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)
        return windows.permute(0, 1, 2, 4, 5, 3).reshape(-1, 9 * x.shape[1])

    for channels, out, side in ((16, 32, 8),) if run.small else CONVOLUTIONS:
        xs = [drawn(run, 2, channels, side, side) for _ in range(SETS)]
        weights = [drawn(run, out, channels, 3, 3, fan=9 * channels) for _ in range(SETS)]
        calls: dict[str, Calls] = {
            f"cudnn.benchmark {'on' if wanted else 'off'}": over(
                lambda x, w, b=wanted: tried(x, w, b), xs, weights
            )
            for wanted in (False, True)
        }
        if side <= 16:
            flat = [w.permute(0, 2, 3, 1).reshape(out, -1) for w in weights]
            copied = [columns(x) for x in xs]
            calls["im2col's columns"] = over(columns, xs)
            calls["im2col's product"] = over(F.linear, copied, flat)
            calls["im2col"] = over(
                lambda x, w, side=side: F.linear(columns(x), w).view(2, side, side, -1).permute(0, 3, 1, 2),
                xs,
                flat,
            )
        want = F.conv2d(xs[0].float(), weights[0].float(), padding=1)
        compare(run, "convolution", f"2x{channels}->{out}@{side} k3 s1", calls, want)


def norms(run: Run) -> None:
    """GroupNorm+SiLU in chunks of whole rows; LayerNorm with residual in several tiles."""
    if not triton(run, "group_norm and layer_norm"):
        return
    rows = group_norm_rows_triton
    for batch, channels, side in ((2, 64, 20),) if run.small else IMAGES:
        xs = [drawn(run, batch, channels, side, side) for _ in range(SETS // 2)]
        weight, bias, shift = drawn(run, channels), drawn(run, channels), drawn(run, batch, channels)
        more = (weight, bias, 32, 1e-5, shift, True)
        called: dict[str, Callable[..., Any]] = {
            "without rows": held(rows, group_norm.run, takes=lambda *_: False)
        }
        for count in (66, 132, 264):
            name = f"rows, {count} chunks an image"
            called[name] = held(rows, rows.run, CHUNKS=count, CHUNKS_OF_LARGE=count)
        calls = {name: over(lambda x, f=f, m=more: f(x, *m), xs) for name, f in called.items()}
        shifted = xs[0].float() + shift.float()[:, :, None, None]
        want = F.silu(F.group_norm(shifted, 32, weight.float(), bias.float(), 1e-5))
        compare(run, "group_norm", f"{batch}x{channels}@{side}", calls, want)
    for count, width in ((40, 96),) if run.small else PROJECTED:
        xs, residuals = ([drawn(run, count, width) for _ in range(SETS)] for _ in range(2))
        weight, bias = drawn(run, width), drawn(run, width)
        calls = {"residual alone": over(torch.add, xs, residuals)}
        block = _triton.power_of_two(width)
        for tall, warps in ((1, 4), (1, 8), (2, 2), (2, 4), (4, 4), (8, 8)):
            tiled = held(layer_norm, layer_norm._triton_run, _tile=lambda *_, t=(tall, block, warps): t)
            calls[f"{tall} rows, {warps} warps"] = over(
                lambda x, r, f=tiled, w=weight, b=bias: f(x, r, w, b, 1e-5), xs, residuals
            )
        want = F.layer_norm((xs[0] + residuals[0]).float(), (width,), weight.float(), bias.float())
        compare(run, "layer_norm", f"{count}x{width}", calls, want)


def skips(run: Run) -> None:
    """Skip concatenation by torch.cat and in one pass of several tiles."""
    for channels, skipped, side in ((24, 40, 5),) if run.small else SKIPS:
        xs = [drawn(run, 2, channels, side, side) for _ in range(SETS)]
        others = [drawn(run, 2, skipped, side, side) for _ in range(SETS)]
        calls: dict[str, Calls] = {"torch.cat": over(lambda *both: torch.cat(both, 1), xs, others)}
        for pixels, wide in ((8, 256), (16, 128), (4, 512)) if triton(run, "skip_concat") else ():
            tiled = held(skip_concat, skip_concat._triton_run, CHANNELS=wide, POSITIONS=pixels)
            calls[f"one pass ({pixels} pixels, {wide} channels, 4 warps)"] = over(tiled, xs, others)
        case = f"2x{channels}+{skipped}@{side}"
        compare(run, "skip_concat", case, calls, torch.cat((xs[0], others[0]), 1))


PARTS: dict[str, Callable[[Run], None]] = {
    "products": products,
    "packed-qkv": packed_qkv,
    "geglu": geglus,
    "attention": attentions,
    "convolutions": convolutions,
    "norms": norms,
    "skip-concat": skips,
}
