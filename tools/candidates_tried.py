"""What was tried to make the UNets faster and what came of it: the rows of docs/candidates.md.

Figures are named by part, case and candidate, as lines of bench/results/ have them, never written here.
"""

from __future__ import annotations

from candidates_form import CALLS, KERNELS, WHOLE, Entry, Figure, calls, cases, many, replays, tiles

ROWS_132, ROWS_264 = "rows, 132 chunks an image", "rows, 264 chunks an image"
ONE_KERNEL = "one kernel by TMA (128, 128, 64), 8 warps, 3 stages"
BEST = "cuBLASLt, the best of its choices"
PASS = "one pass (8 pixels, 256 channels, 4 warps)"
CONVOLUTION = "cudnn.benchmark off"
GATED = ("2048x5120x1280", "8192x2560x640", "8192x1280x320", "2048x2560x640", "512x5120x1280")

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
        "3×3 convolutions in tiles of 320 or 160 channels, in Gluon for Hopper",
        "kept",
        CALLS,
        "Channels are multiples of 320: a tile of all of them reads each pixel once, and powers of two leave "
        "a part empty. Small images' sums are cut into shares. Where a plan would leave much of the device "
        "idle, as at the last shape, PyTorch's runs; the estimate does not see the one before it.",
        (
            *many("convolutions of PyTorch", "convolutions in Gluon"),
            *cases(
                "convolution", "conv2d", "gluon", "2x320->320@128x128", "2x640->640@64x64",
                "2x1280->1280@32x32", "2x640->640@32x32", "2x1280->1280@8x8", "2x640->1280@16x16",
            ),
            *cases("convolution", "conv2d", "gluon, not preferred", "2x1280->1280@24x42"),
        ),
    ),
    Entry(
        "GEGLU inside its matrix product, in Gluon for Hopper",
        "kept",
        CALLS,
        "A warp of its own fetches, so the product loses little and a pass over the widest tensor is saved. "
        "Few rows leave multiprocessors idle: SD 1.5's call is with all of its layers so; since then "
        "PyTorch's product stays at its smaller images.",
        (
            *many("convolutions in Gluon", "convolutions and GEGLU in Gluon"),
            *cases("geglu_linear", "linear, then geglu", "gluon", *GATED),
        ),
    ),
    Entry(
        "Both of GEGLU's halves by one product of a warpgroup in place of two",
        "kept",
        KERNELS,
        "Fewer, wider instructions; the same sums.",
        cases("geglu_linear", "gluon, two products of a warpgroup", "gluon", *GATED),
    ),
    Entry(
        "GEGLU's bias fetched before the product, a quicker reciprocal, and 16 tiles of rows side by side",
        "kept",
        KERNELS,
        "Nothing waits for the bias at a tile's end any more, and large batches find rows and weights in the "
        "cache: as quick as the product alone.",
        (
            *cases(
                "geglu_linear early", "gluon, bias fetched late", "gluon, bias fetched early",
                *GATED[:4], "16384x5120x1280", "65536x2560x640",
            ),
            Figure(
                "SDXL's call at the power limit, all of that day", "unet at the power limit", "sdxl 128x128",
                "all that was kept before", ("all that is kept",),
            ),
        ),
    ),
    Entry(
        "Upsamplers' four phases in one launch that writes each where it belongs, in Gluon for Hopper",
        "kept",
        KERNELS,
        "No pass that interleaves them afterwards. At the last shape Triton's way stays, by the estimate.",
        cases(
            "upsampler", "triton", "gluon",
            "2x1280@8x8", "2x640@32x32", "2x1280@32x32", "2x640@64x64", "2x1280@24x42",
        ),
    ),
    Entry(
        "Upsamplers' phases, sums of weights, made once for a graph and not at each call",
        "kept",
        KERNELS,
        "They change only with the weight, which a graph is checked for anyway.",
        cases("upsampler", "gluon, phases made anew", "gluon", "2x1280@8x8", "2x1280@32x32", "2x640@64x64"),
    ),
    Entry(
        "cuBLASLt's other choices, each tried once on a machine",
        "level",
        CALLS,
        "SD 1.5 gains little, SDXL, whose two figures are of two programs, nothing; trials lengthen the "
        "first picture at a size. There by name (`linear/cublaslt`). Products alone, in an earlier run "
        "and by their number, let {products:.2f} ms of SDXL's {replay:.1f} be expected.",
        (
            *(
                Figure(
                    f"first picture of SDXL, {one}", "first picture", f"sdxl {one}, over a warm one",
                    "linear layers of PyTorch", ("cuBLASLt's other choices",),
                )
                for one in ("1216x832", "832x1216")
            ),
            Figure(
                "SD 1.5", "unet calls", "sd15 64x64",
                "linear layers of PyTorch", ("linear layers by cuBLASLt's choices",), (13, 13),
            ),
            Figure(
                "SDXL, with upsamplers in Gluon too", "unet calls", "sdxl 128x128",
                "convolutions and GEGLU in Gluon", ("linear layers by cuBLASLt's choices",), (8, 13),
            ),
            *cases(
                "linear", "linear", "the trial's choice",
                "8192x320x1280 bias", "8192x320x320 bias", "2048x5120x640 bias", "8192x1920x640",
                "2048x1280x1280",
            ),
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
        "Memset nodes of captured graphs as kernel nodes",
        "level",
        CALLS,
        "The gain does not pay for graphs that are edited after their capture; taken out again.",
        (Figure("SD 1.5", "unet replay", "sd15 64x64", "memset nodes", ("kernel nodes",)),),
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
        "Convolutions of small images with their sum cut among programs, in Triton",
        "lost",
        KERNELS,
        "At 8×8 quicker than cuDNN's or level, at 16×16 much slower; Gluon's tiles, cut so too, are quicker.",
        (
            *cases(
                "convolution, sum cut", "conv2d", "split_k",
                "2x1280->1280@8x8", "2x2560->1280@8x8", "2x640->1280@16x16", "2x1280->1280@16x16",
            ),
            Figure(
                "to Gluon, 2x1280->1280@8x8", "convolution, sum cut", "2x1280->1280@8x8",
                "split_k", ("gluon",),
            ),
        ),
    ),
    Entry(
        "Convolutions in tiles of 64×320 and 128×160 in Triton, by TMA",
        "lost",
        KERNELS,
        "In Triton they gain little where pixels are many and lose elsewhere; in Gluon they gain at each.",
        (
            *cases(
                "convolution tiles", "cuDNN", "Triton by TMA, tiles of 64x320",
                "2x320->320@128", "2x640->640@64", "2x1280->1280@32",
            ),
            *tiles("128×160", "Triton by TMA, tiles of 128x160", "2x320->320@128", "2x640->640@64"),
            *tiles(
                "64×320 in Gluon", "Gluon, tiles of 64x320",
                "2x320->320@128", "2x640->640@64", "2x1280->1280@32",
            ),
        ),
    ),
    Entry(
        "Linear layers in Gluon's tiles of 320",
        "lost",
        CALLS,
        "Lost at every shape of SDXL; won at two of SD 1.5's, where cuBLASLt's other choices are no worse.",
        (
            Figure(
                "SDXL", "unet calls", "sdxl 128x128",
                "linear layers of PyTorch", ("linear layers in Gluon",), (12, 12),
            ),
            Figure(
                "SD 1.5, with cuBLASLt's choices where they are not preferred", "unet calls", "sd15 64x64",
                "linear layers of PyTorch", ("linear layers in Gluon",), (12, 12),
            ),
            *cases(
                "linear", "linear", "gluon",
                "2048x1280x1280 bias", "2048x3840x1280", "8192x1920x640", "8192x320x320 bias",
                "8192x320x1280 bias",
            ),
        ),
    ),
    Entry(
        "GEGLU's halves in tiles of 160, in Gluon",
        "lost",
        KERNELS,
        "Whole turns of all multiprocessors, but room for three stages only: slower at SDXL's "
        "shapes, quicker at few rows, for which alone they were not kept.",
        cases("geglu_linear", "gluon", "gluon, tiles of 160", *GATED),
    ),
    Entry(
        "Brownian paths (DPM++ SDE) on a stream of their own",
        "kept",
        WHOLE,
        "A step's hundred small kernels no longer stand between two calls of the UNet.",
        (
            Figure(
                "between UNet calls", "between UNet calls", "sd15 64x64, all 8 of a generation",
                "paths in the stream of the UNet", ("paths on a stream of their own",),
            ),
            Figure(
                "whole", "whole generation", "sd15 64x64, DPM++ SDE, 5 steps",
                "paths in the stream of the UNet", ("paths on a stream of their own",),
            ),
        ),
    ),
    Entry(
        "A new prompt's keys and values, 32 small products, as a graph of their own",
        "level",
        WHOLE,
        "What the device waits for there is other work of the host's; taken out again.",
        (
            Figure(
                "from the text encoder to the first UNet call", "text to the first UNet call", "sd15 64x64",
                "keys and values one by one", ("keys and values by a graph",),
            ),
        ),
    ),
    Entry(
        "bfloat16 in place of float16",
        "not built",
        CALLS,
        "At the power limit its products take less energy, so less time. The dtype is the user's choice: it "
        "rounds eight times as coarsely.",
        cases("unet at the power limit", "float16", "bfloat16", "sdxl 128x128", "sdxl 128x128, 16 rows"),
    ),
    Entry(
        "The step, or the whole loop, as one graph",
        "not built",
        WHOLE,
        "What lies between the UNet's calls, guidance and sampler, is all that it could save: the second "
        "figure of this generation, of which the first is the whole.",
        (
            Figure(
                "whole, then between", "whole generation", "sd15 64x64, DPM++ SDE, 5 steps",
                "paths on a stream of their own", ("between the UNet's calls",),
            ),
        ),
    ),
    Entry(
        "Attention over many keys in Gluon: two warpgroups, products ahead of softmax",
        "lost",
        KERNELS,
        "Within an eighth of cuDNN's kernel or of our tiles, and ahead only at 4032 keys.",
        (
            *cases("attention gluon", "tiled", "gluon", "2x20x1024x1024x64", "2x20x1008x1008x64"),
            *cases(
                "attention gluon", "cudnn", "gluon",
                "2x10x4096x4096x64", "2x8x4096x4096x40", "2x10x4032x4032x64",
            ),
        ),
    ),
    Entry(
        "A prompt's keys and values by one grouped product in place of one product a layer",
        "kept",
        CALLS,
        "The host took longer to launch them than the device to compute; at 16 rows cuBLAS's own are the "
        "quicker ones, by less than launching them takes.",
        (
            *cases(
                "keys and values of a prompt", "one by one", "grouped (64, 128, 64), 4 warps",
                "SDXL, 140 products", "SD 1.5, 32 products", "SDXL, 16 rows",
            ),
            *(
                Figure(
                    f"first call of a prompt, {label}", "first UNet call of a prompt", case,
                    "keys and values one by one", ("keys and values by one product",),
                )
                for label, case in (("SDXL", "sdxl 128x128"), ("SD 1.5", "sd15 64x64"))
            ),
        ),
    ),
    Entry(
        "Attention's softmax: products scaled where the maximum is subtracted",
        "kept",
        KERNELS,
        "One instruction an element less.",
        cases("attention forms", "(64, 64, 4, 3)", "(64, 64, 4, 3), scaled late", "2x20x1024x1024x64"),
    ),
    Entry(
        "Attention's softmax: powers of two in half precision",
        "lost",
        KERNELS,
        "Two at a time are no quicker than one in single precision, and half again as far off.",
        cases(
            "attention forms", "(64, 64, 4, 3), scaled late", "(64, 64, 4, 3), powers in half precision",
            "2x20x1024x1024x64", "2x10x4096x4096x64",
        ),
    ),
    Entry(
        "Attention in CUDA C++ (NVRTC): up to five warpgroups that share keys and values",
        "lost",
        KERNELS,
        "Five warpgroups of 64 queries fill all multiprocessors at 1024 keys, but products and powers hardly "
        "overlap: each tile took about as long as its parts one after the other.",
        (
            *cases(
                "attention in CUDA C++", "cudnn", "CUDA C++, 5 warpgroups",
                "2x20x1008x1008x64", "2x10x4096x4096x64",
            ),
            *cases(
                "attention in CUDA C++", "cudnn", "CUDA C++, 4 warpgroups and one that fetches",
                "2x10x4096x4096x64", "16x20x1024x1024x64",
            ),
        ),
    ),
    Entry(
        "GEGLU and convolutions in CUDA C++ (NVRTC), weights sent to two multiprocessors at once (multicast)",
        "level",
        KERNELS,
        "Gluon's kernels are as quick once their loads come early, and half the traffic from the cache saves "
        "neither time nor, at the power limit, energy: no third language.",
        (
            *cases("geglu_linear early", "gluon, bias fetched early", "CUDA C++", *GATED[:3]),
            *cases(
                "geglu_linear multicast", "CUDA C++", "CUDA C++, weights by multicast",
                "2048x5120x1280", "16384x5120x1280",
            ),
            *cases(
                "convolution in CUDA C++", "gluon", "CUDA C++, tiles of 128x320",
                "2x320->320@128", "2x640->640@64",
            ),
            *cases(
                "convolution in CUDA C++", "CUDA C++, tiles of 128x320",
                "CUDA C++, tiles of 128x320, weights by multicast", "2x320->320@128", "16x640->640@64",
            ),
        ),
    ),
    Entry(
        "A partition of its own for each of GEGLU's warpgroups, so that one multiplies while one gates",
        "lost",
        KERNELS,
        "They come apart too little; at 65,536 rows level.",
        cases(
            "geglu_linear early", "gluon, bias fetched early", "gluon, a partition a warpgroup",
            *GATED[:2], "65536x2560x640",
        ),
    ),
    Entry(
        "Convolutions' tiles of other heights and widths",
        "level",
        KERNELS,
        "So sizes of pictures share the tile of 8×16, and the kernel built for it.",
        (
            *cases("convolution tile shapes", "1x128", "8x16", "2x320->320@128x128"),
            *cases("convolution tile shapes", "2x64", "8x16", "2x640->640@64x64", "16x640->640@64x64"),
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
