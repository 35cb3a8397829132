"""The flat executor: the same picture as eagerly, and never a stale one, whatever is changed in between."""

import copy
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builders import tiny_sdxl
from clearway.execution import executor, flat, packed
from clearway.execution.flat import FUNCTIONS, Flat
from clearway.models.accelerate import accelerate
from clearway.ops import contract
from recorded_programs import Holding


@pytest.fixture
def unet() -> Any:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    torch.manual_seed(0)
    found = UNet2DConditionModel(
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        sample_size=8,
        cross_attention_dim=32,
    )
    return found.eval().requires_grad_(False)


def given(unet: Any, batch: int = 2, side: int = 8, seed: int = 0) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(seed)
    dtype = unet.dtype
    found = {
        "sample": torch.randn(batch, 4, side, side, generator=drawn).to(dtype),
        "timestep": torch.full((batch,), 431.5),
        "encoder_hidden_states": torch.randn(batch, 77, unet.config.cross_attention_dim, generator=drawn).to(
            dtype
        ),
        "return_dict": False,
    }
    if unet.config.addition_embed_type == "text_time":
        pooled = torch.randn(batch, 48, generator=drawn)
        found["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": torch.full((batch, 6), 64.0)}
    return found


def flat_of(module: Any, routes: Counter[str] | None = None, **how: Any) -> Any:
    return executor("flat", module, "unet", routes, **how)


@torch.no_grad()
def agrees(run: Any, module: Any, inputs: dict[str, Any], tolerance: float = 1e-5) -> Tensor:
    """Runs both twice; the output, if all four are alike."""
    expected = module(**inputs)[0].float()
    for _ in range(2):
        found = run(**inputs)[0].float()
        assert (found - expected).norm() <= tolerance * expected.norm()
    return found


def test_a_unet_gives_the_same_and_says_how_it_ran(unet: Any) -> None:
    routes = Counter[str]()
    run = flat_of(unet, routes)
    for seed in range(3):
        agrees(run, unet, given(unet, seed=seed))
    for batch, side in ((1, 8), (2, 16)):
        agrees(run, unet, given(unet, batch, side))
    assert routes == {"unet/flat": 10} and run.pool.made == 3
    assert run.sentences("the UNet") == []


def test_every_part_of_every_family(tmp_path: Path) -> None:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    folder = tiny_sdxl(tmp_path)
    unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", low_cpu_mem_usage=False).eval()
    vae = AutoencoderKL.from_pretrained(folder, subfolder="vae", low_cpu_mem_usage=False).eval()
    routes = Counter[str]()
    agrees(flat_of(unet.requires_grad_(False), routes), unet, given(unet))
    run = flat_of(vae.requires_grad_(False).decode, routes)
    z = torch.randn(1, 4, 8, 8)
    expected = vae.decode(z, return_dict=False)[0]
    for _ in range(2):
        torch.testing.assert_close(run(z, return_dict=False)[0], expected, rtol=1e-4, atol=1e-5)
    assert type(run(z)) is type(vae.decode(z))  # a model's own kind of output
    assert set(routes) == {"unet/flat"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(unet: Any, dtype: torch.dtype) -> None:
    agrees(flat_of(unet.to(dtype)), unet, given(unet), 0.05)


def test_outputs_are_the_callers_own(unet: Any) -> None:
    run, inputs = flat_of(unet), given(unet)
    with torch.no_grad():
        first = run(**inputs)[0].clone()  # recorded, and the same to the bit as later ones
        kept = run(**inputs)[0]
        run(**given(unet, seed=1))
        assert torch.equal(kept, first)
        kept.zero_()
        assert torch.equal(run(**inputs)[0], first)
        assert not kept.is_inference()
    with torch.inference_mode():
        assert run(**inputs)[0].is_inference()


def merge_through_data(unet: Any) -> None:
    """As PEFT merges an adapter: no version is raised."""
    weight = unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.weight
    weight.data += 0.3 * torch.randn_like(weight)


def in_place(unet: Any) -> None:
    with torch.no_grad():
        unet.conv_in.weight.mul_(1.5)


def norm_in_place(unet: Any) -> None:
    with torch.no_grad():
        unet.conv_norm_out.bias.add_(0.5)


def load(unet: Any) -> None:
    unet.load_state_dict({name: one * 1.1 for name, one in unet.state_dict().items()})


def assign(unet: Any) -> None:
    state = {name: one * 1.1 for name, one in unet.state_dict().items()}
    unet.load_state_dict(state, assign=True)


def replace_data(unet: Any) -> None:
    for weight in unet.parameters():
        weight.data = weight.data * 1.1


def replace_layer(unet: Any) -> None:
    unet.conv_out = nn.Conv2d(32, 4, 3, padding=1).requires_grad_(False)


def processors(unet: Any) -> None:
    class Scaled:
        def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return hidden_states * 0.5

    unet.set_attn_processor(Scaled())


def freeu(unet: Any) -> None:
    for block in unet.up_blocks:
        block.s1, block.s2, block.b1, block.b2 = 0.9, 0.2, 1.5, 1.6


def forward(unet: Any) -> None:
    plain = unet.mid_block.forward
    unet.mid_block.forward = lambda x, *args, **kwargs: plain(x, *args, **kwargs) * 2


CHANGES = [
    merge_through_data,
    in_place,
    norm_in_place,
    load,
    assign,
    replace_data,
    replace_layer,
    processors,
    freeu,
    forward,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_change_of_the_module_is_never_missed(unet: Any, change: Callable[[Any], None]) -> None:
    run, inputs = flat_of(unet, promised=("encoder_hidden_states",)), given(unet)
    before = agrees(run, unet, inputs)
    change(unet)
    after = agrees(run, unet, inputs)
    assert (after - before).abs().max() > 1e-3
    # FreeU's filter writes into parts of a tensor; others' code may do something else each time
    assert not run.reasons or change in (freeu, processors, forward)


def test_another_dtype_is_another_function(unet: Any) -> None:
    run = flat_of(unet)
    agrees(run, unet, given(unet))
    unet.to(torch.bfloat16)
    agrees(run, unet, given(unet), 0.05)
    unet.to(torch.float32)
    agrees(run, unet, given(unet))
    assert not run.reasons


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapters_come_go_and_merge(unet: Any) -> None:
    peft = pytest.importorskip("peft")
    run, inputs = flat_of(unet, promised=("encoder_hidden_states",)), given(unet)
    seen = [agrees(run, unet, inputs)]

    def changed() -> None:
        seen.append(agrees(run, unet, inputs))
        assert (seen[-1] - seen[-2]).abs().max() > 1e-4

    for name in ("one", "two"):
        config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
        unet.add_adapter(config, adapter_name=name)
        unet.requires_grad_(False)
        changed()
    unet.set_adapters(["one", "two"], [0.3, 0.7])
    changed()
    unet.disable_adapters()
    changed()
    torch.testing.assert_close(seen[-1], seen[0], rtol=1e-4, atol=1e-5)
    unet.enable_adapters()
    changed()
    unet.fuse_lora(lora_scale=2.0)
    changed()
    unet.unfuse_lora()  # at the scale it was fused at
    seen.append(agrees(run, unet, inputs))
    torch.testing.assert_close(seen[-1], seen[-2], rtol=1e-4, atol=1e-4)
    unet.fuse_lora(lora_scale=0.5)
    unet.unload_lora()
    changed()
    assert not run.reasons


def test_routed_ops_in_place_are_recorded_and_counted(unet: Any) -> None:
    accelerate(unet, ("attention", "layer_norm", "geglu", "upsample_conv"))
    seen: dict[str, int] = {}
    run, inputs = flat_of(unet), given(unet)
    agrees(run, unet, inputs)
    with torch.no_grad(), contract.recording(seen):
        run(**inputs)
    assert seen["attention/sdpa"] > 0 and seen["layer_norm/reference"] > 0
    agrees(run, unet, given(unet, seed=1))
    with contract.use(attention="math"):
        agrees(run, unet, inputs)
    assert run.pool.made == 2


def test_what_depends_on_a_promised_argument_is_computed_once_for_each() -> None:
    seen = []
    layer = nn.Linear(4, 4, bias=False).requires_grad_(False)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            return x + self.layer(context).exp()

    net = Net()
    run = flat_of(net, promised=("context",))
    x, contexts = torch.randn(2, 4), [torch.randn(2, 4), torch.randn(2, 4)]
    for context in (*contexts, *contexts):
        torch.testing.assert_close(run(x, context=context), net(x, context))
    (function,) = run.pool.held.values()
    assert len(function.kept) == 2 and function.function.lasting == (1,)
    once = function.function.once
    function.function.once = lambda *args: seen.append(1) or once(*args)
    run(x, context=contexts[0])
    assert not seen
    contexts[0].add_(1)  # tracked: seen although it was promised not to happen
    torch.testing.assert_close(run(x, context=contexts[0]), net(x, contexts[0]))
    assert seen == [1]
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(run(x, context=contexts[1]), net(x, contexts[1]))
    del contexts[:], context
    run(x, context=torch.randn(2, 4))
    (function,) = run.pool.held.values()
    assert len(function.kept) == 1  # what died is not kept


REFUSED: list[tuple[Any, tuple[Any, ...], str]] = [
    (lambda m, x: x * float(x.sum()), (), "reads a number"),
    (lambda m, x: x + torch.rand(2), (), "random"),
    (lambda m, x, given: x, ([{1}],), "is a set"),
    (lambda m, x: {1: x}.items(), (), "its output is a dict_items"),
]


@pytest.mark.parametrize(("run", "more", "reason"), REFUSED)
def test_what_cannot_be_recorded_runs_eagerly_with_a_reason(
    run: Any, more: tuple[Any, ...], reason: str
) -> None:
    routes = Counter[str]()
    called = flat_of(Holding(run), routes)
    for _ in range(2):
        called(torch.ones(2), *more)
    assert routes == {"unet/eager": 2}
    assert reason in called.sentences("it")[0] and called.sentences("it")[0].startswith("it ran eagerly: ")


def test_gradients_autocast_hooks_and_other_tensors_run_eagerly() -> None:
    module, x = nn.Linear(3, 3), torch.randn(2, 3)
    run = flat_of(module)
    run(x).sum().backward()
    assert module.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype == torch.bfloat16
    handle = module.register_forward_hook(lambda *_: torch.zeros(1))
    with torch.no_grad():
        assert run(x).tolist() == [0]
        handle.remove()
        run(x)
        run(nn.Buffer(x) if hasattr(nn, "Buffer") else x)
        run(x.to_sparse().to_dense())
    assert [*run.reasons] == [
        "a gradient is needed",
        "torch.autocast is at work",
        "forward hooks are at work in it",
    ]
    assert flat_of(lambda x: x)(x) is x
    with torch.inference_mode():
        other = nn.Linear(3, 3)
        strange = flat_of(other)
        strange(x)
    assert "inference_mode" in next(iter(strange.reasons))


def test_wrong_values_are_noticed_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "able", lambda dtype: False)
    monkeypatch.setattr(flat.rewrite, "_BY_ONE", {torch.ops.aten.mul.Tensor})
    monkeypatch.setattr(flat.rewrite, "_is_one", lambda value: True)  # a mistake
    module, x = Holding(lambda m, x: x * 3), torch.ones(2)
    run = flat_of(module)
    for _ in range(2):
        assert run(x).tolist() == [3, 3]
    assert [*run.reasons] == ["its recorded call gives other values than it does"]


def test_not_finite_values_are_as_they_are() -> None:
    module = Holding(lambda m, x: F.silu(x / 0) + 1)
    run = flat_of(module)
    for _ in range(2):
        assert torch.equal(run(torch.tensor([1.0, -0.5])).isfinite(), torch.tensor([False, False]))
    assert not run.reasons


def test_functions_are_bounded_and_changing_arguments_end_recording() -> None:
    module = Holding(lambda m, x, factor: x * factor)
    run, x = flat_of(module), torch.ones(2)
    for number in range(4 * FUNCTIONS):
        assert run(x, number + 2).tolist() == [number + 2.0] * 2
    assert len(run.pool.held) == FUNCTIONS and run.pool.made == 2 * FUNCTIONS
    assert [*run.reasons] == ["its arguments differ from call to call"]


def test_threads_share_one_function(unet: Any) -> None:
    run = flat_of(unet, promised=("encoder_hidden_states",))
    inputs = [given(unet, seed=seed) for seed in range(4)]
    with torch.no_grad():
        expected = [unet(**one)[0] for one in inputs]
    wrong = []

    def work(number: int) -> None:
        with torch.no_grad():
            for _ in range(3):
                found = run(**inputs[number])[0]
                if (found - expected[number]).norm() > 1e-5 * expected[number].norm():
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and run.pool.made == 1


def test_copies_start_anew_and_what_is_captured_around_it_sees_the_module(unet: Any) -> None:
    run = flat_of(unet)
    agrees(run, unet, given(unet))
    other = copy.deepcopy(unet)
    assert flat_of(other).pool is not run.pool and flat_of(unet).pool is run.pool
    inputs = given(unet)
    whole = flat_of(Holding(lambda m, x: run(**{**inputs, "sample": x})[0]))
    whole(inputs["sample"])
    assert "neither an argument nor a weight" in next(iter(whole.reasons))


def test_every_pair_of_changes_in_a_row(unet: Any) -> None:
    """What one change left behind is not taken for the state before it."""
    run, inputs = flat_of(unet), given(unet)
    for first, second in itertools.pairwise(
        [in_place, merge_through_data, in_place, load, merge_through_data]
    ):
        first(unet)
        agrees(run, unet, inputs)
        second(unet)
        agrees(run, unet, inputs)
    assert isinstance(run, Flat) and not run.reasons


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("named", [False, True])
def test_arguments_that_are_one_tensor_or_a_weight(mode: Any, named: bool) -> None:
    """A recording of (x, x) does not stand for (x, y)."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            return (self.layer(x) + 2 * self.layer(y),)

    module = Two().requires_grad_(False)
    run, w = flat_of(module), module.layer.weight
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with mode():
        for one, other in [(x, x), (x, y), (y, x), (w, x), (x, w), (y, x), (w, w), (y, y), (x.detach(), x)]:
            found = run(one, y=other) if named else run(one, other)
            torch.testing.assert_close(found[0], module(one, other)[0])
    assert not run.reasons
