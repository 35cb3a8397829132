"""Triton kernels without a GPU: late import, numerics under the interpreter, planted faults, compilation."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import evidence
from clearway.ops import _triton, state
from ops.mutants import MUTANTS
from ops.registry import GLUON, OPS, PRODUCTS, TRITON_TOO, with_implementation

ROOT = Path(__file__).parents[2]
OPS_WITH = with_implementation("triton")
WITHOUT = "triton is not installed: its kernels are neither interpreted nor compiled here"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=WITHOUT)


def lines_of(module: str, job: str, folder: Path, **environment: str) -> list[dict[str, Any]]:
    """What a script of this folder prints, in a process whose Triton is set up for it."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", module, job],
        capture_output=True,
        text=True,
        env={**settings, **environment},
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return lines_of("ops.interpreted", "cases", tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("name", OPS_WITH)
def test_interpreted_on_every_case(name: str, interpreted: list[dict[str, Any]]) -> None:
    mine = [line for line in interpreted if line["op"] == name]
    known = {"torch.float32", "torch.float16"} | (set() if name in PRODUCTS else {"torch.bfloat16"})
    assert {line["dtype"] for line in mine} == known
    assert [line for line in mine if line["problem"]] == []
    assert sum("with nan" in line["case"] for line in mine) == 3
    evidence.note(name, "triton", "interpreted", "CPU")


@needs_triton
def test_implementations_of_other_names_interpreted(tmp_path: Path) -> None:
    found = lines_of("ops.interpreted", "others", tmp_path, TRITON_INTERPRET="1")
    assert [line for line in found if line["problem"]] == []
    for op, name in TRITON_TOO:
        mine = [line for line in found if (line["op"], line["implementation"]) == (op, name)]
        assert len(mine) >= 20
        evidence.note(op, name, "interpreted", "CPU")


@needs_triton
def test_planted_faults_are_caught(tmp_path: Path) -> None:
    found = lines_of("ops.interpreted", "mutants", tmp_path, TRITON_INTERPRET="1")
    assert len(found) == len(MUTANTS)
    assert [line["mutant"] for line in found if not line["caught"]] == []


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="it needs sparse files")
def test_offsets_beyond_two_to_the_31(tmp_path: Path) -> None:
    found = lines_of("ops.interpreted", "far", tmp_path, TRITON_INTERPRET="1")
    assert [line["op"] for line in found] == OPS_WITH
    assert [line for line in found if line["problem"]] == []


def assert_compiled(found: list[dict[str, Any]]) -> None:
    assert [line for line in found if line["problem"]] == []
    targets: dict[tuple[str, str], set[int]] = {}
    for line in found:
        targets.setdefault((line["op"], line["implementation"]), set()).add(line["sm"])
        evidence.note(line["op"], line["implementation"], "compiled", f"sm_{line['sm']}")
    everywhere = (*((op, "triton") for op in OPS_WITH), *TRITON_TOO)
    assert targets == {one: {90} if one in GLUON else {80, 86, 89, 90, 120} for one in (*everywhere, *GLUON)}


@needs_triton
def test_each_kernel_compiles_for_each_target(tmp_path: Path) -> None:
    found = lines_of("ops.compiled", "sample", tmp_path)
    assert_compiled(found)
    # rows of 64 at the first real shape; rows cut into groups of 10
    few = ("_merge", "_softmax_rows", "_sums", "_normalise")
    streaming = [line for line in found if line["kernel"] not in few and not line["gluon"]]
    assert [line for line in streaming if not line["vectors"]] == [], (
        "real shapes are read 16 bytes at a time"
    )


@needs_triton
@pytest.mark.triton_compile
def test_every_launch_compiles(tmp_path: Path) -> None:
    assert_compiled(lines_of("ops.compiled", "all", tmp_path))


def test_naming_kernels_imports_no_triton() -> None:
    code = "import sys\nfrom clearway.ops import discover\ndiscover()\nprint('triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert done.stdout.strip() == "False"


def test_absent_is_a_sentence_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _triton.absent.cache_clear()
    try:
        assert _triton.absent() == "triton is not installed (pip install triton)"
    finally:
        _triton.absent.cache_clear()


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (ImportError("libtriton.so"), True),
        (OSError("no such file: gcc"), True),
        (subprocess.CalledProcessError(1, ["gcc"]), True),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), True),
        (RuntimeError("0 active drivers ([]). There should only be one."), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: unspecified launch failure"), False),
        (TypeError("missing argument"), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_counts_as_a_failed_build(error: Exception, is_one: bool) -> None:
    """A device's fault must never be taken for one: it is not to be caught."""

    class Built:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self

        def __call__(self, *args: Any) -> None:
            raise error

    kernel = _triton.kernel(lambda x: None)
    kernel._built = Built()
    with pytest.raises(state.BuildError if is_one else type(error)) as caught:
        kernel.launch((1,), torch.zeros(1))
    assert not is_one or "Triton could not build <lambda>" in str(caught.value)


def test_errors_of_triton_itself_are_failed_builds() -> None:
    class TritonError(Exception):
        pass

    class OutOfResources(TritonError):
        pass

    assert _triton._is_build_failure(OutOfResources("shared memory"))


@pytest.mark.parametrize(
    ("width", "tile"), [(8, (256, 8)), (320, (4, 512)), (1280, (1, 2048)), (16384, (1, 16384))]
)
def test_row_tiles(width: int, tile: tuple[int, int]) -> None:
    assert _triton.row_tile(width) == tile


@pytest.mark.parametrize("name", OPS_WITH)
def test_source_hash_covers_the_kernels(name: str) -> None:
    (implementation,) = [i for i in OPS[name].implementations if i.name == "triton"]
    files = {path.name for path in implementation.sources}
    assert "_triton.py" in files and all(path.exists() for path in implementation.sources)
    texts = [path.read_text(encoding="utf-8") for path in implementation.sources]
    assert any("@kernel" in text or "@counting(" in text for text in texts)
