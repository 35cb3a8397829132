"""A decoder in two precisions: what runs fits together whatever becomes of the weights."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from clearway.device import Device
from clearway.execution import executor
from clearway.execution.cuda_graph import CudaGraph
from clearway.execution.pool import Pool
from clearway.models import _mixed, chosen, estimate
from clearway.models._bound import Cast
from clearway.models._moved import Moved
from clearway.models.accelerate import accelerate, restore
from fake_capture import Recorder
from live_bytes import measured
from mixed_vaes import EVERY, LATENTS, psnr, tiny_vae

HALF = ("conv_in", "up_blocks.0.resnets.1", "up_blocks.2.resnets.0", "up_blocks.2.upsamplers.0", "conv_out")
Z = LATENTS[:1]


def run(vae: Any, z: torch.Tensor = Z) -> torch.Tensor:
    with torch.inference_mode():
        pixels: torch.Tensor = vae.decode(z, return_dict=False)[0]
        return pixels.float().clone()


@pytest.fixture
def mixed() -> Any:
    vae = tiny_vae()
    _mixed.place(vae, HALF, torch.float16)
    return vae


def test_parts_are_all_of_the_decoder_in_its_order() -> None:
    vae = tiny_vae()
    assert tuple(_mixed.parts(vae)) == EVERY
    held = [id(p) for modules in _mixed.parts(vae).values() for one in modules for p in one.parameters()]
    wanted = [id(p) for p in (*vae.post_quant_conv.parameters(), *vae.decoder.parameters())]
    assert len(held) == len(set(held)) and set(held) == set(wanted)


def test_the_named_parts_are_half_and_the_picture_is_near(mixed: Any) -> None:
    assert _mixed.halves(mixed) == HALF and _mixed.precision_of(mixed) == "mixed"
    halves = {id(p) for name in HALF for one in _mixed.parts(mixed)[name] for p in one.parameters()}
    for parameter in mixed.parameters():
        assert parameter.dtype == (torch.float16 if id(parameter) in halves else torch.float32)
    exact = run(tiny_vae())
    assert 40 < psnr(run(mixed), exact) < 120
    assert "float32, the rest in float16" in _mixed.sentence(mixed)


def test_all_parts_half_is_what_a_half_vae_gives() -> None:
    vae, half = tiny_vae(), tiny_vae().half()
    _mixed.place(vae, EVERY, torch.float16)
    assert torch.equal(run(vae), run(half, Z.half()))
    assert _mixed.sentence(vae).endswith("all of its decoder in float16")


def test_no_part_is_a_plain_vae(mixed: Any) -> None:
    _mixed.place(mixed, (), torch.float16)
    assert not any("forward" in vars(module) for module in mixed.modules())
    assert _mixed.precision_of(mixed) == "float32" and _mixed.halves(mixed) == ()
    assert _mixed.precision_of(tiny_vae().half()) == "float16"


def test_whole_again_gives_the_very_weights_back(mixed: Any) -> None:
    read, exact = tiny_vae().state_dict(), run(tiny_vae())
    _mixed.place(mixed, EVERY[:3], torch.float16)  # from other parts to these
    _mixed.whole(mixed)
    for name, weight in mixed.state_dict().items():
        assert torch.equal(weight, read[name])
    assert torch.equal(run(mixed), exact)


def test_weights_that_were_written_to_are_not_taken_back(mixed: Any) -> None:
    weight = mixed.decoder.conv_in.weight
    with torch.no_grad():
        weight.mul_(2)
    kept = weight.float().clone()
    _mixed.whole(mixed)
    assert torch.equal(mixed.decoder.conv_in.weight, kept)
    assert torch.equal(mixed.decoder.conv_out.weight, tiny_vae().decoder.conv_out.weight)


def test_what_half_precision_holds_exactly_is_not_kept_twice() -> None:
    vae = tiny_vae().half().float()
    _mixed.place(vae, EVERY, torch.float16)
    assert not vars(vae)[_mixed._ORIGINALS].held


def test_float_by_hand_makes_all_fit_together(mixed: Any) -> None:
    mixed.float()
    assert _mixed.precision_of(mixed) == "float32"
    assert psnr(run(mixed), run(tiny_vae())) > 60
    mixed.half()
    assert _mixed.precision_of(mixed) == "float16"
    assert torch.isfinite(run(mixed, Z.half())).all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda vae: pickle.loads(pickle.dumps(vae))])
def test_a_copy_is_as_mixed_and_its_own(mixed: Any, copied: Callable[[Any], Any]) -> None:
    before, other = run(mixed), copied(mixed)
    assert _mixed.halves(other) == HALF and torch.equal(run(other), before)
    _mixed.whole(other)
    assert torch.equal(run(other), run(tiny_vae()))
    assert _mixed.halves(mixed) == HALF and torch.equal(run(mixed), before)


@pytest.mark.parametrize("layout", ["channels_last", None])
def test_ops_come_and_go_and_precision_stays(mixed: Any, layout: str | None) -> None:
    plain = run(mixed)
    report = accelerate(mixed, layout=layout)
    assert len(report.placed["group_norm_silu"]) > 6 and report.placed["upsample_conv"]
    assert _mixed.halves(mixed) == HALF
    torch.testing.assert_close(run(mixed), plain, atol=5e-3, rtol=0)
    left = restore(mixed)
    assert not left.left
    assert _mixed.halves(mixed) == HALF and isinstance(vars(mixed.decoder)["forward"], Cast)
    torch.testing.assert_close(run(mixed), plain, atol=1e-3, rtol=0)


def test_made_mixed_after_ops_were_put_in_place() -> None:
    vae = tiny_vae()
    accelerate(vae, packed_qkv=True)
    exact = run(vae)
    _mixed.place(vae, EVERY, torch.float16)
    assert psnr(run(vae), exact) > 40
    _mixed.whole(vae)
    torch.testing.assert_close(run(vae), exact)
    restore(vae)
    torch.testing.assert_close(run(vae), run(tiny_vae()))


def test_casts_are_not_taken_for_ops_in_place(mixed: Any) -> None:
    from types import SimpleNamespace

    assert not chosen._accelerated(SimpleNamespace(unet=torch.nn.Linear(1, 1), vae=mixed))  # type: ignore[arg-type]


def test_an_executor_of_a_users_pipeline_leaves_a_mixed_decoder_alone(mixed: Any) -> None:
    before = run(mixed)
    report = accelerate(mixed, (), executor="flat", layout=None)
    assert any("its forward was replaced" in reason for reason in report.left)
    assert torch.equal(run(mixed), before)


def test_captured_graphs_hold_while_the_precision_does(mixed: Any) -> None:
    pool, counts = Pool(Recorder()), Counter[str]()
    graph = CudaGraph(mixed.decode, "vae", counts, pool)
    with torch.inference_mode():
        for _ in range(3):
            found = graph(Z, return_dict=False)[0]
    assert counts == {"vae/cuda_graph": 3} and pool.backend.captures == 1
    torch.testing.assert_close(found.float(), run(mixed), atol=1e-3, rtol=0)
    _mixed.whole(mixed)
    with torch.inference_mode():
        found = graph(Z, return_dict=False)[0]
    assert pool.backend.captures == 2 and counts == {"vae/cuda_graph": 4}
    torch.testing.assert_close(found, run(tiny_vae()))


@pytest.mark.parametrize("name", ["flat", "eager"])
def test_other_executors_give_the_same_picture(mixed: Any, name: str) -> None:
    call = executor(name, mixed.decode, "vae")
    with torch.inference_mode():
        for _ in range(2):
            found = call(Z, return_dict=False)[0]
    torch.testing.assert_close(found.float(), run(mixed), atol=5e-3, rtol=0)


def test_a_visiting_vae_keeps_its_precisions(mixed: Any) -> None:
    before, moved = run(mixed), Moved(mixed, Device("cpu"))
    moved.enter()
    assert torch.equal(run(mixed), before)
    _mixed.whole(mixed)
    moved.leave()
    moved.enter()
    assert torch.equal(run(mixed), run(tiny_vae()))


def test_hooks_on_blocks_are_called(mixed: Any) -> None:
    heard: list[str] = []
    for name in ("up_blocks.1", "mid_block", "up_blocks.1.resnets.0"):
        mixed.decoder.get_submodule(name).register_forward_hook(lambda *_, name=name: heard.append(name))
    run(mixed)
    assert heard == ["mid_block", "up_blocks.1.resnets.0", "up_blocks.1"]


def test_what_cannot_be_mixed_is_said() -> None:
    vae = tiny_vae()
    assert _mixed.refuse(vae) is None
    _mixed.place(vae, HALF, torch.float16)
    assert _mixed.refuse(vae) is None  # the casts are ours
    vae.decoder.up_blocks[1].forward = lambda x, temb=None: x
    assert "its forward was replaced" in str(_mixed.refuse(vae))
    assert _mixed.refuse(torch.nn.Linear(1, 1)) == "it is a Linear"


def test_lacking_bytes_are_what_float32_adds(mixed: Any) -> None:
    before = estimate.weight_bytes([mixed])
    lacking = _mixed.lacking_bytes(mixed)
    _mixed.whole(mixed)
    assert estimate.weight_bytes([mixed]) == before + lacking and _mixed.lacking_bytes(mixed) == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_mixed_decode_holds_no_more_than_float32_was_estimated_to(seed: int) -> None:
    """SDXL's VAE on meta, with parts in half precision at random; casts are counted."""
    from clearway.measure.random_model import _PLANS
    from clearway.models.build import classes, diffusers_module

    vae: Any = diffusers_module(classes().vae, _PLANS["sdxl"].vae, "vae").eval()
    drawn = torch.rand(len(_mixed.parts(vae)), generator=torch.Generator().manual_seed(seed))
    for value, modules in zip(drawn, _mixed.parts(vae).values(), strict=True):
        for module in modules:
            module.half() if value < 0.5 else None
    for module, forward in _mixed._casting(vae):
        module.forward = Cast(forward, module)
    z = torch.empty(1, 4, 64, 64, device="meta")
    peak = measured(lambda: vae.decode(z, return_dict=False))
    assert peak <= 1.001 * estimate.vae_live_bytes(vae.config, 512, 512, 4)
