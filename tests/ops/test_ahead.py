"""A run without launches: which kernels it would launch, each built once, by threads."""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from clearway.ops import ahead, state
from clearway.ops._triton import Kernel
from clearway.ops.contract import Implementation


class Jit:
    """Stands for Triton's own object: counts what is built, and never runs."""

    cache_key = "key"

    def __init__(self) -> None:
        self.built: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.device_caches = Counter[Any]()
        self.loaded = 0

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.built.append(
            (*((a.dtype, a.data_ptr() % 16) if isinstance(a, ahead.Like) else a for a in args),)
        )
        if constants.get("FAILS"):
            raise RuntimeError("PTXAS says no")
        return self

    @property
    def run(self) -> Any:
        self.loaded += 1
        return self.built.append

    def __getitem__(self, grid: Any) -> Any:
        raise AssertionError("it was launched")


@pytest.fixture
def kernel() -> Kernel:
    made = Kernel(lambda x: None)
    made._built = Jit()
    return made


def test_what_a_run_launches_is_built_and_not_launched(kernel: Kernel) -> None:
    x = torch.zeros(64, dtype=torch.float16)

    def run() -> None:
        for _ in range(3):
            kernel.launch((1,), x, 640, BLOCK=128)
        kernel.launch((1,), x, 1280, BLOCK=128)  # a multiple of 16 too
        kernel.launch((1,), x, 640, BLOCK=256)
        kernel.launch((1,), x[1:], 641, BLOCK=128)
        kernel.launch((1,), x, 1, BLOCK=128)
        kernel.launch((1,), x, 2**31, BLOCK=128)
        kernel.launch((1,), x.float(), 640, BLOCK=128)

    before = ahead.times()["variants"]
    assert ahead.build(run) == 6
    jit = kernel.built()
    assert len(jit.built) == 6 and all("clearway-build" in name for name in jit.threads)
    assert (torch.float16, 2) in [one[0] for one in jit.built]
    assert ahead.times()["variants"] == before + 6 and ahead.gathering() is None
    with pytest.raises(AssertionError, match="launched"):
        kernel.launch((1,), x, 640, BLOCK=128)


def test_a_kernel_that_cannot_be_built_is_left_to_its_launch(kernel: Kernel) -> None:
    assert ahead.build(lambda: kernel.launch((1,), torch.zeros(4), FAILS=True)) == 1
    absent = Kernel(lambda x: None)
    absent.built = lambda: (_ for _ in ()).throw(ImportError("no module named triton"))  # type: ignore[method-assign]
    assert ahead.build(lambda: absent.launch((1,), torch.zeros(4))) == 1


@pytest.mark.parametrize(
    "error", [ValueError("NaN in a block"), AssertionError(), IndexError(), ZeroDivisionError()]
)
def test_what_comes_of_thrown_away_values_is_passed_over(kernel: Kernel, error: Exception) -> None:
    def run() -> None:
        kernel.launch((1,), torch.zeros(4), BLOCK=1)
        raise error

    assert ahead.build(run) == 1 and len(kernel.built().built) == 1
    assert ahead.gathering() is None


def test_faults_of_the_device_and_want_of_memory_are_not(kernel: Kernel) -> None:
    for error in (
        RuntimeError("CUDA error: an illegal memory access"),
        torch.OutOfMemoryError("out of memory"),
    ):

        def run(error: Exception = error) -> None:
            raise error

        with pytest.raises(RuntimeError):
            ahead.build(run)
        assert ahead.gathering() is None


def test_nobody_is_asked_for_a_verdict_meanwhile_and_none_is_believed_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ops.faulty import faulty_double

    asked: list[str] = []

    def verdict(implementation: Implementation, kind: str, args: Any) -> None:
        if not state.trusted():
            asked.append(implementation.name)

    monkeypatch.setattr(state, "verdict", verdict)
    faulty_double._sound.clear()
    x = torch.ones(2, 3)
    ahead.build(lambda: faulty_double.route(x))
    assert not asked and not faulty_double._sound
    faulty_double.route(x)
    assert asked and faulty_double._sound
    faulty_double._sound.clear()


def test_launches_of_other_threads_are_not_taken(kernel: Kernel) -> None:
    heard: list[object] = []
    ahead.build(lambda: _in_a_thread(lambda: heard.append(ahead.gathering())))
    assert heard == [None]


def _in_a_thread(run: Any) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is built when interpreted")
def test_a_stand_in_is_told_apart_as_its_tensor_is() -> None:
    """Triton's own specialisation of a Like is that of the tensor, or the launch would build it again."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from clearway.ops import geglu

    jit = geglu._forward.built()
    bind = create_function_from_signature(jit.signature, jit.params, make_backend(GPUTarget("cuda", 90, 32)))
    for x in (
        torch.zeros(64, dtype=torch.float16),
        torch.zeros(64)[1:],
        torch.zeros(9, dtype=torch.bfloat16),
    ):
        for number in (1, 16, 17, 2**31, 2**40):
            args = (x, x, number, 1280, 3)
            stand_ins = (ahead.Like(x), ahead.Like(x), number, 1280, 3)
            options = {"EXACT": False, "BLOCK": 256, "num_warps": 1}
            assert bind(*args, **options)[1:] == bind(*stand_ins, **options)[1:]


@pytest.mark.parametrize("counted", [False, True])
def test_arguments_are_one_variant_exactly_where_triton_says_so(counted: bool) -> None:
    """Also of an argument that only counts, and is told apart neither by 1 nor by multiples of 16."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from clearway.ops import geglu

    jit = Kernel(geglu._forward.function, ("width",) if counted else ()).built()
    bind = create_function_from_signature(jit.signature, jit.params, make_backend(GPUTarget("cuda", 90, 32)))
    x = torch.zeros(64)
    given = [x, x[1:], x[4:], x.half(), x.half()[8:]]
    numbers = [1, 2, 15, 16, 32, 2**31 - 16, 2**31, 2**31 + 1, 2**40]
    signs: dict[Any, Any] = {}
    for tensor in given:
        for number in numbers:
            theirs = str(bind(tensor, x, number, 1280, 3, EXACT=False, BLOCK=256)[1])
            ours = ahead._sign(tensor), ahead._sign(number, counted)
            assert signs.setdefault(theirs, ours) == ours
    assert len(set(signs.values())) == len(signs)


def test_counts_share_a_variant() -> None:
    made = Kernel(_rows, ("rows",))
    made._built = Jit()
    x = torch.zeros(64)

    def run() -> None:
        for rows, width in ((1024, 640), (988, 640), (988, 641)):
            made.launch((1,), x, rows, width)

    assert ahead.build(run) == 2


def _rows(x: Any, rows: int, width: int) -> None:
    """Only its arguments' names matter."""


@pytest.mark.parametrize("counted", [False, True])
def test_one_of_those_that_are_launched_by_the_same_function_builds_it(counted: bool) -> None:
    kernel = Kernel(lambda x, n, f, b: None, counts=("n",) if counted else ())
    kernel._built = jit = Jit()
    x = torch.zeros(64, dtype=torch.float16)
    alike = [((x, 640), 128), ((x, 640), 256), ((x[1:], 640), 128), ((x, 641), 128)]
    others = [((x.float(), 640), 128), ((x, 2**31), 128), ((x, 640, 0.5), 128), ((x, 640, None), 128)]
    one = ((x, 1), 128)  # a constant to Triton, unless it counts

    def run() -> None:
        for args, block in (*alike, *others, one):
            kernel.launch((1,), *args, BLOCK=block)

    builds = ahead.taken_down(run)
    assert all(build() for build in builds)
    firsts, rest = (5, 2) if counted else (6, 3)
    assert (jit.loaded, len(jit.built)) == (firsts, firsts + rest)
    assert [build.args[0] for build in builds] == [True] * firsts + [False] * rest  # type: ignore[attr-defined]


@pytest.mark.cuda
def test_what_was_built_beforehand_is_not_built_again() -> None:
    """On the device: after a run without launches the launch itself finds its kernel ready."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from clearway.ops import geglu

    x = torch.randn(3, 74, device="cuda", dtype=torch.float16)
    implementation = next(i for i in geglu.geglu.implementations if i.name == "triton")
    assert ahead.build(lambda: implementation.run(x)) == 1
    jit = geglu._forward.built()
    index = torch.cuda.current_device()
    ready = dict(jit.device_caches[index][0])
    out = implementation.run(x)
    assert dict(jit.device_caches[index][0]).keys() == ready.keys()
    torch.testing.assert_close(out, geglu.geglu.reference.run(x), rtol=1e-2, atol=1e-2)
