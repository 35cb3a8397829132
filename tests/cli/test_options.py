"""Options to Request and Precision."""

import pytest

from clearway import RequestError
from clearway.cli.main import build_parser
from clearway.cli.options import precision_from, request_from
from clearway.device import Device

PICTURE = """a cat
Steps: 9, Sampler: Euler a, CFG scale: 5, Seed: 3, Size: 64x32, Dtype: bfloat16, Version: Clearway 0.1.0"""


def parse(*arguments: str):
    return build_parser().parse_args(["generate", *arguments])


def test_what_is_not_given_stays_open() -> None:
    request = request_from(parse("a cat"))
    assert (request.prompt, request.width, request.steps, request.sampler, request.seed) == (
        "a cat", None, None, None, -1,
    )  # fmt: skip


def test_size_is_both_sides() -> None:
    request = request_from(parse("x", "--size", "64x72"))
    assert (request.width, request.height) == (64, 72)
    with pytest.raises(RequestError, match="one of them is enough"):
        request_from(parse("x", "--size", "64x72", "--height", "8"))


def test_options_lie_over_a_repeated_picture() -> None:
    request = request_from(parse("--steps", "4", "--no-exact-batch"), PICTURE)
    assert (request.prompt, request.steps, request.seed, request.width) == ("a cat", 4, 3, 64)
    assert request_from(parse("a dog"), PICTURE).prompt == "a dog"


def test_another_sampler_takes_only_its_own_fine_points(capsys: pytest.CaptureFixture[str]) -> None:
    picture = PICTURE.replace("Dtype", "Eta: 0.3, Schedule rho: 3, Schedule type: Karras, Dtype")
    kept = request_from(parse("--seed", "4"), picture)
    assert (kept.eta, kept.rho, kept.schedule) == (0.3, 3.0, "Karras")
    changed = request_from(parse("--sampler", "DPM++ 2M"), picture)
    assert (changed.eta, changed.rho, changed.schedule) == (None, 3.0, None)  # DPM++ 2M's own is Karras
    assert "eta 0.3 is left out" in capsys.readouterr().err
    assert request_from(parse("--schedule", "Exponential"), picture).rho is None
    assert (
        request_from(parse("--sampler", "DPM++ 2M", "--eta", "1"), picture).eta == 1.0
    )  # named: refused later


def test_what_is_named_empty_is_not_the_default() -> None:
    with pytest.raises(RequestError):
        precision_from(parse("x", "--dtype", ""), Device("cpu"))


def test_precision_device_then_picture_then_options() -> None:
    cpu = Device("cpu")
    assert precision_from(parse("x"), cpu).unet == "float32"
    assert precision_from(parse("x"), cpu, PICTURE).unet == "bfloat16"
    changed = precision_from(parse("x", "--dtype", "fp16", "--vae-dtype", "bf16", "--tf32"), cpu, PICTURE)
    assert (changed.unet, changed.text_encoder, changed.vae, changed.tf32) == (
        "float16", "float16", "bfloat16", True,
    )  # fmt: skip
    assert precision_from(parse("x", "--sampling-dtype", "float16"), cpu).sampling == "float16"
    with pytest.raises(RequestError, match="not known"):
        precision_from(parse("x", "--dtype", "int8"), cpu)


def test_mixed_is_for_the_vae_alone() -> None:
    cpu = Device("cpu")
    assert precision_from(parse("x", "--vae-dtype", "mixed"), cpu).vae == "mixed"
    assert precision_from(parse("x"), cpu, f"{PICTURE}, VAE dtype: mixed").vae == "mixed"
    for option in ("--dtype", "--text-encoder-dtype", "--sampling-dtype"):
        with pytest.raises(RequestError, match="'mixed' is the VAE's alone"):
            precision_from(parse("x", option, "mixed"), cpu)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 2**30), ("1.5 gib", 3 * 2**29), ("900MiB", 900 * 2**20), ("6g", 6 * 2**30), ("1024", 1024)],
)
def test_memory_sizes(text: str, size: int) -> None:
    assert parse("x", "--memory-limit", text).memory_limit_bytes == size


@pytest.mark.parametrize("text", ["", "8TB", "-1GiB", "0", "GiB", "1e9", "\u0663GiB"])
def test_what_is_no_memory_size(text: str) -> None:
    with pytest.raises(RequestError, match="is no memory size"):
        parse("x", f"--memory-limit={text}")


def test_tiles_can_be_asked_for_refused_and_left_open() -> None:
    for given, expected in (((), None), (("--vae-tiling",), True), (("--no-vae-tiling",), False)):
        assert request_from(parse("x", *given)).vae_tiling is expected
