"""cuBLASLt through ctypes: the choices that it has for a linear layer, and a product by one of them.

PyTorch takes the first choice of cuBLASLt's heuristic; the others are to be had only here. The library is the
one PyTorch has loaded. A linear layer of rows is, in the columns that cuBLASLt counts in, out (N, M) =
weight^T (N, K) x (K, M) with a bias along N. Partial sums are added in float32, never in the dtype of the
output.
Source: cublasLt.h of CUDA 12 and 13 (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearway import device

WORKSPACE_BYTES = 2**25
"""The most a choice may work in, which is what PyTorch gives cuBLASLt on Hopper."""
ALIGNED = 16
"""Bytes that addresses are multiples of: any choice then takes any of them."""
DTYPES = {torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_16F, CUDA_R_16BF
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68  # CUDA_R_32F, CUBLAS_COMPUTE_32F
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _BIAS_DTYPE = 3, 7, 8, 26  # CUBLASLT_MATMUL_DESC_...
_TRANSPOSED, _WITH_BIAS = 1, 4  # CUBLAS_OP_T, CUBLASLT_EPILOGUE_BIAS
_MOST_WORKSPACE, _REDUCTIONS = 1, 3  # CUBLASLT_MATMUL_PREF_...
_ALIGNMENTS = (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES to D
_IN_FLOAT32 = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "Create": (POINTER(c_void_p),),
    "MatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "MatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "MatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64),
    "MatmulPreferenceCreate": (POINTER(c_void_p),),
    "MatmulPreferenceDestroy": (c_void_p,),
    "MatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "MatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, c_void_p, POINTER(c_int)),
    "Matmul": (c_void_p, c_void_p, *[c_void_p] * 12, c_size_t, c_void_p),
}
"""Arguments of what is called; each gives a status."""


class Failed(RuntimeError):
    """cuBLASLt gave an error; the message says which and where."""


class Shape(NamedTuple):
    """A linear layer: x (rows, inputs) and weight (outputs, inputs), both contiguous; CUDA's number of a
    device."""

    device: int
    dtype: torch.dtype
    rows: int
    outputs: int
    inputs: int
    bias: bool


class Choice(NamedTuple):
    """One of cuBLASLt's: its place in the heuristic's order, what it is, and the bytes it works in."""

    number: int
    algorithm: bytes
    workspace: int
    waves: float = 0.0


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Product(NamedTuple):
    """What cuBLASLt knows of a shape; made once, and kept. Whoever sets the bias holds the lock until the
    product is launched."""

    operation: c_void_p
    weight: c_void_p
    x: c_void_p
    out: c_void_p
    lock: threading.Lock


class Library:
    """The functions of libcublasLt that are used, by the names in its header without their prefix."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._loaded = ctypes.CDLL(path)
        self._version = self._loaded.cublasLtGetVersion
        self._version.argtypes, self._version.restype = (), c_size_t
        self._status = self._loaded.cublasLtGetStatusName
        self._status.argtypes, self._status.restype = (c_int,), c_char_p
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._loaded, f"cublasLt{name}")
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function

    def version(self) -> int:
        """130100 for 13.1."""
        return int(self._version())

    def call(self, name: str, *args: Any) -> None:
        """Calls `cublasLt<name>`; Failed where it does not succeed."""
        status = self._functions[name](*args)
        if status:
            said = (self._status(status) or b"an unknown status").decode(errors="replace")
            raise Failed(f"cublasLt{name} gave {said} ({status})")

    def made(self, name: str, *args: Any) -> c_void_p:
        """A handle or descriptor that `cublasLt<name>` makes."""
        handle = c_void_p()
        self.call(name, byref(handle), *args)
        return handle


class CublasLt:
    """cuBLASLt for linear layers; one for the process (`binding`)."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._handles: dict[int, c_void_p] = {}
        self._products: dict[Shape, _Product] = {}
        self._lock = threading.Lock()
        self._one, self._zero = c_float(1.0), c_float(0.0)  # kept: they are read where they lie
        self._pointers = byref(self._one), byref(self._zero)

    def version(self) -> int:
        """The library's."""
        return self.library.version()

    def choices(self, shape: Shape, most: int, aligned: int = ALIGNED) -> list[Choice]:
        """At most so many, in the heuristic's order, for addresses that are multiples of `aligned` bytes;
        none where it has none. Runs nothing on the device."""
        product, call = self._product(shape), self.library.call
        preference = self.library.made("MatmulPreferenceCreate")
        _set(call, "MatmulPreference", preference, _MOST_WORKSPACE, c_uint64(WORKSPACE_BYTES))
        _set(call, "MatmulPreference", preference, _REDUCTIONS, c_uint32(_IN_FLOAT32))
        for alignment in _ALIGNMENTS:
            _set(call, "MatmulPreference", preference, alignment, c_uint32(aligned))
        found, count = (_Found * most)(), c_int()
        with product.lock, torch.cuda.device(shape.device):
            if shape.bias:  # its alignment counts, nothing is read there
                _set(call, "MatmulDesc", product.operation, _BIAS_POINTER, c_uint64(aligned))
            laid_out = product.weight, product.x, product.out, product.out
            handle = self._handle(shape.device)
            try:
                call(
                    "MatmulAlgoGetHeuristic",
                    *(handle, product.operation, *laid_out, preference, most, found, byref(count)),
                )
            except Failed as error:
                if "NOT_SUPPORTED" in str(error):
                    return []
                raise
            finally:
                call("MatmulPreferenceDestroy", preference)
        return [
            Choice(number, bytes(one.algorithm), int(one.workspace), round(float(one.waves), 3))
            for number, one in enumerate(found[: count.value])
            if not one.status
        ]

    def run(self, shape: Shape, choice: Choice, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x weight^T + bias by a choice, (rows, outputs), on the current stream of the tensors' device.

        What it works in is allocated as its output is: a captured graph has it in its own memory. Failed
        where cuBLASLt does not take it.
        """
        if shape.device != torch.cuda.current_device():
            with torch.cuda.device(shape.device):
                return self.run(shape, choice, x, weight, bias)
        product = self._product(shape)
        out = torch.empty((shape.rows, shape.outputs), dtype=shape.dtype, device=x.device)
        room = None
        if choice.workspace:
            room = torch.empty(choice.workspace, dtype=torch.uint8, device=x.device)
        one, zero = self._pointers
        stream = torch.cuda.current_stream().cuda_stream
        with product.lock:
            if bias is not None:
                _set(
                    self.library.call,
                    *("MatmulDesc", product.operation, _BIAS_POINTER, c_uint64(bias.data_ptr())),
                )
            self.library.call(
                "Matmul",
                *(self._handle(shape.device), product.operation),
                *(one, weight.data_ptr(), product.weight, x.data_ptr(), product.x),
                *(zero, out.data_ptr(), product.out, out.data_ptr(), product.out),
                *(choice.algorithm, None if room is None else room.data_ptr(), choice.workspace, stream),
            )
        return out

    def _handle(self, index: int) -> c_void_p:
        """The library's own state on a device, which is the current one."""
        handle = self._handles.get(index)
        if handle is None:
            handle = self._handles.setdefault(index, self.library.made("Create"))
        return handle

    def _product(self, shape: Shape) -> _Product:
        product = self._products.get(shape)
        if product is None:
            with self._lock:
                product = self._products.get(shape)
                if product is None:
                    product = self._products[shape] = self._described(shape)
        return product

    def _described(self, shape: Shape) -> _Product:
        made, call, dtype = self.library.made, self.library.call, DTYPES[shape.dtype]
        operation = made("MatmulDescCreate", _COMPUTE_FLOAT32, _FLOAT32)
        _set(call, "MatmulDesc", operation, _TRANSPOSE_A, c_uint32(_TRANSPOSED))
        if shape.bias:
            _set(call, "MatmulDesc", operation, _EPILOGUE, c_uint32(_WITH_BIAS))
            _set(call, "MatmulDesc", operation, _BIAS_DTYPE, c_uint32(dtype))
        return _Product(
            operation,
            made("MatrixLayoutCreate", dtype, shape.inputs, shape.outputs, shape.inputs),
            made("MatrixLayoutCreate", dtype, shape.inputs, shape.rows, shape.inputs),
            made("MatrixLayoutCreate", dtype, shape.outputs, shape.rows, shape.outputs),
            threading.Lock(),
        )


def _set(call: Any, kind: str, described: c_void_p, attribute: int, value: Any) -> None:
    call(f"{kind}SetAttribute", described, attribute, byref(value), ctypes.sizeof(value))


def absent() -> str | None:
    """Why cuBLASLt cannot be had, or has no device; None where it can."""
    found = _library()
    return found if isinstance(found, str) else device.absent("cuda")


@functools.cache
def binding() -> CublasLt:
    """cuBLASLt; Failed where it is absent."""
    found = _library()
    if isinstance(found, str):
        raise Failed(found)
    return CublasLt(found)


@functools.cache
def _library() -> Library | str:
    """The library, or why there is none."""
    if torch.version.hip is not None:
        return "this PyTorch is built for ROCm, which has no cuBLASLt"
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    name = _name(int(torch.version.cuda.partition(".")[0]))
    failed = "it is neither loaded nor beside PyTorch"
    for path in _places(name):
        try:
            return Library(path)
        except (OSError, AttributeError) as error:
            failed = " ".join(str(error).split())
    return f"{name} cannot be used: {failed}"


def _name(major: int) -> str:
    return f"cublasLt64_{major}.dll" if sys.platform == "win32" else f"libcublasLt.so.{major}"


def _places(name: str) -> Iterator[str]:
    """Where the library may be, the one that PyTorch has loaded first."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            loaded = {line.split(maxsplit=5)[-1].strip() for line in maps if name in line}
        yield from sorted(path for path in loaded if os.path.basename(path).startswith(name))
    except OSError:  # not Linux
        pass
    yield from (str(path) for folder in _folders() for path in folder.glob(name))
    if sys.platform != "win32":
        yield name  # where the loader finds it


def _folders() -> Iterator[Path]:
    """PyTorch's own libraries, and those of NVIDIA's packages that it depends on."""
    yield Path(torch.__file__).parent / "lib"
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in ("cublas/lib", "cu*/lib", "cublas/bin", "cu*/bin"):
            yield from sorted(Path(folder).glob(pattern))
