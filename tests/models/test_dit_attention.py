"""The attention processors of Flux and SD 3: what the user chose stays, and stays chosen afterwards."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearway.models._dit_attention import FluxProcessor, JointProcessor
from clearway.models.accelerate import accelerate, restore
from clearway.ops import contract
from dit_builders import TEXT, inputs, seeded, tiny_flux, tiny_sd3, tiny_sd35


@pytest.fixture
def flux() -> Any:
    return tiny_flux()


def run(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**given)[0]
    return out


def attentions(model: Any, given: dict[str, Any]) -> int:
    """How many attentions went through the op."""
    routes: dict[str, int] = {}
    with contract.recording(routes):
        run(model, given)
    return sum(times for route, times in routes.items() if route.startswith("attention/"))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


def test_they_take_what_they_stand_in_for_takes() -> None:
    """Diffusers reads the names of the arguments, and leaves out what is not among them."""
    for kind in (FluxProcessor, JointProcessor):
        names = [list(inspect.signature(each.__call__).parameters) for each in (kind, kind.usual())]
        assert names[0] == names[1]
        assert type(kind().stock) is kind.usual()
        assert "Added" not in kind.__name__  # by which Diffusers knows those that cannot be fused


@pytest.mark.parametrize("maker", [tiny_flux, tiny_sd35])
def test_processors_of_the_user_s_stay(maker: Any) -> None:
    model = maker()
    stock = type(model.transformer_blocks[0].attn.processor)

    class Mine(stock):  # type: ignore[misc, valid-type]
        pass

    given = inputs(model, 1, 4, 6)
    model.transformer_blocks[1].attn.set_processor(mine := Mine())
    expected, before = run(model, given), attentions(model, given)
    report = accelerate(model)
    assert report.left == {"its processor is Mine": [f"{type(model).__name__}.transformer_blocks.1.attn"]}
    close(run(model, given), expected)
    attn = model.transformer_blocks[0].attn
    attn.set_processor(later := Mine())  # in place of ours
    close(run(model, given), expected)
    restore(model)
    assert model.transformer_blocks[1].attn.processor is mine and attn.processor is later
    assert before == attentions(model, given) == 0


def test_a_backend_set_before_is_left_and_named(flux: Any) -> None:
    given = inputs(flux, 1, 4, 6)
    flux.set_attention_backend("_native_math")
    flux.transformer_blocks[0].attn.set_attention_backend("native")  # a choice too
    try:
        report = accelerate(flux)
        assert len(report.left["its attention backend was set to _native_math"]) == 3
        assert len(report.left["its attention backend was set to native"]) == 1
        assert "rope" not in report.placed and attentions(flux, given) == 0
    finally:
        registry()._active_backend = native()


def test_a_backend_set_afterwards_is_what_runs(flux: Any) -> None:
    given = inputs(flux, 1, 4, 6)
    expected = run(flux, given)
    accelerate(flux)
    assert attentions(flux, given) == 4
    try:
        flux.set_attention_backend("_native_math")
        registry()._active_backend = native()
        assert attentions(flux, given) == 0
        close(run(flux, given), expected)
        restore(flux)
        processors = [module.processor for module in flux.modules() if hasattr(module, "processor")]
        assert {processor._attention_backend.value for processor in processors} == {"_native_math"}
        flux.reset_attention_backend()
        accelerate(flux)
        assert attentions(flux, given) == 4
    finally:
        registry()._active_backend = native()


def test_the_context_of_a_backend_is_respected(flux: Any) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    given = inputs(flux, 1, 4, 6)
    accelerate(flux)
    with attention_backend("_native_math"):
        assert attentions(flux, given) == 0
        assert "its attention backend was set to _native_math" in accelerate(flux).left
    accelerate(flux)
    assert attentions(flux, given) == 4


def registry() -> Any:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return _AttentionBackendRegistry


def native() -> Any:
    from diffusers.models.attention_dispatch import AttentionBackendName

    return AttentionBackendName.NATIVE


def test_attention_over_several_devices_is_left(flux: Any) -> None:
    attn = flux.transformer_blocks[0].attn
    accelerate(flux)
    attn.processor._parallel_config = config = object()
    assert attn.processor.stock._parallel_config is config
    assert "its attention is spread over devices" in accelerate(flux).left
    assert attn.processor._parallel_config is config


@pytest.mark.parametrize("maker", [tiny_flux, tiny_sd3])
def test_the_caller_s_choice_among_pytorch_s_backends_holds(maker: Any) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = maker()
    given = inputs(model, 1, 4, 6)
    accelerate(model)
    routes: dict[str, int] = {}
    with sdpa_kernel(SDPBackend.MATH), contract.recording(routes):
        run(model, given)
    assert {route for route in routes if "attention" in route} == {"attention/sdpa"}


@pytest.mark.parametrize("kind", ["keys", "scores", "numbers"])
def test_masks(flux: Any, kind: str) -> None:
    """Of keys alone (B, S), as Chroma's of scores (B, 1, L, S), and of numbers that are added."""
    given = inputs(flux, 2, 3, 3, text=4)
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[1, 2:4] = False
    if kind != "keys":
        mask = mask[:, None, None] & (mask[:, None, :, None] | torch.eye(13, dtype=torch.bool))
    if kind == "numbers":
        mask = mask.float() * 2
    masked = given | {"joint_attention_kwargs": {"attention_mask": mask}}
    expected = run(flux, dict(masked))
    accelerate(flux)
    assert attentions(flux, dict(masked)) == 4
    close(run(flux, dict(masked)), expected)
    assert (run(flux, given) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("maker", [tiny_flux, tiny_sd3])
def test_fused_projections(maker: Any, late: bool) -> None:
    """Flux's processor goes on with them; SD 3 brings one of its own, which stays."""
    model = maker()
    given = inputs(model, 2, 4, 6)
    expected = run(model, given)
    if late:
        accelerate(model)
    model.fuse_qkv_projections()
    if not late:
        accelerate(model)
    assert attentions(model, given) == (4 if maker is tiny_flux else 0)
    close(run(model, given), expected)
    model.unfuse_qkv_projections()
    close(run(model, given), expected)
    restore(model)
    close(run(model, given), expected)


def test_positions_of_another_form_are_diffusers_own(flux: Any) -> None:
    """Tables by pair instead of by element do not fit the op."""
    attn = flux.single_transformer_blocks[0].attn
    x = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1))
    angles = torch.randn(7, 16, generator=torch.Generator().manual_seed(2))
    batched = angles.cos()[:, None, :].expand(7, 3, 16), angles.sin()[:, None, :].expand(7, 3, 16)
    with torch.no_grad():
        expected = attn(x, image_rotary_emb=(angles.cos(), angles.sin()))
        plain = attn(x)
        accelerate(flux)
        close(attn(x, image_rotary_emb=(angles.cos(), angles.sin())), expected)
        close(attn(x), plain)
        with pytest.raises(RuntimeError):
            attn(x, image_rotary_emb=batched)  # what Diffusers says of them


def test_without_the_op_diffusers_rotates(flux: Any) -> None:
    given = inputs(flux, 1, 4, 6)
    expected = run(flux, given)
    assert "rope" not in accelerate(flux, ("attention",)).placed
    routes: dict[str, int] = {}
    with contract.recording(routes):
        close(run(flux, given), expected)
    assert set(routes) == {"attention/sdpa"}


def test_a_norm_of_queries_that_reads_more_than_its_row_is_left() -> None:
    """SD 3 norms (B, N, L, E), the processor (B, L, N, E): one for rows alone."""

    class Centred(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(2, keepdim=True))

    model = tiny_sd35()
    given = inputs(model, 1, 4, 6)
    accelerate(model)
    attn = model.transformer_blocks[0].attn
    attn.norm_q = Centred(16)
    found = run(model, given)
    assert attentions(model, given) == 4
    assert any("another class" in reason for reason in accelerate(model).left)
    restore(model)
    close(found, run(model, given))


@pytest.mark.parametrize("late", [False, True])
def test_an_ip_adapter_of_flux_is_left_whole(flux: Any, late: bool) -> None:
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    given = inputs(flux, 1, 4, 6)
    plain = run(flux, given)
    if late:
        accelerate(flux)
    adapters = [
        seeded(FluxIPAdapterAttnProcessor(hidden_size=48, cross_attention_dim=TEXT), number)
        for number in range(len(flux.transformer_blocks))
    ]
    processors = {
        name: adapters.pop() if name.startswith("transformer_blocks") else processor.__class__()
        for name, processor in flux.attn_processors.items()
    }
    flux.set_attn_processor(processors)
    if not late:
        report = accelerate(flux)
        assert len(report.left["its processor is FluxIPAdapterAttnProcessor"]) == 2
    image = [torch.randn(1, 4, TEXT, generator=torch.Generator().manual_seed(3))]

    def drawn() -> Tensor:
        return run(flux, given | {"joint_attention_kwargs": {"ip_hidden_states": image}})

    found = drawn()
    restore(flux)
    expected = drawn()
    close(found, expected)
    assert (expected - plain).abs().max() > 1e-2


def test_what_unloading_an_adapter_makes_anew_is_taken_away_too(flux: Any) -> None:
    """Diffusers makes a processor of the class that it finds."""
    given = inputs(flux, 1, 4, 6)
    expected = run(flux, given)
    accelerate(flux)
    flux.set_attn_processor({name: each.__class__() for name, each in flux.attn_processors.items()})
    close(run(flux, given), expected)
    restore(flux)
    assert {type(each).__name__ for each in flux.attn_processors.values()} == {"FluxAttnProcessor"}
    assert torch.equal(run(flux, given), expected)
