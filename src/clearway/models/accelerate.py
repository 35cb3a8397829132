"""accelerate(target): routed ops in place of the layers of a Diffusers pipeline, a module of it, or a Model.

What is put in place is put at instances, never at classes: a forward, or an attention processor where the
module has a stock one. What somebody else put there stays, and the report says so. `restore` undoes it
exactly. Every mark lies on the module that it is about, so that deepcopy, pickle, moving and LoRA loaded
afterwards need no care; only inference is changed, since a gradient takes the classes' own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import CellType
from typing import Any

import torch
from torch import nn

from clearway.errors import RequestError
from clearway.execution import EXECUTORS, forget
from clearway.execution.kept import Kept
from clearway.models import (
    _asked,
    _attention,
    _checks,
    _dit,
    _executors,
    _fused_blocks,
    _joined,
    _linear,
    _time_embedding,
    _transformers,
    _up_blocks,
    foreseen,
)
from clearway.models._bound import Bound, occupied, plain, plain_weight
from clearway.models._report import Report
from clearway.models.chosen import MARK
from clearway.models.model import Model
from clearway.types import Choices

OPS = (
    "attention",
    "convolution",
    "cross_kv",
    "geglu",
    "group_norm_silu",
    "layer_norm",
    "linear",
    "residual_add",
    "skip_concat",
    "time_embedding",
    "upsample_conv",
)
"""What can be put in place, each on its own; `cross_kv` (keys and values of a context once) comes with
`attention`, whose processor does it, `residual_add` (convolutions' biases folded away) and `time_embedding`
(all blocks' projections of it as one) with `group_norm_silu`, `convolution` (without their biases) with
`residual_add`."""

EVERY = (*OPS, *_dit.OPS)
"""With what is put in place in transformers (Flux, SD 3) alone."""

LAYOUTS = _asked.LAYOUTS
ROWS = ("joined", "separate")
_STRIDES = "_clearway_strides"
_PACKED = "_clearway_packed"
_TOKENS = "_get_output_for_continuous_inputs"
"""The method of Transformer2DModel that makes an image of tokens again."""
_DEFAULT = "set_default_attn_processor"
"""The method of Diffusers' models that takes away processors, and refuses those that it does not know."""


@torch.inference_mode(False)  # weights that are laid out in it stay marked by it
def accelerate(
    target: Any,
    ops: Iterable[str] | None = None,
    *,
    executor: str = _executors.AUTO,
    layout: str | None = _executors.AUTO,
    packed_qkv: bool | None = None,
) -> Report:
    """Puts `ops` and an executor in place in `target` and lays its convolutions' weights out; the report says
    where, and later what ran.

    `target`: a Diffusers pipeline, a module (UNet2DConditionModel, AutoencoderKL, ...) or a Model. What was
    put there before is taken away first. `ops` None is every op; none where there is only a CPU, for a Model
    on one, and with `executor` "flat". `executor` runs the UNet or transformer, ControlNets, the VAE's
    decoder and the text encoders: "auto" is captured CUDA graphs on CUDA devices, recorded calls ("flat")
    where there is only a CPU and no op is in place, and nothing elsewhere; a Model is run as its choices say.
    `layout` "auto" is channels_last but with recorded calls, None leaves memory as it is; `packed_qkv` makes
    one projection of three in self-attention, None where the part is on a CUDA device. Raises RequestError
    for a target, op, executor or layout that is none of these.
    """
    parts = list(_parts(target))
    asked = _asked.exact(target, [part for _, part in parts], EVERY, ops, executor, layout, packed_qkv)
    restore(target)
    report = Report(notes=list(asked.notes))
    for label, part in parts:
        packed = _on_cuda(part) if packed_qkv is None else packed_qkv
        _place(label, part, asked.ops, asked.layout, packed, isinstance(target, Model), report)
        if asked.layout == "channels_last" and _has_images(part):
            _channels_last(label, part, report)
        if not isinstance(target, Model):
            _executors.place(label, part, asked.executor, report)
        _checks.begin(label, part, report, target if isinstance(target, Model) else None)
    if not isinstance(target, nn.Module | Model):
        _foresee(dict(parts))
    return report


@torch.inference_mode(False)
def restore(target: Any) -> Report:
    """Takes away what `accelerate` put in place: forwards, processors and memory layout as they were.

    What somebody has since wrapped a forward in is not touched: it calls the class's own forward from now on,
    and the report names it.
    """
    report = Report()
    for label, part in _parts(target):
        for name, module in _walk(label, part):
            _take_away(name, module, report)
        part.__dict__.pop(MARK, None)
    return report


def apply(model: Model, choices: Choices) -> Model:
    """The model run as `choices` say. Its modules are shared and changed: what is applied last holds.

    Routes, executor and rows are kept in `choices`, for the pipeline to call by. Raises RequestError for a
    choice that does not exist.
    """
    for value, known, name in (
        (choices.executor, EXECUTORS, "executor"),
        (choices.rows, ROWS, "rows"),
    ):
        if value not in known:
            raise RequestError(f"{name} {value!r} is not known; it is one of {', '.join(known)}")
    attention = ("attention",) if choices.packed_qkv and "attention" not in choices.ops else ()
    layout = choices.layout if choices.layout != "contiguous" else None
    accelerate(model, (*choices.ops, *attention), layout=layout, packed_qkv=choices.packed_qkv)
    return replace(model, choices=choices)


def _parts(target: Any) -> Iterator[tuple[str, nn.Module]]:
    """(label, module) of everything that may be changed."""
    if isinstance(target, Model):
        yield "unet", target.unet
        yield "vae", target.vae
    elif isinstance(target, nn.Module):
        yield type(target).__name__, target
    elif isinstance(getattr(target, "components", None), dict):
        seen: set[int] = set()
        for label, part in target.components.items():
            if isinstance(part, nn.Module) and id(part) not in seen:
                seen.add(id(part))
                yield label, part
    else:
        raise RequestError(
            f"{type(target).__name__} cannot be accelerated or restored; a Diffusers pipeline, a module or a "
            "Model can"
        )


def _foresee(parts: dict[str, nn.Module]) -> None:
    """Begins to build what a pipeline launches at its own size, where nothing was built on this machine."""
    unet, vae = parts.get("unet"), parts.get("vae")
    side = getattr(getattr(unet, "config", None), "sample_size", None)
    if vae is not None and isinstance(side, int):
        foreseen.begin(unet, vae, side, side)


def _on_cuda(part: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in part.parameters())


def _walk(label: str, part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in part.named_modules():
        yield f"{label}.{name}" if name else label, module


def _place(
    label: str,
    part: nn.Module,
    ops: tuple[str, ...],
    layout: str | None,
    packed: bool,
    promised: bool,
    report: Report,
) -> None:
    from diffusers.models.activations import GEGLU
    from diffusers.models.attention import BasicTransformerBlock
    from diffusers.models.attention_processor import Attention
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.transformers.transformer_2d import Transformer2DModel
    from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
    from diffusers.models.upsampling import Upsample2D

    ups: dict[type, Callable[..., Any]] = {
        UpBlock2D: _up_blocks.plain_up,
        CrossAttnUpBlock2D: _up_blocks.attention_up,
    }
    within: set[int] = set()  # norms that are computed with what is around them
    timed: list[nn.Module] = []
    modules = list(_walk(label, part))
    for name, module in modules:
        kind = type(module)
        if "attention" in ops and hasattr(kind, _DEFAULT):
            module.__dict__[_DEFAULT] = Bound(_attention.default, module)
        if _dit.place(name, module, ops, _bind, report):
            continue
        if kind is ResnetBlock2D and "group_norm_silu" in ops:
            within |= {id(module.norm1), id(module.norm2)}
            run: Callable[..., Any] = _fused_blocks.resnet
            if "residual_add" in ops:
                routed = "convolution" in ops
                run = _fused_blocks.routed_resnet if routed else _fused_blocks.folded_resnet
            why = _fused_blocks.refuse_resnet(module)
            if _bind(name, module, "group_norm_silu", run, why, report):
                for what in ("residual_add", "convolution") if "residual_add" in ops else ():
                    if what in ops:
                        report.place(what, name)
                if "time_embedding" in ops and not _time_embedding.refuse(module):
                    report.place("time_embedding", name)
                    timed.append(module)
        elif kind in ups and "skip_concat" in ops:
            _bind(name, module, "skip_concat", ups[kind], None, report)
        elif kind is Upsample2D and "upsample_conv" in ops:
            why = _fused_blocks.refuse_upsample(module)
            _attention.listen()
            _bind(name, module, "upsample_conv", _fused_blocks.upsample, why, report, Kept())
        elif kind is Transformer2DModel and module.is_input_continuous:
            if "linear" in ops:
                _route_linear(name, module, report)
            if layout == "channels_last":
                module.__dict__[_TOKENS] = Bound(_transformers.image_of_tokens, module)
            if "layer_norm" in ops:
                _bind(name, module, "transformer", _transformers.blocks_of_image, None, report)
        elif kind is BasicTransformerBlock and "layer_norm" in ops:
            why = _transformers.refuse_transformer(module)
            _bind(name, module, "layer_norm", _transformers.transformer, why, report)
        elif kind is GEGLU and "geglu" in ops:
            _bind(name, module, "geglu", _fused_blocks.gated, None, report)
        elif kind is Attention and "attention" in ops:
            _swap(name, module, "cross_kv" in ops, packed, promised, report)
    if "group_norm_silu" not in ops:
        return
    _time_embedding.place(timed)
    for name, module in modules:
        last, activation = (module._modules.get(key) for key in ("conv_norm_out", "conv_act"))
        if last is not None and plain(last, nn.GroupNorm) and plain(activation, nn.SiLU):
            assert activation is not None
            within.add(id(last))
            _stand_in(last, _fused_blocks.last_norm, module)
            _stand_in(activation, _fused_blocks.nothing, module)
            report.place("group_norm_silu", f"{name}.conv_norm_out")
    for name, module in modules:
        if type(module) is nn.GroupNorm and id(module) not in within:
            _bind(name, module, "group_norm", _fused_blocks.group_norm, None, report)


def _bind(
    name: str,
    module: nn.Module,
    what: str,
    run: Callable[..., Any],
    why: str | None,
    report: Report,
    *more: Any,
) -> bool:
    """Puts `run(module, *more, ...)` in place of the module's forward, if nothing speaks against it."""
    reason = occupied(module) or why
    if reason:
        report.leave(reason, name)
        return False
    _stand_in(module, run, *more)
    report.place(what, name)
    return True


def _stand_in(module: nn.Module, run: Callable[..., Any], *more: Any) -> None:
    bound = Bound(run, module, *more)
    bound.before = module.__dict__.get("forward")
    module.forward = bound


def _route_linear(name: str, transformer: nn.Module, report: Report) -> None:
    """Puts the op at the linear layers of a transformer, and has it compute those of its convolutions that
    are products."""
    for key, layer in _linear.layers(transformer):
        if type(layer) is nn.Linear:
            _bind(f"{name}.{key}", layer, "linear", _linear.routed, _linear.refuse(layer), report)
        else:
            layer.__dict__[_linear.MARK] = True


def _swap(name: str, attn: Any, kept: bool, packed: bool, promised: bool, report: Report) -> None:
    from diffusers.models.attention_processor import AttnProcessor2_0

    if type(attn.processor) is not AttnProcessor2_0:
        report.leave(f"its processor is {type(attn.processor).__name__}", name)
        return
    reason = occupied(attn) or _attention.refuse(attn)
    if reason:
        report.leave(reason, name)
        return
    attn.processor = _attention.Processor(attn.processor, kept and attn.is_cross_attention, promised, packed)
    report.place("attention", name)
    if kept and attn.is_cross_attention:
        report.place("cross_kv", name)
    if packed and not attn.is_cross_attention:
        refused = _attention.refuse_packed(attn)
        if refused:
            report.leave(f"not packed, {refused}", name)
        else:
            attn.__dict__[_PACKED] = True  # here, since another processor may come in this one's place
            report.place("packed_qkv", name)


def _is_set(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # of a name that is bound later
        return False
    return True


def _has_images(part: nn.Module) -> bool:
    from diffusers.models.resnet import ResnetBlock2D

    return any(isinstance(module, ResnetBlock2D) for module in part.modules())


def _channels_last(label: str, part: nn.Module, report: Report) -> None:
    """Lays 4-axis weights out channels last; each module keeps what strides its own had."""
    for name, module in _walk(label, part):
        strides = {}
        for key, weight in module._parameters.items():
            if weight is None or weight.dim() != 4:
                continue
            if not plain_weight(weight) or weight.is_meta:
                report.leave("its weight is quantised, of a class of its own or offloaded", name)
                continue
            with _joined.kind_of(weight):
                laid_out = weight.data.contiguous(memory_format=torch.channels_last)
                if laid_out.stride() != weight.stride():
                    strides[key] = weight.stride()
                    weight.data = laid_out
        if strides:
            module.__dict__[_STRIDES] = strides
            report.place("channels_last", name)


def _take_away(name: str, module: nn.Module, report: Report) -> None:
    held = module.__dict__
    forget(module)
    for method in (_TOKENS, _DEFAULT):
        if isinstance(held.get(method), Bound):
            del held[method]
    forward = held.get("forward")
    if isinstance(forward, Bound):
        del held["forward"]
        if forward.before is not None:
            held["forward"] = forward.before
        report.place("restored", name)
    elif (inner := _wrapped(module)) is not None:
        inner.give_way()
        report.leave("its forward was wrapped since; it calls the class's own from now on", name)
    processor = held.get("processor")
    if isinstance(processor, _attention.Processor | _dit.Processor):
        held["processor"] = processor.stock
        report.place("restored", name)
    if held.pop(_PACKED, False):
        _joined.unpack([module.to_q, module.to_k, module.to_v])
    held.pop(_linear.MARK, None)
    _time_embedding.take_away(module)
    for key, stride in held.pop(_STRIDES, {}).items():
        weight = module._parameters.get(key)
        if weight is not None and weight.dim() == len(stride):
            with _joined.kind_of(weight):
                data = torch.empty_strided(weight.shape, stride, dtype=weight.dtype, device=weight.device)
                weight.data = data.copy_(weight.data)


def _wrapped(module: nn.Module) -> Bound | None:
    """A Bound that somebody has put a wrapper around: Accelerate's hooks keep it as `_old_forward`,
    Diffusers' in a registry, others as functools.wraps does or in a closure."""
    held = module.__dict__
    found = list(held.values())
    for reference in getattr(held.get("_diffusers_hook"), "_fn_refs", ()):
        found += [getattr(reference, name, None) for name in ("forward", "original_forward")]
    inner = held.get("forward")
    while inner is not None:
        cells = getattr(inner, "__closure__", None) or ()
        found += [inner, *(cell.cell_contents for cell in cells if _is_set(cell))]
        inner = getattr(inner, "__wrapped__", None)
    return next((one for one in found if isinstance(one, Bound) and one.args[0] is module), None)
