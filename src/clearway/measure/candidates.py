"""What could be run otherwise, in three sections: same arithmetic, changed precision, less work.

A candidate is a change of how a generation is run, as data. Candidates that claim one slot (two executors,
say) exclude one another. `absent` says why one cannot be had here; it is listed all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from clearway.measure.record import WORK
from clearway.models._mixed_choice import HALF
from clearway.types import MIXED, Choices, Precision

if TYPE_CHECKING:
    from clearway.device import Device
    from clearway.models import Model
    from clearway.request import Request

SAME, PRECISION, LESS = WORK
NGMS_SIGMAS = (1.0, 3.0)
FEWER_STEPS = (0.8, 0.6)
BATCHES = (1, 2, 4, 8, 16)
WITH: dict[str, tuple[str, ...]] = {
    "attention": ("cross_kv",),
    "convolution": ("residual_add", "group_norm_silu"),
    "cross_kv": ("attention",),
    "residual_add": ("group_norm_silu",),
}
"""Ops that `accelerate` puts in place together with others, which do their work or need it."""


@dataclass(frozen=True)
class Change:
    """How a run differs from the plain one; what is None or empty stays as it is.

    `tuned` are op -> "dtype|size class" -> implementation; `precision` dtypes by part; `request` fields.
    """

    executor: str | None = None
    layout: str | None = None
    rows: str | None = None
    packed_qkv: bool = False
    ops: tuple[str, ...] = ()
    tuned: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)

    def choices(self) -> Choices:
        """What `accelerate.apply` is given."""
        plain = Choices()
        return Choices(
            executor=self.executor or plain.executor,
            layout=self.layout or plain.layout,
            rows=self.rows or plain.rows,
            ops=self.ops,
            packed_qkv=self.packed_qkv,
        )

    def as_dict(self) -> dict[str, Any]:
        """Every field, as JSON values."""
        return {**asdict(self), "ops": list(self.ops)}


def merged(changes: Iterable[Change]) -> Change:
    """All of them at once. They must not disagree: candidates of one slot are never merged."""
    made = Change()
    for one in changes:
        made = Change(
            executor=one.executor or made.executor,
            layout=one.layout or made.layout,
            rows=one.rows or made.rows,
            packed_qkv=one.packed_qkv or made.packed_qkv,
            ops=tuple(dict.fromkeys((*made.ops, *one.ops))),
            tuned={**made.tuned, **one.tuned},
            precision={**made.precision, **one.precision},
            request={**made.request, **one.request},
        )
    return made


@dataclass(frozen=True, eq=False)
class Candidate:
    """One change to try. `slots` are what it decides; `why` is what it is, for a person."""

    name: str
    section: str
    change: Change
    slots: frozenset[str]
    why: str
    absent: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For `--dry-run --json`."""
        return {
            "name": self.name,
            "section": self.section,
            "what": self.why,
            "not_here": self.absent,
            "change": self.change.as_dict(),
        }


def list_candidates(model: Model, request: Request) -> list[Candidate]:
    """Everything that can be named for this model and request, in all three sections.

    Tuned routes come on top when shapes have been measured: see `routed`.
    """
    return [
        *_same(model.device, request),
        *_precision(model.device, model.precision),
        *_less(model, request),
    ]


def routed(findings: Iterable[Mapping[str, Any]], ops: Sequence[str]) -> list[Candidate]:
    """Candidates from micro-benchmarks: of each op, the implementations that were fastest by shape.

    `findings` say "op", "key", "best" and "current"; a shape whose current route is the best proposes
    nothing. `ops` are those that can be put in place.
    """
    tables: dict[str, dict[str, str]] = {}
    for one in findings:
        if one["best"] != one["current"] and one["op"] in ops:
            tables.setdefault(one["op"], {})[one["key"]] = one["best"]
    made = []
    for op, table in tables.items():
        names = _together(op, ops)
        change = Change(ops=names, tuned={op: table})
        why = f"{op} by its fastest implementation at {len(table)} shape(s)"
        made.append(Candidate(f"{op}, tuned", SAME, change, _slots(names), why))
    if len(tables) > 1:
        change = Change(ops=tuple(ops), tuned=tables)
        made.append(Candidate("all ops, tuned", SAME, change, _slots(ops), "every op in place, routes tuned"))
    return made


def _together(op: str, ops: Sequence[str]) -> tuple[str, ...]:
    return (op, *(other for other in WITH.get(op, ()) if other in ops))


def _slots(ops: Iterable[str]) -> frozenset[str]:
    return frozenset(f"op {op}" for op in ops)


def _same(device: Device, request: Request) -> list[Candidate]:
    """The same arithmetic in another order or by other code."""
    from clearway.execution.executor import EXECUTORS, absent
    from clearway.models.accelerate import OPS

    made = []
    for op in (one for one in OPS if one != "cross_kv"):
        names = _together(op, OPS)
        why = "Clearway's op in place of the network's own layers"
        missing = None
        if op in ("convolution", "residual_add") and device.kind != "cuda":
            missing = f"convolutions on {device.kind} add their bias themselves"
        if op == "linear" and device.kind != "cuda":
            missing = f"the choices are cuBLASLt's, this is {device.kind}"
        made.append(Candidate(op, SAME, Change(ops=names), _slots(names), why, missing))
    made.append(Candidate("all ops", SAME, Change(ops=OPS), _slots(OPS), "every op in place"))
    for name in EXECUTORS:
        if name != "eager":
            made.append(
                Candidate(
                    name,
                    SAME,
                    Change(executor=name),
                    frozenset({"executor"}),
                    f"networks run by the executor {name}",
                    absent(name, device.kind),
                )
            )
    if "block_graphs" not in EXECUTORS:
        missing = "no executor that captures single blocks is built"
        made.append(
            Candidate(
                "block_graphs",
                SAME,
                Change(executor="block_graphs"),
                frozenset({"executor"}),
                "each residual block as one graph",
                missing,
            )
        )
    simple = (
        ("channels_last", Change(layout="channels_last"), "layout", "convolutions in channels-last memory"),
        ("separate rows", Change(rows="separate"), "rows", "guidance's halves one after the other"),
        ("packed QKV", Change(packed_qkv=True), "qkv", "one projection of query, key and value"),
    )
    made += [Candidate(name, SAME, change, frozenset({slot}), why) for name, change, slot, why in simple]
    if request.count > 1 and not request.exact_batch:
        usual = request.batch_size or min(request.count, 4)
        made += [
            Candidate(
                f"batch {size}",
                SAME,
                Change(request={"batch_size": size}),
                frozenset({"batch"}),
                f"{size} picture(s) at a time in place of {usual}",
            )
            for size in BATCHES
            if size <= request.count and size != usual
        ]
    return made


def _precision(device: Device, now: Precision) -> list[Candidate]:
    """Other dtypes by part: pictures change."""
    made = []
    for parts, label in (
        (("unet", "text_encoder"), "UNet and text"),
        (("vae",), "VAE"),
        (("sampling",), "sampling"),
    ):
        for dtype in ("float32", "float16", "bfloat16"):
            if getattr(now, parts[0]) != dtype:
                made.append(
                    Candidate(
                        f"{label} in {dtype}",
                        PRECISION,
                        Change(precision=dict.fromkeys(parts, dtype)),
                        frozenset(f"precision {part}" for part in parts),
                        f"{dtype} in place of {getattr(now, parts[0])}",
                    )
                )
    if now.vae != MIXED:
        missing = None if device.kind in HALF else f"parts of a VAE are half on GPUs, this is {device.kind}"
        made.append(
            Candidate(
                "VAE in mixed precision",
                PRECISION,
                Change(precision={"vae": MIXED}),
                frozenset({"precision vae"}),
                f"half precision where it is measured to be safe and near, in place of {now.vae}",
                missing,
            )
        )
    if {"float32", MIXED} & {now.unet, now.vae, now.text_encoder}:
        missing = None if device.kind == "cuda" else f"TF32 is CUDA's, this is {device.kind}"
        flag = not now.tf32
        made.append(
            Candidate(
                "TF32" if flag else "no TF32",
                PRECISION,
                Change(precision={"tf32": flag}),
                frozenset({"precision tf32"}),
                f"float32 matmuls and convolutions {'in' if flag else 'without'} TF32",
                missing,
            )
        )
    return made


def _less(model: Model, request: Request) -> list[Candidate]:
    """Less work: pictures change."""
    defaults, made = model.defaults, []
    scale = defaults.cfg_scale if request.cfg_scale is None else request.cfg_scale
    steps = request.steps or defaults.steps
    missing = "cfg_scale 1 computes no negative guidance" if scale == 1 else None
    for sigma in NGMS_SIGMAS:
        for every in (False, True):
            fields = {"ngms": sigma, "ngms_all_steps": every}
            if (request.ngms, request.ngms_all_steps) != (sigma, every):
                name = f"NGMS {sigma:g}{' all steps' if every else ''}"
                calls = "each" if every else "every other"
                why = f"no negative guidance below sigma {sigma:g} at {calls} call"
                made.append(_work(name, fields, "guidance", why, missing))
    for fewer in dict.fromkeys(max(1, round(steps * share)) for share in FEWER_STEPS):
        if fewer < steps:
            made.append(_work(f"{fewer} steps", {"steps": fewer}, "steps", f"in place of {steps}"))
    if steps > 24:
        other = {"steps": 24, "sampler": "DPM++ 2M", "schedule": "Karras"}
        made.append(_work("DPM++ 2M Karras, 24 steps", other, "steps", "another sampler with fewer steps"))
    made.append(_work("fp8", {}, "weights", "the UNet's weights in 8 bits", "it is not built yet"))
    made.append(_work("TAESD", {}, "decoder", "a small decoder in place of the VAE", "it is not built yet"))
    return made


def _work(name: str, fields: Mapping[str, Any], slot: str, why: str, missing: str | None = None) -> Candidate:
    return Candidate(name, LESS, Change(request=dict(fields)), frozenset({slot}), why, missing)


def changed_precision(now: Precision, change: Change) -> Precision:
    """The dtypes a change leads to."""
    return replace(now, **change.precision)
