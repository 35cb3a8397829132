"""What was tried to make the UNets faster and what came of it: the rows of docs/candidates.md.

Figures are named by part, case and candidate, as lines of bench/results/ have them, never written here.
"""

from __future__ import annotations

from dataclasses import dataclass

VERDICTS = ("kept", "level", "lost", "not built")
KERNELS, CALLS, WHOLE = "kernels alone", "UNet calls", "whole generations"


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured before and after: a case of a part, and two candidates of it. Several candidates
    after are added up."""

    label: str
    part: str
    case: str
    before: str
    after: tuple[str, ...]
    runs: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that was tried."""

    what: str
    verdict: str
    decided: str
    why: str
    figures: tuple[Figure, ...]


def replays(before: str, *after: str, runs: tuple[int, int] | None = None) -> tuple[Figure, Figure]:
    """Both UNets' captured calls."""
    return (
        Figure("SDXL", "unet replay", "sdxl 128x128", before, after, runs),
        Figure("SD 1.5", "unet replay", "sd15 64x64", before, after, runs),
    )


def calls(after: str) -> tuple[Figure, Figure]:
    """Both UNets' calls with all that surrounds a replay."""
    return (
        Figure("SDXL", "unet call", "sdxl 128x128", "unpacked", (after,)),
        Figure("SD 1.5", "unet call", "sd15 64x64", "unpacked", (after,)),
    )


def cases(part: str, before: str, after: str | tuple[str, ...], *named: str) -> tuple[Figure, ...]:
    """The same two candidates at several cases."""
    several = (after,) if isinstance(after, str) else after
    return tuple(Figure(name, part, name, before, several) for name in named)


ROWS_132, ROWS_264 = "rows, 132 chunks an image", "rows, 264 chunks an image"
ONE_KERNEL = "one kernel by TMA (128, 128, 64), 8 warps, 3 stages"
BEST = "cuBLASLt, the best of its choices"
PASS = "one pass (8 pixels, 256 channels, 4 warps)"
CONVOLUTION = "cudnn.benchmark off"

ENTRIES = (
    Entry(
        "Packed QKV: one projection of three in self-attention",
        "kept",
        CALLS,
        "One product of three times the columns fills the device better and reads its input once.",
        replays("unpacked", "packed QKV"),
    ),
    Entry(
        "Attention in our tiles, up to 128 keys",
        "kept",
        KERNELS,
        "A prompt's 77 keys are one tile: no running maximum, and no fills launched before it.",
        cases(
            "attention", "sdpa", "tiled (64, 128, 4, 1)",
            "2x20x1024x77x64", "2x10x4096x77x64", "2x8x4096x77x40", "2x8x1024x77x80", "2x8x64x77x160",
        ),
    ),
    Entry(
        "Attention in our tiles, 1024 keys in heads of 64 and 256 in heads of 160",
        "kept",
        KERNELS,
        "About level alone; cuDNN's kernel has fills launched before it, ours none.",
        cases("attention", "sdpa", "tiled (64, 64, 4, 3)", "2x20x1024x1024x64", "2x8x256x256x160"),
    ),
    Entry(
        "GroupNorm+SiLU over whole rows, two launches in place of three",
        "kept",
        KERNELS,
        "Statistics are merged by whoever reads them; at 16² a program a group is as quick and stays.",
        (
            *cases("group_norm", "without rows", ROWS_132, "2x320@128", "2x960@128", "2x640@32"),
            *cases("group_norm", "without rows", ROWS_264, "1x256@512"),
            *cases("group_norm", "without rows", ROWS_132, "2x1280@16"),
        ),
    ),
    Entry(
        "GELU by a polynomial and one power in place of erf, fp16 and bf16",
        "kept",
        KERNELS,
        "A third of the instructions, exact to 1e-7; the product before it is counted in both figures.",
        cases(
            "geglu", "linear, then geglu by erf", "linear, then geglu",
            "2048x5120x1280", "8192x2560x640", "8192x1280x320",
        ),
    ),
    Entry(
        "Skip concatenation in one pass",
        "kept",
        KERNELS,
        "torch.cat copies channels-last images piece by piece, far below the memory's rate.",
        cases("skip_concat", "torch.cat", PASS, "2x1280+1280@32", "2x1280+640@64", "2x640+320@128"),
    ),
    Entry(
        "LayerNorm, two rows a program, a warp each",
        "kept",
        KERNELS,
        "Fewer warps wait for each other's sums.",
        cases("layer_norm", "1 rows, 4 warps", "2 rows, 2 warps", "2048x1280"),
    ),
    Entry(
        "All kernels kept above, with time embeddings as one product and additions inside the next norm",
        "kept",
        CALLS,
        "What they give together: SD 1.5 with three products, SDXL packed, in two runs of one day.",
        (
            Figure("SDXL", "unet replay", "sdxl 128x128", "packed QKV", ("packed QKV",), (2, 5)),
            Figure("SD 1.5", "unet replay", "sd15 64x64", "unpacked", ("unpacked",), (2, 5)),
        ),
    ),
    Entry(
        "LayerNorm's row in five exact pieces, so that no lane idles",
        "level",
        KERNELS,
        "Two padded rows a program are as quick, and take any width.",
        cases("layer_norm", "2 rows, 2 warps", "1 rows, 1 warps, five pieces", "2048x1280"),
    ),
    Entry(
        "Programmatic dependent launch of our kernels",
        "level",
        CALLS,
        "Gaps before our kernels were {gaps:.3f} ms of SDXL's call; the others are cuBLAS's and cuDNN's.",
        replays("unpacked", "programmatic dependent launch"),
    ),
    Entry(
        "`preferred_blas_library(\"cublaslt\")`",
        "level",
        CALLS,
        "One UNet gains what the other loses.",
        calls("cuBLASLt preferred"),
    ),
    Entry(
        "`cudnn.benchmark`: convolutions chosen by trial",
        "level",
        CALLS,
        "No convolution of {convolutions} gained more than {convolution:.1f} %: cuDNN's own choice is good.",
        (
            *calls("cudnn.benchmark"),
            *cases("convolution", CONVOLUTION, "cudnn.benchmark on", "2x1280->1280@32 k3 s1"),
        ),
    ),
    Entry(
        "Guidance's two halves as parallel branches of one graph",
        "lost",
        CALLS,
        "They contend for the same multiprocessors, and each reads all weights; one batch reads them once.",
        replays("unpacked", "two branches, unpacked"),
    ),
    Entry(
        "GEGLU inside its matrix product, in Triton by TMA",
        "lost",
        KERNELS,
        "The product loses what the saved pass gives, but at K = 320: {geglu:.2f} ms of SD 1.5's call.",
        cases(
            "geglu", "linear, then geglu", ONE_KERNEL,
            "2048x5120x1280", "8192x2560x640", "8192x1280x320", "2048x2560x640", "512x5120x1280",
        ),
    ),
    Entry(
        "Attention in our tiles, 4096 keys; 1024 keys in heads of 80",
        "lost",
        KERNELS,
        "cuDNN's kernel for Hopper is the quicker one wherever the keys are many.",
        (
            *cases("attention", "sdpa", "tiled (128, 64, 8, 3)", "2x10x4096x4096x64", "2x8x4096x4096x40"),
            *cases("attention", "sdpa", "tiled (64, 64, 4, 3)", "2x8x1024x1024x80"),
        ),
    ),
    Entry(
        "Convolutions of 8×8 images as products of copied windows (im2col)",
        "lost",
        KERNELS,
        "The product is quicker than the convolution, but not with PyTorch's copy of the windows before it.",
        cases(
            "convolution", CONVOLUTION, ("im2col's columns", "im2col's product"),
            "2x1280->1280@8 k3 s1", "2x2560->1280@8 k3 s1",
        ),
    ),
    Entry(
        "cuBLASLt's other algorithms, each tried",
        "not built",
        KERNELS,
        "Nothing to gain in most products. By their number {products:.2f} ms of SDXL's {replay:.1f}, for an "
        "interface of our own to a C library and a trial at each new size.",
        (
            *cases("product", "linear", BEST, "2048x1280x1280", "8192x1920x640", "8192x320x320"),
            *cases("product", "linear", BEST, "2048x10240x1280 bias"),
        ),
    ),
    Entry(
        "Residual added by the product (cuBLASLt's epilogue)",
        "not built",
        KERNELS,
        "The next LayerNorm adds it while it reads the row anyway.",
        cases(
            "product", "linear, then residual", "cuBLASLt with residual, the best of its choices",
            "2048x1280x1280 bias", "2048x1280x5120 bias",
        ),
    ),
)  # fmt: skip
