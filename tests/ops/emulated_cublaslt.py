"""libcublasLt as far as it is used, on this CPU: its descriptors, and products as its header tells."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

SUCCESS, INVALID, NOT_SUPPORTED = 0, 7, 15
_SIZES = {
    "MatmulDesc": {3: 4, 4: 4, 7: 4, 8: 8, 26: 4},
    "MatmulPreference": {1: 8, 3: 4, 5: 4, 6: 4, 7: 4, 8: 4},
}
"""Bytes of the attributes in cublasLt.h."""
_DTYPES = {2: torch.float16, 14: torch.bfloat16}


class Function:
    """One exported function; ctypes' declarations are taken and heeded where they are of use."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *args: Any) -> Any:
        assert len(args) == len(self.argtypes), self.run.__name__
        return self.run(*args)


class Emulated:
    """What ctypes.CDLL gives of the library.

    `found` are the heuristic's answers: (first byte of an algorithm, bytes of workspace, status).
    """

    def __init__(self, found: tuple[tuple[int, int, int], ...] = ((1, 0, 0), (2, 64, 0))) -> None:
        self.found = found
        self.made: list[dict[Any, Any]] = [{}]  # a handle is a place here; 0 is none
        self.asked: list[dict[int, int]] = []
        self.ran: list[dict[str, Any]] = []
        self.status = SUCCESS

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cublasLt"):
            raise AttributeError(name)
        function = Function(getattr(self, f"_{name.removeprefix('cublasLt')}"))
        setattr(self, name, function)
        return function

    def _GetVersion(self) -> int:
        return 130100

    def _GetStatusName(self, status: int) -> bytes:
        return {INVALID: b"CUBLAS_STATUS_INVALID_VALUE", NOT_SUPPORTED: b"CUBLAS_STATUS_NOT_SUPPORTED"}[
            status
        ]

    def _new(self, to: Any, **content: Any) -> int:
        self.made.append(content)
        to._obj.value = len(self.made) - 1
        return SUCCESS

    def _Create(self, to: Any) -> int:
        return self._new(to)

    def _MatmulDescCreate(self, to: Any, compute: int, scale: int) -> int:
        return self._new(to, compute=compute, scale=scale)

    def _MatrixLayoutCreate(self, to: Any, dtype: int, rows: int, columns: int, ld: int) -> int:
        return self._new(to, dtype=dtype, rows=rows, columns=columns, ld=ld)

    def _MatmulPreferenceCreate(self, to: Any) -> int:
        return self._new(to)

    def _MatmulPreferenceDestroy(self, preference: Any) -> int:
        self.made[preference.value]["destroyed"] = True
        return SUCCESS

    def _MatmulDescSetAttribute(self, *args: Any) -> int:
        return self._set("MatmulDesc", *args)

    def _MatmulPreferenceSetAttribute(self, *args: Any) -> int:
        return self._set("MatmulPreference", *args)

    def _set(self, kind: str, described: Any, attribute: int, value: Any, size: int) -> int:
        if _SIZES[kind].get(attribute) != size:
            return INVALID
        self.made[described.value][attribute] = value._obj.value
        return SUCCESS

    def _MatmulAlgoGetHeuristic(self, *args: Any) -> int:
        handle, operation, _, _, _, _, preference, most, results, count = args
        assert handle.value
        self.asked.append(dict(self.made[preference.value]) | {"bias": self.made[operation.value].get(8)})
        if self.status:
            return self.status
        for (first, workspace, status), one in zip(self.found[:most], results, strict=False):
            one.algorithm[0], one.workspace, one.status, one.waves = first, workspace, status, 0.5
        count._obj.value = min(len(self.found), most)
        return SUCCESS

    def _Matmul(self, *args: Any) -> int:
        handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, *rest = args
        algorithm, workspace, workspace_bytes, stream = rest
        assert handle.value and (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        assert c == d and c_layout.value == d_layout.value
        if self.status:
            return self.status
        told, out = self.made[operation.value], self.made[d_layout.value]
        left, right = self._read(a, a_layout), self._read(b, b_layout)
        value = (left.T if told.get(3) else left).double() @ (right.T if told.get(4) else right).double()
        if told.get(7, 1) == 4:
            value += _memory(told[8], _DTYPES[told[26]], out["rows"]).double()[:, None]
        assert value.shape == (out["rows"], out["columns"])
        _memory(d, _DTYPES[out["dtype"]], value.numel()).copy_(value.T.flatten())
        self.ran.append(
            {"algorithm": algorithm[0], "workspace": (workspace, workspace_bytes), "stream": stream, **told}
        )
        return SUCCESS

    def _read(self, address: int, layout: Any) -> Tensor:
        """A matrix of columns `ld` apart."""
        told = self.made[layout.value]
        whole = _memory(address, _DTYPES[told["dtype"]], told["ld"] * told["columns"])
        return whole.view(told["columns"], told["ld"]).T[: told["rows"]]


def _memory(address: int, dtype: torch.dtype, count: int) -> Tensor:
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)
