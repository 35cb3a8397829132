import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clearway.errors import RequestError
from clearway.measure.pictures import GAIN, data_uri, pair, picture_name, pictures


def _saved(path: Path, image: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return path


def _inside(address: str) -> np.ndarray:
    head, _, data = address.partition(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.info == {}
        return np.asarray(image)


@pytest.fixture
def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, (16, 24, 3), dtype=np.uint8)


def test_names_hold_no_path() -> None:
    assert picture_name("sdxl-30", "clearway") == "sdxl-30--clearway.png"
    assert picture_name("../etc", "a/b c\\d") == "..-etc--a-b-c-d.png"


def test_a_pair_has_the_difference_exaggerated(tmp_path: Path, noise: np.ndarray) -> None:
    other = noise.copy()
    other[3:5] += 7
    found = pair("c", _saved(tmp_path / "a.png", noise), _saved(tmp_path / "b.png", other))
    assert found.reference and found.difference and found.found
    assert (_inside(found.picture) == noise).all() and (_inside(found.reference) == other).all()
    assert (_inside(found.difference)[3:5] == 7 * GAIN).all() and found.found["max_error"] == 7
    assert not _inside(found.difference)[5:].any()


def test_texts_in_a_picture_are_not_carried_over(tmp_path: Path, noise: np.ndarray) -> None:
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    texts.add_text("parameters", "a private prompt")
    Image.fromarray(noise).save(tmp_path / "a.png", pnginfo=texts)
    found = pair("c", tmp_path / "a.png", None)
    assert found.reference is None
    assert _inside(found.picture).shape == noise.shape


def test_another_size_has_no_difference(tmp_path: Path, noise: np.ndarray) -> None:
    found = pair("c", _saved(tmp_path / "a.png", noise), _saved(tmp_path / "b.png", noise[:8]))
    assert found.reference and found.difference is None


def test_folders_one_a_machine_are_read(tmp_path: Path, noise: np.ndarray) -> None:
    _saved(tmp_path / "s--c.png", noise)
    _saved(tmp_path / "apple-m1" / "s--c.png", noise)
    assert set(pictures(tmp_path)) == {"s--c.png", "apple-m1/s--c.png"}
    with pytest.raises(RequestError, match="no such folder"):
        pictures(tmp_path / "none")


def test_what_is_no_picture_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("not a picture")
    with pytest.raises(RequestError, match="cannot be read as a picture"):
        pair("c", tmp_path / "a.png", None)


def test_a_picture_too_large_to_open_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(RequestError, match="decompression bomb"):
        pair("c", tmp_path / "a.png", None)


def test_an_address_holds_the_pixels(noise: np.ndarray) -> None:
    assert (_inside(data_uri(noise)) == noise).all()
