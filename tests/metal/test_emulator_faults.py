"""Every kind of fault that the emulator reports, from the smallest kernel that has it."""

from __future__ import annotations

import pytest
import torch

from metal.emulator import EmulatorError, Fault, compile_shader

pytestmark = pytest.mark.usefixtures("emulator")
HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
INDEX = "uint t [[thread_index_in_threadgroup]], uint g [[thread_position_in_grid]]"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def fault(
    body: str, *, checked: bool = True, threads: int = 64, size: int = 64, dtype: torch.dtype = torch.float32
) -> Fault:
    """The first fault of a kernel with the body, o (size,) and the indices t and g."""
    kind = "half" if dtype is torch.float16 else "float"
    kernel = compile_shader(
        f"{HEAD}kernel void k(device {kind}* o, {INDEX}) {{\n{body}\n}}", checked=checked
    ).k
    with pytest.raises(EmulatorError) as caught:
        kernel(torch.zeros(size, dtype=dtype), threads=threads, group_size=64)
    assert caught.value.report is not None
    return caught.value.report.faults[0]


def test_race_on_threadgroup_memory() -> None:
    found = fault(f"threadgroup float s[64]; s[t] = 1.0f; {BARRIER} s[63 - t] = o[t] = s[t];\n")
    assert str(found).startswith("race on threadgroup memory: thread")
    assert str(found).endswith("line 5")


def test_lanes_of_one_simdgroup_need_a_simdgroup_barrier() -> None:
    step = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    body = "threadgroup float s[64]; s[t] = 1.0f; {} o[t] = s[t ^ 1]; {} s[t] = 2.0f;"
    assert fault(body.format("", step)).kind == "read of threadgroup memory that was never written"
    assert fault(body.format(step, "")).kind == "race on threadgroup memory"
    source = f"{HEAD}kernel void k(device float* o, {INDEX}) {{ {body.format(step, step)} }}"
    assert compile_shader(source, checked=True).k(torch.zeros(64), threads=64, group_size=64).barriers == 0


def test_write_after_read_by_many_lanes() -> None:
    """The last reader writes: only that others read too makes it a race."""
    body = (
        f"threadgroup float s[1]; if (t == 0) s[0] = 1.0f; {BARRIER} o[t] = s[0]; if (t == 31) s[0] = 2.0f;"
    )
    assert fault(body, threads=32, size=32).kind == "race on threadgroup memory"


def test_race_on_device_memory() -> None:
    found = fault("o[g / 128] = 1.0f;", threads=256)
    assert found.kind == "race on device memory"
    assert found.buffer == 0
    assert "another threadgroup" in str(fault("o[t] = 1.0f;", threads=128))


def test_loads_out_of_bounds() -> None:
    found = fault("o[t] = o[t + 64] * 0.0f;")
    assert found.kind == "access out of bounds"
    assert not found.write


@pytest.mark.parametrize("checked", [False, True])
def test_stores_out_of_bounds(checked: bool) -> None:
    """Fast mode knows it by the canaries around each buffer."""
    assert fault("o[t + 1] = 1.0f;", checked=checked).write


def test_stores_between_the_elements_of_a_view() -> None:
    source = f"{HEAD}kernel void k(device float* o, {INDEX}) {{ o[t] = 1.0f; }}"
    wide = torch.zeros(8, 4)
    for checked in (False, True):
        with pytest.raises(EmulatorError, match=r"strided argument|out of bounds"):
            compile_shader(source, checked=checked).k(wide[:, :2], threads=30)


def test_stores_to_memory_of_two_arguments() -> None:
    source = f"{HEAD}kernel void k(device float* a, device float* b, {INDEX}) {{ a[t] = b[t] + 1.0f; }}"
    x = torch.zeros(12)
    with pytest.raises(EmulatorError, match="another argument covers too"):
        compile_shader(source).k(x[:8], x[4:], threads=8)
    x.zero_()
    compile_shader(source).k(x[:8], x[:8], threads=8)  # in place is one buffer
    assert x.tolist() == [1.0] * 8 + [0.0] * 4


def test_index_outside_a_private_array() -> None:
    found = fault("float a[4] = {1, 2, 3, 4}; for (uint i = 0; i <= t; i++) o[t] += a[i];")
    assert found.kind == "index outside a private or threadgroup array"


@pytest.mark.parametrize(
    "body",
    [f"if (t < 16) {BARRIER}\no[t] = 1.0f;", f"if (t > 40) return;\n{BARRIER} o[t] = 1.0f;"],
    ids=["in a branch", "after an early return"],
)
@pytest.mark.parametrize("checked", [False, True])
def test_barriers_that_not_all_reach(body: str, checked: bool) -> None:
    assert fault(body, checked=checked).kind == "barrier that not every thread reaches"


def test_matrix_operations_with_lanes_missing() -> None:
    body = "simdgroup_float8x8 a(1.0f); if (t % 2) simdgroup_multiply(a, a, a); o[t] = 1.0f;"
    assert fault(body, checked=False).kind == "simdgroup matrix operation with lanes missing"


def test_more_than_32_kib_of_threadgroup_memory() -> None:
    body = "threadgroup float s[{}]; s[t] = 1.0f; o[t] = s[t];"
    assert "more threadgroup memory" in fault(body.format(8193), checked=False).kind
    source = f"{HEAD}kernel void k(device float* o, {INDEX}) {{ {body.format(8192)} }}"
    assert compile_shader(source).k(torch.zeros(64), threads=64).threadgroup_bytes == 32768


def test_vectors_off_their_alignment() -> None:
    found = fault("*(device half4*)(o + 4 * t + 1) = half4(1.0h);", threads=8, dtype=torch.float16)
    assert found.kind == "vector access at an address that is not a multiple of its size"


def test_wild_pointers_do_not_end_the_process() -> None:
    assert "host cannot make" in fault("o[ulong(t) << 45] = 1.0f;", checked=False).kind


def test_barriers_that_order_other_memory() -> None:
    """mem_device does not order threadgroup memory: only checked mode sees it."""
    body = "threadgroup float s[64]; s[t] = float(t); threadgroup_barrier(mem_flags::{}); o[t] = s[63 - t];"
    assert fault(body.format("mem_device")).kind == "race on threadgroup memory"
    source = f"{HEAD}kernel void k(device float* o, {INDEX}) {{ {body.format('mem_threadgroup')} }}"
    report = compile_shader(source, checked=True).k(torch.zeros(64), threads=64, group_size=64)
    assert (report.barriers, report.threadgroup_bytes) == (1, 256)
    assert (report.traffic[0].stored, report.traffic[0].distinct_stored) == (256, 256)


def test_faults_can_be_read_instead_of_raised() -> None:
    source = f"{HEAD}kernel void k(device float* o, {INDEX}) {{ o[t + 1] = 1.0f; }}"
    library = compile_shader(source)
    report = library.k(torch.zeros(64), threads=64, raise_on_fault=False)
    assert [fault.kind for fault in report.faults] == ["store out of bounds"]
    assert "emulated" in str(report)
    assert library.reports == [report]
