"""The PNG writer against Pillow's reader and against the format's own checks."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from clearway.image import png


def read(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as picture:
        picture.load()
        assert picture.mode == "RGB" and picture.format == "PNG"
        return np.asarray(picture)


def pictures(height: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(height * 1000 + width)
    ramp = np.arange(height * width * 3, dtype=np.uint64).reshape(height, width, 3)
    return {
        "noise": rng.integers(0, 256, (height, width, 3), dtype=np.uint8),
        "flat": np.full((height, width, 3), 200, np.uint8),
        "ramp": (ramp // 7).astype(np.uint8),
        "extremes": np.where(ramp % 2 == 0, 0, 255).astype(np.uint8),
    }


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (8, 8), (67, 45), (300, 512), (513, 640)])
def test_gives_back_the_same_pixels(size: tuple[int, int]) -> None:
    for name, image in pictures(*size).items():
        assert np.array_equal(read(png.write(image)), image), name


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_any_picture(height: int, width: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    assert np.array_equal(read(png.write(image)), image)


def test_any_strides() -> None:
    image = pictures(31, 42)["noise"]
    for view in (image[::2], image[:, ::-1], image.transpose(1, 0, 2)):
        assert np.array_equal(read(png.write(view)), view)


def test_chunks_and_checks_are_the_formats_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every CRC holds, the stream is one zlib stream with its Adler-32, and bands leave no seam."""
    monkeypatch.setattr(png, "BAND_BYTES", 200)
    image = pictures(29, 21)["ramp"]
    data, kinds, pixels = png.write(image, [(b"tEXt", b"k\0v")]), [], b""
    assert data.startswith(png.SIGNATURE)
    at = len(png.SIGNATURE)
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        kinds.append(kind)
        pixels += body if kind == b"IDAT" else b""
        at += 12 + length
    assert kinds == [b"IHDR", b"tEXt", b"IDAT", b"IEND"]
    assert len(zlib.decompress(pixels)) == 29 * (1 + 21 * 3)
    assert np.array_equal(read(data), image)


def test_the_bytes_do_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pictures(513, 640)["noise"]
    first = png.write(image)
    monkeypatch.setattr(png, "THREADS", 1)
    assert png.write(image) == first


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checks_of_pieces_are_joined_as_zlib_would_go_on(first: bytes, second: bytes) -> None:
    joined = png._joined(zlib.adler32(first), zlib.adler32(second), len(second))
    assert joined == zlib.adler32(second, zlib.adler32(first)) == zlib.adler32(first + second)


def test_the_cost_of_a_row_is_that_of_its_signed_differences() -> None:
    rows = np.arange(256, dtype=np.uint8)[:, None]
    assert png._cost(rows).tolist() == [min(value, 256 - value) for value in range(256)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_ends_the_threads_and_both_processes_write_on() -> None:
    """Whatever another thread writes meanwhile. From Python 3.12 on a fork beside threads is a warning."""
    program = (
        "import os, threading, warnings\n"
        "def own(): return [t.name for t in threading.enumerate() if t.name.startswith('clearway-png')]\n"
        "seen = []\n"
        "os.register_at_fork(before=lambda: seen.append(own()))  # the first of these is called last\n"
        "import numpy as np\n"
        "from clearway.image import png\n"
        "image = np.zeros((300, 512, 3), np.uint8)\n"
        "before = png.write(image)\n"
        "assert own()\n"
        "def fork():\n"
        "    child = os.fork()\n"
        "    assert png.write(image) == before\n"
        "    if not child:\n"
        "        os._exit(0)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    fork()\n"
        "assert seen == [[]] and own() and not said, said\n"
        "warnings.simplefilter('ignore')\n"
        "wrong = []\n"
        "def go_on():\n"
        "    try:\n"
        "        wrong.extend(1 for _ in range(100) if png.write(image) != before)\n"
        "    except BaseException as error:\n"
        "        wrong.append(error)\n"
        "writing = threading.Thread(target=go_on)\n"
        "writing.start()\n"
        "for _ in range(10): fork()\n"
        "writing.join()\n"
        "assert seen == [[]] * 11 and not wrong, wrong\n"
    )
    alone = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={**os.environ, **alone})
