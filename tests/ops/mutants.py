"""Faults planted in Triton kernels: (file stem, text that is there, text in its place)."""

from __future__ import annotations

MUTANTS = (
    ("geglu", "h_row + width + c", "h_row + c"),
    ("geglu", "live = c < width", "live = c < width - 1"),
    ("geglu", "row * h_row + c", "row * width + c"),
    ("geglu", "(1.0 + tl.erf", "(tl.erf"),
    ("layer_norm", "tl.where(live, value - mean[:, None], 0.0)", "value - mean[:, None]"),
    ("layer_norm", "variance + eps", "variance"),
    ("layer_norm", "value += added.to(tl.float32)", "value = added.to(tl.float32)"),
    ("layer_norm", "tl.store(total + at, value.to", "tl.store(total + at, (2 * value).to"),
    ("layer_norm", "(row < rows)[:, None] & in_row", "(row < rows - 1)[:, None] & in_row"),
    ("rms_norm", "tl.sum(value * value, 1) / width", "tl.sum(value * value, 1) / BLOCK"),
    ("rms_norm", "(row * x_row)", "(row * width)"),
    ("adaln_modulate", "1.0 + by", "by"),
    ("adaln_modulate", "row // length", "row * 0"),
    ("adaln_modulate", "image * shift_row", "image * width"),
    ("rope", "tl.join(-second, first)", "tl.join(second, first)"),
    ("rope", "(position * out_l)", "(position * size)"),
    ("rope", "(head % heads)", "(head // heads)"),
    ("group_norm_silu_triton", "difference = tl.where(live, first - mean, 0.0)", "difference = first - mean"),
    ("group_norm_silu_triton", "        mean += drift\n", ""),
    ("group_norm_silu_triton", "            if ACTIVATION:\n", "            if not ACTIVATION:\n"),
    ("group_norm_silu_triton", "centre -= tl.load(shift", "centre += tl.load(shift"),
    (
        "group_norm_silu_triton",
        "centre = tl.sum(first, 1) / tl.minimum(count, BLOCK_P).to(tl.float32)",
        "centre = tl.sum(first, 1) * 0.0",
    ),
    ("group_norm_silu_triton", "inner / number + away * away * (count / number)", "inner / number"),
    ("group_norm_silu_triton", "middle -= tl.load(shift", "middle += tl.load(shift"),
    ("group_norm_silu_triton", "y = (value.to(tl.float32) - centre", "y = (value.to(tl.float32) + centre"),
    ("group_norm_silu_triton", "start = k.to(tl.int64) * chunk", "start = k.to(tl.int64) * 0"),
)
