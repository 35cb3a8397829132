"""The products of the UNets' transformers by each choice of cuBLASLt's heuristic, beside PyTorch's own.

    python bench/products_on_device.py --output bench/results/<machine>/products.jsonl

Each contender's calls, over sets of inputs that together are more than the cache holds, are captured in one
graph and its replays timed between two events, contenders taking turns; fp16, random data. The first line
says where the figures come from, then one JSON line a product, written at once: microseconds of a call
(median) by contender, "linear" being F.linear and numbers the heuristic's order; the memset nodes that a call
has in its graph; how far results are from float64's, as a ratio of norms, beside F.linear's; then what the op
would choose by its own trial, the times that it finds, and how long that takes. With `--device cpu --small`
two small products run, by F.linear alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from candidate_kernels import PRODUCTS
from candidates_timed import chained, drawn, in_turns, opened, options
from ops_on_device import Call, Run
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _cublaslt, _linear_choices, _linear_trial

LINEAR = "linear"
MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
SMALL = ((16, 32, 24, True), (8, 16, 32, False))
MOST = 16
WIDE = 256
"""Bytes of alignment that the heuristic takes for granted where it is told nothing."""
CHECKED_ROWS = 256
"""Rows of a result that are compared with float64's."""

Calls = Sequence[Call]


def used() -> list[tuple[int, int, int, bool]]:
    """(rows, outputs, inputs, whether there is a bias) as the UNets have them: packed projections of
    self-attention and cross-attention's queries have none, all others one."""
    found = []
    for rows, outputs, inputs in PRODUCTS:
        if outputs in (inputs, 3 * inputs):
            found.append((rows, outputs, inputs, False))
        if outputs != 3 * inputs:
            found.append((rows, outputs, inputs, True))
    return found


def measure(run: Run, rows: int, outputs: int, inputs: int, biased: bool) -> None:
    """One product by all contenders: a line."""
    x, weight = drawn(run, rows, inputs), drawn(run, outputs, inputs, fan=inputs)
    bias = drawn(run, outputs) if biased else None
    sets = _linear_trial.copies((x, weight), _linear_trial.cache_bytes(0) if run.kind == "cuda" else 1)
    calls: dict[str, Calls] = {LINEAR: [lambda one=one: F.linear(*one, bias) for one in sets]}
    told: dict[str, Any] = {}
    if run.kind == "cuda":
        shape = _cublaslt.Shape(x.get_device(), x.dtype, rows, outputs, inputs, biased)
        choices = asked(shape, told)
        for choice in choices:
            calls[str(choice.number)] = [
                lambda one=one, choice=choice: _cublaslt.binding().run(shape, choice, *one, bias)
                for one in sets
            ]
    failed: dict[str, str] = {}
    errors = checked(calls, x, weight, bias, failed, told)
    ready = made(run, {name: each for name, each in calls.items() if name not in failed}, failed, told)
    us = {
        name: round(1e3 * statistics.median(taken) / len(sets), 2)
        for name, taken in in_turns(run, ready).items()
    }
    if run.kind == "cuda":
        told["trial"] = tried(shape, x.device)
    own = errors.get(LINEAR, float("nan"))
    run.write(
        part="product",
        case=f"{rows}x{outputs}x{inputs}{' bias' * biased}",
        sets=len(sets),
        us=dict(sorted(us.items(), key=lambda item: item[1])),
        error_of_linear=float(f"{own:.3g}"),
        times_its_error={name: float(f"{error / own:.3g}") for name, error in errors.items()},
        failed=failed,
        **told,
    )


def asked(shape: _cublaslt.Shape, told: dict[str, Any]) -> list[_cublaslt.Choice]:
    """The choices; tells what is to be known of them."""
    cublas = _cublaslt.binding()
    found = cublas.choices(shape, MOST)
    wide = {one.algorithm: one.number for one in cublas.choices(shape, MOST, WIDE)}
    told["asked_again_the_same"] = [one.algorithm for one in cublas.choices(shape, MOST)] == [
        one.algorithm for one in found
    ]
    told["index_at_256_bytes"] = [wide.get(one.algorithm) for one in found]
    told["algorithms"] = [hashlib.sha256(one.algorithm).hexdigest()[:6] for one in found]
    told["workspace_bytes"] = [one.workspace for one in found]
    told["waves"] = [one.waves for one in found]
    return found


def checked(
    calls: Mapping[str, Calls],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    failed: dict[str, str],
    told: dict[str, Any],
) -> dict[str, float]:
    """‖result − float64's‖ / ‖float64's‖ of each, over rows from all places; tells which give the bits of
    F.linear. What fails, or gives other bits a second time, is put down in `failed`."""
    some = slice(None, None, max(x.shape[0] // CHECKED_ROWS, 1))
    want = F.linear(x[some].double(), weight.double(), None if bias is None else bias.double())
    errors: dict[str, float] = {}
    plain = calls[LINEAR][0]()
    same = []
    for name, each in calls.items():
        try:
            first, again = each[0](), each[0]()
        except _cublaslt.Failed as error:
            failed[name] = str(error)[:200]
            continue
        errors[name] = float((first[some].double() - want).norm() / want.norm())
        if not torch.equal(first, again):
            failed[name] = "a second call gives other bits"
        if name != LINEAR and torch.equal(first, plain):
            same.append(name)
    told["bits_of_linear"] = same
    return errors


def made(
    run: Run, calls: Mapping[str, Calls], failed: dict[str, str], told: dict[str, Any]
) -> dict[str, Call]:
    """Each contender's calls as one: on CUDA the replay of their graph."""
    if run.kind != "cuda":
        return {name: chained(each) for name, each in calls.items()}
    ready: dict[str, Call] = {}
    nodes: dict[str, Any] = {}
    stream = capturing()
    stream.wait_stream(torch.cuda.current_stream())
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        for name, each in calls.items():
            each[0]()
            try:
                graph = captured(each, pool)
                nodes[name] = memsets_in(graph, len(each))
                graph.instantiate()
                ready[name] = graph.replay
            except RuntimeError as error:
                failed[name] = f"{type(error).__name__}: {error}"[:200]
        for replay in ready.values():
            replay()
    torch.cuda.current_stream().wait_stream(stream)
    told["memsets"] = {name: count for name, count in nodes.items() if count != 0}
    return ready


@functools.cache
def capturing() -> Any:
    """One stream for all captures: each has a workspace of cuBLAS's to the end of the process."""
    return torch.cuda.Stream()


def captured(calls: Calls, pool: Any) -> Any:
    """A graph of the calls, not instantiated yet, captured on the current stream."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for call in calls:
            call()
    finally:
        graph.capture_end()
    return graph


def memsets_in(graph: Any, calls: int) -> float | str:
    """Memset nodes for each call of a graph that is not instantiated yet, or why they were not counted."""
    try:
        driver, count, kind = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_int()
        whole = ctypes.c_void_p(graph.raw_cuda_graph())
        status = driver.cuGraphGetNodes(whole, None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        status = status or driver.cuGraphGetNodes(whole, nodes, ctypes.byref(count))
        found = 0
        for node in nodes:
            status = status or driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
            found += kind.value == MEMSET
        if status:
            raise RuntimeError(f"the driver gave {status}")
        return round(found / calls, 2)
    except Exception as error:  # times are wanted all the same
        return f"{type(error).__name__}: {error}"[:100]


def tried(shape: _cublaslt.Shape, where: torch.device) -> dict[str, Any]:
    """What the op's own trial chooses, the microseconds it finds, and the milliseconds that it takes with all
    around it."""
    took: dict[int, float] = {}

    def times(contenders: Mapping[int, Calls]) -> dict[int, float]:
        took.update(_linear_trial.times(contenders))
        return took

    torch.cuda.synchronize()
    began = time.perf_counter()
    found = _linear_choices.Choices(_cublaslt.binding(), times).of(shape, where)
    torch.cuda.synchronize()
    return {
        "number": None if found is None else found.number,
        "ms": round(1e3 * (time.perf_counter() - began), 1),
        "us": {
            LINEAR if number == _linear_choices.LINEAR else str(number): round(1e3 * ms, 2)
            for number, ms in took.items()
        },
    }


def main() -> None:
    """Product by product; one that fails says so in a line, and the next one follows."""
    parser = options(__doc__.splitlines()[0], "two small products, to see that it runs", rounds=11)
    parser.add_argument("--limit-s", type=float, default=35.0, help="start no further product after this")
    with opened(parser.parse_args(), "products", "bench/products_on_device.py") as run:
        absent = _cublaslt.absent()
        if absent is None:
            library = _cublaslt.binding().library
            run.write(cublaslt=library.version(), path=os.path.basename(library.path))
        else:
            run.write(cublaslt=None, why=absent)
        with tempfile.TemporaryDirectory() as home:
            os.environ["CLEARWAY_HOME"] = home  # trials begin from nothing, and leave nothing behind
            for case in SMALL if run.small else used():
                if run.late():
                    run.write(case=str(case), skipped="the time was up")
                    continue
                try:
                    with torch.no_grad():
                        measure(run, *case)
                except Exception as error:  # the other products' figures are worth having
                    run.write(case=str(case), failed=f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
