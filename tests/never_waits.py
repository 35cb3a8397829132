"""On a CUDA device: an error where the host waits for it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def never_waits() -> Iterator[None]:
    """Within it whatever waits for the device raises; PyTorch says once that it may miss some."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
