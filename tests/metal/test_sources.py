"""The .metal files as texts: what Apple's compiler and the package need of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clearway.ops import _metal_launch as launch
from metal.emulator import compile_shader, lint
from metal.sources import FILES

NAMES = {file.stem: file for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_texts(file: Path) -> None:
    """Pure ASCII, short, lines that fit, nothing that Apple's compiler is known to refuse."""
    text = file.read_text(encoding="ascii")
    assert lint(text) == []
    assert len(text.splitlines()) <= 250
    assert [line for line in text.splitlines() if len(line) > 110] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_headers_say_how_to_launch(file: Path) -> None:
    header = file.read_text(encoding="ascii").split("#include")[0]
    for words in ("Arguments, in order:", "Launch: threads", "group_size", "Names: "):
        assert words in header
    assert re.search(r"Sources?: |issues", header)


def test_each_file_has_its_launch() -> None:
    assert set(NAMES) == {
        "attention", "constant_pad", "geglu", "group_norm_silu", "layer_norm", "linear_row", "softmax",
    }  # fmt: skip
    assert [name for name in NAMES if not hasattr(launch, name)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_carry_the_name_of_their_file(file: Path, emulator: None) -> None:
    kernels = dir(compile_shader(file.read_text(encoding="ascii")))
    assert [name for name in kernels if not name.startswith(file.stem)] == []
    types = {name.removeprefix(file.stem).split("_")[1] for name in kernels}
    assert types == set(launch.TYPES.values())
    if file.stem == "attention":
        assert len(kernels) == len(launch.TYPES) * len(launch.HEAD_SIZES)


@pytest.mark.cpu_slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_kernel_compiles(file: Path, emulator: None) -> None:
    library = compile_shader(file.read_text(encoding="ascii"))
    for name in dir(library):
        getattr(library, name)
