"""The list says everything, in three sections, with what cannot be had here and why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from clearway.device import Device
from clearway.execution.executor import EXECUTORS
from clearway.measure import candidates
from clearway.measure.candidates import LESS, PRECISION, SAME, Change, list_candidates, merged, routed
from clearway.models.accelerate import OPS
from clearway.request import Request
from clearway.types import Choices, Defaults, Precision


def model(kind: str = "cpu", precision: Precision = Precision(), cfg_scale: float = 7.0) -> SimpleNamespace:  # noqa: B008
    return SimpleNamespace(
        device=Device(kind), precision=precision, defaults=Defaults(64, 64, 30, cfg_scale, "Euler")
    )


def listed(given: SimpleNamespace | None = None, **request: object) -> dict[str, candidates.Candidate]:
    found = list_candidates(given or model(), Request(**request))
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    return {one.name: one for one in found}


def test_every_op_executor_and_layout_is_a_candidate() -> None:
    found = listed()
    assert {"channels_last", "separate rows", "packed QKV", "all ops", "block_graphs"} <= found.keys()
    assert set(OPS) - {"cross_kv"} <= found.keys() and set(EXECUTORS) - {"eager"} <= found.keys()
    assert found["attention"].change.ops == ("attention", "cross_kv")
    assert found["residual_add"].change.ops == ("residual_add", "group_norm_silu")
    assert found["convolution"].change.ops == ("convolution", "residual_add", "group_norm_silu")
    assert "bias" in str(found["convolution"].absent)
    assert found["geglu"].change.ops == ("geglu",)
    assert "CUDA" in str(found["cuda_graph"].absent)
    assert "no executor" in str(found["block_graphs"].absent)
    assert found["all ops"].slots >= found["geglu"].slots
    assert found["cuda_graph"].slots == found["compiled"].slots


def test_sections_never_mix() -> None:
    for one in listed(count=4).values():
        change = one.change
        assert bool(change.precision) == (one.section == PRECISION)
        if one.section == SAME:
            assert change.request.keys() <= {"batch_size"}
        else:
            assert change.choices() == Choices() and not change.tuned
            assert one.section in (PRECISION, LESS)


def test_dtypes_other_than_the_present_ones() -> None:
    found = listed(model("cuda", Precision(unet="float16", text_encoder="float16")))
    assert "UNet and text in float16" not in found and "VAE in float32" not in found
    assert found["UNet and text in float32"].change.precision == {
        "unet": "float32",
        "text_encoder": "float32",
    }
    assert found["TF32"].absent is None and "CUDA" in str(listed()["TF32"].absent)
    assert "no TF32" in listed(model("cuda", Precision(tf32=True)))
    mixed = found["VAE in mixed precision"]
    assert mixed.change.precision == {"vae": "mixed"} and mixed.absent is None
    assert "VAE in mixed precision" not in listed(model("cuda", Precision(vae="mixed")))
    assert "GPUs" in str(listed()["VAE in mixed precision"].absent)
    change = found["VAE in bfloat16"].change
    assert candidates.changed_precision(Precision(), change) == Precision(vae="bfloat16")


def test_less_work_from_the_request_and_the_model() -> None:
    found = listed()
    assert found["NGMS 3"].change.request == {"ngms": 3.0, "ngms_all_steps": False}
    assert found["24 steps"].change.request == {"steps": 24}
    assert found["DPM++ 2M Karras, 24 steps"].change.request["sampler"] == "DPM++ 2M"
    assert found["fp8"].absent and found["TAESD"].absent
    assert "cfg_scale 1" in str(listed(cfg_scale=1)["NGMS 3"].absent)
    assert "2 steps" in listed(steps=3)  # both shares of 3: listed once
    few = listed(steps=2, ngms=3)
    assert "1 steps" in few and "2 steps" not in few and "NGMS 3" not in few
    assert "DPM++ 2M Karras, 24 steps" not in few
    assert not any(name.endswith(" steps") and name[0].isdigit() for name in listed(steps=1))


def test_batches_only_where_there_are_several_pictures() -> None:
    names = [name for name in listed(count=8) if name.startswith("batch")]
    assert names == ["batch 1", "batch 2", "batch 8"]
    assert not any(name.startswith("batch") for name in listed(count=8, exact_batch=True))
    assert not any(name.startswith("batch") for name in listed())


def test_routes_are_proposed_where_a_shape_has_a_better_one() -> None:
    findings = [
        {"op": "attention", "key": "a", "current": "sdpa", "best": "math"},
        {"op": "attention", "key": "b", "current": "sdpa", "best": "sdpa"},
        {"op": "rope", "key": "c", "current": "x", "best": "y"},
    ]
    (one,) = routed(findings, OPS)
    assert one.name == "attention, tuned" and one.change.tuned == {"attention": {"a": "math"}}
    assert one.change.ops == ("attention", "cross_kv") and one.slots == listed()["attention"].slots
    both = routed([*findings, {"op": "geglu", "key": "c", "current": "x", "best": "y"}], OPS)
    assert [one.name for one in both] == ["attention, tuned", "geglu, tuned", "all ops, tuned"]
    assert both[2].change.tuned.keys() == {"attention", "geglu"} and both[2].change.ops == tuple(OPS)
    assert routed(findings[1:2], OPS) == []


def test_changes_add_up() -> None:
    parts = [
        Change(ops=("geglu",), tuned={"geglu": {"k": "a"}}),
        Change(ops=("geglu", "layer_norm"), executor="compiled"),
        Change(layout="channels_last", rows="separate", packed_qkv=True, request={"batch_size": 2}),
    ]
    made = merged(parts)
    assert made.choices() == Choices(
        executor="compiled",
        layout="channels_last",
        rows="separate",
        ops=("geglu", "layer_norm"),
        packed_qkv=True,
    )
    assert made.tuned == {"geglu": {"k": "a"}} and made.request == {"batch_size": 2}
    assert merged([]) == Change() and Change().choices() == Choices()
    assert made.as_dict()["ops"] == ["geglu", "layer_norm"]


@pytest.mark.parametrize("name", ["cuda_graph", "geglu"])
def test_a_candidate_as_data(name: str) -> None:
    data = listed()[name].as_dict()
    assert data["name"] == name and data["section"] == SAME and data["change"]["ops"] is not None
    assert replace(listed()[name], absent=None).as_dict()["not_here"] is None
