"""The emulator's fidelity: small probes of what Metal promises, against answers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from metal.emulator import Library, compile_shader

HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
MODES = {"in order": {}, "shuffled": {"seed": 5}, "checked": {"checked": True}}
pytestmark = pytest.mark.usefixtures("emulator")


@pytest.fixture(params=MODES)
def program(request: pytest.FixtureRequest) -> Callable[..., Library]:
    """program(body) in each mode."""
    return lambda body, **options: compile_shader(HEAD + body, **MODES[request.param], **options)


def test_atomics(program: Callable[..., Library]) -> None:
    library = program("""
        kernel void k(device atomic_uint* o, device atomic_float* f, uint t [[thread_position_in_grid]],
                      uint l [[thread_index_in_threadgroup]]) {
          threadgroup atomic_uint n;
          if (l == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          if (l == 0)
            atomic_fetch_add_explicit(o, atomic_load_explicit(&n, memory_order_relaxed),
                                      memory_order_relaxed);
          atomic_fetch_max_explicit(o + 1, t, memory_order_relaxed);
          atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);
          uint expected = 7;
          while (!atomic_compare_exchange_weak_explicit(o + 2, &expected, expected + 2, memory_order_relaxed,
                                                        memory_order_relaxed)) {}
        }""")
    o, f = torch.tensor([0, 0, 0], dtype=torch.int32), torch.zeros(1)
    report = library.k(o, f, threads=256, group_size=64)
    assert o.tolist() == [256, 255, 512]
    assert f.item() == 128.0
    assert report.atomics > 256 * 3


def test_simdgroup_functions(program: Callable[..., Library]) -> None:
    library = program("""
        kernel void k(device float* o, uint l [[thread_index_in_simdgroup]]) {
          float x = float(l) + 1.0;
          o[l] = simd_prefix_exclusive_sum(x);
          o[32 + l] = quad_sum(x);
          o[64 + l] = simd_shuffle_down(x, ushort(4));
          o[96 + l] = simd_broadcast(x, ushort(7));
          o[128 + l] = float(uint(ulong(simd_vote::vote_t(simd_ballot(l % 3 == 0)))));
          o[160 + l] = simd_shuffle_and_fill_up(x, -1.0f, ushort(2));
          o[192 + l] = simd_max(x) + simd_shuffle_xor(x, ushort(8));
          o[224 + l] = (simd_any(l == 31) ? 1.0 : 0.0) + (simd_all(l < 31) ? 2.0 : 0.0);
        }""")
    o = torch.zeros(8, 32)
    library.k(o, threads=32, group_size=32)
    x = torch.arange(1, 33).float()
    assert torch.equal(o[0], x.cumsum(0) - x)
    assert torch.equal(o[1], x.view(8, 4).sum(1).repeat_interleave(4))
    assert torch.equal(o[2, :28], x[4:])
    assert (o[3] == 8).all()
    assert (o[4] == float(sum(1 << lane for lane in range(0, 32, 3)))).all()
    assert torch.equal(o[5, 2:], x[:30]) and (o[5, :2] == -1).all()
    assert torch.equal(o[6], 32 + x[torch.arange(32) ^ 8])
    assert (o[7] == 1).all()


def test_a_divergent_sum_is_one_of_the_active_lanes_and_is_counted(program: Callable[..., Library]) -> None:
    library = program("""
        kernel void k(device float* o, uint l [[thread_index_in_simdgroup]]) {
          if (l < 10) o[l] = simd_sum(1.0f);
          else o[l] = simd_sum(2.0f);
        }""")
    o = torch.zeros(32)
    report = library.k(o, threads=32, group_size=32)
    assert o.tolist() == [10.0] * 10 + [44.0] * 22
    assert report.divergent > 0


def test_types_literals_and_structs(program: Callable[..., Library]) -> None:
    library = program("""
        constant bool twice [[function_constant(3)]];
        struct P { int a; float b[2]; };
        kernel void k(device const bfloat* x, device half* y, device float* z, constant int* list,
                      constant float2& pair, device float4* v, uint t [[thread_position_in_grid]]) {
          y[t] = half(float(x[t])) * 2.0h + 0.25h;
          z[t] = float(x[t]) * 0.5 + float(list[1]) + pair.y + (twice ? 100.0 : 0.0);
          float4 q = float4(1, 2, 3, 4) * float(t);
          q.xy = q.yx; q.w = dot(q.xyz, float3(1));
          v[t] = select(q, -q, q > 3.0f);
        }""", constants={3: True})  # fmt: skip
    x = torch.tensor([1.5, 2.5, -3.0, 1024.0]).bfloat16()
    y, z, v = torch.zeros(4).half(), torch.zeros(4), torch.zeros(4, 4)
    library.k(x, y, z, [3, 5], [0.0, 7.0], v, threads=4, group_size=4, arg_casts={3: "int32"})
    assert torch.equal(y, x.half() * 2 + 0.25)
    assert torch.equal(z, x.float() * 0.5 + 5 + 7 + 100)
    q = torch.tensor([2.0, 1.0, 3.0, 6.0])
    assert torch.equal(v, torch.stack([torch.where(q * t > 3, -q * t, q * t) for t in range(4)]))


def test_bfloat_rounds_to_nearest_even(program: Callable[..., Library]) -> None:
    library = program("""
        kernel void k(device const float* x, device bfloat* y, uint t [[thread_position_in_grid]]) {
          y[t] = bfloat(x[t]);
        }""")
    x = torch.randn(256) * torch.logspace(-40, 38, 256)
    x[:4] = torch.tensor([float("inf"), float("nan"), 3.4e38, 1.00390625])
    y = torch.zeros(256).bfloat16()
    library.k(x, y, threads=256)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_ragged_grids(program: Callable[..., Library]) -> None:
    """dispatchThreads: groups at the edges are smaller, and threads_per_threadgroup says so."""
    library = program("""
        kernel void k(device int* o, uint2 g [[thread_position_in_grid]], uint2 n [[threads_per_threadgroup]],
                      uint2 d [[dispatch_threads_per_threadgroup]]) {
          o[g.y * 5 + g.x] = int(n.x * 100 + d.x * 10 + n.y);
        }""")
    o = torch.zeros(3, 5, dtype=torch.int32)
    library.k(o, threads=(5, 3), group_size=(4, 2))
    assert o.tolist() == [[442] * 4 + [142]] * 2 + [[441] * 4 + [141]]


def test_threads_default_to_the_first_tensor(program: Callable[..., Library]) -> None:
    library = program("kernel void k(device float* o, uint t [[thread_position_in_grid]]) { o[t] = t; }")
    o = torch.zeros(2, 700)
    report = library.k(o)
    assert torch.equal(o.view(-1), torch.arange(1400).float())
    assert (report.threads, report.group_size) == ((1400,), (1024,))


def test_simdgroup_matrices_multiply(program: Callable[..., Library]) -> None:
    """a b^T + c, with origins, strides and transposed loads."""
    library = program("""
        kernel void k(device const half* a, device const half* b, device const float* c, device float* d) {
          simdgroup_half8x8 x, y;
          simdgroup_float8x8 z, eye = simdgroup_float8x8(1.0f), r;
          simdgroup_load(x, a, 16, ulong2(8, 0));
          simdgroup_load(y, b, 8, ulong2(0, 0), true);
          simdgroup_load(z, c);
          simdgroup_multiply_accumulate(z, x, y, z);
          simdgroup_multiply(r, z, eye);
          simdgroup_store(r, d, 8, ulong2(0, 0), true);
        }""")
    a, b, c, d = torch.randn(8, 16).half(), torch.randn(8, 8).half(), torch.randn(8, 8), torch.zeros(8, 8)
    report = library.k(a, b, c, d, threads=32, group_size=32)
    torch.testing.assert_close(d.T, a[:, 8:].float() @ b.float().T + c)
    assert report.matrix_operations == 2


def test_forms_of_kernels(program: Callable[..., Library]) -> None:
    """Plain, templates by signature and by decltype, in namespaces, beside address-space overloads."""
    library = program("""
        inline float one(device const float* p) { return *p; }
        inline float one(constant const float* p) { return *p; }
        namespace inner {
        template <typename T> kernel void f(device T* o [[buffer(1)]], device const float* x [[buffer(0)]],
                                            uint t [[thread_position_in_grid]]) { o[t] = T(one(x + t)); }
        template [[host_name("by_signature")]] kernel void f<half>(
            device half* o [[buffer(1)]], device const float* x [[buffer(0)]],
            uint t [[thread_position_in_grid]]);
        template [[host_name("by_" "decltype")]] [[kernel]] decltype(f<float>) f<float>;
        kernel void plain(device float* o, threadgroup float* shared [[threadgroup(0)]],
                          uint t [[thread_position_in_grid]]) {
          shared[t] = float(t);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          o[t] = shared[63 - t];
        }
        }""")
    assert sorted(dir(library)) == ["by_decltype", "by_signature", "plain"]
    x, half, full = torch.randn(4), torch.zeros(4).half(), torch.zeros(4)
    library.by_signature(x, half, threads=4)
    library.by_decltype(x, full, threads=4)
    assert torch.equal(half, x.half()) and torch.equal(full, x)
    o = torch.zeros(64)
    library.plain(o, threads=64, group_size=64, group_buffers=[256])
    assert torch.equal(o, torch.arange(63, -1, -1).float())


def test_shuffled_orders_differ_and_repeat() -> None:
    """A race shows the order: the last writer differs between seeds, not between runs of one."""
    body = "kernel void k(device int* o, uint t [[thread_position_in_grid]]) { o[0] = int(t); }"
    last = []
    for seed in (1, 1, 2, 3, 4):
        o = torch.zeros(1, dtype=torch.int32)
        compile_shader(HEAD + body, seed=seed).k(o, threads=512, group_size=64)
        last.append(o.item())
    assert last[0] == last[1]
    assert len(set(last)) > 1
