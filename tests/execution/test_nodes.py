"""The driver's functions: what they are given, and what comes of their results."""

import ctypes

import pytest

from clearway.execution.nodes import KERNEL, MEMSET, Driver, DriverError, Launch, Memset
from fake_driver import SIZES, FakeDriver


def test_structures_are_as_large_as_the_drivers() -> None:
    assert ctypes.sizeof(Memset) == 40 and ctypes.sizeof(Launch) == 72
    assert Launch.shared_bytes.offset == 32 and Launch.parameters.offset == 40 and Memset.width.offset == 24


def test_nodes_and_their_neighbours() -> None:
    fake = FakeDriver()
    driver = Driver(fake)
    assert driver.nodes(1) == []
    first = fake.add(KERNEL, "first")
    second = fake.add(MEMSET, 2**40 + 4, 0, 7, 2, 30, 1, after=[first])
    third = fake.add(KERNEL, "third", after=[first, second])
    assert driver.nodes(1) == [first, second, third]
    assert [driver.kind(node) for node in (first, second)] == [KERNEL, MEMSET]
    assert driver.before(first) == [] and set(driver.before(third)) == {first, second}
    assert set(driver.after(first)) == {second, third} and driver.after(third) == []
    found = driver.memset(second)
    assert (found.address, found.value, found.element_bytes, found.width) == (2**40 + 4, 7, 2, 30)


def test_a_kernel_is_added_with_values_and_edges() -> None:
    fake = FakeDriver()
    driver, first, last = Driver(fake), fake.add(KERNEL, "first"), fake.add(KERNEL, "last")
    values = ctypes.c_uint64(2**40), ctypes.c_int32(1500), ctypes.c_uint64(), ctypes.c_uint64()
    launch = Launch(4, 2, 128, 0, values)
    new = driver.add(1, [first], launch)
    driver.link(1, new, [last])
    assert fake.nodes[new].params == (4, 2**40, 1500) and fake.edges == {(first, new), (new, last)}
    driver.destroy(new)
    assert not fake.edges and new not in fake.nodes
    assert fake.nodes[driver.add(1, [], launch)].params == (4, 2**40, 1500)
    driver.launch(launch, 9)
    assert fake.launched == [(4, 2**40, 1500, 2, 1, 1, 128, 1, 1, 0, 9)]
    assert driver.parameters(4) == list(SIZES)


def test_what_fails_is_named() -> None:
    with pytest.raises(DriverError, match="cuGraphGetNodes gave CUDA error 999"):
        Driver(FakeDriver(fails=[0])).nodes(1)
    with pytest.raises(DriverError, match="cuFuncGetParamInfo gave CUDA error 999"):
        Driver(FakeDriver(fails=[1])).parameters(4)
    with pytest.raises(AttributeError):
        Driver(object())


def test_a_kernel_of_endless_parameters_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_driver.SIZES", (8,) * 99)
    with pytest.raises(DriverError, match="more than 16"):
        Driver(FakeDriver()).parameters(4)
