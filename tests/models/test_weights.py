"""Tensors out of files: views of safetensors, shards, and pickles only when allowed and only tensors."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from builders import save_original
from clearway.errors import RequestError
from clearway.models.header import DTYPE_BYTES
from clearway.models.weights import TORCH_DTYPES, is_pickle, open_safetensors, open_weights, shards

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.float16)}


class Malicious:
    """Runs a command when unpickled."""

    def __reduce__(self):
        return os.system, ("touch owned",)


def test_safetensors(tmp_path: Path) -> None:
    path = save_original(TENSORS, tmp_path / "x.safetensors", {"clearway": "{}"})
    with open_weights(path) as weights:
        assert weights.shapes == {"a": (2, 3), "b": (4,)}
        assert weights.metadata["clearway"] == "{}"
        assert all(torch.equal(weights.read(name), value) for name, value in TENSORS.items())
        assert sorted("ab", key=weights.order) != sorted("ba", key=lambda name: -weights.order(name)[1])


def test_every_dtype_is_read_as_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    names = ("float32", "float16", "bfloat16", "float64", "int64", "int8", "uint8", "bool", "float8_e4m3fn")
    held = {name: torch.tensor([[0, 1, 2], [3, 1, 0]]).to(getattr(torch, name)) for name in names}
    held |= {"scalar": torch.tensor(2.5), "nothing": torch.zeros(0, 3)}
    path = save_original(held, tmp_path / "x.safetensors")
    theirs = load_file(path)
    with open_weights(path) as weights:
        for name, value in theirs.items():
            mine = weights.read(name)
            assert mine.dtype == value.dtype and mine.shape == value.shape
            assert torch.equal(mine.double(), value.double())


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    path = save_original(TENSORS, tmp_path / "x.safetensors")
    with open_weights(path) as weights, path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
        last = max(TENSORS, key=weights.order)
        with pytest.raises(RequestError, match=r"x\.safetensors became shorter"):
            weights.read(last)


def test_every_dtype_of_the_format_has_one_of_torch() -> None:
    assert set(TORCH_DTYPES) == set(DTYPE_BYTES)
    for name, size in DTYPE_BYTES.items():
        assert torch.empty(1, dtype=getattr(torch, TORCH_DTYPES[name])).element_size() == size


def test_shards_are_one_collection(tmp_path: Path) -> None:
    for name, value in TENSORS.items():
        save_original({name: value}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in TENSORS}}))
    with open_safetensors(shards(index)) as weights:
        assert set(weights.shapes) == set(TENSORS)
        assert torch.equal(weights.read("b"), TENSORS["b"])


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "[" * 100_000,
        '{"weight_map": {"a": ""}}', '{"weight_map": {"a": "../a.safetensors"}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": "no.safetensors"}}', '{"weight_map": {"a": "x\\u0000y"}}',
        '{"weight_map": {"a": "%s"}}' % ("a" * 5000),
    ],
    ids=range(13),
)  # fmt: skip
def test_an_index_that_lies(tmp_path: Path, text: str) -> None:
    index = tmp_path / "inner" / "m.safetensors.index.json"
    index.parent.mkdir()
    save_original(TENSORS, tmp_path / "a.safetensors")
    index.write_text(text)
    with pytest.raises(RequestError) as error:
        shards(index)
    assert len(str(error.value)) < 300 and str(error.value).isprintable()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pickle_is_refused_or_only_its_tensors_are_read(
    tmp_path: Path, legacy: bool, wrapped: bool
) -> None:
    path = tmp_path / "x.ckpt"
    held = {"state_dict": TENSORS, "global_step": 3} if wrapped else TENSORS
    torch.save(held, path, _use_new_zipfile_serialization=not legacy)
    assert is_pickle(path)
    with pytest.raises(RequestError, match="--allow-pickle"):
        open_weights(path)
    with open_weights(path, allow_pickle=True) as weights:
        assert weights.shapes == {"a": (2, 3), "b": (4,)}
        assert torch.equal(weights.read("a"), TENSORS["a"])


@pytest.mark.parametrize("kind", ["torch zip", "torch legacy", "plain"])
def test_a_pickle_that_would_run_code_is_refused_even_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.ckpt"
    held = {"state_dict": TENSORS, "hook": Malicious()}
    if kind == "plain":
        path.write_bytes(pickle.dumps(held))
    else:
        torch.save(held, path, _use_new_zipfile_serialization=kind == "torch zip")
    with pytest.raises(RequestError, match=r"x\.ckpt holds more than tensors") as error:
        open_weights(path, allow_pickle=True)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + bytes(99), b"\x80\x02garbage", b"text", b"<html>"])
def test_damaged_pickles(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(RequestError) as error:
        open_weights(path, allow_pickle=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("held", [[1, 2], {"a": 3}, {"state_dict": {}}])
def test_pickles_without_tensors(tmp_path: Path, held: object) -> None:
    torch.save(held, tmp_path / "x.pth")
    with pytest.raises(RequestError, match="holds no"):
        open_weights(tmp_path / "x.pth", allow_pickle=True)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_that_are_no_plain_ones(tmp_path: Path, kind: str) -> None:
    held = torch.empty(2, 2, device="meta") if kind == "meta" else torch.ones(2, 2).to_sparse()
    torch.save(TENSORS | {"c": held}, tmp_path / "x.pt")
    with open_weights(tmp_path / "x.pt", allow_pickle=True) as weights:
        assert torch.equal(weights.read("a"), TENSORS["a"])
        with pytest.raises(RequestError, match=r"x\.pt: c is no plain tensor"):
            weights.read("c")


def test_a_pickle_by_another_name_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    torch.save(TENSORS, path)
    with pytest.raises(RequestError, match="is a zip archive"):
        open_weights(path, allow_pickle=True)


def test_safetensors_by_another_name_are(tmp_path: Path) -> None:
    path = save_original(TENSORS, tmp_path / "x.safetensors").rename(tmp_path / "x.ckpt")
    with open_weights(path) as weights:
        assert set(weights.shapes) == set(TENSORS)
