"""accelerate and restore: the same picture, every mark taken away, and others' things left alone."""

import copy
import functools
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from clearway import Request, device
from clearway.device import Device
from clearway.errors import RequestError
from clearway.execution import executor
from clearway.models import load
from clearway.models._bound import Bound
from clearway.models.accelerate import OPS, accelerate, apply, restore
from clearway.ops import contract
from clearway.pipeline import generate
from clearway.types import Choices
from fake_capture import Recorder
from marks import bits, marks

FAMILIES = ("sd1", "sd2", "sdxl")


def part(folder: Path, name: str) -> Any:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    kind = UNet2DConditionModel if name == "unet" else AutoencoderKL
    return kind.from_pretrained(folder, subfolder=name, low_cpu_mem_usage=False).eval()


def inputs(unet: Any, batch: int, height: int, width: int, seed: int = 0) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(seed)
    given = {
        "sample": torch.randn(batch, 4, height, width, generator=drawn),
        "timestep": torch.full((batch,), 431.5),
        "encoder_hidden_states": torch.randn(batch, 77, unet.config.cross_attention_dim, generator=drawn),
        "return_dict": False,
    }
    if unet.config.addition_embed_type == "text_time":
        pooled = torch.randn(batch, 48, generator=drawn)
        given["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": torch.full((batch, 6), 64.0)}
    return given


def close(actual: Tensor, expected: Tensor) -> None:
    """Within what float32 leaves between two orders of the same sums, over a whole network.

    Also for one module before and after its weights have moved: a product of one row is summed in an order
    that depends on where the weight lies (MKL on an AMD EPYC), so no more than this is promised. What must
    be exact are the weights, by `bits`, and what `marks` tells.
    """
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module")
def unets(folders: dict[str, Path]) -> dict[str, Any]:
    return {family: part(folders[family], "unet") for family in FAMILIES}


@pytest.mark.parametrize("size", [(1, 8, 8), (2, 9, 13), (4, 7, 5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_unet_gives_the_same(unets: dict[str, Any], family: str, size: tuple[int, int, int]) -> None:
    unet = unets[family]
    given = inputs(unet, *size)
    with torch.no_grad():
        expected = unet(**given)[0]
        values, before, routes = bits(unet), marks(unet), dict[str, int]()
        report = accelerate(unet, packed_qkv=True)
        assert "left alone" not in str(report)
        with contract.recording(routes):
            close(unet(**given)[0], expected)
        absent = {"cross_kv", "time_embedding"}  # no op
        absent |= {"convolution", "residual_add"}  # only where a bias is a pass of its own
        absent |= {"upsample_conv"} if size[1] % 8 else set()  # a size that upsampling by two does not give
        assert {route.partition("/")[0] for route in routes} == {*OPS} - absent
        other = inputs(unet, *size, seed=1)
        close(unet(**other)[0], copy_of(unet)(**other)[0])
        restore(unet)
        close(unet(**given)[0], expected)
    assert marks(unet) == before
    assert bits(unet) == values


def copy_of(unet: Any) -> Any:
    """An untouched twin."""
    twin = copy.deepcopy(unet)
    restore(twin)
    return twin


@pytest.mark.parametrize("size", [(1, 8, 8), (2, 5, 7)])
def test_a_vae_gives_the_same(folders: dict[str, Path], size: tuple[int, int, int]) -> None:
    vae = part(folders["sd1"], "vae")
    batch, height, width = size
    latents = torch.randn(batch, 4, height, width, generator=torch.Generator().manual_seed(2))
    pixels = torch.randn(batch, 3, 8 * height, 8 * width, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = vae.decode(latents, return_dict=False)[0], vae.encode(pixels).latent_dist.mean
        values, before = bits(vae), marks(vae)
        report = accelerate(vae)
        assert not report.left and len(report.placed["attention"]) == 2
        close(vae.decode(latents, return_dict=False)[0], expected[0])
        close(vae.encode(pixels).latent_dist.mean, expected[1])
        restore(vae)
        close(vae.decode(latents, return_dict=False)[0], expected[0])
    assert marks(vae) == before
    assert bits(vae) == values


WITH = {
    "convolution": ("group_norm_silu", "residual_add"),
    "cross_kv": ("attention",),
    "residual_add": ("group_norm_silu",),
    "time_embedding": ("group_norm_silu",),
}


@pytest.mark.parametrize("op", OPS)
def test_each_op_alone(unets: dict[str, Any], op: str) -> None:
    unet = unets["sd1"]
    given = inputs(unet, 2, 8, 8)
    with torch.no_grad():
        expected = unet(**given)[0]
        report = accelerate(unet, (*WITH.get(op, ()), op), layout=None)
        assert {what.split("_norm")[0] for what in report.placed} >= {op.split("_norm")[0]}
        close(unet(**given)[0], expected)
        restore(unet)


def test_a_gradient_takes_the_classes_own_way(unets: dict[str, Any]) -> None:
    unet = unets["sd1"]
    given = inputs(unet, 1, 8, 8)
    given["sample"].requires_grad_()
    accelerate(unet, layout=None)
    routes: dict[str, int] = {}
    with contract.recording(routes):
        unet(**given)[0].sum().backward()
    assert routes == {}
    with_ops, given["sample"].grad = given["sample"].grad, None
    restore(unet)
    unet(**given)[0].sum().backward()
    assert torch.equal(with_ops, given["sample"].grad)
    unet.zero_grad()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda unet: pickle.loads(pickle.dumps(unet))])
def test_a_copy_works_and_is_restored_by_itself(unets: dict[str, Any], copied: Callable[[Any], Any]) -> None:
    unet = unets["sd2"]
    given = inputs(unet, 2, 8, 8)
    with torch.no_grad():
        values, expected = bits(unet), unet(**given)[0]
        accelerate(unet, packed_qkv=True)
        unet(**given)
        twin = copied(unet)
        for module in twin.modules():
            forward = vars(module).get("forward")
            assert not isinstance(forward, Bound) or forward.args[0] is module
        next(unet.parameters()).add_(1)  # the copy reads nothing of the original
        close(twin(**given)[0], expected)
        restore(twin)
        close(twin(**given)[0], expected)
        assert bits(twin) == values
        next(unet.parameters()).sub_(1)
        restore(unet)


def test_others_things_are_left_alone_and_named(unets: dict[str, Any]) -> None:
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    class Mine(AttnProcessor2_0):
        pass

    unet = copy.deepcopy(unets["sd1"])
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    block.attn1.set_processor(AttnProcessor())
    block.attn2.set_processor(mine := Mine())
    resnet = unet.mid_block.resnets[0]
    resnet.norm1.register_forward_hook(lambda module, args, out: out * 1)
    unet.mid_block.resnets[1].forward = theirs = functools.partial(unet.mid_block.resnets[1].forward)
    given = inputs(unet, 1, 8, 8)
    with torch.no_grad():
        expected = unet(**given)[0]
        report = accelerate(unet)
        close(unet(**given)[0], expected)
    told = str(report)
    for words in ("processor is AttnProcessor:", "processor is Mine:", "hooked:", "was replaced"):
        assert words in told
    assert len(told.splitlines()) < 20
    restore(unet)
    assert block.attn2.processor is mine
    assert unet.mid_block.resnets[1].forward is theirs


class LoRA(nn.Module):
    """What PEFT puts in a layer's place, in short."""

    def __init__(self, base: nn.Module, scale: float) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.scaling = {"style": scale}

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base_layer(x) + self.up(self.down(x)) * self.scaling["style"]
        return added


def wrap(unet: Any, scale: float = 1.0) -> None:
    for module in list(unet.modules()):
        for name in ("to_q", "to_k", "to_v", "time_emb_proj", "proj"):
            if isinstance(module._modules.get(name), nn.Linear):
                setattr(module, name, LoRA(module._modules[name], scale))


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_captured_graphs_of_an_accelerated_unet(
    unets: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "cpu":
        monkeypatch.setattr(sys.modules["clearway.execution.executor"], "TorchCapture", Recorder)
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    unet, routes = copy.deepcopy(unets["sdxl"]).requires_grad_(False).to(kind), Counter[str]()
    accelerate(unet, executor="eager", packed_qkv=True)
    run = executor("cuda_graph", unet, "unet", routes, promised=("encoder_hidden_states",))

    def agree(given: dict[str, Any]) -> None:
        given = tree_map_only(Tensor, lambda tensor: tensor.to(kind), given)
        for _ in range(2):
            close(run(**given)[0], unet(**given)[0])

    # in TF32 a convolution by cuDNN and one of ours, which a later verdict brings, would differ
    with torch.inference_mode(), device.tf32(Device(kind), False):
        first = inputs(unet, 2, 8, 8)
        agree(first)
        agree(first | {"sample": first["sample"] * 2, "timestep": first["timestep"] / 2})
        agree(inputs(unet, 2, 8, 8, seed=1))  # another prompt
        agree(inputs(unet, 1, 9, 7))  # another size
        assert run.pool.made == 2
        longer = inputs(unet, 2, 8, 8)
        agree(longer | {"encoder_hidden_states": longer["encoder_hidden_states"].repeat(1, 2, 1)})
        with contract.use(attention="math"):
            agree(first)
        assert run.pool.made == 4
        torch.manual_seed(5)
        wrap(unet)  # an adapter
        unet.to(kind)
        agree(first)
        for module in unet.modules():
            if isinstance(module, LoRA):
                module.scaling["style"] = 0.3
        agree(first)
        assert (run.pool.made, len(run.pool.held)) == (6, 2)
        for module in list(unet.modules()):  # merged, and the layers put back
            for name, lora in list(module._modules.items()):
                if isinstance(lora, LoRA):
                    lora.base_layer.weight.data += lora.up.weight @ lora.down.weight
                    setattr(module, name, lora.base_layer)
        agree(first)
        unet.double()
        agree(tree_map_only(Tensor, Tensor.double, first))
    assert set(routes) == {"unet/cuda_graph"}
    assert not run.pool.reasons
    restore(unet)
    assert not any("_clearway" in key for module in unet.modules() for key in vars(module))


@pytest.mark.parametrize("late", [False, True])
def test_adapters_loaded_before_and_after(unets: dict[str, Any], late: bool) -> None:
    unet = copy.deepcopy(unets["sd1"])
    given = inputs(unet, 2, 8, 8)
    with torch.no_grad():
        plain = unet(**given)[0]
        if late:
            accelerate(unet, packed_qkv=True)
            close(unet(**given)[0], plain)  # what is kept of this context must not be used below
        torch.manual_seed(5)
        wrap(unet)
        if not late:
            accelerate(unet, packed_qkv=True)
        found = unet(**given)[0]
        restore(unet)
        expected = unet(**given)[0]
    close(found, expected)
    assert (expected - plain).abs().max() > 1e-3
    assert not any("_clearway" in key for module in unet.modules() for key in vars(module))


def test_what_wraps_a_forward_afterwards_keeps_working(unets: dict[str, Any]) -> None:
    unet = copy.deepcopy(unets["sd1"])
    given = inputs(unet, 1, 8, 8)
    with torch.no_grad():
        expected = unet(**given)[0]
        accelerate(unet, layout=None)
        resnet, calls = unet.mid_block.resnets[0], []
        resnet._old_forward = inner = resnet.forward
        resnet.forward = lambda *args, **kwargs: calls.append(1) or inner(*args, **kwargs)
        report = restore(unet)
        close(unet(**given)[0], expected)
    assert calls == [1]
    assert "wrapped since" in str(report)


def test_a_wrapper_that_keeps_its_inner_elsewhere_is_found(unets: dict[str, Any]) -> None:
    """Diffusers' hooks (group offloading): the norm's SiLU must not come twice."""
    unet = copy.deepcopy(unets["sd1"])
    given = inputs(unet, 1, 8, 8)
    with torch.no_grad():
        expected = unet(**given)[0]
        accelerate(unet, layout=None)
        norm = unet.conv_norm_out
        norm.forward = functools.update_wrapper(functools.partial(norm.forward), norm.forward)
        resnet = unet.mid_block.resnets[0]
        held = SimpleNamespace(forward=None, original_forward=resnet.forward)
        resnet._diffusers_hook = SimpleNamespace(_fn_refs=[held])
        resnet.forward = lambda *args, **kwargs: held.original_forward(*args, **kwargs)
        report = restore(unet)
        close(unet(**given)[0], expected)
    (names,) = report.left.values()
    assert len(names) == 2


@pytest.mark.parametrize("name", ["unet", "vae"])
def test_diffusers_may_take_the_processors_away(folders: dict[str, Path], name: str) -> None:
    """Its set_default_attn_processor refuses classes that it does not know."""
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    part_ = part(folders["sd1"], name)
    before = marks(part_)
    accelerate(part_)
    part_.set_default_attn_processor()
    assert {type(one) for one in part_.attn_processors.values()} == {AttnProcessor}
    accelerate(part_)  # what it set is another's: left alone, and set again as it likes
    part_.set_default_attn_processor()
    restore(part_)
    part_.set_attn_processor(AttnProcessor2_0())
    assert [mark[:3] for mark in marks(part_)] == [mark[:3] for mark in before]


def test_what_diffusers_does_with_processors_works_as_before(unets: dict[str, Any]) -> None:
    def sliced(unet: Any) -> None:
        unet.set_attention_slice("max")

    def fused(unet: Any) -> None:
        unet.fuse_qkv_projections()

    def fused_and_back(unet: Any) -> None:
        unet.fuse_qkv_projections()
        unet.unfuse_qkv_projections()

    def default(unet: Any) -> None:
        unet.set_default_attn_processor()

    def saved(unet: Any) -> None:
        processors = unet.attn_processors
        unet.set_default_attn_processor()
        unet.set_attn_processor(processors)

    for change in (sliced, fused, fused_and_back, default, saved):
        unet, twin = copy.deepcopy(unets["sd1"]), copy.deepcopy(unets["sd1"])
        accelerate(unet, packed_qkv=True)
        for one in (unet, twin):
            change(one)
        given = inputs(unet, 2, 8, 8)
        with torch.no_grad():
            close(unet(**given)[0], twin(**given)[0])


def test_packed_weights_come_apart_where_the_processor_is_gone(unets: dict[str, Any]) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    unet = copy.deepcopy(unets["sd1"])
    with torch.no_grad():
        accelerate(unet, packed_qkv=True)
        unet(**inputs(unet, 1, 8, 8))
        twin = copy.deepcopy(unet)
        unet.set_attn_processor(AttnProcessor())
    for each in (unet, twin):
        restore(each)
        assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in each.parameters())


def test_what_a_removed_hook_leaves_is_no_hindrance(unets: dict[str, Any]) -> None:
    unet = copy.deepcopy(unets["sd1"])
    for module in unet.modules():
        module.forward = module.forward  # the class's own, at the instance
    before, report = marks(unet), accelerate(unet)
    assert not report.left
    restore(unet)
    assert marks(unet) == before


def test_a_pipeline_is_accelerated_and_restored(folders: dict[str, Path]) -> None:
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline

    pipe = StableDiffusionPipeline(
        unet=(unet := part(folders["sd1"], "unet")),
        vae=(vae := part(folders["sd1"], "vae")),
        text_encoder=None,
        tokenizer=None,
        scheduler=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    before = marks(unet), marks(vae)
    report = accelerate(pipe)
    assert "in unet" in str(report) and "in vae" in str(report)
    accelerate(pipe, ("geglu",), layout=None)  # once more: what was there is taken away first
    assert isinstance(vars(unet.mid_block.attentions[0].transformer_blocks[0].ff.net[0])["forward"], Bound)
    restore(pipe)
    assert (marks(unet), marks(vae)) == before


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_choices_on_a_model_draw_the_same_picture(folders: dict[str, Path], family: str) -> None:
    model = load(str(folders[family]), device="cpu")
    request = Request(
        prompt="a red cube", width=64, height=64, steps=3, seed=1, cfg_scale=4.0, sampler="Euler"
    )
    plain = generate(request, model)
    chosen = Choices(layout="channels_last", ops=OPS, packed_qkv=True, rows="separate")
    applied = apply(model, chosen)
    assert applied.choices == chosen and applied.unet is model.unet
    drawn = generate(request, applied)
    assert abs(drawn.images.astype(int) - plain.images.astype(int)).max() <= 1
    assert drawn.routes["geglu/reference"] > 0 and drawn.routes["group_norm_silu/reference"] > 0
    back = apply(applied, Choices())
    assert abs(generate(request, back).images.astype(int) - plain.images.astype(int)).max() <= 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: accelerate(nn.Linear(1, 1), ("atention",)), "nearest: 'attention'"),
        (lambda: accelerate(nn.Linear(1, 1), "atention"), "op 'atention' cannot"),
        (lambda: accelerate(nn.Linear(1, 1), layout="nhwc"), "contiguous, channels_last"),
        (lambda: accelerate(object()), "a Diffusers pipeline, a module or a Model"),
    ],
)
def test_mistakes_are_sentences(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        call()


def test_choices_that_do_not_exist(folders: dict[str, Path]) -> None:
    model = load(str(folders["sd1"]), device="cpu")
    for wrong in (Choices(executor="graph"), Choices(rows="both"), Choices(layout="x"), Choices(ops=("y",))):
        with pytest.raises(RequestError):
            apply(model, wrong)
    assert str(accelerate(nn.Linear(1, 1))).startswith("nothing here")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_weights_read_under_inference_mode(folders: dict[str, Path], mode: Any) -> None:
    """As where a whole program is decorated with it: such weights take no memory made outside of it."""
    with torch.inference_mode():
        unet = part(folders["sd1"], "unet")
        given = inputs(unet, 2, 8, 8)
        values, expected = bits(unet), unet(**given)[0]
    with mode():
        for _ in range(2):
            accelerate(unet, packed_qkv=True)
            close(unet(**given)[0], expected)
            restore(unet)
            close(unet(**given)[0], expected)
            assert bits(unet) == values


def test_a_compiler_sees_all_of_it_as_one_graph(unets: dict[str, Any]) -> None:
    """Where tensors lie, and in which mode they were made, it cannot see."""
    unet = copy.deepcopy(unets["sd1"]).requires_grad_(False)
    accelerate(unet, packed_qkv=True)
    torch.compiler.reset()
    compiled = torch.compile(unet, backend="eager", fullgraph=True)
    with torch.no_grad():
        for seed in range(2):
            given = inputs(unet, 2, 8, 8, seed)
            unet(**given)  # with weights joined
            close(compiled(**given)[0], copy_of(unet)(**given)[0])
    torch.compiler.reset()
