"""Attention: the reference by an independent formula, PyTorch's backends, policy and limits."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearway import device
from clearway.errors import UnavailableError
from clearway.ops import (
    _cpp,
    _metal,
    _metal_launch,
    attention_torch,
    budget,
    contract,
    selftest,
    state,
    workarounds,
)
from clearway.ops.attention import attention, cases, inputs
from clearway.ops.contract import Implementation, recording, use

SMALL = {name: attention._bound(given, {}) for name, given in cases() if not callable(given)}


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    monkeypatch.setenv(state.INSIDE, "1")  # the self-test has tests of its own
    state.forget()
    yield
    state.forget()


def on(kind: str, *args: object) -> dict[str, str]:
    """Each implementation's reason on a device that is not here; "" for the one taken."""
    return {d.implementation: d.reason for d in attention.explain(*args, kind=kind)}


def meta(
    batch: int, heads: int, queries: int, keys: int, size: int, dtype=torch.float16
) -> tuple[Tensor, ...]:
    q = torch.empty(batch, heads, queries, size, dtype=dtype, device="meta")
    k = torch.empty(batch, heads, keys, size, dtype=dtype, device="meta")
    return q, k, k


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_is_the_formula(name: str) -> None:
    q, k, v, scale, is_causal, mask = SMALL[name]
    out = attention.reference.run(q, k, v, scale, is_causal, mask)
    for b, n, i in ((0, 0, 0), (-1, -1, -1), (0, -1, q.shape[2] // 2)):
        row = k[b, n].double() @ q[b, n, i].double() * (scale or q.shape[-1] ** -0.5)
        if mask is not None:
            part = mask.expand(*q.shape[:3], k.shape[2])[b, n, i]
            row = row.masked_fill(~part, -math.inf) if part.dtype == torch.bool else row + part.double()
        if is_causal:
            row[(i % q.shape[2]) + 1 :] = -math.inf
        weights = (row - row.max()).exp() if row.max() > -math.inf else torch.zeros_like(row)
        expected = weights @ v[b, n].double() / max(weights.sum(), 1)
        assert torch.allclose(out[b, n, i].double(), expected, atol=2e-5), (b, n, i)


@pytest.fixture
def stock_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No preference on the CPU, whatever this one is."""
    monkeypatch.delitem(attention.defaults, "cpu")


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_keeps_q_s_layout(name: str) -> None:
    q, _, v, *_ = SMALL[name]
    out = attention.reference.run(*SMALL[name])
    if v.shape[-1] == q.shape[-1]:
        assert out.stride() == torch.empty_like(q).stride()
        side_by_side = out.transpose(1, 2)
        assert side_by_side.is_contiguous() or not q.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", ["sdpa", "math", "streaming"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_on_this_machine_keeps_the_promise(name: str, dtype: torch.dtype) -> None:
    implementation = next(
        i for i in attention.implementations if i.name == name and i.device in ("cpu", "any")
    )
    for case, given in SMALL.items():
        args = selftest._on(given, "cpu", dtype)
        if contract.refused(implementation, args) is None:
            assert selftest.problem(attention, implementation, args, routed=True) == "", case


def test_nan_and_infinite_inputs_give_nan_where_they_are_read() -> None:
    q, k, v, *rest = inputs(1, 2, 6, 9, 8)
    q[0, 0, 2], q[0, 1, 3, 0] = math.nan, math.inf
    v[0, 1, 4, 5] = math.nan
    args = (q, k, v, *rest)
    right = attention.reference.run(*args)
    assert right[0, 0, 2].isnan().all() and right[0, 0, 1].isfinite().all()
    for name in ("math", "streaming"):
        with use(attention=name):
            assert torch.allclose(attention(*args), right, atol=1e-5, equal_nan=True), name
    # torch 2.13's flash kernel for the CPU gives zeros for a query of NaN; values of NaN do come through.
    assert attention(*args)[0, 1, :, 5].isnan().all()


def test_automatic_and_named(stock_first: None) -> None:
    args = SMALL["ragged 40"]
    routes: dict[str, int] = {}
    with recording(routes):
        plain = attention(*args)
        with use(attention="math"):
            by_math = attention(*args)
        with use(attention="streaming"):
            streamed = attention(*args)
    assert routes == {"attention/sdpa": 1, "attention/math": 1, "attention/streaming": 1}
    for other in (by_math, streamed):
        assert torch.allclose(plain, other, atol=1e-5)
    with use(attention="flash"), pytest.raises(UnavailableError) as error:
        attention(*args)
    assert "attention=flash was asked for and cannot run: it is for cuda" in str(error.value)
    native = "" if _cpp.absent() else "native, "
    assert f"others that can: sdpa, {native}streaming, math, reference" in str(error.value)


def test_a_mask_with_is_causal_still_works() -> None:
    q, k, v, *_ = inputs(1, 2, 8, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool).triu(-2)
    assert attention.route(q, k, v, None, True, mask).name == "streaming"
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask & torch.ones_like(mask).tril())
    assert torch.allclose(attention(q, k, v, is_causal=True, mask=mask), expected, atol=1e-5)


def test_broadcast_batches_and_heads() -> None:
    q, k, v, *_ = inputs(2, 4, 12, 9, 16)
    expected = F.scaled_dot_product_attention(q, k[:1, :1].expand_as(k), v[:1, :1].expand_as(v))
    assert torch.allclose(attention(q, k[:1, :1], v[:1, :1]), expected, atol=1e-5)


def test_the_caller_s_own_backends_are_kept() -> None:
    args = SMALL["ragged 40"]
    state.store_tuned("cpu", {"attention": {f"torch.float32|{attention.size_class(*args)}": "streaming"}})
    assert attention.route(*args).name == "streaming"
    with sdpa_kernel(SDPBackend.MATH):
        assert attention.route(*args).name == "sdpa"
        reasons = on("cuda", *(t.half().to("meta") for t in args[:3]))
        assert "switched off by the caller" in reasons["flash"] and "caller chose" in reasons["streaming"]
        assert "caller chose" in (metal().refuse(*meta(2, 8, 4096, 4096, 40), None, False, None) or "")
        with use(attention="math"):
            attention(*args)
        assert not torch.backends.cuda.flash_sdp_enabled()  # left as the caller had them
    assert torch.backends.cuda.flash_sdp_enabled() and attention.route(*args).name == "streaming"


def test_backends_on_cuda_say_what_they_cannot() -> None:
    half, full = meta(2, 8, 64, 64, 40), meta(2, 8, 64, 64, 40, torch.float32)
    reasons = on("cuda", *full)
    assert reasons["sdpa"] == "" and reasons["flash"] == "inputs are float32, it takes float16 or bfloat16"
    assert "float16 or bfloat16" in reasons["cudnn"] and reasons["efficient"] == "sdpa comes before it"
    assert on("cuda", *half)["flash"] == "sdpa comes before it"
    assert "equal ones up to 256" in on("cuda", *meta(1, 1, 64, 64, 512))["flash"]
    assert "multiple of 8" in on("cuda", *meta(1, 1, 64, 64, 20))["cudnn"]
    mask = torch.empty(64, 64, dtype=torch.bool, device="meta")
    assert on("cuda", *half, None, False, mask)["flash"] == "there is a mask"
    q, k, v = half
    assert "batch or heads" in on("cuda", q, k[:, :1], v[:, :1])["efficient"]
    assert "not contiguous" in on("cuda", q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3))["cudnn"]
    q = q.clone().requires_grad_()
    assert "pytorch#196678" in on("cuda", q, k, v)["cudnn"]


def test_rocm_has_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives it the GPU's version, which for gfx90a looks like Hopper's."""
    monkeypatch.setattr(attention_torch, "_capability", lambda index: (9, 0))
    there = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    assert attention_torch.capability(there) == (9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert attention_torch.capability(there) is None


def test_capability_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = meta(2, 8, 2048, 2048, 64)
    for found, words in (((7, 5), "it needs 8.0"), ((10, 0), "pytorch#193893"), ((9, 0), "")):
        monkeypatch.setattr(attention_torch, "capability", lambda tensor, found=found: found)
        assert words in on("cuda", q, k, v)["cudnn"]
    assert on("cuda", q, k, v)["cudnn"] == ""  # the default table on Hopper
    assert on("cuda", *meta(2, 8, 2048, 77, 64))["sdpa"] == ""
    monkeypatch.setattr(attention_torch, "capability", lambda tensor: (7, 5))
    assert "it needs 8.0" in on("cuda", *meta(2, 8, 64, 64, 64, torch.bfloat16))["efficient"]


def test_a_size_is_padded_only_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_torch.PADDED == {}
    monkeypatch.setitem(attention_torch.PADDED, ("math", 20), 24)
    args = SMALL["heads of 20"]
    seen: list[tuple[int, ...]] = []
    whole = F.scaled_dot_product_attention

    def spy(q: Tensor, *rest, **more) -> Tensor:
        seen.append(tuple(q.shape))
        return whole(q, *rest, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    with use(attention="math"):
        out = attention(*args)
    assert seen[0][-1] == 24 and torch.allclose(out, attention.reference.run(*args), atol=1e-5)


def test_the_default_table_on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [dataclasses.replace(i, absent=lambda: None) for i in attention.implementations]
    monkeypatch.setattr(attention, "implementations", here)
    roomy = budget.Sample("mps", 0, 0, 1e12)
    monkeypatch.setattr(budget, "current", lambda device: roomy)
    for size in (40, 64, 80, 96, 128, 160):
        wanted = "metal" if size in (40, 80, 160) else "sdpa"
        assert taken(on("mps", *meta(2, 8, 192, 77, size))) == wanted
        assert taken(on("mps", *meta(2, 8, 191, 77, size))) == "sdpa"  # policy: metal is able
        assert taken(on("mps", *meta(2, 8, 4096, 77, size, torch.bfloat16))) == "sdpa"
    with use(attention="metal"):  # and a name is not policy
        assert taken(on("mps", *meta(2, 8, 16, 77, 64, torch.bfloat16))) == "metal"
    state.store_tuned("mps", {"attention": {"torch.float16|4x6x6x40": "metal"}})
    assert taken(on("mps", *meta(2, 8, 64, 77, 40))) == "metal"


def taken(reasons: dict[str, str]) -> str:
    (found,) = [name for name, reason in reasons.items() if reason in ("", contract.UNTESTED)]
    return found


def metal() -> Implementation:
    return next(i for i in attention.implementations if i.name == "metal")


def test_metal_is_launched_with_q_k_v_out_and_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(_metal, "library", lambda stem: calls.append(stem) or "the library")
    monkeypatch.setattr(_metal_launch, "attention", lambda *args: calls.append(args))
    q, k, v, *_ = args = SMALL["ragged 40"]
    out = metal().run(*args)
    stem, (lib, *launched, scale) = calls
    assert (stem, lib) == ("attention", "the library") and scale == 40**-0.5
    assert all(one is other for one, other in zip(launched, (q, k, v, out), strict=True))
    assert out.shape == q.shape and out.stride() == q.stride()
    metal().run(q, k, v, 0.25, False, None)
    assert calls[-1][-1] == 0.25


def test_mps_faults_are_refused_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = (*meta(1, 12, 77, 77, 64), None, True, None)
    assert "2^31" not in on("mps", *causal)["sdpa"]
    huge = meta(2, 8, 16384, 16384, 40)
    assert (
        "2^31" in on("mps", *huge)["sdpa"] and "2^31" not in on("mps", *meta(2, 8, 16384, 16384, 64))["sdpa"]
    )
    with monkeypatch.context() as patch:
        patch.setenv("A1111_MPS_FORCE_LEGACY_OPS", "1")
        assert "195910" in on("mps", *causal)["sdpa"]
        q, k, v, *_ = SMALL["ragged 40"]
        seen = []
        patch.setattr(attention_torch, "run", lambda q, *rest: seen.append(q.is_contiguous()) or q)
        attention_torch.run_mps(q, k, v, None, False, None)
        assert seen == [True]
    assert workarounds.needed("broadcast attention")
    q, k, v = meta(2, 8, 64, 64, 64)
    assert "189631" in on("mps", q, k[:1], v[:1])["sdpa"]


def test_the_size_class_tells_cross_from_self_attention() -> None:
    assert attention.size_class(*SMALL["ragged 40"]) != attention.size_class(*SMALL["ragged 80"])
    names = {attention.size_class(*attention._bound(inputs(2, 8, 4096, keys, 40), {})) for keys in (77, 4096)}
    assert len(names) == 2


def test_large_cases_are_made_only_when_asked_for() -> None:
    for name, given in cases():
        args = selftest.made(attention, given) if not callable(given) else None
        assert callable(given) == name.startswith(("SD1.5", "SDXL", "VAE")), name
        assert args is None or selftest._is_small(attention, args), name


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_a_row_without_keys_gives_zeros(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    given = dict(cases())["a row without keys"]
    args = tuple(arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in given)
    q, k, v = (arg.to(dtype) for arg in args[:3])
    out = attention(q, k, v, None, False, args[5])
    assert out[..., 4, :].abs().max().item() == 0


def test_without_cudnn_the_callers_other_backends_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this thread alone, and no longer than a call."""

    def on() -> dict[str, bool]:
        return {name: is_on() for name, (is_on, _) in attention_torch._SWITCHES.items()}

    heard: list[dict[str, bool]] = []

    def told(*args: Any, **kwargs: Any) -> Tensor:
        heard.append(on())
        if kwargs.get("scale") == 0:
            raise ZeroDivisionError
        return torch.zeros(())

    def attend(**kwargs: Any) -> None:  # as a function of PyTorch's is called within a mode
        mode.__torch_function__(told, (), (), kwargs)

    monkeypatch.setattr(attention_torch.F, "scaled_dot_product_attention", told)
    mode, before = attention_torch.WithoutCudnn(), on()
    attend()
    with pytest.raises(ZeroDivisionError):
        attend(scale=0)
    assert heard == [{**before, "cudnn": False}] * 2 and on() == before
    for chosen in ("cudnn", "flash"):  # the caller's own choice stays
        with attention_torch.only(chosen):
            inside = on()
            attend()
            assert heard.pop() == inside == on()
    assert on() == before


def test_attention_within_it_is_heard_of_and_nothing_else_changes() -> None:
    q = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    expected, seen = F.scaled_dot_product_attention(q, q, q, is_causal=True), []

    class Heard(attention_torch.WithoutCudnn):
        def __torch_function__(self, function: Any, *more: Any) -> Any:
            seen.append(function is F.scaled_dot_product_attention)
            return super().__torch_function__(function, *more)

    with Heard():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q, is_causal=True), expected)
    assert True in seen


def test_switches_of_two_threads_are_left_as_they_were() -> None:
    def on() -> dict[str, bool]:
        return {name: is_on() for name, (is_on, _) in attention_torch._SWITCHES.items()}

    before, wrong = on(), []

    def work(backend: str) -> None:
        for _ in range(300):
            with attention_torch.only(backend):
                if [name for name, is_on in on().items() if is_on] != [backend]:
                    wrong.append(backend)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("flash", "math", "efficient")]
    for one in threads:
        one.start()
    states = {device.switches()[9:13] for _ in range(300)}
    for one in threads:
        one.join()
    assert on() == before and not wrong and len(states) == 1
