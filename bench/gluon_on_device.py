"""The kernels in Gluon at the SD UNets' shapes, beside what runs without them.

    python bench/gluon_on_device.py --output bench/results/<machine>/gluon.jsonl

Parts: GEGLU in its product; 3x3 convolutions, in every cut that fills the device about once or twice;
upsamplers. fp16, random data, several sets of inputs and weights in turns, so that they are read from memory;
calls are captured in one graph and its replays timed, contenders taking turns. Errors are relative, in the
2-norm, against float64. One JSON line a contender, after one on the machine. With `--device cpu --small`
what needs no Hopper runs, on tiny shapes.
"""

from __future__ import annotations

from typing import Any

from candidates_timed import SETS, Calls, compare, drawn, opened, options, over
from ops_on_device import Run
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _gluon, convolution_gluon, geglu_linear, upsample_conv
from clearway.ops.convolution_gluon import SPLITS, TILES, Plan
from clearway.ops.geglu import geglu

CONVOLUTIONS = ((2, 320, 320, 128, 128), (2, 640, 320, 128, 128), (2, 960, 320, 128, 128),
                (2, 320, 640, 64, 64), (2, 640, 640, 64, 64), (2, 1280, 640, 64, 64), (2, 1920, 640, 64, 64),
                (2, 640, 1280, 32, 32), (2, 1280, 1280, 32, 32), (2, 2560, 1280, 32, 32),
                (2, 320, 320, 64, 64), (2, 640, 640, 32, 32), (2, 1920, 640, 32, 32),
                (2, 640, 1280, 16, 16), (2, 1280, 1280, 16, 16), (2, 2560, 1280, 16, 16),
                (2, 1280, 1280, 8, 8), (2, 2560, 1280, 8, 8), (2, 320, 320, 96, 168), (2, 1280, 1280, 24, 42),
                (2, 320, 320, 48, 80), (2, 1280, 1280, 12, 20), (8, 1280, 1280, 8, 8))  # fmt: skip
"""Images, channels, output channels, height, width."""
UPSAMPLERS = ((2, 1280, 8, 8), (2, 1280, 16, 16), (2, 640, 32, 32), (2, 1280, 32, 32), (2, 640, 64, 64),
              (2, 1280, 24, 42))  # fmt: skip
GATED = ((2048, 1280), (8192, 640), (8192, 320), (2048, 640), (1024, 1280), (512, 1280), (2016, 1280))
"""Rows, width."""


def sets(run: Run, elements: int) -> int:
    """Fewer where one is larger than any cache."""
    return 2 if run.small or elements > 4e7 else SETS


def plans(x: Tensor, outputs: int) -> dict[str, Plan]:
    """Cuts of a 3x3 convolution that fill the device at least a third of once and at most twice."""
    there = _gluon.processors(x.get_device())
    batch, channels, height, width = x.shape
    found = {}
    for tile in TILES:
        columns = tile.first + tile.second
        if outputs % columns:
            continue
        sides = convolution_gluon._sides(tile.rows)
        high, wide = min(sides, key=lambda s: -(-height // s[0]) * -(-width // s[1]))
        tiles = batch * -(-height // high) * -(-width // wide) * (outputs // columns)
        for split in SPLITS:
            if there // 3 <= tiles * split <= 2 * there and 9 * channels // 64 // split >= 8:
                found[f"{tile.rows}x{columns} in {split}"] = Plan(tile, high, wide, split, 0.0)
    return found


def convolutions(run: Run) -> None:
    """cuDNN's convolution, ours as planned, and ours in other cuts."""
    for batch, channels, outputs, height, width in ((1, 64, 160, 8, 8),) if run.small else CONVOLUTIONS:
        if run.late():
            return
        count = sets(run, batch * channels * height * width)
        xs = [drawn(run, batch, channels, height, width) for _ in range(count)]
        weights = [drawn(run, outputs, channels, 3, 3, fan=9 * channels) for _ in range(count)]
        calls: dict[str, Calls] = {"conv2d": over(lambda x, w: F.conv2d(x, w, padding=1), xs, weights)}
        if _gluon.absent() is None:
            preferred = convolution_gluon.prefer(xs[0], weights[0])
            calls["gluon" if preferred else "gluon, not preferred"] = over(convolution_gluon.run, xs, weights)
            for name, cut in plans(xs[0], outputs).items():
                calls[name] = over(lambda x, w, c=cut: convolution_gluon.cut_so(x, w, None, c), xs, weights)
        want = F.conv2d(xs[0].double(), weights[0].double(), padding=1)
        compare(run, "convolution", f"{batch}x{channels}->{outputs}@{height}x{width}", calls, want)


def upsamplers(run: Run) -> None:
    """cuDNN's convolution of phases and a pass after it, against tiles written where they belong."""
    for batch, channels, height, width in ((1, 160, 4, 4),) if run.small else UPSAMPLERS:
        if run.late():
            return
        count = sets(run, 4 * batch * channels * height * width)
        xs = [drawn(run, batch, channels, height, width) for _ in range(count)]
        weights = [drawn(run, channels, channels, 3, 3, fan=9 * channels) for _ in range(count)]
        bias = drawn(run, channels)
        made = [upsample_conv.made_phases(weight) for weight in weights]
        ways: dict[str, Any] = {"phases": upsample_conv._phases_run}
        if run.kind == "cuda":
            ways = {"triton": upsample_conv._triton_run}
        if _gluon.absent() is None:
            ways["gluon"] = upsample_conv._gluon_run
        calls = {
            name: over(lambda x, w, p, one=way, c=bias: one(x, w, c, p), xs, weights, made)
            for name, way in ways.items()
        }
        calls |= {
            f"{name}, phases made anew": over(lambda x, w, one=way, c=bias: one(x, w, c, None), xs, weights)
            for name, way in ways.items()
        }
        large = F.interpolate(xs[0].double(), scale_factor=2.0)
        want = F.conv2d(large, weights[0].double(), bias.double(), padding=1)
        compare(run, "upsampler", f"{batch}x{channels}@{height}x{width}", calls, want)


def gated(run: Run) -> None:
    """A product by PyTorch and GEGLU after it, against both in one."""
    for rows, width in ((16, 64),) if run.small else GATED:
        if run.late():
            return
        count, outputs = sets(run, rows * width), 2 * width if run.small else 4 * width
        xs = [drawn(run, rows, width) for _ in range(count)]
        weights = [drawn(run, 2 * outputs, width, fan=width) for _ in range(count)]
        bias = drawn(run, 2 * outputs)
        calls: dict[str, Calls] = {
            "linear alone": over(lambda x, w, c=bias: F.linear(x, w, c), xs, weights),
            "linear, then geglu": over(lambda x, w, c=bias: geglu(F.linear(x, w, c)), xs, weights),
        }
        if _gluon.absent() is None:
            calls["gluon"] = over(lambda x, w, c=bias: geglu_linear._gluon_run(x, w, c), xs, weights)
        a, b = F.linear(xs[0].double(), weights[0].double(), bias.double()).chunk(2, -1)
        compare(run, "geglu_linear", f"{rows}x{outputs}x{width}", calls, a * F.gelu(b))


PARTS = {"geglu_linear": gated, "convolution": convolutions, "upsampler": upsamplers}


def main() -> None:
    """Part by part; one that fails says so in a line, and the next one follows."""
    parser = options(__doc__.splitlines()[0], "tiny shapes, to see that it runs", rounds=9)
    parser.add_argument("--limit-s", type=float, default=60.0, help="start no further case after this")
    given, source = parser.parse_args(), "bench/gluon_on_device.py"
    with opened(given, "gluon", source, gluon=_gluon.absent() or "") as run:
        for name, part in PARTS.items():
            try:
                part(run)
            except Exception as error:  # the other parts' figures are worth having
                run.write(part=name, failed=f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
