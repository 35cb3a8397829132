"""Which parts of a VAE's decoder run in half precision: measured on a first picture's latents, and kept.

The picture is decoded in float32 while the largest magnitude in each part is taken down; parts that stay
below LIMIT become half. Then it is decoded so and compared: below NEAR_DB those parts that add most to the
error are float32 again, as few as suffice. What was found is kept in the state folder by the weights, so that
other processes and runs need no measuring. Later pictures are other pictures: `vae.decode` looks at each for
NaN all the same.
"""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clearway import device as machine
from clearway import home
from clearway.models._mixed import parts, place, refuse, whole
from clearway.models.model import Model

HALF = {"cuda": "float16", "mps": "float16", "xpu": "float16"}
"""The half precision of a mixed VAE by kind of device. On the CPU there is none: its half precision,
bfloat16, overflows no sooner than float32: nothing has to be chosen, and it can be named."""
MARGIN = 4.0
"""How far the largest magnitude of a part must stay below float16's own. Other pictures have larger ones than
the one that was measured, and sums on the way to a value (split over blocks, Winograd's transforms, which add
up to 4 values of an input) may be larger than any value that is seen."""
LIMIT = torch.finfo(torch.float16).max / MARGIN
NEAR_DB = 40.0
"""PSNR of the mixed picture against the float32 one, of a range of -1..1, below which parts are put back."""
FOLDER, SCHEMA = "mixed_vae", 1

_SETTLED = "_clearway_mixed"
_known: dict[str, Choice] = {}
"""Of this process, by key: where the state folder cannot be written, too."""
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class Choice:
    """The parts that are half, the largest magnitude in each part, and how near the mixed picture was."""

    half: tuple[str, ...]
    maxima: dict[str, float] = field(default_factory=dict)
    psnr_db: float = math.inf
    largest_error: float = 0.0


class _Settled:
    """The weights for which a VAE is as it was decided; a copy of the VAE has none, and asks anew."""

    def __init__(self, weights: list[nn.Parameter] | None = None) -> None:
        self._refs = [weakref.ref(one) for one in weights or ()]
        self._versions = [_version(one) for one in weights or ()]

    def holds(self, weights: list[nn.Parameter]) -> bool:
        """Whether these are the same tensors, and none was written to. Moving and casting write to none."""
        return (
            len(weights) == len(self._refs)
            and all(ref() is one for ref, one in zip(self._refs, weights, strict=True))
            and list(map(_version, weights)) == self._versions
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Settled, ()

    def __deepcopy__(self, memo: Any) -> _Settled:
        return _Settled()


def settle(model: Model, latents: Tensor, picture: Callable[[Tensor], Tensor]) -> tuple[str, ...]:
    """Puts the VAE of a model whose precision of it is mixed in the precision that was decided for its
    weights, deciding it by `latents` (1, C, h, w) where nothing was; sentences about that.

    `picture` decodes latents by the VAE as it then is, eagerly: pixels in -1..1, float32. Nothing is decided
    where they are not finite.
    """
    vae, kind = model.vae, model.device.kind
    if kind not in HALF:
        return (f"a mixed VAE is float32 on this device ({kind}); half precision in parts is for GPUs",)
    with _lock:
        settled = vars(vae).get(_SETTLED)
        if settled is not None and settled.holds(_weights(vae)):
            return ()
        reason = refuse(vae)
        if reason is not None:
            return (f"the VAE cannot be mixed, so it is as it was loaded: {reason}",)
        half = machine.dtype(HALF[kind])
        key = _key(vae, kind)
        choice, notes = _kept(key), tuple[str, ...]()
        if choice is None:
            try:
                choice = _decided(vae, half, lambda: picture(latents))
            except BaseException:  # stopped, or memory ran out: not half-way
                whole(vae)
                raise
            if choice is None:
                return ()
            _keep(key, choice)
            notes = (_told(choice, key),)
        else:
            place(vae, choice.half, half)
        vars(vae)[_SETTLED] = _Settled(_weights(vae))
    return notes


def give_up(model: Model) -> None:
    """Makes a VAE float32 whole, where it stays; what was decided for its weights did not hold and goes."""
    with _lock:
        if _SETTLED in vars(model.vae):
            name = _name(_key(model.vae, model.device.kind))
            _known.pop(name, None)
            home.write_json({}, FOLDER, name)
        whole(model.vae)


def forget() -> None:
    """Drops what this process knows; the state folder keeps its own."""
    _known.clear()


def _decided(vae: Any, half: torch.dtype, picture: Callable[[], Tensor]) -> Choice | None:
    """The choice, which is in place afterwards; None where the picture is not finite in float32 either."""
    whole(vae)
    with _listening(vae) as found:
        reference = picture()
    if not bool(torch.isfinite(reference).all()):
        return None
    maxima = dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
    safe = [name for name, value in maxima.items() if value <= LIMIT]  # never where it is NaN

    def apart(names: list[str]) -> tuple[float, float]:
        place(vae, names, half)
        return _apart(picture(), reference) if names else (math.inf, 0.0)

    psnr_db, largest = apart(safe)
    if psnr_db < NEAR_DB:
        worst = sorted(safe, key=lambda name: apart([name])[0])
        few, many = 1, len(worst)  # so many of the worst are float32 again; all of them are enough
        while few < many:
            middle = (few + many) // 2
            near = apart(worst[middle:])[0] >= NEAR_DB
            few, many = (few, middle) if near else (middle + 1, many)
        safe = [name for name in safe if name not in worst[:many]]
        psnr_db, largest = apart(safe)
        if psnr_db < NEAR_DB:  # rounding that falls otherwise each time
            safe, (psnr_db, largest) = [], apart([])
    return Choice(tuple(safe), maxima, psnr_db, largest)


@contextmanager
def _listening(vae: Any) -> Iterator[dict[str, Tensor]]:
    """Within it the largest magnitude of weights, inputs and outputs of every module is taken down by part.

    Ops in place hand over to the classes' own forwards where modules are listened to, so that what is inside
    a residual block is seen as well; sums of residuals are outputs of blocks.
    """
    found, handles = dict[str, Tensor](), []
    for name, modules in parts(vae).items():
        found[name] = torch.stack([_largest(one) for module in modules for one in module.parameters()]).max()

        def hook(_: Any, given: Any, output: Any, name: str = name) -> None:
            for one in (*given, output):
                if isinstance(one, Tensor):
                    found[name] = torch.maximum(found[name], _largest(one))

        inner = {id(one): one for module in modules for one in module.modules()}
        handles += [one.register_forward_hook(hook) for one in inner.values()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude, without a tensor of that size beside it; NaN where there is one."""
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()


def _apart(pixels: Tensor, reference: Tensor) -> tuple[float, float]:
    """(PSNR in dB, largest error in 1/255) of one picture from another; NaN is infinitely far."""
    off = pixels.clamp(-1, 1) - reference.clamp(-1, 1)
    square, largest = torch.stack([off.square().mean(), off.abs().max()]).tolist()
    if not math.isfinite(square):
        return -math.inf, math.inf
    return (math.inf if square == 0 else 10 * math.log10(4 / square)), largest * 255 / 2


def _told(choice: Choice, key: dict[str, Any]) -> str:
    high = [name for name in key["parts"] if name not in choice.half]
    if not choice.half:
        return "the VAE was measured: no part of its decoder is safe and near enough in half precision"
    where = f"all but {', '.join(high)}" if high else "all of its decoder"
    return (
        f"the VAE was measured on this picture: {where} in {key['dtype']} is {choice.psnr_db:.1f} dB PSNR "
        f"from float32, at most {choice.largest_error:.2g}/255"
    )


def _weights(vae: Any) -> list[nn.Parameter]:
    before = [] if vae.post_quant_conv is None else [*vae.post_quant_conv.parameters()]
    return [*before, *vae.decoder.parameters()]


def _version(weight: nn.Parameter) -> int:
    return -1 if weight.is_inference() else weight._version


def _key(vae: Any, kind: str) -> dict[str, Any]:
    """What a choice depends on. Weights count as half precision rounds them, which it leaves as they are."""
    digest = hashlib.sha256()
    for name, modules in parts(vae).items():
        for weight in (one for module in modules for one in module.parameters()):
            low = weight.detach().to(machine.dtype(HALF[kind])).cpu().contiguous()
            digest.update(f"{name} {tuple(weight.shape)}\0".encode())
            digest.update(low.view(torch.int16).numpy().data)
    return {
        "weights": digest.hexdigest(),
        "parts": list(parts(vae)),
        "kind": kind,
        "dtype": HALF[kind],
        "limit": LIMIT,
        "near_db": NEAR_DB,
    }


def _name(key: dict[str, Any]) -> str:
    return f"{key['weights'][:16]}-{key['kind']}.json"


def _keep(key: dict[str, Any], choice: Choice) -> None:
    _known[_name(key)] = choice
    values = {**asdict(choice), "half": list(choice.half)}
    if not math.isfinite(choice.psnr_db):
        values["psnr_db"] = None
    home.write_json({"schema": SCHEMA, "key": key, **values}, FOLDER, _name(key))


def _kept(key: dict[str, Any]) -> Choice | None:
    """The choice for these weights, where it is sound: all its half parts were measured to be below LIMIT."""
    name = _name(key)
    if name in _known:
        return _known[name]
    found = home.read_json(FOLDER, name)
    if found.get("schema") != SCHEMA or found.get("key") != key:
        return None
    try:
        maxima = {part: float(found["maxima"][part]) for part in key["parts"]}
        psnr_db = math.inf if found["psnr_db"] is None else float(found["psnr_db"])
        half, largest = tuple(map(str, found["half"])), float(found["largest_error"])
        sound = all(maxima[part] <= LIMIT for part in half) and (not half or psnr_db >= NEAR_DB)
    except (KeyError, TypeError, ValueError):
        return None
    return _known.setdefault(name, Choice(half, maxima, psnr_db, largest)) if sound else None
