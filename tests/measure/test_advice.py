"""Advice: what is said of made-up profiles, and that no bound promises more than Amdahl allows."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from clearway import Precision, Request
from clearway.measure.advice import KINDS, LESS, PRECISION, SAME, Advice, Machine, advice, bottleneck, worst
from clearway.measure.ceilings import Ceilings
from clearway.measure.inside import Inner
from clearway.measure.profiling import Profile
from clearway.measure.rows import Row

REQUEST = Request(prompt="x", steps=10, cfg_scale=3.0, sampler="Euler", batch_size=1, seed=1)
RATES = {"float32": 1e12, "float16": 4e12, "bfloat16": 3e12}
CUDA = Machine("cuda", 8, 8, lambda dtype: Ceilings(dtype, RATES[dtype], 1e11, 1e-6))
CPU = dataclasses.replace(CUDA, kind="cpu", threads=2)


def unet(**fields: object) -> Row:
    row = Row(
        "unet", "float32", calls=10, host_ms=300.0, device_ms=800.0, share=0.8, flops=2e11, bytes_moved=4e9,
        operations=9000, of_matmul=0.25, of_copy=0.05, floor_ms=200.0,
    )  # fmt: skip
    return dataclasses.replace(row, **fields)


def rest(name: str, ms: float, **fields: object) -> Row:
    return Row(name, "float32", calls=1, host_ms=ms, share=ms / 1000, **fields)


def profile(row: Row, *others: Row, **fields: object) -> Profile:
    found = Profile(REQUEST, SimpleNamespace(), 1.0, [1000.0], [1010.0])
    found.rows = [row, *(others or (rest("prompt parse", 200.0),))]
    found.calls_ms = {"unet": [row.ms / row.calls] * row.calls}
    return dataclasses.replace(found, **fields)


def said(found: Profile, machine: Machine = CUDA, precision: Precision = Precision()) -> dict[str, Advice]:  # noqa: B008
    return {one.what: one for one in advice(found, machine, precision)}


def test_it_is_ranked_within_kinds_and_kinds_are_apart() -> None:
    found = advice(profile(unet()), CUDA, Precision())
    assert [one.kind for one in found] == sorted((one.kind for one in found), key=KINDS.index)
    for kind in KINDS:
        bounds = [one.bound_ms for one in found if one.kind == kind]
        assert bounds and bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize("machine", [CUDA, CPU])
@pytest.mark.parametrize("row", [unet(), unet(host_ms=800.0), unet(floor_ms=790.0), unet(device_ms=None)])
def test_no_bound_is_more_than_what_it_touches(row: Row, machine: Machine) -> None:
    found = profile(row, rest("vae decode", 100.0, floor_ms=10.0, operations=5.0), rest("idle gaps", 100.0))
    whole = sum(one.ms for one in found.rows)
    for one in advice(found, machine, Precision()):
        assert 0 < one.bound_ms <= row.ms + 200 and one.bound == pytest.approx(one.bound_ms / whole)
        assert one.times == pytest.approx(whole / (whole - one.bound_ms))


def test_a_unet_far_from_its_ceilings_wants_other_code() -> None:
    found = profile(unet())
    one = said(found)["other code for unet (routes, layout, executor: clearway select)"]
    assert (one.kind, one.bound_ms) == (SAME, 600.0)
    assert bottleneck(found, CUDA).startswith(
        "unet takes 80% of the generation (10 calls, 80 ms each), at 25%"
    )


def test_a_host_that_cannot_keep_up_wants_graphs() -> None:
    found = profile(unet(host_ms=790.0))
    assert said(found)["run unet compiled, or captured as a graph"].bound_ms == 600.0
    assert "launching its operations takes more" in bottleneck(found, CUDA)
    graphed = dataclasses.replace(CUDA, executor="cuda_graph")
    assert "run unet" not in " ".join(said(found, graphed))
    many = profile(unet(operations=500_000, device_ms=None, host_ms=800.0))
    assert "run unet compiled" in said(many, CPU)


def test_a_unet_at_its_ceiling_wants_less_work_or_precision() -> None:
    found = profile(unet(of_matmul=0.9, floor_ms=720.0, flops=7.2e11))
    assert "bound by arithmetic" in bottleneck(found, CUDA)
    assert "bound by memory traffic" in bottleneck(profile(unet(of_copy=0.7)), CUDA)
    assert said(found)["unet in float16 (--dtype float16)"].bound_ms == pytest.approx(800 - 180)
    assert "TF32 for float32 work (--tf32)" in said(found)
    assert "TF32 for float32 work (--tf32)" not in said(found, precision=Precision(tf32=True))
    assert not [one for one in said(profile(unet(dtype="float16"))).values() if one.kind == PRECISION]


def test_a_ceiling_that_was_passed_is_no_ceiling() -> None:
    words = bottleneck(profile(unet(of_matmul=1.4, of_copy=1.7)), CUDA)
    assert "measured too low" in words and "bound by" not in words
    assert "bound by memory traffic" in bottleneck(profile(unet(of_matmul=0.5, of_copy=1.7)), CUDA)


def test_idle_cores_are_named() -> None:
    one = said(profile(unet(device_ms=None, host_ms=800.0)), CPU)[
        "let torch use 8 threads (OMP_NUM_THREADS=8)"
    ]
    assert one.bound_ms == pytest.approx(800 * 0.75)
    assert "let torch" not in " ".join(said(profile(unet())))


def test_less_work_is_said_for_what_it_is() -> None:
    found = said(profile(unet()))
    assert found["skip negative guidance below a sigma (--ngms)"].bound_ms == 400.0
    assert found["8 steps instead of 10"].bound_ms == pytest.approx(160.0)
    assert all(found[name].kind == LESS for name in found if "steps" in name or "ngms" in name)
    heun = profile(unet(calls=19), request=dataclasses.replace(REQUEST, sampler="Heun", ngms=2.0))
    assert said(heun)["a sampler with one call a step (DPM++ 2M)"].bound_ms == pytest.approx(800 * 9 / 19)
    assert "skip negative guidance below a sigma (--ngms)" not in said(heun)
    plain = profile(unet(), request=dataclasses.replace(REQUEST, cfg_scale=1.0, steps=1))
    assert not [one for one in said(plain).values() if one.kind == LESS and "ngms" in one.what]


def test_waits_recompilations_saving_and_gaps() -> None:
    found = profile(
        unet(reads=10.0), rest("encode and save", 100.0), rest("idle gaps", 50.0),
        compiler={"recompilations": 2}, calls_ms={"unet": [80.0] * 9 + [380.0]},
    )  # fmt: skip
    bounds = {what: one.bound_ms for what, one in said(found).items()}
    assert bounds["leave tensors on the device"] == 600.0
    assert bounds["keep shapes as they are"] == 300.0
    assert bounds["save while the next picture is drawn"] == 100.0
    assert bounds["look at what runs between the stages"] == 50.0
    assert "leave tensors on the device" not in said(found, CPU)


def test_a_slow_module_is_named_first() -> None:
    slow = Inner("unet.mid.conv", "Conv2d", "unet", 1, 50.0, 50.0, own_share=0.5, usual_ms=1.0, slow=True)
    well = Inner("unet.up.conv", "Conv2d", "unet", 1, 90.0, 90.0, own_share=0.9, usual_ms=80.0)
    found = profile(unet(floor_ms=500.0), inside=[well, slow])
    assert worst(found) is slow
    assert bottleneck(found, CUDA) == (
        "unet.mid.conv (Conv2d) takes 50 ms a call, where work like its own usually takes 1 ms: "
        "49% of the generation goes there."
    )
    first = advice(found, CUDA, Precision())[0]
    assert first.what == "look at unet.mid.conv" and first.bound == pytest.approx(0.49)
    slow.own_share = 0.05
    assert bottleneck(found, CUDA).startswith("unet takes 80%")
    assert "Beside it, unet.mid.conv (Conv2d) takes 50 ms a call" in bottleneck(found, CUDA)


def test_a_bottleneck_that_is_no_network() -> None:
    found = profile(unet(device_ms=None, host_ms=10.0, share=0.01), rest("encode and save", 990.0))
    assert bottleneck(found, CUDA) == "encode and save takes 99% of the generation (990 ms)."
