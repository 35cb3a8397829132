"""The real evaluator on a tiny model: arms do not touch one another, and each proves what it ran."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from builders import tiny_sd1
from clearway.measure import shapes
from clearway.measure.candidates import Change
from clearway.measure.generations import Generations
from clearway.measure.trial import TimeUp
from clearway.models import Model, load
from clearway.models.accelerate import OPS
from clearway.ops import state
from clearway.request import Request
from clearway.result import Result
from clearway.types import Precision

REQUEST = Request(width=64, height=64, steps=2, cfg_scale=3.0, sampler="Euler", schedule="Automatic")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(str(tiny_sd1(tmp_path_factory.mktemp("models") / "tiny")), device="cpu")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    state.forget()
    yield
    state.forget()


@pytest.fixture
def evaluator(model: Model) -> Generations:
    return Generations(
        model, REQUEST, ("a cat", "a dog"), lambda precision: load(str(model.path), precision=precision)
    )


def test_generations_go_through_prompts_and_seeds(evaluator: Generations) -> None:
    assert [evaluator.label(number) for number in range(3)] == [
        "a cat, seed 1",
        "a dog, seed 1",
        "a cat, seed 2",
    ]
    pair = Generations(evaluator.model, replace(REQUEST, count=2, seed=5), ("a cat",))
    assert [pair.order(number, Change()).seed for number in range(3)] == [5, 7, 9]
    assert pair.order(0, Change(request={"steps": 1})).steps == 1


def test_arms_share_weights_and_not_modules(evaluator: Generations) -> None:
    model = evaluator.model
    plain, laid_out = evaluator.arm(Change()), evaluator.arm(Change(layout="channels_last", ops=("geglu",)))
    assert plain.model.unet is not model.unet
    assert plain.model.unet.conv_in.weight.data_ptr() == model.unet.conv_in.weight.data_ptr()
    assert model.unet.conv_in.weight.is_contiguous()
    assert laid_out.model.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    first, other, again = plain(0), laid_out(0), plain(0)
    assert np.array_equal(first, again)
    assert np.abs(first.astype(int) - other.astype(int)).max() <= 1
    assert first.shape == (1, 64, 64, 3) and not np.array_equal(first, plain(1))
    assert plain.proof() is None and laid_out.proof() is None
    assert plain.peak_bytes() > 0 and plain.ready_s > 0
    plain.close()
    laid_out.close()


def test_what_did_not_run_is_said(evaluator: Generations) -> None:
    run = evaluator.arm(Change(ops=("geglu",)))
    assert run.proof() == "nothing has run yet"
    run(0)
    result = run.last
    assert isinstance(result, Result)

    def proof(change: Change, **routes: int) -> str | None:
        run.change, run.last = change, replace(result, routes={"unet/eager": 4, **routes})
        return run.proof()

    assert proof(Change()) is None
    assert proof(Change(executor="cuda_graph")) == "the UNet was not run by cuda_graph but by eager"
    assert proof(Change(executor="cuda_graph"), **{"unet/cuda_graph": 3}) is None
    assert "no layer that geglu" in str(proof(Change(ops=("geglu",))))
    tuned = Change(ops=("geglu",), tuned={"geglu": {"k": "triton"}})
    assert proof(tuned, **{"geglu/reference": 1}) == "geglu was not run by triton but by reference"
    assert proof(tuned, **{"geglu/reference": 1, "geglu/triton": 1}) is None
    assert "no weight" in str(proof(Change(layout="channels_last")))
    assert "projections" in str(proof(Change(packed_qkv=True)))
    evaluator.plain_calls = 4
    assert "not separate" in str(proof(Change(rows="separate")))
    evaluator.plain_calls = 2
    assert proof(Change(rows="separate")) is None


def test_another_precision_is_loaded_once(evaluator: Generations) -> None:
    change = Change(precision={"vae": "bfloat16"})
    run, again = evaluator.arm(change), evaluator.arm(change)
    assert run.model.vae.dtype == torch.bfloat16 and run.model.precision == Precision(vae="bfloat16")
    one, two = (each.model.vae.decoder.conv_in.weight.data_ptr() for each in (run, again))
    assert one == two
    assert evaluator.model.vae.dtype == torch.float32
    assert run(0).shape == (1, 64, 64, 3) and run.proof() is None


def test_routes_on_trial_are_taken_and_gone_afterwards(evaluator: Generations) -> None:
    with_ops = evaluator.arm(Change(ops=("attention",)))
    with_ops(0)
    assert with_ops.last is not None and with_ops.last.routes["attention/sdpa"] > 0
    with shapes.listening() as heard:
        with_ops(0)
    keys = [key for op, key in heard.calls if op == "attention"]
    tuned = evaluator.arm(Change(ops=("attention",), tuned={"attention": dict.fromkeys(keys, "math")}))
    tuned(0)
    assert tuned.last is not None and tuned.proof() is None
    assert "attention/sdpa" not in tuned.last.routes and tuned.last.routes["attention/math"] > 0
    assert state.tuned("attention", "cpu") is None


def test_micro_benchmarks_are_of_what_a_generation_runs(
    evaluator: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {}

    def timed(heard, timer, device, limit_s):
        given.update(ops={op for op, _ in heard.calls}, device=device, limit_s=limit_s)
        return []

    monkeypatch.setattr("clearway.measure.shapes.timed", timed)
    assert evaluator.micro(7.0) == []
    assert given["device"] == "cpu" and given["limit_s"] == 7.0
    assert {"attention", "geglu", "group_norm_silu", "layer_norm"} <= given["ops"]
    assert given["ops"] <= {*OPS, "softmax"}


def test_what_takes_too_long_is_stopped(evaluator: Generations) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeUp), evaluator.within(0.01):
        while True:
            time.sleep(0.001)
    with evaluator.within(3600.0):
        pass
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with ThreadPoolExecutor(1) as pool:  # no alarm there, and no error
        assert pool.submit(lambda: evaluator.within(1.0).__enter__()).result() is None
