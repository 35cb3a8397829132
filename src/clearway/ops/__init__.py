"""What runs the arithmetic: one op a file, found by listing; see contract.py."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearway.ops.contract import Op

_MACHINERY = ("contract", "state", "selftest", "budget", "workarounds", "ahead", "verdicts", "other_sizes")
_SOURCES = ("_triton", "_cuda", "_torch", "_streaming")  # what parts of an op beside its file end with


def discover() -> dict[str, Op]:
    """Imports every op file of this folder and gives the ops of this package by name."""
    from clearway.ops.contract import OPS

    for module in pkgutil.iter_modules(__path__):
        name = module.name
        if name not in _MACHINERY and not name.startswith("_") and not name.endswith(_SOURCES):
            importlib.import_module(f"{__name__}.{name}")
    return {name: made for name, made in sorted(OPS.items()) if made.module.startswith(__name__)}
