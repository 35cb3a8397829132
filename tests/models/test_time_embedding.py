"""All blocks' projections of a time embedding as one: same sums, one product, given up where it must be."""

import copy
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.nn import functional as F

from clearway.models import _time_embedding
from clearway.models._time_embedding import MARK, place, projected, refuse, take_away

TEMB = torch.randn(2, 12)


def blocks() -> list[Any]:
    torch.manual_seed(0)
    widths = (16, 8, 24)
    made = [ResnetBlock2D(in_channels=8, out_channels=w, temb_channels=12, groups=4).eval() for w in widths]
    assert not any(map(refuse, made))
    place(made)
    return made


def expected(block: Any, temb: Tensor, folded: bool) -> Tensor:
    shift: Tensor = block.time_emb_proj(F.silu(temb))
    return shift + block.conv1.bias if folded else shift


def agree(made: list[Any], temb: Tensor = TEMB) -> None:
    for folded in (False, True):
        for block in made:
            torch.testing.assert_close(projected(block, temb, folded), expected(block, temb, folded))


def products(made: list[Any], monkeypatch: pytest.MonkeyPatch, temb: Tensor = TEMB) -> int:
    count = []
    linear = F.linear

    def watched(*args: Any) -> Tensor:
        count.append(1)
        return linear(*args)

    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", watched)
        for block in made:
            projected(block, temb, True)
    return len(count)


@torch.no_grad()
def test_one_product_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = blocks()
    agree(made)
    assert products(made, monkeypatch, torch.randn(2, 12)) == 1
    assert products(made, monkeypatch, torch.randn(2, 12)) == 1


@torch.no_grad()
def test_another_embedding_and_one_changed_in_place_are_projected_anew() -> None:
    made, temb = blocks(), TEMB.clone()
    agree(made, temb)
    temb.mul_(2.0)
    agree(made, temb)
    agree(made, torch.randn(3, 12))


def test_under_inference_mode() -> None:
    made = blocks()
    with torch.inference_mode():
        agree(made, torch.randn(2, 12))
    with torch.no_grad():
        agree(made, torch.randn(2, 12))


@torch.no_grad()
@pytest.mark.parametrize("temb", [TEMB, torch.randn(2, 12)], ids=["same", "another"])
@pytest.mark.parametrize("change", ["hook", "adapter", "moved", "loaded", "in place", "swapped"])
def test_what_changes_a_layer_is_seen(change: str, temb: Tensor) -> None:
    made = blocks()
    agree(made)
    layer = made[1].time_emb_proj
    if change == "hook":
        layer.register_forward_hook(lambda module, args, out: out * 2)
    elif change == "adapter":
        made[1].time_emb_proj = nn.Sequential(layer, nn.Linear(8, 8))
    elif change == "moved":
        made[1].to(torch.float64).to(torch.float32)
    elif change == "loaded":
        other = ResnetBlock2D(in_channels=8, out_channels=8, temb_channels=12, groups=4)
        made[1].load_state_dict(other.state_dict(), strict=False)
    elif change == "swapped":
        layer.weight = nn.Parameter(torch.randn(8, 12))
        layer.bias.data = torch.randn(8)
    else:
        layer.weight.mul_(3.0)
        made[1].conv1.bias.add_(1.0)
    agree(made, temb)


def test_threads_at_different_steps_take_their_own() -> None:
    made, apart = blocks(), list[float]()

    @torch.no_grad()
    def draw(seed: int) -> None:
        temb = torch.randn(2, 12, generator=torch.Generator().manual_seed(seed))
        right = [expected(block, temb, True) for block in made]
        for _ in range(300):
            for block, one in zip(made, right, strict=True):
                apart.append(float((projected(block, temb, True) - one).abs().max()))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(apart) == 4 * 300 * 3 and max(apart) < 1e-5


@torch.no_grad()
def test_copies_have_their_own() -> None:
    made = blocks()
    agree(made)
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        copied[0].time_emb_proj.weight.zero_()
        agree(copied, torch.randn(2, 12))
        agree(made, torch.randn(2, 12))
        assert copied[0].__dict__[MARK][0].blocks[0] is copied[0]


@torch.no_grad()
def test_a_block_copied_alone_is_right_too() -> None:
    made = blocks()
    agree(made)
    alone = copy.copy(made[1])
    torch.testing.assert_close(projected(alone, TEMB, False), expected(alone, TEMB, False))


def test_taken_away() -> None:
    made = blocks()
    with torch.no_grad():
        agree(made)
    for block in made:
        take_away(block)
        weight = block.time_emb_proj.weight
        assert MARK not in vars(block) and weight.untyped_storage().nbytes() == weight.nbytes


def test_blocks_that_do_not_go_along() -> None:
    def made(**options: Any) -> ResnetBlock2D:
        return ResnetBlock2D(in_channels=8, out_channels=8, groups=4, **({"temb_channels": 12} | options))

    assert refuse(made(temb_channels=None)) and refuse(made(time_embedding_norm="scale_shift"))
    assert refuse(made(skip_time_act=True)) and refuse(made(non_linearity="gelu"))
    one = made()
    place([one])
    place([one, made(temb_channels=10)])
    assert MARK not in vars(one)
    assert _time_embedding.projected(one, TEMB, True).shape == (2, 8)
