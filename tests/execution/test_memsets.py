"""Memsets that become kernels: the same work in the same order, whatever fails on the way."""

import ctypes
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearway.execution import memsets as module
from clearway.execution.capture import TorchCapture
from clearway.execution.memsets import MOST_BYTES, BrokenError, Built, Memsets, refused
from clearway.execution.nodes import KERNEL, MEMSET, Driver, Memset
from fake_driver import FakeDriver

FILL = {word: Built(word, 0, 2) for word in module.WORDS}


def kernel(_: Driver, word: int) -> Built:
    return FILL[word]


def chain(*memsets: tuple[int, ...], fails: Any = ()) -> FakeDriver:
    """Two kernels, then each memset after both and after the memset before it, each before two kernels."""
    fake = FakeDriver(fails)
    first = [fake.add(KERNEL, "first"), fake.add(KERNEL, "beside it")]
    last: list[int] = []
    for params in memsets:
        last = [fake.add(MEMSET, *params, after=[*first, *last])]
        for turn in range(2):
            fake.add(KERNEL, "reads", params[0], turn, after=[*last, first[0]])
    return fake


def zeros(address: int, size: int) -> tuple[int, ...]:
    return address, 0, 0, 1, size, 1


@st.composite
def graphs(draw: Any) -> FakeDriver:
    """Any graph: its nodes in an order of time, their edges, memsets of any kind."""
    fake, nodes = FakeDriver(), list[int]()
    for number in range(draw(st.integers(1, 12))):
        after = draw(st.sets(st.sampled_from(nodes))) if nodes else set()
        if draw(st.booleans()):
            address = 2**40 + number * 2**20 + draw(st.integers(0, 8))
            value, element = draw(st.sampled_from([0, 0, 0, 1])), draw(st.sampled_from([1, 2, 4]))
            size = draw(
                st.sampled_from([0, 1, 3, 4, 1024, 1025, MOST_BYTES // 4, MOST_BYTES, MOST_BYTES + 1])
            )
            height = draw(st.sampled_from([1, 1, 1, 2]))
            nodes.append(fake.add(MEMSET, address, 0, value, element, size, height, after=after))
        else:
            nodes.append(fake.add(draw(st.sampled_from([KERNEL, 1, 4])), f"work {number}", after=after))
    return fake


@given(graphs())
def test_the_work_and_its_order_stay(fake: FakeDriver) -> None:
    before, found = fake.work(), [node.params for node in fake.nodes.values() if node.kind == MEMSET]
    able = [p for p in found if p[2] == 0 and p[5] == 1 and 0 < p[3] * p[4] <= MOST_BYTES]
    memsets = Memsets()
    memsets.replace(Driver(fake), 1, kernel)
    assert fake.work() == before
    assert fake.kinds().count(MEMSET) == len(found) - len(able)
    assert memsets.replaced == len(able) and memsets.left.total() == len(found) - len(able)
    assert memsets.sizes == Counter(p[3] * p[4] * p[5] for p in found)


MIXED = zeros(2**40, 8192), zeros(2**41, 7), zeros(2**42 + 2, 64)


def test_words_are_as_wide_as_address_and_size_allow() -> None:
    fake = chain(*MIXED)
    Memsets().replace(Driver(fake), 1, kernel)
    added = {node.params for node in fake.nodes.values() if node.params[0] in FILL}
    assert added == {(4, 2**40, 2048), (1, 2**41, 7), (1, 2**42 + 2, 64)}


def test_wherever_a_call_fails_the_graph_does_what_it_did() -> None:
    sound = chain(*MIXED)
    Memsets().replace(Driver(sound), 1, kernel)
    for number, name in enumerate(sound.calls):
        fake, memsets = chain(*MIXED, fails=[number]), Memsets()
        before = fake.work()
        try:
            memsets.replace(Driver(fake), 1, kernel)
        except RuntimeError:
            assert memsets.replaced == 0 and fake.kinds().count(MEMSET) == 3
        else:
            assert memsets.reason == f"{name} gave CUDA error 999"
            assert memsets.replaced == 2 and fake.kinds().count(MEMSET) == 1
            assert memsets.left == {memsets.reason: 1}
        assert fake.work() == before and len(fake.nodes) == len(sound.nodes)


def test_what_can_neither_be_linked_nor_taken_out_must_not_run() -> None:
    sound = chain(*MIXED)
    Memsets().replace(Driver(sound), 1, kernel)
    for name in ("cuGraphAddDependencies", "cuGraphDestroyNode"):
        number = sound.calls.index(name)
        with pytest.raises(BrokenError, match="half changed"):
            Memsets().replace(Driver(chain(*MIXED, fails=[number, number + 1])), 1, kernel)


def test_what_stays_says_why() -> None:
    assert refused(Memset(8, 0, 0, 4, 16, 1)) is None
    assert refused(Memset(8, 0, 1, 4, 16, 1)) == "its value is not zero"
    assert refused(Memset(8, 64, 0, 4, 16, 2)) == "it has rows"
    for width in (0, MOST_BYTES + 1):
        assert "bytes" in (refused(Memset(8, 0, 0, 1, width, 1)) or "")


INTERPRETED = """
import torch
from clearway.execution.memsets import BLOCK, WORDS, clear
for dtype in WORDS.values():
    for count in (1, 7, BLOCK, BLOCK + 1, 3 * BLOCK - 1):
        memory = torch.full((4 * BLOCK,), 85, dtype=dtype)
        clear.built()[(-(-count // BLOCK),)](memory[3:], count, BLOCK=BLOCK, num_warps=4)
        assert memory.tolist() == [85] * 3 + [0] * count + [85] * (len(memory) - 3 - count)
"""


def test_the_kernel_interpreted_clears_what_it_should() -> None:
    pytest.importorskip("triton")
    settings = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=settings, check=True, timeout=120)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is built when interpreted")
def test_the_kernel_is_built_for_any_address_and_count() -> None:
    """Triton neither leaves out nor assumes anything of what it is shown, so one kernel serves all."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    jit = module.clear.built()
    bind = create_function_from_signature(jit.signature, jit.params, make_backend(GPUTarget("cuda", 90, 32)))
    for dtype, sign in ((torch.int32, "*i32"), (torch.uint8, "*u8")):
        shown = module._shown(dtype, "cpu")
        assert shown.numel() == module.BLOCK and shown.data_ptr() % 16 == dtype.itemsize
        found = [tuple(one) for one in bind(shown, module.BLOCK, BLOCK=module.BLOCK)[1][:2]]
        assert found == [(sign, None), ("i32", None)] or found == [(sign, ""), ("i32", "")]


class Kept:
    """A torch.cuda.CUDAGraph that was captured."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.kept, self.instantiated = keep_graph, 0

    def raw_cuda_graph(self) -> int:
        assert self.kept and not self.instantiated
        return 1

    def instantiate(self) -> None:
        self.instantiated += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A torch for CUDA, a driver with three memsets in its graph, and kernels for them."""
    made = chain(*MIXED)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Kept)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_driver", lambda: Driver(made))
    monkeypatch.setattr(module, "_built", {(0, word): FILL[word] for word in FILL})
    monkeypatch.setattr(module._triton, "absent", lambda: None)
    return made


def test_a_captured_graph_is_changed_and_then_instantiated(fake: FakeDriver) -> None:
    memsets = Memsets()
    graph = memsets.graph()
    memsets.finish(graph)
    assert graph.instantiated == 1 and memsets.replaced == 3 and memsets.reason is None


def test_what_cannot_be_changed_is_instantiated_as_it_is(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fake.work()
    monkeypatch.setattr(module, "_built", {(0, word): "no compiler" for word in FILL})
    memsets = Memsets()
    graph = memsets.graph()
    memsets.finish(graph)
    assert memsets.reason == "no compiler" and memsets.left == {"no compiler": 3} and not memsets.replaced
    fake.fails = range(10**6)
    again = memsets.graph()
    memsets.finish(again)
    assert "cuGraphGetNodes" in (memsets.reason or "")
    assert graph.instantiated == again.instantiated == 1 and fake.work() == before


def test_a_half_changed_graph_is_not_instantiated(fake: FakeDriver) -> None:
    memsets = Memsets()
    graph = memsets.graph()
    Memsets().replace(Driver(sound := chain(*MIXED)), 1, kernel)
    number = sound.calls.index("cuGraphAddDependencies")
    fake.fails = [number, number + 1]
    with pytest.raises(BrokenError):
        memsets.finish(graph)
    assert not graph.instantiated


def test_where_it_cannot_be_graphs_are_plain(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(memsets: Memsets) -> str | None:
        graph = memsets.graph()
        memsets.finish(graph)
        assert not graph.kept and not graph.instantiated and not fake.calls
        return memsets.reason

    assert plain(Memsets(wanted=False)) == "it is switched off"
    with monkeypatch.context() as patch:
        patch.setattr(module._triton, "absent", lambda: "no Triton")
        assert plain(Memsets()) == "no Triton"

    def missing() -> Driver:
        raise OSError("libcuda.so.1: cannot open")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_driver", missing)
        assert plain(Memsets()) == "libcuda.so.1: cannot open"
    monkeypatch.delattr(Kept, "instantiate")
    monkeypatch.setattr(Kept, "__getattr__", lambda self, name: 0, raising=False)
    assert "changed" in (plain(Memsets()) or "")


def test_kernels_are_built_once_and_a_failure_is_kept(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(driver: Driver, word: int) -> Built:
        words.append(word)
        raise RuntimeError("no compiler")

    words: list[int] = []
    monkeypatch.setattr(module, "_built", {})
    monkeypatch.setattr(module, "_build", build)
    for _ in range(2):
        with pytest.raises(module.AbsentError, match="no compiler"):
            module.built(Driver(fake), 4)
    assert words == [4]


@pytest.fixture
def real() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if why := module.absent():
        pytest.skip(why)
    torch.cuda.init()
    yield


def fill(tensor: torch.Tensor, value: int = 0) -> None:
    """By a memset, as libraries do; PyTorch itself fills by a kernel."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemsetD8Async.argtypes = ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p
    stream = torch.cuda.current_stream().cuda_stream
    assert library.cuMemsetD8Async(tensor.data_ptr(), value, tensor.nbytes, stream) == 0


@pytest.mark.cuda
def test_replays_of_a_changed_graph_clear_what_they_should(real: None) -> None:
    x = torch.randn(4096, device="cuda")
    sizes = [1, 7, 64, 1000, 4096, MOST_BYTES, MOST_BYTES + 4]

    def work() -> list[torch.Tensor]:
        found = []
        for size in sizes:
            noise = torch.empty(size + 35, dtype=torch.uint8, device="cuda").fill_(7)
            fill(noise[16 + size % 2 : 16 + size % 2 + size])
            found.append(noise + x[0].to(torch.uint8))
        whole = x * 3
        fill(whole[:256], 1)  # stays
        fill(whole[256:512])
        fill(whole[512:520])  # after a memset
        return [*found, whole + x]

    outputs, kinds = [], []
    for wanted in (False, True):
        backend = TorchCapture(memsets=wanted)
        with backend.lock:
            backend.warm_up(work, 2)
            spied = Spied()
            replay, output = spied.capture(backend, work)
            kinds.append(spied.kinds)
            for turn in range(3):
                x.fill_(turn)
                replay()
                outputs.append([one.clone() for one in output])
            if wanted:
                assert backend.memsets.reason is None
                assert backend.memsets.sizes.total() == len(sizes) + 3
                assert backend.memsets.replaced == len(sizes) + 1 and backend.memsets.left.total() == 2
    for plain, changed in zip(outputs[:3], outputs[3:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, changed, strict=True))
    for size, found in zip(sizes, outputs[-1], strict=False):
        first = 16 + size % 2
        assert found[first : first + size].eq(2).all()
        assert found[:first].eq(9).all() and found[first + size :].eq(9).all()
    assert outputs[-1][-1][256:520].eq(2).all() and outputs[-1][-1][520:].eq(8).all()
    assert not kinds[0] and kinds[1][MEMSET] == 2 and kinds[1][KERNEL] >= len(sizes) + 1


class Spied:
    """Counts the nodes of a graph by kind as they are when it is instantiated."""

    def __init__(self) -> None:
        self.kinds = Counter[int]()

    def capture(self, backend: TorchCapture, work: Any) -> Any:
        spy, original = self, torch.cuda.CUDAGraph.instantiate

        def instantiate(graph: Any) -> None:
            driver = module._driver()
            spy.kinds.update(driver.kind(node) for node in driver.nodes(graph.raw_cuda_graph()))
            original(graph)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda.CUDAGraph, "instantiate", instantiate)
            return backend.capture(work)


@pytest.mark.cuda
def test_memory_random_numbers_and_an_end_are_as_with_plain_graphs(real: None) -> None:
    backend = TorchCapture()

    def work() -> torch.Tensor:
        return torch.zeros(64, device="cuda") + torch.randn(64, device="cuda")

    with backend.lock:
        backend.warm_up(work, 2)
        replay, output = backend.capture(work)
        drawn = []
        for _ in range(2):
            torch.cuda.manual_seed(3)
            replay()
            drawn.append(output.clone())
        replay()
        assert torch.equal(*drawn) and not torch.equal(drawn[0], output)
        again = backend.capture(work)
        del replay, output
        again[0]()
        assert bool(again[1].isfinite().all())
