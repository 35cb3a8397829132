"""Pixels -> PNG, several times as fast as by Pillow: the same pixels, read by everybody.

Rows are filtered by Sub or Up, whichever leaves the smaller sum, and deflated by runs and Huffman codes alone
(zlib's Z_RLE): after such filters a search for longer matches finds next to nothing in a photograph. Bands of
rows are deflated side by side, since zlib lets other threads run, while this one filters the next band; where
a band ends depends on the picture's width only, so the bytes are the same on every machine. The threads stay
until a fork: new ones for each picture would begin with memory that was never touched. What it takes, and
what it makes larger: bench/results/amd-epyc-2-cores/png.jsonl, written by bench/png.py.
Source: PNG 3rd edition (W3C 2025), RFC 1950 and 1951.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
BAND_BYTES = 2**16
THREADS = 8
_SUB, _UP = 1, 2
_ADLER = 65521


def write(image: np.ndarray, texts: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """The file of one picture, uint8 (H, W, 3); `texts` are chunks (type, data) that precede the pixels."""
    height, width, _ = image.shape
    rows = np.ascontiguousarray(image).reshape(height, width * 3)
    band = max(BAND_BYTES // (width * 3), 1)
    bands = (
        (_filtered(rows, start, min(start + band, height)), start + band) for start in range(0, height, band)
    )
    if band >= height:
        parts = [_deflated(filtered, True) for filtered, _ in bands]
    else:
        begun = [_begun(filtered, end >= height) for filtered, end in bands]
        parts = [one.result() for one in begun]
    check, done = 1, 0
    for _, own, length in parts:
        check, done = _joined(check, own, length), done + length
    assert done == height * (1 + width * 3)
    pixels = (b"\x78\x01", *(data for data, _, _ in parts), struct.pack(">I", check))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pieces = [SIGNATURE, *_chunk(b"IHDR", header)]
    for kind, data in texts:
        pieces += _chunk(kind, data)
    return b"".join((*pieces, *_chunk(b"IDAT", *pixels), *_chunk(b"IEND")))


_threads: dict[int, ThreadPoolExecutor] = {}
_forking = threading.RLock()
"""Held over a fork, and while a band is handed to the threads."""


def _begun(filtered: np.ndarray, last: bool) -> Future[tuple[bytes, int, int]]:
    with _forking:
        if THREADS not in _threads:
            _threads[THREADS] = ThreadPoolExecutor(THREADS, thread_name_prefix="clearway-png")
        return _threads[THREADS].submit(_deflated, filtered, last)


def _before_fork() -> None:
    """Ends the threads: a child would have none of them, and Python 3.12 and later warn of a process that has
    some. Who writes next, in either process, begins new ones."""
    _forking.acquire()
    for threads in _threads.values():
        threads.shutdown()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_forking.release, after_in_child=_forking.release
    )


def _deflated(filtered: np.ndarray, last: bool) -> tuple[bytes, int, int]:
    """(deflated, Adler-32, how many bytes it was) of one band."""
    stream = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    done = stream.compress(filtered.data) + stream.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
    return done, zlib.adler32(filtered.data), filtered.nbytes


def _joined(first: int, second: int, length: int) -> int:
    """The Adler-32 of two pieces in a row, of theirs; `length` is the second's."""
    low = (first & 0xFFFF) + (second & 0xFFFF) - 1
    high = (first >> 16) + (second >> 16) + length * ((first & 0xFFFF) - 1)
    return high % _ADLER << 16 | low % _ADLER


def _filtered(rows: np.ndarray, start: int, end: int) -> np.ndarray:
    """Rows `start` to `end`, each behind the number of its filter, uint8 (rows, 1 + 3 W)."""
    band = rows[start:end]
    up = band.copy()
    up[1:] -= band[:-1]
    if start:
        up[0] -= rows[start - 1]
    out = np.empty((end - start, 1 + rows.shape[1]), np.uint8)
    sub = out[:, 1:]
    sub[:, :3] = band[:, :3]
    np.subtract(band[:, 3:], band[:, :-3], out=sub[:, 3:])
    by_up = _cost(up) < _cost(sub)
    out[:, 0] = np.where(by_up, _UP, _SUB)
    sub[by_up] = up[by_up]
    return out


def _cost(rows: np.ndarray) -> np.ndarray:
    """The sum of absolute values of each row, read as signed differences."""
    wide = np.uint32 if rows.shape[1] < 2**25 else np.uint64  # uint32 is summed twice as fast
    sizes: np.ndarray = np.abs(rows.view(np.int8)).view(np.uint8)  # of -128 it is 128, as it should be
    sums: np.ndarray = sizes.sum(1, dtype=wide)
    return sums


def _chunk(kind: bytes, *data: bytes) -> list[bytes]:
    """The pieces of a chunk: length, type, data, check."""
    check = zlib.crc32(kind)
    for piece in data:
        check = zlib.crc32(piece, check)
    return [struct.pack(">I", sum(map(len, data))), kind, *data, struct.pack(">I", check)]
