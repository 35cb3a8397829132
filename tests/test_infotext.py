"""Infotext: round trips of all that the format can carry, the published expression, other programs' texts."""

from __future__ import annotations

import re
import string
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clearway import infotext
from clearway.errors import RequestError
from clearway.request import Request
from clearway.types import Precision

# The expression that defines A1111's format (shared/reference/a1111.md §5); the code under test has none.
PUBLISHED = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')

# Texts written for these tests after the key order and quoting that each program documents; none was copied.
A1111_1_4 = """a red apple on a table, (masterpiece:1.2)
Negative prompt: blurry, low quality
Steps: 28, Sampler: DPM++ 2M Karras, CFG scale: 7.5, Seed: 3141592653, Size: 512x768, \
Model hash: 6ce0161689, Model: v1-5-pruned-emaonly, Clip skip: 2, ENSD: 31337, Version: v1.4.1"""
A1111_1_6 = """portrait of a lighthouse keeper <lora:oilpaint:0.8>
BREAK stormy sea
Negative prompt: photo
Steps: 30, Sampler: Euler a, CFG scale: 6, Seed: 77, Size: 640x512, Model hash: 31e35c80fc, \
Model: sd_xl_base_1.0, Denoising strength: 0.45, RNG: CPU, \
Hires upscale: 2, Hires steps: 10, Hires upscaler: Latent, \
Lora hashes: "oilpaint: 0a1b2c3d4e5f", NGMS: 2.5, Version: v1.6.0"""
A1111_1_10 = """a city, at night
Negative prompt: day
Steps: 20, Sampler: DPM++ 2M SDE, Schedule type: Exponential, CFG scale: 5.5, Seed: 42, \
Size: 1024x1024, Model hash: 31e35c80fc, Model: sd_xl_base_1.0, VAE hash: 235745af8d, VAE: \
sdxl_vae.safetensors, \
Clip skip: 2, RNG: NV, Hires prompt: "a city, at night: sharper\\nand \\"brighter\\"", Hires resize: \
1536x1536, \
Schedule max sigma: 14.2, Schedule min sigma: 0.03, Schedule rho: 5, NGMS: 1, NGMS all steps: True, \
Pad conds: True, Version: v1.10.1"""
FORGE = """a paper boat
Steps: 20, Sampler: Euler, Schedule type: Simple, CFG scale: 1, Distilled CFG Scale: 3.5, Seed: 5, \
Size: 896x1152, Model hash: bea01d51bd, \
Model: flux1-dev-bnb-nf4-v2, Version: f2.0.1v1.10.1-previous-659-gc055f2d4"""
SDNEXT = """a wooden bridge
Negative prompt: 
Steps: 25, Size: 768x512, Sampler: DPM++ 2M, Seed: 99, CFG scale: 6.0, App: SD.Next, Version: 0c7038e, \
Pipeline: StableDiffusionPipeline, Operations: txt2img, Model: dreamshaper_8, Model hash: 879db523c3, \
Sampler sigma: karras"""  # noqa: W291


def _carried(prompt: str) -> str:
    """What A1111's format keeps of a prompt."""
    lines = [line.strip() for line in prompt.split("\n")]
    while lines and not lines[0]:
        lines.pop(0)
    return "\n".join(lines)


def _is_carried(prompt: str) -> bool:
    return not any(line.strip().startswith("Negative prompt:") for line in prompt.split("\n"))


prompts = st.text(st.characters(exclude_categories=["Cs"]), max_size=80).filter(_is_carried)
keys = st.from_regex(r"[A-Za-z][A-Za-z /-]{1,12}", fullmatch=True).filter(lambda key: key == key.strip())


def _is_value(value: str) -> bool:
    plain = not any(sign in value for sign in ",:\n")
    broken = plain and (value != value.strip() or (value.startswith('"') and value.endswith('"')))
    return not broken and not re.fullmatch(r"\d+x\d+", value)


values = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(_is_value)


@settings(deadline=None)
@given(prompts, prompts, st.dictionaries(keys, values, min_size=3, max_size=8))
@example("", "", {"Steps": "1", "Seed": "2", "Note": 'he said: "a, b"\nand \\ left'})
@example("a\n\nb", "c\n\n", {"Steps": "1", "Seed": "2", "Name": "😀, ü"})
def test_what_is_built_is_parsed(prompt: str, negative: str, parameters: dict[str, str]) -> None:
    parameters = {key: value for key, value in parameters.items() if key != value}
    if len(parameters) < 3:
        return
    found = infotext.parse(infotext.build(prompt, negative, parameters))
    assert found.prompt == _carried(prompt)
    assert found.negative_prompt == _carried(negative)
    assert found.values == parameters


@settings(deadline=None)
@given(st.text(alphabet=string.ascii_letters + '12x ,:"\\-/_\n\té\u2003', max_size=120))
@example('aa: "b, c", dd: "e')
@example('aa: "b" , dd: e')
@example("a:b c:,dd:ee:ff,,gg :h")
def test_pairs_are_those_of_the_published_expression(line: str) -> None:
    assert infotext._pairs(line) == PUBLISHED.findall(line)


@settings(deadline=None)
@given(st.text(max_size=300))
def test_parse_never_raises(text: str) -> None:
    infotext.parse(text)
    infotext.parse(text + "\nSteps: 1, Seed: 2, Size: 3x4, " + text)
    infotext.unread(text)


@settings(deadline=None)
@given(st.text(alphabet='Steps:Seed,Size"0x1-.e \\', max_size=80))
def test_request_fields_gives_fields_or_one_sentence(text: str) -> None:
    try:
        infotext.request_fields("Steps: 1, Sampler: Euler, Seed: 2, " + text)
    except RequestError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "line", ["a" * 300_000, " " * 300_000 + "a", 'aa:"' * 80_000, 'aa:"\\' * 80_000, "a b:" * 80_000]
)
def test_hostile_lines_take_linear_time(line: str) -> None:
    start = time.perf_counter()
    infotext.parse("x\n" + line)
    assert time.perf_counter() - start < 5  # the published expression would take minutes on the first


@settings(deadline=None)
@given(
    prompt=prompts,
    negative=prompts,
    numbers=st.tuples(
        st.integers(1, 1000),
        st.integers(0, 2**63 - 1),
        st.integers(1, 2000),
        st.floats(0, 1000, allow_nan=False),
    ),
    eta=st.none() | st.floats(0, 10),
    sampler=st.sampled_from(["Euler a", "DDIM", "DPM++ 2M"]),
    rng=st.sampled_from(["GPU", "CPU"]),
    clip_skip=st.integers(1, 12),
    ngms=st.floats(0.01, 20),
    all_steps=st.booleans(),
    knobs=st.lists(st.none() | st.floats(0.01, 900), min_size=7, max_size=7),
)
def test_a_request_comes_back(
    prompt: str,
    negative: str,
    numbers: tuple[int, int, int, float],
    eta: float | None,
    sampler: str,
    rng: str,
    clip_skip: int,
    ngms: float,
    all_steps: bool,
    knobs: list[float | None],
) -> None:
    steps, seed, eighth, cfg_scale = numbers
    names = ("s_noise", "s_churn", "s_tmin", "s_tmax", "sigma_min", "sigma_max", "rho")
    request = Request(
        prompt=_carried(prompt.strip()).strip(),
        negative_prompt=_carried(negative.strip()).strip(),
        width=8 * eighth,
        height=8,
        steps=steps,
        cfg_scale=cfg_scale,
        sampler=sampler,
        schedule="Karras",
        seed=seed,
        ngms=ngms,
        ngms_all_steps=all_steps,
        clip_skip=clip_skip,
        rng=rng,
        eta=eta,
        **dict(zip(names, knobs, strict=True)),
    )
    values = infotext.parameters(request, seed=seed, version="0.1.0", model_name="a: b, c", ngms_used=True)
    text = infotext.build(request.prompt, request.negative_prompt, values)
    assert Request.from_infotext(text) == request
    assert infotext.unread(text) == ()


def _request(**fields: object) -> Request:
    return Request(
        **{  # type: ignore[arg-type]
            "width": 512,
            "height": 768,
            "steps": 20,
            "cfg_scale": 7.0,
            "sampler": "DPM++ 2M",
            "schedule": "Automatic",
            "seed": 5,
            **fields,
        }
    )


def test_a_plain_picture_reads_as_the_webui_writes_it() -> None:
    values = infotext.parameters(
        _request(),
        seed=6,
        version="0.1.0",
        model_name="v1-5",
        model_hash="6ce0161689",
        schedule_label="Karras",
    )
    assert infotext.build("a red apple", "blurry", values) == (
        "a red apple\nNegative prompt: blurry\n"
        "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 6, Size: 512x768, "
        "Model hash: 6ce0161689, Model: v1-5, Version: Clearway 0.1.0"
    )


def test_everything_set_comes_in_the_webuis_order() -> None:
    request = _request(
        sampler="Euler a", ngms=1.5, ngms_all_steps=True, clip_skip=2, rng="CPU", eta=0.5, s_noise=1.01,
        s_churn=1.0, s_tmin=0.1, s_tmax=float("inf"), sigma_min=0.03, sigma_max=14.6, rho=7.0,
    )  # fmt: skip
    values = infotext.parameters(
        request,
        seed=5,
        version="0.1.0",
        precision=Precision("float16", "bfloat16", "float16", "float16", tf32=True),
        ngms_used=True,
        extras={"Emphasis": "No norm"},
    )
    assert infotext.build("", "", values) == (
        "Steps: 20, Sampler: Euler a, Schedule type: Automatic, CFG scale: 7, Seed: 5, Size: 512x768, "
        "Clip skip: 2, RNG: CPU, Eta: 0.5, Sigma churn: 1, Sigma tmin: 0.1, Sigma tmax: inf, "
        "Sigma noise: 1.01, "
        "Schedule min sigma: 0.03, Schedule max sigma: 14.6, Schedule rho: 7, NGMS: 1.5, "
        "NGMS all steps: True, Emphasis: No norm, Dtype: float16, VAE dtype: float16, "
        "Text encoder dtype: bfloat16, Sampling dtype: float16, TF32: True, Version: Clearway 0.1.0"
    )


def test_ngms_is_named_only_where_it_skipped_a_call() -> None:
    request = _request(ngms=1.5, ngms_all_steps=True)
    values = infotext.parameters(request, seed=5, version="0", ngms_used=False)
    assert "NGMS" not in values and "NGMS all steps" not in values
    assert "NGMS all steps" not in infotext.parameters(
        _request(ngms=1.0), seed=5, version="0", ngms_used=True
    )


@pytest.mark.parametrize("sampler, key", [("DDIM", "Eta DDIM"), ("Euler a", "Eta"), ("DPM++ SDE", "Eta")])
def test_eta_has_the_key_of_its_sampler(sampler: str, key: str) -> None:
    assert infotext.parameters(_request(sampler=sampler, eta=0.25), seed=5, version="0")[key] == 0.25


def test_extras_cannot_replace_what_clearway_writes() -> None:
    with pytest.raises(ValueError, match="Seed"):
        infotext.parameters(_request(), seed=5, version="0", extras={"Seed": 6})


def test_build_follows_the_format() -> None:
    text = infotext.build(
        "p", "", {"A": None, "Both": "Both", "Comma": "a,b", "Quote": 'a "b"', "Nap": "ä:b", "F": 0.1}
    )
    assert text == 'p\nBoth, Comma: "a,b", Quote: a "b", Nap: "ä:b", F: 0.1'


def test_fewer_than_three_parameters_are_prompt() -> None:
    assert infotext.parse("a\nSteps: 1, Seed: 2").prompt == "a\nSteps: 1, Seed: 2"
    assert infotext.parse("a\nSteps: 1, Seed: 2, Size: 8x16").values == {
        "Steps": "1", "Seed": "2", "Size-1": "8", "Size-2": "16"
    }  # fmt: skip


def test_windows_line_ends_and_a_second_negative_line() -> None:
    found = infotext.parse(
        "a\r\nb\r\nNegative prompt: c\r\nNegative prompt: d\r\nSteps: 1, Seed: 2, Size: 8x8\r\n"
    )
    assert (found.prompt, found.negative_prompt) == ("a\nb", "c\nd")


def test_a1111_1_4() -> None:
    assert infotext.request_fields(A1111_1_4) == {
        "prompt": "a red apple on a table, (masterpiece:1.2)", "negative_prompt": "blurry, low quality",
        "steps": 28, "sampler": "DPM++ 2M Karras", "cfg_scale": 7.5, "seed": 3141592653, "width": 512,
        "height": 768, "clip_skip": 2,
    }  # fmt: skip
    assert infotext.unread(A1111_1_4) == ("ENSD",)


def test_a1111_1_6() -> None:
    request = Request.from_infotext(A1111_1_6)
    assert request.prompt == "portrait of a lighthouse keeper <lora:oilpaint:0.8>\nBREAK stormy sea"
    assert (request.rng, request.ngms, request.ngms_all_steps) == ("CPU", 2.5, False)
    assert request.schedule is None and request.count == 1
    assert infotext.unread(A1111_1_6) == (
        "Denoising strength", "Hires upscale", "Hires steps", "Hires upscaler", "Lora hashes"
    )  # fmt: skip


def test_a1111_1_10() -> None:
    request = Request.from_infotext(A1111_1_10)
    assert (request.sampler, request.schedule) == ("DPM++ 2M SDE", "Exponential")
    assert (request.sigma_min, request.sigma_max, request.rho) == (0.03, 14.2, 5.0)
    assert (request.ngms, request.ngms_all_steps, request.rng) == (1.0, True, "NV")
    assert infotext.parse(A1111_1_10).values["Hires prompt"] == 'a city, at night: sharper\nand "brighter"'
    assert infotext.unread(A1111_1_10) == (
        "VAE hash", "VAE", "Hires prompt", "Hires resize", "Pad conds"
    )  # fmt: skip


def test_forge() -> None:
    request = Request.from_infotext(FORGE)
    assert (request.prompt, request.negative_prompt, request.cfg_scale) == ("a paper boat", "", 1.0)
    assert (request.width, request.height, request.schedule) == (896, 1152, "Simple")
    assert infotext.unread(FORGE) == ("Distilled CFG Scale",)


def test_sdnext() -> None:
    request = Request.from_infotext(SDNEXT)
    assert (request.prompt, request.negative_prompt) == ("a wooden bridge", "")
    assert (request.steps, request.sampler, request.schedule) == (25, "DPM++ 2M", "Karras")
    assert infotext.unread(SDNEXT) == ()


def test_precision_comes_back_from_clearways_own_pictures_only() -> None:
    precision = Precision("float16", "float32", "bfloat16", "float32", tf32=True)
    values = infotext.parameters(_request(), seed=5, version="0.1.0", precision=precision)
    assert Precision(**infotext.precision_fields(infotext.build("a", "", values))) == precision
    plain = infotext.parameters(_request(), seed=5, version="0.1.0")
    assert Precision(**infotext.precision_fields(infotext.build("a", "", plain))) == Precision()
    assert infotext.precision_fields(A1111_1_10) == {}
    assert infotext.unread(A1111_1_4 + ", Dtype: float16") == ("ENSD", "Dtype")


def test_a_mixed_vae_comes_back_and_nothing_else_is_mixed() -> None:
    precision = Precision(unet="float16", vae="mixed")
    values = infotext.parameters(_request(), seed=5, version="0.1.0", precision=precision)
    text = infotext.build("a", "", values)
    assert "VAE dtype: mixed" in text and infotext.unread(text) == ()
    assert Precision(**infotext.precision_fields(text)) == precision
    with pytest.raises(RequestError, match=r"VAE dtype 'half'.* float32, float16, bfloat16 or mixed"):
        infotext.precision_fields("Steps: 1, Seed: 2, VAE dtype: half, Version: Clearway 9.0")
    with pytest.raises(RequestError, match=r"Dtype 'mixed'.* float32, float16 or bfloat16"):
        infotext.precision_fields("Steps: 1, Seed: 2, Dtype: mixed, Version: Clearway 9.0")


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "no generation parameters"),
        ("just a prompt", "no generation parameters"),
        ("Steps: banana, Seed: 1, Sampler: Euler", "Steps 'banana'"),
        ("Steps: 20, Seed: 1.5, Sampler: Euler", "Seed '1.5'"),
        ("Steps: 20, Seed: 1, Sampler: Euler, CFG scale: nan", "CFG scale 'nan'"),
        ("Steps: 20, Seed: 1, Sampler: Euler, CFG scale: 1e999", "CFG scale '1e999'"),
        ("Steps: 20, Seed: 1, Sampler: ", "Sampler ''"),
        ("Steps: 20, Seed: 1, RNG: TPU", "RNG 'TPU'"),
        ("Steps: 20, Seed: 1, NGMS all steps: maybe", "NGMS all steps 'maybe'"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text: str, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        infotext.request_fields(text)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_dtype_is_one_sentence() -> None:
    with pytest.raises(RequestError, match="Dtype 'int3'"):
        infotext.precision_fields("Steps: 1, Seed: 2, Dtype: int3, Version: Clearway 9.0")


def test_a_size_that_is_not_split_is_reported() -> None:
    assert infotext.unread("Steps: 1, Seed: 2, Size: 512 by 512") == ("Size",)


def test_tiles_of_a_vae_are_written_and_asked_for_again() -> None:
    values = infotext.parameters(_request(), seed=5, version="0.1.0", vae_tiling="64/16")
    text = infotext.build("a", "", values)
    assert "VAE tiling: 64/16" in text
    assert Request.from_infotext(text).vae_tiling is True
    assert Request.from_infotext(text.replace("64/16", "False")).vae_tiling is False
    assert Request.from_infotext(text.replace("VAE tiling: 64/16, ", "")).vae_tiling is None
