"""Headers: what is sound is read, and every way to break a file is one sentence."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

from clearway.errors import RequestError
from clearway.models.header import contents, read_header, size_of

SOUND = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
    "empty": {"dtype": "F16", "shape": [0, 5], "data_offsets": [32, 32]},
    "scalar": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}


def encode(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def test_a_sound_header(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode({"__metadata__": {"format": "pt"}, **SOUND}, bytes(40)))
    header = read_header(path)
    assert header.shapes == {"a": (2, 3), "b": (4,), "empty": (0, 5), "scalar": ()}
    assert header.metadata == {"format": "pt"}
    assert header.tensors["b"].dtype == "F16" and header.tensors["b"].start == path.stat().st_size - 40 + 24
    assert contents(path) == "safetensors"


def test_padding_after_the_json_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode(json.dumps(SOUND).encode() + b"   ", bytes(40)))
    assert len(read_header(path).shapes) == 4


def one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


TWO = {"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}
HOSTILE = {
    "empty": (b"", "is empty"),
    "short": (b"abc", "not a safetensors file"),
    "web page": (b"\n<!DOCTYPE html><html>", "is a web page"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "pickle": (pickle.dumps({"a": 1}), "is a pickle"),
    "zip": (b"PK\x03\x04" + bytes(60), "is a zip archive"),
    "length 2^60": (encode(b"{}", length=2**60), "not a safetensors file"),
    "length 2^64-1": (b"\xff" * 8 + b"{}", "not a safetensors file"),
    "length 0": (encode(b""), "not a safetensors file"),
    "ends in header": (encode(json.dumps(SOUND).encode()[:20], length=900), "ends within its header"),
    "no JSON": (encode(b"{nonsense}"), "header is damaged"),
    "no UTF-8": (encode(b'{"\xff\xfe": 1}'), "header is damaged"),
    "nested": (encode(b'{"a":' * 50_000), "header is damaged"),
    "huge number": (encode(b'{"a":' + b"9" * 5000 + b"}"), "header is damaged"),
    "a list": (encode([1, 2]), "no table of tensors"),
    "no tensors": (encode({"__metadata__": {}}), "holds no tensors"),
    "tensor is text": (encode({"a": "b"}), "tensor 'a'"),
    "no offsets": (encode({"a": {"dtype": "F32", "shape": [1]}}), "tensor 'a'"),
    "negative": (encode(one(data_offsets=[-8, 0])), "tensor 'a'"),
    "backwards": (encode(one(data_offsets=[8, 0]), bytes(8)), "tensor 'a'"),
    "size does not fit": (encode(one(data_offsets=[0, 12]), bytes(12)), "tensor 'a'"),
    "shape of texts": (encode(one(shape=["2"]), bytes(8)), "tensor 'a'"),
    "shape of truths": (encode(one(shape=[True, 2]), bytes(8)), "tensor 'a'"),
    "endless shape": (encode(one(shape=[0, 2**62], data_offsets=[0, 0])), "tensor 'a'"),
    "many dimensions": (encode(one(shape=[1] * 100 + [2]), bytes(8)), "tensor 'a'"),
    "dtype": (encode(one(dtype="Q4"), bytes(8)), "dtype 'Q4', which is not supported"),
    "dtype is a list": (encode(one(dtype=["F32"]), bytes(8)), "is not supported"),
    "overlap": (encode(one() | TWO, bytes(12)), "overlaps another"),
    "gap": (encode(one(data_offsets=[4, 12]), bytes(12)), "leaves a gap"),
    "truncated": (encode(one(), bytes(3)), "was not downloaded whole"),
    "longer": (encode(one(), bytes(9)), "1 bytes follow the last tensor"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_broken_is_one_sentence(tmp_path: Path, case: str) -> None:
    data, sentence = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(RequestError) as error:
        read_header(path)
    assert sentence in str(error.value) and str(error.value).startswith("model.safetensors")
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


def test_truncation_is_said_in_the_unit_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    whole = {"a": {"dtype": "F32", "shape": [1725, 10**6], "data_offsets": [0, 6_900_000_000]}}
    with path.open("wb") as file:
        file.write(encode(whole))
        file.truncate(3_100_000_000)  # sparse: takes no space
    with pytest.raises(RequestError) as error:
        read_header(path)
    sentence = "model.safetensors: the file ends after 3.1 of 6.9 GB; it was not downloaded whole"
    assert str(error.value) == sentence


def test_a_header_length_that_begins_like_a_pickle_is_no_pickle(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    raw = json.dumps(one()).encode()
    path.write_bytes(encode(raw.ljust(0x0280), bytes(8)))
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert contents(path) == "safetensors" and read_header(path).shapes == {"a": (2,)}


def test_folders_and_missing_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a folder without model_index\.json"):
        read_header(tmp_path)
    with pytest.raises(RequestError, match="is not a file"):
        read_header(tmp_path / "nothing.safetensors")


def test_kinds_and_sizes(tmp_path: Path) -> None:
    archive = tmp_path / "a.ckpt"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data.pkl", "x")
    assert contents(archive) == "zip"
    assert size_of(tmp_path) == size_of(archive) == archive.stat().st_size
    assert size_of(tmp_path / "nothing") == 0
