"""Token ids against transformers' CLIPTokenizer."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from builders import VOCABULARY, write_json
from clearway.errors import RequestError
from clearway.models.tokenizer import KNOWN, load

TEXTS = [
    "", " ", "a red apple", "A  Red\tAPPLE\n", "don't they've I'm he'd we'll it's 'tis rock'n'roll",
    "masterpiece, best quality, (detailed:1.2), [bad], {x|y}", "1girl 2 dogs 1234567890 3.14 1/2 50%",
    "naïve café Ångström straße ΑΒΓ Кошка", "e\u0301 vs é, ﬁ ligature, Ⅷ ½", "猫が好き 日本語 中文 한국어",
    "🍎🍏 👩‍🚀 🏳️‍🌈 ❤️", "!!! ??? ... --- <lora:x:0.5> @#$%^&*()", "a_b-c.d/e\\f", "İstanbul DŽ ǅ ẞ",
    "\u00a0non\u2003breaking\u200bspaces\u3000", "<|startoftext|> a <|endoftext|> b",
    "supercalifragilistic" * 20,
    "اللغة العربية עברית हिन्दी ไทย", "\x00\x07 control \x7f", "a" * 300, "''' '' '", "’s “quotes” – dash",
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> Any:
    import transformers

    # before 5 the plain name is another, slower implementation with other ids for a few scripts
    name = "CLIPTokenizer" if int(transformers.__version__.split(".")[0]) >= 5 else "CLIPTokenizerFast"
    return getattr(transformers, name).from_pretrained(VOCABULARY)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(theirs: Any, text: str) -> None:
    assert load(VOCABULARY).encode(text) == theirs(text, add_special_tokens=False).input_ids


def test_ids_of_random_texts(theirs: Any) -> None:
    draw = random.Random(0)
    signs = [chr(code) for code in (*range(32, 0x250), *range(0x370, 0x530), *range(0x2000, 0x2100))]
    signs += [chr(code) for code in range(0x1F300, 0x1F650)] + ["'s", "'LL", " ", "\n", "\u0301"] * 20
    ours = load(VOCABULARY)
    for _ in range(1500):
        text = "".join(draw.choices(signs, k=draw.randint(1, 30)))
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, repr(text)


def test_the_last_few_texts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    made = load(VOCABULARY)
    first = made.encode("a red apple")
    first.append(0)  # a caller's own list
    texts = [f"apple {number}" for number in range(KNOWN - 1)]
    expected = [made.encode(text) for text in texts]
    again = made.encode("a red apple")
    assert again == first[:-1]
    assert len(made._known) == KNOWN
    monkeypatch.setattr(made, "_engine", None)
    assert [made.encode(text) for text in texts] == expected
    with pytest.raises(AttributeError):
        made.encode("a green apple")


def test_special_ids() -> None:
    found = load(VOCABULARY)
    assert (found.bos, found.eos, found.pad, found.comma) == (49406, 49407, 49407, 267)
    assert found.encode(",") == [267]
    assert load(VOCABULARY, 0).pad == 0
    assert found.size == 49408


def test_a_vocabulary_with_gaps_counts_to_its_highest_id(tmp_path: Path) -> None:
    ids = json.loads((VOCABULARY / "vocab.json").read_text(encoding="utf-8"))
    ids["zzz</w>"] = 60_000
    write_json(tmp_path / "vocab.json", ids)
    shutil.copy(VOCABULARY / "merges.txt", tmp_path / "merges.txt")
    assert load(tmp_path).size == 60_001


def test_what_is_no_text_does_not_break_it() -> None:
    assert load(VOCABULARY).encode("a \ud800 b") == load(VOCABULARY).encode("a ? b")


@pytest.mark.parametrize(
    ("token", "pad"),
    [("!", 0), ({"content": "!"}, 0), ("<|endoftext|>", 49407), (None, 49407), ("nonsense word", 49407)],
)
def test_padding_is_what_the_folder_says(tmp_path: Path, token: Any, pad: int) -> None:
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(VOCABULARY / name, tmp_path / name)
    write_json(tmp_path / "special_tokens_map.json", {"pad_token": token})
    assert load(tmp_path).pad == pad


def test_a_tokenizer_json_alone(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).unlink(missing_ok=True)
    found = load(tmp_path)
    assert all(found.encode(text) == load(VOCABULARY).encode(text) for text in TEXTS)
    assert (found.bos, found.pad) == (49406, 49407)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"vocab.json": "{}", "merges.txt": ""},
        {"vocab.json": "nonsense", "merges.txt": ""},
        {"vocab.json": '{"a": 1}', "merges.txt": "x"},
        {"tokenizer.json": "{}"},
    ],
)
def test_broken_tokenizers_are_one_sentence(tmp_path: Path, files: dict[str, str]) -> None:
    place = tmp_path / "tokenizer"
    place.mkdir()
    for name, text in files.items():
        (place / name).write_text(text)
    with pytest.raises(RequestError) as error:
        load(place)
    assert "\n" not in str(error.value)
