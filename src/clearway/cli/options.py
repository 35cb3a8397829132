"""The options that fill a Request and choose model, device and dtypes; for every command that draws."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from clearway.cli.output import say
from clearway.errors import RequestError
from clearway.request import Request

if TYPE_CHECKING:
    from clearway.device import Device
    from clearway.models import Model
    from clearway.types import Precision

FINE_POINTS = ("eta", "s_noise", "s_churn", "s_tmin", "s_tmax", "sigma_min", "sigma_max", "rho")


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for every field of Request, and those for model, device and dtypes."""
    picture = parser.add_argument_group("picture")
    add = picture.add_argument
    add("-n", "--negative", dest="negative_prompt", metavar="TEXT", help="what to keep out of it")
    add("--width", type=int, metavar="PX", help="multiple of 8")
    add("--height", type=int, metavar="PX", help="multiple of 8")
    add("--size", type=size, metavar="WxH", help="both sides at once, e.g. 512x768")
    add("--steps", type=int, metavar="N", help="sampling steps")
    add(
        "--cfg-scale",
        "--cfg",
        dest="cfg_scale",
        type=float,
        metavar="X",
        help="how strictly to follow the words",
    )
    add("--sampler", metavar="NAME", help="see: clearway samplers")
    add("--schedule", metavar="NAME", help="see: clearway samplers")
    add("--seed", type=int, metavar="N", help="the first picture's; -1 draws one (default)")
    add("--count", type=int, metavar="N", help="how many pictures, with seeds seed, seed+1, … (1)")
    add("--batch-size", type=int, metavar="N", help="how many run together (up to 4)")
    add(
        "--exact-batch",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run them singly, to the bit",
    )
    add("--clip-skip", type=int, metavar="N", help="text encoder layer from the end, SD 1.x (1)")
    add("--ngms", type=float, metavar="SIGMA", help="skip negative guidance below this sigma: less work (0)")
    add(
        "--ngms-all-steps",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="on all steps, not every other",
    )
    fine = parser.add_argument_group("fine points of samplers and schedules")
    add = fine.add_argument
    add(
        "--rng",
        choices=("GPU", "CPU", "NV"),
        help="where noise is made: the device (GPU, default), the CPU, or as on NVIDIA's (NV)",
    )
    add("--eta", type=float, metavar="X", help="how much fresh noise (ancestral samplers and SDE 1, DDIM 0)")
    add("--s-noise", type=float, metavar="X", help="scale of fresh noise (1)")
    add("--s-churn", type=float, metavar="X", help="churn (0)")
    add("--s-tmin", type=float, metavar="SIGMA", help="churn above this sigma (0)")
    add("--s-tmax", type=float, metavar="SIGMA", help="churn below this sigma (no limit)")
    add("--sigma-min", type=float, metavar="SIGMA", help="smallest sigma above 0 of the schedule")
    add("--sigma-max", type=float, metavar="SIGMA", help="largest sigma of the schedule")
    add("--rho", type=float, metavar="X", help="exponent of the Karras schedule (7)")
    model = parser.add_argument_group("model and machine")
    add = model.add_argument
    add(
        "-m",
        "--model",
        metavar="NAME",
        help="a .safetensors file, a Diffusers folder, a name, a hub id (embedded)",
    )
    add("--device", metavar="NAME", help="auto, cuda, cuda:1, mps, xpu or cpu (auto)")
    add(
        "--memory-budget-bytes",
        type=int,
        metavar="N",
        help="what attention may hold at once (by the memory that is free)",
    )
    add("--dtype", metavar="TYPE", help="float32, float16 or bfloat16, for the UNet and the text encoders")
    add("--vae-dtype", metavar="TYPE", help="the VAE's; mixed: float16 where measured to be safe")
    add("--text-encoder-dtype", metavar="TYPE", help="the text encoders'")
    add("--sampling-dtype", metavar="TYPE", help="the latents' in the sampling loop")
    add(
        "--memory-limit",
        dest="memory_limit_bytes",
        type=_size_in_bytes,
        metavar="SIZE",
        help="draw as if the CUDA device had this much, e.g. 8GiB (all it has)",
    )
    add(
        "--vae-tiling",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="decode by tiles, which changes the picture a little (only where memory is short)",
    )
    add("--tf32", action=argparse.BooleanOptionalAction, default=None, help="TF32 for float32 work on CUDA")
    add("--local-files-only", action="store_true", help="never ask a hub, use what was downloaded before")
    add("--allow-pickle", action="store_true", help="read .ckpt and .bin files too, weights only")


def add_plain(parser: argparse.ArgumentParser) -> None:
    """Adds --plain, for `chosen.plainly`."""
    parser.add_argument(
        "--plain",
        action="store_true",
        help="run the networks plainly, neither as was selected nor by the device's default",
    )


def request_from(args: argparse.Namespace, repeated: str | None = None) -> Request:
    """The Request that the options describe, on top of a repeated picture's infotext if there is one."""
    base = Request.from_infotext(repeated) if repeated else Request()
    given = {
        field.name: value
        for field in fields(Request)
        if (value := getattr(args, field.name, None)) is not None
    }
    if args.size:
        if args.width is not None or args.height is not None:
            raise RequestError("--size and --width or --height were both given; one of them is enough")
        given["width"], given["height"] = args.size
    if repeated and ("sampler" in given or "schedule" in given):
        base = _without_foreign_options(base, given)
    return replace(base, **given)


def _without_foreign_options(base: Request, given: dict[str, Any]) -> Request:
    """A repeated picture's request without what another sampler or schedule than its own does not take."""
    from clearway import sampling

    if "sampler" in given:
        base = replace(base, schedule=None)  # the picture's schedule belonged to its sampler
    sampler, schedule = sampling.resolve(
        given.get("sampler", base.sampler) or "Euler", given.get("schedule", base.schedule)
    )
    for name in FINE_POINTS:
        value = getattr(base, name)
        if value is not None and name not in given:
            try:
                sampling.check_options(sampler, schedule, {name: value})
            except RequestError as error:
                say(f"the picture's {name} {value:g} is left out: {error}")
                base = replace(base, **{name: None})  # type: ignore[arg-type]
    return base


def precision_from(args: argparse.Namespace, device: Device, repeated: str | None = None) -> Precision:
    """The device's own dtypes, changed by the repeated picture's and then by the options."""
    from clearway import infotext
    from clearway.device import default_precision, dtype_for

    precision = default_precision(device)
    if repeated:
        precision = replace(precision, **infotext.precision_fields(repeated))
    named = {
        "unet": args.dtype,
        "text_encoder": args.dtype if args.text_encoder_dtype is None else args.text_encoder_dtype,
        "vae": args.vae_dtype,
        "sampling": args.sampling_dtype,
    }
    changes: dict[str, str | bool] = {
        part: dtype_for(part, name) for part, name in named.items() if name is not None
    }
    if args.tf32 is not None:
        changes["tf32"] = args.tf32
    return replace(precision, **changes)  # type: ignore[arg-type]


DTYPE_OPTIONS = ("dtype", "text_encoder_dtype", "vae_dtype", "sampling_dtype", "tf32")


def names_dtypes(args: argparse.Namespace) -> bool:
    """Whether an option names dtypes, so that neither the device's own nor adopted ones are taken."""
    return any(getattr(args, name) is not None for name in DTYPE_OPTIONS)


def with_adopted(request: Request, args: argparse.Namespace, model: Model) -> Request:
    """The request with what the user adopted for this model (`clearway select --adopt`), where it is open."""
    from clearway.models import chosen

    adopted = chosen.adopted(model.path, model.device.kind)
    named = {name for name in adopted.request if getattr(args, name, None) is not None}
    if "ngms" in named:
        named.add("ngms_all_steps")  # a part of it
    if "sampler" in named:
        named.add("schedule")  # it belongs to the adopted sampler
    left_open = {name: value for name, value in adopted.request.items() if name not in named}
    if left_open:
        shown = ", ".join(f"{name} {value}" for name, value in left_open.items())
        say(f"adopted for this model by clearway select: {shown}")
    return replace(request, **left_open)


_UNITS = {"": 0, "b": 0, "kib": 10, "mib": 20, "gib": 30, "k": 10, "m": 20, "g": 30}


def _size_in_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if found is None or found[2] not in _UNITS or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no memory size, e.g. 8GiB or 900MiB")
    return int(float(found[1]) * 2 ** _UNITS[found[2]])


def size(text: str) -> tuple[int, int]:
    """(width, height) of "512x768"; argparse's error where it is none."""
    width, sign, height = text.lower().partition("x")
    if not (sign and text.isascii() and width.strip().isdigit() and height.strip().isdigit()):
        raise argparse.ArgumentTypeError(f"size {text!r:.40} is not WIDTHxHEIGHT, e.g. 512x768")
    return int(width), int(height)
