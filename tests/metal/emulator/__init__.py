"""Metal Shading Language kernels, emulated: compiled as C++ and executed on the CPU with Metal's semantics.

    lib = compile_shader(source)                  # in order
    lib = compile_shader(source, seed=3)          # threadgroups, simdgroups and lanes shuffled
    lib = compile_shader(source, checked=True)    # every load and store followed
    report = lib.kernel(x, out, [64, 77], 0.5, threads=[256, 8], group_size=[256, 1])

It shows indexing, masks, barriers, races, bounds, layouts, numerics to a tolerance, and traffic. It cannot
show that Apple's compiler takes the source, nor speed, registers, last bits or fast-math behaviour.

Environment: CLEARWAY_EMULATOR_CXX names the compiler, CLEARWAY_EMULATOR_CACHE a folder that keeps what was
compiled between runs. Not covered: textures, samplers, tile functions, lists of tensors, Metal 4's tensors,
asynchronous copies, rare swizzles; simdgroups have 32 lanes, a threadgroup up to 1024 threads and 32 KiB.

1. The preprocessor, then a token pass (transform.py): kernels and where their arguments come from,
   threadgroup variables, literals.
2. The host's compiler, against cpp/msl.h (the stand-in for <metal_stdlib>), one shared object a kernel.
3. cpp/runtime.cpp: a fibre a thread, barriers and simdgroup functions as rendezvous of 32 lanes.
4. Checked mode compiles with -fsanitize=thread and =bounds, whose call-outs are ours (cpp/checker.h).
"""

from .build import absent
from .library import EmulatedKernel, Library, compile_shader
from .lint import lint
from .report import EmulatorError, Fault, Report, Traffic

__all__ = [
    "EmulatedKernel",
    "EmulatorError",
    "Fault",
    "Library",
    "Report",
    "Traffic",
    "absent",
    "compile_shader",
    "lint",
]
