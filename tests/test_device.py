"""The machine, without needing any but the CPU."""

import pytest
import torch

from clearway import RequestError, UnavailableError, device


def test_the_cpu_is_always_there() -> None:
    assert str(device.pick("cpu")) == "cpu"
    assert device.absent("cpu") is None
    assert device.memory(device.pick("cpu")).total_bytes > 2**28


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "cpu:one", "tpu"])
def test_an_unknown_name_is_one_sentence(name: str) -> None:
    with pytest.raises(RequestError, match="is not known"):
        device.pick(name)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_missing_device_says_why(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(device, "absent", lambda kind: None if kind == "cpu" else "none answers")
    with pytest.raises(
        UnavailableError, match=f"device {kind} was asked for and cannot be used: none answers"
    ):
        device.pick(kind)
    assert str(device.pick()) == str(device.pick("auto")) == "cpu"


def test_an_old_torch_is_refused_on_mps_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    assert "causal attention is wrong before" in (device.absent("mps") or "")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert device.absent("mps") is None


def test_dtypes_by_name() -> None:
    assert device.dtype("float16") is device.dtype("fp16") is torch.float16
    with pytest.raises(RequestError, match="'float8' is not known"):
        device.dtype("float8")


def test_the_cpu_computes_in_float32() -> None:
    precision = device.default_precision(device.pick("cpu"))
    assert {precision.unet, precision.text_encoder, precision.vae, precision.sampling} == {"float32"}


def test_switches_are_read_whoever_set_them() -> None:
    before = device.switches()
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    held = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision, conv.fp32_precision = "tf32", "ieee"  # the two may differ
        assert device.switches()[:2] == (True, False)
    finally:
        matmul.fp32_precision, conv.fp32_precision = held
    assert device.switches() == before


def test_noise_is_made_on_the_cpu_for_mps() -> None:
    assert device.noise_device(device.Device("mps"), "GPU") == "cpu"
    assert device.noise_device(device.Device("cuda", 1), "GPU") == "cuda:1"
    assert device.noise_device(device.Device("cuda", 1), "CPU") == "cpu"


def test_out_of_memory_is_recognised() -> None:
    assert device.is_out_of_memory(MemoryError())
    assert device.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert device.is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert device.is_out_of_memory(RuntimeError("Invalid buffer size: 8.00 GiB"))
    assert not device.is_out_of_memory(RuntimeError("shape mismatch"))


def test_the_report_names_versions_and_nothing_private() -> None:
    report = device.machine()
    assert report["versions"]["torch"] == torch.__version__
    assert "/home" not in str(report) and "/root" not in str(report)


def test_tensors_cross_as_they_are() -> None:
    """Without a GPU both are plain copies; with one the same values arrive."""
    values = torch.arange(6).reshape(1, 6)
    assert torch.equal(device.to_device(values, device.Device("cpu")), values)
    assert torch.equal(device.to_host(values), values)


@pytest.mark.cuda
def test_on_a_device_tensors_cross_without_waiting_but_for_what_is_read() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = torch.arange(12, dtype=torch.uint8).reshape(1, 2, 2, 3)
    device.to_device(values, device.Device("cuda", 0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = device.to_device(values, device.Device("cuda", 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(moved.cpu(), values)
    back = device.to_host(moved)
    assert torch.equal(back, values) and not back.is_pinned()
