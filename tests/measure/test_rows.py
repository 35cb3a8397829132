"""The stage table of hand-made runs: every figure can be reckoned."""

from __future__ import annotations

import pytest

from clearway.measure.ceilings import Ceilings
from clearway.measure.rows import Row, rows, without
from clearway.measure.stages import ARITHMETIC, CALL, RUN, STAGE, WAIT, Recorder
from fake_timer import FakeTimer

LIMITS = Ceilings("float32", 1e12, 1e10, 1e-6)


def made(timer: FakeTimer, batch: int = 2, work: bool = False, calls: int = 2) -> Recorder:
    """A generation: 10 ms parsing; `calls` of 100 ms UNet in 3 ms guidance; 7 ms waiting; 5 ms of gaps."""
    recorder = Recorder(timer)
    with recorder.span("generation", RUN):
        timer.spend(0.005)
        with recorder.span("prompt", STAGE) as span:
            timer.spend(0.010)
            span.memory = {"driver_peak_bytes": 100, "allocator_peak_bytes": None}
        with recorder.span("sampling", STAGE) as stage:
            for _ in range(calls):
                with recorder.span("guidance", ARITHMETIC):
                    timer.spend(0.002)
                    with recorder.span("denoiser", ARITHMETIC):
                        timer.spend(0.001)
                        call = recorder.begin("unet", CALL, ((batch, 4, 8, 8), (batch,)))
                        timer.spend(0.040, 0.100)
                        if work:
                            call.flops, call.bytes_moved, call.ops, call.reads = 5 * 10**10, 2 * 10**8, 7, 1
                        recorder.finish(call)
            with recorder.span("wait", WAIT):
                timer.spend(0.007, 0.0)
            stage.memory = {"driver_peak_bytes": 300, "allocator_peak_bytes": 200}
    return recorder


def table(timed: Recorder, counted: Recorder, scale: dict[str, float] | None = None) -> dict[str, Row]:
    found = rows(timed, counted, scale or {}, lambda name: "float32", lambda dtype: LIMITS)
    return {row.name: row for row in found}


def test_rows_share_out_the_whole_by_host_time() -> None:
    found = table(made(FakeTimer()), made(FakeTimer(), work=True))
    assert {name: (row.calls, round(row.host_ms)) for name, row in found.items()} == {
        "prompt parse": (1, 10),
        "sampler arithmetic": (1, 0),
        "guidance": (2, 6),
        "unet": (2, 80),
        "wait for the device": (1, 7),
        "idle gaps": (1, 5),
    }
    assert list(found)[-1] == "idle gaps"
    assert sum(row.share for row in found.values()) == pytest.approx(1)
    assert all(row.device_ms is None for row in found.values())


def test_device_time_is_what_a_row_costs_where_there_is_one() -> None:
    found = table(made(FakeTimer(events=True)), made(FakeTimer(), work=True))
    unet = found["unet"]
    assert (unet.host_ms, unet.device_ms) == (
        pytest.approx(80),
        pytest.approx(200),
    ) and unet.ms == unet.device_ms
    assert unet.share == pytest.approx(200 / (200 + 10 + 6 + 5))
    assert unet.flops == 10**11 and unet.tflop_per_s == pytest.approx(0.5)
    assert (unet.of_matmul, unet.of_copy) == (pytest.approx(0.5), pytest.approx(2e9 / 1e10))
    assert unet.floor_ms == pytest.approx(100) and (unet.operations, unet.reads) == (14, 2)


def test_a_call_of_fewer_rows_did_that_much_less() -> None:
    unet = table(made(FakeTimer(), batch=1), made(FakeTimer(), batch=2, work=True))["unet"]
    assert (unet.flops, unet.bytes_moved, unet.operations) == (5 * 10**10, 2 * 10**8, 14)


def test_a_shortened_run_is_scaled_to_the_whole() -> None:
    found = table(made(FakeTimer()), made(FakeTimer(), work=True, calls=1), {"sampling": 5.0})
    assert (found["unet"].calls, round(found["unet"].host_ms)) == (10, 400)
    assert found["unet"].flops == 5 * 10**11 and found["unet"].tflop_per_s == pytest.approx(1.25)
    assert (found["prompt parse"].calls, round(found["prompt parse"].host_ms)) == (1, 10)


def test_memory_stands_at_what_took_most_of_its_stage() -> None:
    found = table(made(FakeTimer()), made(FakeTimer()))
    assert (found["unet"].driver_peak_bytes, found["unet"].allocator_peak_bytes) == (300, 200)
    assert (found["prompt parse"].driver_peak_bytes, found["prompt parse"].allocator_peak_bytes) == (
        100,
        None,
    )
    assert found["guidance"].driver_peak_bytes is None


def test_a_row_that_a_device_does_not_have_counts_to_the_gaps() -> None:
    found = list(table(made(FakeTimer()), made(FakeTimer())).values())
    fewer = without(found, "wait for the device")
    assert "wait for the device" not in {row.name for row in fewer}
    assert sum(row.host_ms for row in fewer) == pytest.approx(sum(row.host_ms for row in found))
    assert without(fewer, "wait for the device") == fewer


def test_a_network_called_vae_is_not_its_stage() -> None:
    recorder, timer = Recorder(timer := FakeTimer()), timer
    with recorder.span("generation", RUN), recorder.span("vae", STAGE):
        timer.spend(0.001)
        with recorder.span("vae", CALL):
            timer.spend(0.004)
    found = table(recorder, recorder)
    assert (round(found["vae decode"].ms), round(found["pixels to bytes"].ms)) == (4, 1)
