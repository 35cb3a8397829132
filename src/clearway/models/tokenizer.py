"""CLIP's tokenizer: text -> token ids, through the tokenizers library (transformers' wrapper costs more).

Same ids as transformers' CLIPTokenizer: NFC, whitespace runs to one space, lower case, words, single digits
and runs of other signs, byte-level BPE with `</w>` at a word's end.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from clearway.errors import RequestError, one_line
from clearway.models.card import read_object

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
KNOWN = 32
"""Texts whose ids a tokenizer remembers: the same negative prompt, or prompt, comes again and again."""
PATTERN = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""


class Tokenizer:
    """Text to ids, all of them below `size`.

    `bos` and `eos` frame a window, `pad` fills it, `comma` is where a prompt may be split.
    """

    def __init__(self, engine: Any, pad: int | None = None) -> None:
        """`engine` is a tokenizers.Tokenizer with CLIP's vocabulary; `pad` is by default the end token."""
        ids = {name: engine.token_to_id(name) for name in (BOS, EOS, ",</w>")}
        if None in ids.values():
            raise RequestError("the tokenizer's vocabulary is not CLIP's")
        self._engine = engine
        self._known: dict[str, list[int]] = {}
        self.bos: int = ids[BOS]
        self.eos: int = ids[EOS]
        self.comma: int = ids[",</w>"]
        self.pad: int = self.eos if pad is None else pad
        count: int = engine.get_vocab_size()
        dense = all(map(engine.id_to_token, range(count)))  # five times quicker than asking for all ids
        self.size: int = count if dense else 1 + max(engine.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, of any length, without bos, eos and padding; of the last few texts at once."""
        known = self._known.get(text)
        if known is not None:
            return list(known)
        # Lone surrogates (from a terminal or JSON) are no text; the library would raise on them.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = self._engine.encode(clean, add_special_tokens=False).ids
        self._known = {**dict(list(self._known.items())[1 - KNOWN :]), text: ids}  # a new one: threads read
        return list(ids)


def load(folder: Path, pad: int | None = None) -> Tokenizer:
    """The tokenizer in a Diffusers folder's `tokenizer/`: vocab.json with merges.txt, or tokenizer.json.

    Its padding token is the one that the folder's settings name, unless `pad` is given.
    """
    vocabulary, merges, whole = folder / "vocab.json", folder / "merges.txt", folder / "tokenizer.json"
    where = f"{folder.parent.name}/{folder.name}"
    try:
        if vocabulary.is_file() and merges.is_file():
            engine = _from_vocabulary(vocabulary, merges)
        elif whole.is_file():
            engine = _from_file(whole)
        else:
            raise RequestError(f"{where} holds neither vocab.json with merges.txt nor tokenizer.json")
        named = _pad_token(folder)
        token = engine.token_to_id(named) if pad is None and named else pad
        if token is None and named:
            token = engine.token_to_id(f"{named}</w>")
        return Tokenizer(engine, token)
    except RequestError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise RequestError(f"{where} cannot be read as a tokenizer: {one_line(error)[:160]}") from error


@functools.lru_cache(maxsize=4)
def _from_vocabulary(vocabulary: Path, merges: Path) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    model = BPE.from_file(
        str(vocabulary),
        str(merges),
        unk_token=EOS,
        continuing_subword_prefix="",
        end_of_word_suffix="</w>",
        fuse_unk=False,
    )
    engine = Tokenizer(model)
    engine.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    if engine.token_to_id(BOS) is None or engine.token_to_id(EOS) is None:
        raise RequestError(f"{vocabulary.name} is not CLIP's vocabulary")
    engine.add_special_tokens([AddedToken(BOS, normalized=False), AddedToken(EOS, normalized=False)])
    return engine


@functools.lru_cache(maxsize=4)
def _from_file(path: Path) -> Any:
    from tokenizers import Tokenizer

    engine = Tokenizer.from_file(str(path))
    engine.no_truncation()
    engine.no_padding()
    return engine


def _pad_token(folder: Path) -> str | None:
    """The padding token that the settings beside the vocabulary name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            found = read_object(folder / name).get("pad_token")
        except RequestError:
            continue
        if isinstance(found, dict):
            found = found.get("content")
        if isinstance(found, str):
            return found
    return None
