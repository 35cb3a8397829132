"""What is counted agrees with torch's own counter and with hand arithmetic, and stays where it ran."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import clearway
from builders import tiny_sd1
from clearway import Request
from clearway.measure import counts
from clearway.measure.counts import Counting, counting
from clearway.measure.stages import CALL, RUN, Recorder, listening
from clearway.models import chosen
from clearway.ops import contract, discover
from fake_timer import FakeTimer

SMALL = Request(prompt="a red apple", width=64, height=64, steps=2, sampler="Euler", seed=7, cfg_scale=4.0)


def counted(run, kind: str = "cpu"):
    recorder = Recorder(FakeTimer())
    with counting(recorder, kind) as mode, recorder.span("generation", RUN) as span:
        run()
    return span, mode


def test_a_matrix_product() -> None:
    a, b = torch.rand(3, 5), torch.rand(5, 7)
    span, _ = counted(lambda: a @ b)
    assert (span.flops, span.bytes_moved, span.ops, span.reads) == (2 * 3 * 5 * 7, 4 * (15 + 35 + 21), 1, 0)


def test_a_linear_layer_in_inference_mode_is_its_product() -> None:
    layer, x = torch.nn.Linear(8, 4), torch.rand(2, 8)
    with torch.inference_mode():
        span, _ = counted(lambda: layer(x))
    assert span.flops == 2 * 2 * 8 * 4


def test_views_move_nothing_and_copies_do() -> None:
    x = torch.rand(4, 6)
    assert counted(lambda: x.t().reshape(6, 2, 2).unsqueeze(0)[:, 1:])[0].bytes_moved in (0, 2 * 96)
    assert counted(lambda: x.view(24).view(2, 12)[0])[0].ops == 0
    assert counted(lambda: x.clone())[0].bytes_moved == 2 * 96
    assert counted(lambda: x.add_(1))[0].bytes_moved == 2 * 96


def test_fused_attention_on_the_cpu_has_its_flops() -> None:
    q = torch.rand(1, 2, 16, 8)
    with torch.inference_mode():
        span, _ = counted(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert span.flops == 2 * 2 * 2 * 16 * 16 * 8


def test_reads_are_counted_where_they_are() -> None:
    recorder, x = Recorder(FakeTimer()), torch.rand(3)
    with counting(recorder, "cpu"), recorder.span("generation", RUN) as run:
        with recorder.span("unet", CALL) as call:
            x.sum().item()
            bool(x[0] > 2)
        float(x[1])
    assert (call.reads, run.reads) == (2, 1)
    span, _ = counted(lambda: x.sum().item(), kind="mps")  # a number on the host is no wait for a device
    assert span.reads == 0


@chosen.plainly()  # what is listened to inside is not recorded, and its last bits are its own
def test_a_whole_generation_agrees_with_torchs_counter(tmp_path) -> None:
    model = clearway.load(str(tiny_sd1(tmp_path / "model")), device="cpu")
    plain = clearway.generate(SMALL, model)
    recorder = Recorder(FakeTimer())
    with (
        listening(recorder, model),
        recorder.span("generation", RUN),
        counting(recorder, "cpu") as mode,
    ):
        seen = clearway.generate(SMALL, model)
    assert (plain.images == seen.images).all() and mode.unknown == {}
    with FlopCounterMode(display=False) as reference:
        clearway.generate(SMALL, model)
    attention = sum(reference.get_flop_counts()["Global"].values()) - reference.get_total_flops()
    mine = sum(span.flops for span in recorder.spans)
    assert mine >= reference.get_total_flops() > 0 and attention == 0
    assert all(span.reads == 0 for span in recorder.spans if span.name in ("unet", "guidance", "sampling"))


def test_an_op_of_our_own_counts_what_it_states() -> None:
    attention = discover()["attention"]
    before = vars(contract.Op)["_run"]
    q = torch.rand(1, 16, 2, 8)
    span, _ = counted(lambda: attention(q, q, q))
    bound = attention._bound((q, q, q), {})
    assert (span.flops, span.bytes_moved) == (attention.flops(*bound), attention.bytes_moved(*bound))
    assert span.ops == 1 and vars(contract.Op)["_run"] is before


def test_foreign_operations_are_named() -> None:
    made = torch.library.custom_op(
        "foreign_test::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    _, mode = counted(lambda: made(torch.rand(3)))
    assert dict(mode.unknown) == {"foreign_test::twice": 1}


def test_cuda_is_asked_for_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    asked = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", asked.append)
    shown, filters = warnings.showwarning, list(warnings.filters)

    def run() -> None:
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)

    with pytest.raises(ValueError, match="x"):
        recorder = Recorder(FakeTimer())
        with recorder.span("unet", CALL) as span, counts._waits(recorder, "cuda"):
            run()
            run()
            raise ValueError("x")
    assert span.reads == 2 and asked == ["warn", 0]
    assert warnings.showwarning is shown and list(warnings.filters) == filters
    assert Counting(recorder, "cuda").unknown == {}
