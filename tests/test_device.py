"""The machine, without needing any but the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearway import RequestError, UnavailableError, device
from never_waits import never_waits


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


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    ],
)
def test_how_sums_are_made_is_a_switch(holder: Any, name: str, value: bool) -> None:
    before, held = device.switches(), getattr(holder, name)
    setattr(holder, name, value)
    try:
        assert device.switches() != before
    finally:
        setattr(holder, name, held)
    assert device.switches() == before


def test_the_order_of_attentions_backends_is_a_switch() -> None:
    before, backends = device.switches(), [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends, set_priority=True):
        first = device.switches()
    with sdpa_kernel(backends[::-1], set_priority=True):
        assert device.switches() != first
    assert device.switches() == before


def test_somebodys_attention_in_place_of_pytorchs_is_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = device.switches()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *given: given[2])
    assert device.switches() != before
    monkeypatch.undo()
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
    assert device.is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cub`"))
    assert device.is_out_of_memory(
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")
    )
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
    with never_waits():
        moved = device.to_device(values, device.Device("cuda", 0))
    assert torch.equal(moved.cpu(), values)
    back = device.to_host(moved)
    assert torch.equal(back, values) and not back.is_pinned()


class Card:
    """Stands in for torch.cuda: 24 GiB, of which 20 are free; the allocator has 3, tensors 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fraction = 1.0
        self.held = {"reserved_bytes": 3 * GIB, "allocated_bytes": 2 * GIB}
        for name, stand_in in {
            "mem_get_info": lambda index: (20 * GIB, 24 * GIB),
            "memory_stats_as_nested_dict": lambda index: {
                kind: {"all": {"current": value}} for kind, value in self.held.items()
            },
            "get_per_process_memory_fraction": lambda index: self.fraction,
            "set_per_process_memory_fraction": lambda fraction, index: setattr(self, "fraction", fraction),
            "get_device_properties": lambda index: SimpleNamespace(total_memory=24 * GIB),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


GIB = 2**30
CUDA = device.Device("cuda", 0)


def test_room_is_what_is_free_and_what_the_allocator_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    assert device.room(CUDA) == 21 * GIB
    card.fraction = 0.25  # somebody's own cap: 6 GiB for tensors
    assert device.room(CUDA) == 4 * GIB
    card.fraction = 1 / 24  # below what tensors hold
    assert device.room(CUDA) == -GIB
    card.held, card.fraction = {}, 0.25  # before anything was allocated
    assert device.held(CUDA) == device.Held()
    assert device.room(device.Device("cpu")) > 0


def test_within_a_cap_the_device_is_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    left = 8 * GIB - device.CONTEXT_BYTES
    with device.capped(CUDA, 8 * GIB):
        assert device.memory(CUDA) == device.Memory(8 * GIB, left - 3 * GIB)
        assert device.room(CUDA) == pytest.approx(left - 2 * GIB, abs=1)
        assert card.fraction == left / (24 * GIB)
    assert card.fraction == 1.0 and device.memory(CUDA).total_bytes == 24 * GIB
    with device.capped(CUDA, None):
        assert device.memory(CUDA).total_bytes == 24 * GIB
    card.fraction = 0.1
    with pytest.raises(ZeroDivisionError), device.capped(CUDA, 8 * GIB):
        assert card.fraction == 0.1  # a tighter cap of somebody else's holds
        raise ZeroDivisionError
    assert card.fraction == 0.1
    with device.capped(device.Device("cpu"), 1):
        assert device.memory(device.Device("cpu")).total_bytes > 2**28


@pytest.mark.cuda
def test_on_a_device_a_cap_is_kept() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with device.capped(CUDA, 2 * GIB):
        assert device.room(CUDA) <= 2 * GIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
