import math
import re
from xml.etree import ElementTree

import pytest

from clearway.measure import plots
from clearway.measure.markup import Markup, tag


def _drawn(markup: Markup) -> ElementTree.Element:
    return ElementTree.fromstring(tag("div", markup))


def _marks(markup: Markup, name: str, kind: str) -> list[dict[str, str]]:
    return [each.attrib for each in _drawn(markup).iter(name) if kind in each.get("class", "").split()]


def _share(text: str) -> float:
    assert text.endswith("%")
    return float(text[:-1]) / 100


def test_bars_are_to_scale_and_every_sample_is_there() -> None:
    drawn = plots.strips([("a", [1.0, 2.0, 3.0], 1.4, 2.0, 2.6), ("b", [4.0], 4.0, 4.0, 4.0)], most=8.0)
    a, b = (_share(bar["width"]) for bar in _marks(drawn, "rect", "bar"))
    assert b / a == pytest.approx(2, rel=1e-3)
    assert len(_marks(drawn, "circle", "dot")) == 4
    (low, *_), widths = (
        [_share(one["x"]) for one in _marks(drawn, "rect", "band")],
        _marks(drawn, "rect", "band"),
    )
    assert low / a == pytest.approx(0.7, rel=1e-3) and _share(widths[0]["width"]) / a == pytest.approx(
        0.6, rel=1e-3
    )


def test_ratios_are_mirrored_about_one() -> None:
    rows = [
        ("half", 0.5, 0.45, 0.55, 0.01, "faster"),
        ("double", 2.0, 1 / 0.55, 1 / 0.45, 0.01, "slower"),
        ("same", 1.0, 0.99, 1.01, 0.02, "no difference"),
    ]
    drawn = plots.forest(rows)
    half, double, same = (_share(one["cx"]) for one in _marks(drawn, "circle", "estimate"))
    assert half + double == pytest.approx(1, abs=1e-4) and same == pytest.approx(0.5, abs=1e-4)
    assert len(_marks(drawn, "circle", "faster")) == len(_marks(drawn, "circle", "slower")) == 1
    assert len(_marks(drawn, "rect", "floor")) == 3


def test_an_interval_without_bound_reaches_the_edges() -> None:
    (line,) = _marks(plots.forest([("a", 0.9, 0.0, None, None, "no difference")]), "line", "interval")
    assert (_share(line["x1"]), _share(line["x2"])) == (0.0, 1.0)


def test_stages_are_to_scale_and_keep_their_colours() -> None:
    drawn = plots.stages(
        [("a", {"text": 10.0, "unet": 80.0, "vae": 10.0}), ("b", {"unet": 40.0, "new": 10.0})]
    )
    widths = [_share(one["width"]) for one in _marks(drawn, "rect", "segment")]
    assert widths == pytest.approx([0.1, 0.8, 0.1, 0.4, 0.1], rel=1e-3)
    kinds = [one["class"].split()[0] for one in _marks(drawn, "rect", "segment")]
    assert kinds == ["c0", "c1", "c2", "c1", "c3"]
    assert [each.text or each[0].tail for each in _drawn(drawn).iter("li")] == ["text", "unet", "vae", "new"]


def test_the_roof_bends_where_both_ceilings_meet() -> None:
    points = [(1, "at the ridge", 200.0, 800.0), (2, "half of it", 2000.0, 400.0), (7, "copy", 0.1, 0.4)]
    drawn = plots.roofline(points, gb_per_s=4000.0, tflop_per_s=800.0)
    slope, flat = _marks(drawn, "line", "roof")
    ridge, below, copy = _marks(drawn, "circle", "point")
    assert slope["x2"] == flat["x1"] == ridge["cx"] and float(ridge["cy"]) == pytest.approx(float(flat["y1"]))
    assert float(below["cy"]) > float(flat["y1"])
    rise = (float(slope["y1"]) - float(slope["y2"])) / (_share(slope["x2"]) - _share(slope["x1"]))
    at = float(slope["y2"]) + rise * (_share(slope["x2"]) - _share(copy["cx"]))
    assert float(copy["cy"]) == pytest.approx(at, abs=0.1)
    assert [each.text for each in _drawn(drawn).iter("text") if "number" in each.get("class", "")] == [
        "1",
        "2",
        "7",
    ]


def test_memory_keeps_its_peak_when_thinned() -> None:
    points = [(float(second), 1e9) for second in range(5000)]
    points[1234] = (1234.0, 6e9)
    drawn = plots.timeline([("a", points), ("b", points[:2])])
    lines = [each.get("points", "").split() for each in _drawn(drawn).iter("polyline")]
    assert len(lines[0]) <= 600
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert min(heights) / 1000 == pytest.approx(1 - 6e9 / (6e9), abs=0.1) and "5.588 GiB" in drawn


@pytest.mark.parametrize("most", [1e-6, 0.04, 0.62, 1.0, 3.2, 59.0, 94.0, 1e6])
def test_ticks_are_few_and_round(most: float) -> None:
    ticks = plots._ticks(most)
    assert 3 <= len(ticks) <= 7 and ticks[0] == 0 and ticks[-1] <= most * (1 + 1e-6)
    assert all(re.fullmatch(r"[\d,]*\.?\d*|\d+e-\d+", plots._tick(tick)) for tick in ticks)


@pytest.mark.parametrize("most", [5e-324, 1e-320, 1e308])
def test_ticks_of_numbers_that_no_clock_gives(most: float) -> None:
    assert plots._ticks(most)[0] == 0 and plots.strips([("a", [most], most, most, most)])
    assert plots.timeline([("a", [(0.0, most), (most, most)])])


def test_nothing_is_wider_than_the_plot_or_not_a_number() -> None:
    drawn = plots.forest([("a", 1e-9, 1e-12, 1e9, math.inf, "faster"), ("b", 1e9, 0.0, None, 0.0, "slower")])
    drawn = Markup(drawn + plots.strips([("z", [0.0], 0.0, 0.0, 0.0)]) + plots.stages([]) + plots.forest([]))
    shares = [_share(each) for each in re.findall(r'(?:x|x1|x2|cx|width)="([^"]*%)"', drawn)]
    assert min(shares) >= 0 and max(shares) <= 1 and "nan" not in drawn and "inf" not in drawn


def test_a_long_label_keeps_both_ends() -> None:
    label = "clearway:executor=cuda_graph,layout=channels_last"
    drawn = plots.strips([(label, [1.0], 1.0, 1.0, 1.0)])
    (text,) = (each for each in _drawn(drawn).iter("text") if each.get("class") == "label")
    assert text.text == "clearway:executor=…t=channels_last" and text[0].text == label
