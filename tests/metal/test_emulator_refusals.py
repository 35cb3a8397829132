"""What torch.mps.compile_shader refuses is refused here, and what only the emulator is strict about."""

from __future__ import annotations

import pytest
import torch

from metal.emulator import EmulatorError, compile_shader, lint
from metal.emulator.transform import transform

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
BODY = """kernel void k(device float* o, constant int& n, constant float* list,
                   uint t [[thread_position_in_grid]]) {
  o[t] = float(n) + list[0];
}"""


@pytest.fixture
def kernel(emulator: None):
    return compile_shader(HEAD + BODY).k


@pytest.fixture
def out() -> torch.Tensor:
    return torch.zeros(8)


@pytest.mark.parametrize(
    "threads, group, error",
    [
        ((8, 1), (8,), RuntimeError),
        ((8, 1, 1, 1), None, RuntimeError),
        ((8,), (1025,), ValueError),
        ((8, 8), (64, 32), ValueError),
        ((0,), (1,), ValueError),
    ],
    ids=["rank", "four axes", "too large", "too large a product", "nothing"],
)
def test_threads_and_groups(kernel, out, threads, group, error) -> None:
    with pytest.raises(error):
        kernel(out, 1, 2.0, threads=threads, group_size=group)


@pytest.mark.parametrize(
    "arguments",
    [(1, []), (1, [1.0, "a"]), (1, None), ("1", 2.0), (1, [torch.zeros(1)])],
    ids=["empty list", "mixed list", "None", "string", "tensors"],
)
def test_types_of_arguments(kernel, out, arguments) -> None:
    with pytest.raises(RuntimeError):
        kernel(out, *arguments, threads=8)


def test_casts(kernel, out) -> None:
    kernel(out, 3, [2.0], threads=8, arg_casts={1: "int32"})
    assert out[0] == 5.0
    with pytest.raises(RuntimeError, match="Unsupported cast"):
        kernel(out, 3, 2.0, threads=8, arg_casts={1: "int64"})


def test_constants_over_4_kib(kernel, out) -> None:
    kernel(out, 1, [0.5] * 1024, threads=8)
    with pytest.raises(ValueError, match="4096"):
        kernel(out, 1, [0.5] * 1025, threads=8)


def test_keywords_only(kernel, out) -> None:
    with pytest.raises(EmulatorError, match="arguments"):
        kernel(out, 1, 2.0, (8,), (8,), threads=8)


def test_sources_outside_ascii() -> None:
    with pytest.raises(UnicodeEncodeError):
        compile_shader(HEAD + "// \N{GREEK SMALL LETTER SIGMA}\n" + BODY)


def test_sources_that_do_not_compile(emulator: None) -> None:
    with pytest.raises(SyntaxError, match="nothing"):
        compile_shader("#include <nothing>\n")
    library = compile_shader(HEAD + "kernel void k(device float* o) { o[0] = missing; }")
    with pytest.raises(SyntaxError, match="missing"):
        _ = library.k


def test_names_that_no_kernel_has(emulator: None) -> None:
    with pytest.raises(AttributeError, match="it has k"):
        _ = compile_shader(HEAD + BODY).other


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((1,), "arguments"),
        ((1, 2.0, 3), "arguments"),
        ((1.0, 2.0), "elements of type f"),
        ((1, 2), "elements of type 8"),
    ],
    ids=["too few", "too many", "float for int", "int for float"],
)
def test_the_emulator_checks_what_the_real_call_does_not(kernel, out, arguments, message) -> None:
    with pytest.raises(EmulatorError, match=message):
        kernel(out, *arguments, threads=8)


def test_the_emulator_checks_types_of_tensors_and_sizes_of_constants(kernel, emulator: None) -> None:
    with pytest.raises(EmulatorError, match="elements of type h"):
        kernel(torch.zeros(8).half(), 1, 2.0, threads=8)
    source = (
        HEAD + "struct S { long a[3]; }; kernel void k(device float* o, constant S& s) { o[0] = s.a[2]; }"
    )
    with pytest.raises(EmulatorError, match="16 bytes, the kernel reads 24"):
        compile_shader(source).k(torch.zeros(1), [1, 2], threads=1)


def test_textures_are_refused() -> None:
    with pytest.raises(SyntaxError, match="textures"):
        transform("kernel void k(texture2d<float> x [[texture(0)]]) {}")


def test_lint() -> None:
    assert lint(BODY) == []
    assert lint("inline float f(thread float& x) { return x; }") == []
    assert "no address space" in lint("inline float f(float* x) { return *x; }")[0]
    assert "double" in lint("double x;")[0]
    assert "ASCII" in lint("// \N{MULTIPLICATION SIGN}")[0]
    assert "C++17" in lint("inline float f() { if constexpr (true) return 1; }")[0]
