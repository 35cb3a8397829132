"""The reference of a scenario, made in the same run, and how far an arm is from it.

The reference is computed in float32 without TF32 by Diffusers' eager pipeline, which shares no code with
Clearway's flow: on the CPU for a small model, else on the device. How far the same pipeline in the scenario's
own dtypes is from it is the error budget: nothing that runs in half precision can be asked for more. What
Diffusers cannot do (NGMS) is checked against Clearway's own eager float32.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clearway import device as machine
from clearway.errors import UnavailableError
from clearway.measure.contenders import Probe, clearway_arm, isolated_model
from clearway.measure.quality import compare_pictures, compare_tensors
from clearway.models import Model
from clearway.models._mixed import whole
from clearway.types import Choices, Precision

if TYPE_CHECKING:
    from clearway.measure.scenario import Scenario

SMALL_PARAMETERS = 60_000_000  # a UNet of up to so many is run on the CPU too (R22)
FACTOR = 2.0  # how much more than the budget an arm may be off: rounding falls out differently each time
FLOOR = 5e-3  # of |latents - reference| / |reference|: sampling amplifies what float32 rounding begins with
SAME_PICTURE_DB = 40.0  # an arm's own picture again, after the timed rounds


@dataclass(frozen=True, slots=True)
class Reference:
    """What arms are checked against; `stock` is the eager path in the scenario's own dtypes.

    Of an arm's pictures the first ones are compared, as many as the reference has.
    """

    label: str
    probe: Probe
    stock: Probe
    stock_label: str
    budget: float | None

    @property
    def tolerance(self) -> float:
        """The relative error of latents up to which an arm counts as verified."""
        return max(FLOOR, FACTOR * (self.budget or 0.0))

    def judge(self, found: Probe) -> dict[str, Any]:
        """The correctness ledger of one arm's probe."""
        ledger: dict[str, Any] = {"reference": self.label}
        found = _first(found, self.probe)
        if self.probe.images is not None and found.images is not None:
            ledger |= compare_pictures(found.images, self.probe.images)
            if self.stock.images is not None:
                versus = compare_pictures(found.images, self.stock.images)
                ledger["stock"] = {"reference": self.stock_label, **versus}
        if self.probe.latents is None or found.latents is None:
            return {**ledger, "verified": "not checked"}
        latents = compare_tensors(found.latents, self.probe.latents)
        if found.images is None:
            ledger |= {"max_error": latents["max_abs"], "psnr_db": latents["psnr_db"]}
            ledger["identical"] = latents["identical"]
        ledger |= {"latents": latents, "budget_rel_l2": self.budget, "tolerance_rel_l2": self.tolerance}
        return {**ledger, "verified": latents["rel_l2"] <= self.tolerance}

    def doubt(self, found: Probe, correctness: dict[str, Any]) -> str | None:
        """Why this arm did not do the reference's work; None where nothing speaks against it."""
        if correctness.get("verified") is False:
            off = correctness["latents"]["rel_l2"]
            return f"its latents are {off:.2g} from the reference, and {self.tolerance:.2g} was allowed"
        if None not in (found.calls, self.probe.calls) and found.calls != self.probe.calls:
            return f"it called the UNet {found.calls} times, and the reference {self.probe.calls} times"
        return None


def reference(scenario: Scenario, model: Model, pictures: int | None = None) -> Reference:
    """The reference of `scenario`: one eager generation or call in float32, and one in its own dtypes.

    `pictures` of a whole generation are enough: the first ones, drawn as a group of their own.
    """
    of = ""
    if pictures and scenario.what == "whole" and pictures < scenario.batch_size:
        of = f", the first {pictures} of {scenario.count} pictures"
        scenario = replace(scenario, count=pictures, batch_size=pictures)
    small = sum(one.numel() for one in model.unet.parameters()) <= SMALL_PARAMETERS
    place = "cpu" if small else str(model.device)
    exact = {model.precision.unet, model.precision.vae, model.precision.text_encoder} == {"float32"}
    same = exact and place == str(model.device)
    with machine.tf32(model.device, False), _freed(model):
        if scenario.what != "whole":
            label, probe, stock_label, stock = _network(scenario, model, place, same)
        else:
            label, probe, stock_label, stock = _whole(scenario, model, place, same)
    budget = None
    if probe.latents is not None and stock.latents is not None:
        budget = compare_tensors(stock.latents, probe.latents)["rel_l2"]
    return Reference(label + of, probe, stock, stock_label + of, budget)


def _first(found: Probe, reference: Probe) -> Probe:
    """As many rows of a probe as the reference has."""
    rows = reference.latents if reference.latents is not None else reference.images
    if rows is None:
        return found
    count = len(rows)
    images = None if found.images is None else found.images[:count]
    return replace(found, images=images, latents=None if found.latents is None else found.latents[:count])


def changed(before: Probe, after: Any, tolerance: float) -> str | None:
    """Why an arm's result after the timed rounds is not what it was before them; None where it is."""
    if before.images is not None:
        found = compare_pictures(after, before.images)
        off = found["psnr_db"]
        fine = found["identical"] or off >= SAME_PICTURE_DB
        return None if fine else f"its picture changed during the run ({off:.1f} dB from its own before)"
    assert before.latents is not None
    off = compare_tensors(after.detach().float().cpu(), before.latents)["rel_l2"]
    return None if off <= tolerance else f"its result changed during the run (by {off:.2g})"


Found = tuple[str, Probe, str, Probe]
"""(the reference's label, its probe, the stock path's label, its probe)."""


def _whole(scenario: Scenario, model: Model, place: str, same: bool) -> Found:
    from clearway.measure import diffusers_arms
    from clearway.measure.compiled import Compiled

    try:
        exact = diffusers_arms.reference(scenario, model, place)
    except UnavailableError:
        return _own(scenario, model, same)
    label = f"Diffusers eager, float32, {_where(model, place)}"
    probe = on_cpu(exact.probe(0))
    if same:
        return label, probe, label, probe
    # Diffusers has no mixed VAE: a float32 one, which changes nothing of the latents that the budget is of
    model = replace(model, precision=replace(model.precision, vae=model.precision.vae_weights))
    stock = on_cpu(diffusers_arms.Pipeline(scenario, model, Compiled()).probe(0))
    return label, probe, f"Diffusers eager, {_dtypes(model)}", stock


def _own(scenario: Scenario, model: Model, same: bool) -> Found:
    """Clearway's own eager path, in float32 on the same device, for what Diffusers has no word for."""
    import torch

    exact = isolated_model(model)
    whole(exact.vae)
    for module in (exact.unet, exact.vae, *exact.text_encoders):
        torch.nn.Module.float(module)
    exact = replace(exact, precision=Precision())
    label = f"Clearway eager, float32, {_where(model, str(model.device))}"
    probe = on_cpu(clearway_arm(scenario, exact, Choices()).probe(0))
    if same:
        return label, probe, label, probe
    stock = on_cpu(clearway_arm(scenario, model, Choices()).probe(0))
    return label, probe, f"Clearway eager, {_dtypes(model)}", stock


def _network(scenario: Scenario, model: Model, place: str, same: bool) -> Found:
    from clearway.measure import networks

    label = f"eager, float32, {_where(model, place)}"
    probe = on_cpu(Probe(None, networks.output(scenario, model, 0, "float32", place)))
    if same:
        return label, probe, label, probe
    own = {"unet": model.precision.unet, "vae": model.precision.vae}.get(
        scenario.what, model.precision.text_encoder
    )
    stock = on_cpu(Probe(None, networks.output(scenario, model, 0, own, str(model.device))))
    return label, probe, f"eager, {own}", stock


def on_cpu(probe: Probe) -> Probe:
    """The probe with its latents on the CPU, so that it holds none of the device's memory."""
    return replace(probe, latents=None if probe.latents is None else probe.latents.cpu())


def _where(model: Model, place: str) -> str:
    return "on the CPU" if place == "cpu" else f"on the {model.device.kind} device"


def _dtypes(model: Model) -> str:
    one = model.precision
    return one.unet if one.unet == one.vae else f"{one.unet} with a {one.vae} VAE"


@contextmanager
def _freed(model: Model) -> Iterator[None]:
    """Gives back, after its body, what the reference's copies held."""
    try:
        yield
    finally:
        gc.collect()
        machine.release_memory(model.device)
