"""Planted faults: one change each of a .metal file that ships. test_mutants.py shows that each is caught."""

from __future__ import annotations

from dataclasses import dataclass

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old`, its occurrence number `nth` in `file`.metal, becomes `new`."""

    file: str
    fault: str
    old: str
    new: str
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}"

    def apply(self, source: str) -> str:
        """The changed source; fails where there is nothing to change."""
        parts = source.split(self.old)
        assert len(parts) > self.nth + 1, f"{self}: {self.old!r} is not there"
        return self.old.join(parts[: self.nth + 1]) + self.new + self.old.join(parts[self.nth + 1 :])


def _barriers(file: str, count: int) -> list[Mutant]:
    return [Mutant(file, f"barrier {nth} missing", BARRIER, "", nth) for nth in range(count)]


MUTANTS = (
    *_barriers("attention", 4),
    Mutant("attention", "barrier orders nothing", "mem_threadgroup)", "mem_none)", 1),
    Mutant("attention", "no mask", "column + e < rows;", "column + e < 1000;"),
    Mutant("attention", "mask lets one key too many through", "column + e < rows;", "column + e <= rows;"),
    Mutant("attention", "vector tail reads a row too many", "if (r < rows) value", "if (r <= rows) value"),
    Mutant("attention", "scalar tail reads a row too many", "r < rows ? from", "r <= rows ? from"),
    Mutant("attention", "rows past the end are no numbers", "vec<T, 4>(T(0.0f))", "vec<T, 4>(T(NAN))"),
    Mutant("attention", "store of queries that do not exist", "if (exists) {", "{"),
    Mutant("attention", "keys not transposed", "ulong2(0, 0), true", "ulong2(0, 0), false"),
    Mutant("attention", "columns of the fragment", "(lane % 2) * 2;", "(lane & 2);"),
    Mutant("attention", "rows of the fragment", "(lane / 2) % 4", "lane % 4"),
    Mutant("attention", "shuffle across the wrong lanes", "ushort(8)", "ushort(4)"),
    Mutant("attention", "sum of one lane", "added += simd_shuffle_xor(added, ushort(1));", ""),
    Mutant("attention", "accumulator not rescaled", "sums[d].thread_elements()[1] *= rescale;", ""),
    Mutant("attention", "total not rescaled", "total * rescale", "total"),
    Mutant("attention", "-inf minus -inf", "now == -INFINITY ? 0.0f : now", "now"),
    Mutant("attention", "stride of k for v", "v += KEYS * shape.v[2]", "v += KEYS * shape.k[2]"),
    Mutant(
        "attention",
        "batch and head stride swapped",
        "b * shape.q[0] + n * shape.q[1]",
        "b * shape.q[1] + n * shape.q[0]",
    ),
    Mutant(
        "attention", "element stride ignored", "from[r * row_stride + c * stride]", "from[r * row_stride + c]"
    ),
    Mutant(
        "attention",
        "matrix operation in divergent flow",
        "simdgroup_multiply_accumulate(sums",
        "if (exists) simdgroup_multiply_accumulate(sums",
    ),
    Mutant("attention", "powers of two with the scale of e", "scale * M_LOG2E_F", "scale"),
    Mutant("attention", "tile without room for padding", "tile[KEYS * WIDTH]", "tile[KEYS * E]"),
    *_barriers("group_norm_silu", 2),
    Mutant("group_norm_silu", "barrier orders nothing", "mem_threadgroup)", "mem_none)", 1),
    Mutant(
        "group_norm_silu",
        "partial sums that nobody wrote",
        "lane < SIMDGROUPS ? partial[lane] : 0.0f",
        "partial[lane]",
    ),
    Mutant("group_norm_silu", "store past the group", "at.outer_at < outer", "at.outer_at <= outer", 2),
    Mutant("group_norm_silu", "square sums not centred", "F(0.0f)) - mean;", "F(0.0f));"),
    Mutant(
        "group_norm_silu", "walk steps too short", "THREADS * width % inner_length", "THREADS % inner_length"
    ),
    Mutant("group_norm_silu", "walk does not carry", "outer_at++;", ""),
    Mutant("group_norm_silu", "parameters of the first group", "= first_channel + (", "= ("),
    Mutant("group_norm_silu", "bias where there is none", "shape.has & 2", "shape.has & 1"),
    Mutant(
        "group_norm_silu", "strides of x for out", "shape.out[2] : shape.out[1]", "shape.x[2] : shape.x[1]"
    ),
    Mutant("group_norm_silu", "no eps", "variance + eps", "variance", 1),
    Mutant("layer_norm", "store past the row", "i < width", "i <= width", 2),
    Mutant(
        "layer_norm", "one-pass variance", "(value - mean) * (value - mean)", "value * value - mean * mean"
    ),
    Mutant("layer_norm", "sum with the residual not rounded", "float(T(value))", "value"),
    Mutant("layer_norm", "stride of rows ignored", "row * shape.x;", "row * shape.width;"),
    Mutant("layer_norm", "residual where there is none", "(shape.has & 4) != 0", "true"),
    Mutant("softmax", "barrier missing", BARRIER, ""),
    Mutant("softmax", "barrier in divergent flow", BARRIER, f"if (lane < 16) {BARRIER}"),
    Mutant("softmax", "store past the row", "i < width", "i <= width", 1),
    Mutant(
        "softmax",
        "sums that nobody wrote",
        "lane < simd_count ? sum_of_simdgroup[lane] : 0.0f",
        "sum_of_simdgroup[lane % 8]",
    ),
    Mutant("softmax", "-inf minus -inf", "highest == -INFINITY ? 0.0f : highest", "highest"),
    Mutant("softmax", "running sum not rescaled", "sum * exp(highest - base) +", "sum +"),
    Mutant("geglu", "gate one element on", "value + shape.width,", "value + shape.width + 1,"),
    Mutant("geglu", "wrong side of the curve", "gate < 0.0f", "gate > 0.0f"),
    Mutant("geglu", "stride of x for out", "at.y) * shape.out_row", "at.y) * shape.x_row"),
    Mutant("constant_pad", "no lower bound", "i >= 0 && ", ""),
    Mutant("constant_pad", "upper bound one too far", "i < shape.x_size[d]", "i <= shape.x_size[d]"),
    Mutant(
        "constant_pad",
        "planes in the wrong order",
        "place.z % uint(shape.out_size[2])",
        "place.z % uint(shape.out_size[1])",
    ),
    Mutant("linear_row", "every lane stores", "if (lane == 0)", ""),
    Mutant("linear_row", "a lane's elements twice", "i += 32 * WIDTH", "i += 32"),
    Mutant("linear_row", "reads past the row", "i < inputs", "i <= inputs"),
    Mutant("linear_row", "bias where there is none", "shape.has_bias ?", "true ?"),
)
