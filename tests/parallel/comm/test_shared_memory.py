"""Sums, gathers and scatters through shared memory against the same made locally. Threads in place of processes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from engine.parallel.comm import shared_memory
from engine.parallel.comm.shared_memory import SharedMemory, shared_bytes
from tests.parallel.comm.neighbours import neighbours, run_threads

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64)
SMALL_SLOT = 1 << 10
"""In place of a real slot, so that small tensors take several pieces."""
SIZES = (0, 1, 7, 255, 257, 1000)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", SMALL_SLOT)
    monkeypatch.setattr(shared_memory, "_IN_PARTS", 600)


@contextmanager
def opened(ranks: int) -> Iterator[list[SharedMemory]]:
    with neighbours(ranks, shared_bytes(ranks)) as found:
        yield [SharedMemory(one) for one in found]


def noise(index: int, size: int, dtype: torch.dtype) -> Tensor:
    """Floats whose sum depends on the order of addition; whole numbers of few digits."""
    generator = torch.Generator().manual_seed(index)
    if not dtype.is_floating_point:
        return torch.randint(0, 25, (size,), generator=generator, dtype=dtype)
    digits = torch.randn(size, generator=generator, dtype=torch.float64)
    return (digits * torch.pow(2, digits.flip(0))).to(dtype)


def in_pairs(given: list[Tensor]) -> Tensor:
    """The sum as it is promised: half precision in fp32 and rounded once, the rest pairs of neighbours first."""
    dtype = given[0].dtype
    if dtype in (torch.bfloat16, torch.float16):
        total = torch.zeros(given[0].shape)
        for part in given:
            total = total + part.float()
        return total.to(dtype)
    trees = {2: "a+b", 3: "(a+b)+c", 4: "(a+b)+(c+d)", 5: "((a+b)+c)+(d+e)"}
    total = eval(trees[len(given)], dict(zip("abcde", given, strict=False)))
    assert isinstance(total, Tensor)
    return total


def on_all(ranks: int, body: Callable[[SharedMemory, int], Tensor]) -> list[Tensor]:
    with opened(ranks) as found:
        return run_threads(lambda index: body(found[index], index), ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_of_every_size(ranks: int, dtype: torch.dtype) -> None:
    def body(shared: SharedMemory, index: int) -> Tensor:
        found = []
        for size in SIZES:
            tensor = noise(index, size, dtype)
            shared.all_reduce(tensor)()
            largest = noise(index, size, dtype)
            shared.all_reduce(largest, "max")()
            found += [tensor, largest]
        return torch.cat(found)

    expected = []
    for size in SIZES:
        given = [noise(index, size, dtype) for index in range(ranks)]
        expected += [in_pairs(given), torch.stack(given).amax(0)]
    assert all(torch.equal(got, torch.cat(expected)) for got in on_all(ranks, body))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_reduce_scatter_and_all_gather_of_every_size(ranks: int, dtype: torch.dtype, inside: bool) -> None:
    """A shard of its own, or one that lies in the whole."""

    def body(shared: SharedMemory, index: int) -> Tensor:
        found = []
        for size in SIZES:
            full = noise(index, ranks * size, dtype)
            shard = full.view(ranks, -1)[index] if inside else full.new_empty(size)
            shared.reduce_scatter(shard, full)()
            gathered = full if inside else full.new_empty(ranks * size)
            shared.all_gather(gathered, shard)()
            found.append(gathered)
        return torch.cat(found)

    expected = [in_pairs([noise(index, ranks * size, dtype) for index in range(ranks)]) for size in SIZES]
    assert all(torch.equal(got, torch.cat(expected)) for got in on_all(ranks, body))


def test_real_slots_in_whole_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    size = shared_memory.SLOT_BYTES // 4 * 2 + 13

    def body(shared: SharedMemory, index: int) -> Tensor:
        tensor = noise(index, size, torch.float32)
        shared.all_reduce(tensor)()
        return tensor

    for ranks in (2, 4):
        expected = in_pairs([noise(index, size, torch.float32) for index in range(ranks)])
        assert all(torch.equal(got, expected) for got in on_all(ranks, body))


def test_shapes_strides_and_gradients_do_not_matter() -> None:
    def body(shared: SharedMemory, index: int) -> Tensor:
        scalar = torch.tensor(2.0 + index)
        columns = noise(index, 600, torch.float32).view(20, 30).t()
        leaf = torch.ones(3, requires_grad=True)
        product = leaf * leaf
        for tensor in (scalar, columns, leaf, product):
            shared.all_reduce(tensor)()
        return torch.cat([scalar.view(1), columns.flatten(), leaf.detach(), product.detach()])

    total = in_pairs([noise(index, 600, torch.float32) for index in range(2)]).view(20, 30).t().flatten()
    expected = torch.cat([torch.tensor([5.0]), total, torch.full((6,), 2.0)])
    assert all(torch.equal(got, expected) for got in on_all(2, body))


def test_what_is_summed_is_no_news_to_autograd() -> None:
    """As with a process group: the tensor is written behind autograd's back."""

    def body(shared: SharedMemory, _: int) -> Tensor:
        x = torch.full((3,), 2.0, requires_grad=True)
        y = x * 1.0
        loss = (y * y).sum()
        shared.all_reduce(y)()
        loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    assert all(got.tolist() == [8.0] * 3 for got in on_all(2, body))


# under way


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_can_be_under_way_and_be_waited_for_in_any_order(ranks: int) -> None:
    def body(shared: SharedMemory, index: int) -> Tensor:
        tensors = [noise(index + 10 * i, 700, torch.float32) for i in range(4)]
        waits = [shared.all_reduce(tensor) for tensor in tensors]
        for wait in reversed(waits) if index % 2 else waits:
            wait()
            wait()  # once more changes nothing
        return torch.cat(tensors)

    expected = [in_pairs([noise(r + 10 * i, 700, torch.float32) for r in range(ranks)]) for i in range(4)]
    assert all(torch.equal(got, torch.cat(expected)) for got in on_all(ranks, body))


def test_a_call_does_not_wait_for_the_others() -> None:
    """What a rank does between call and wait is done while the others are on their way."""
    times: list[float] = []

    def body(shared: SharedMemory, index: int) -> Tensor:
        tensor = torch.ones(3)
        if index:
            time.sleep(0.3)
        began = time.monotonic()
        wait = shared.all_reduce(tensor)
        times.append(time.monotonic() - began)
        wait()
        return tensor

    assert all(got.tolist() == [2.0] * 3 for got in on_all(2, body))
    assert max(times) < 0.2


def test_many_small_calls_of_changing_kinds() -> None:
    def body(shared: SharedMemory, index: int) -> Tensor:
        total = torch.zeros(3, dtype=torch.int64)
        for turn in range(300):
            part = torch.tensor([turn, index, 1])
            shared.all_reduce(part, "max" if turn % 3 == 0 else "sum")()
            full = torch.empty(9, dtype=torch.int64)
            shared.all_gather(full, part)()
            shared.reduce_scatter(part, full)()
            total += part
        return total

    sums = [torch.tensor([turn, 2, 1]) if turn % 3 == 0 else torch.tensor([3 * turn, 3, 3]) for turn in range(300)]
    assert all(torch.equal(got, 3 * torch.stack(sums).sum(0)) for got in on_all(3, body))


# failing


def test_after_a_failure_nothing_works_and_the_others_are_told() -> None:
    def body(shared: SharedMemory, index: int) -> list[str]:
        if index == 2:
            shared.close()
        said = []
        for _ in range(2):
            try:
                shared.all_reduce(torch.ones(2))()
                said.append("done")
            except RuntimeError as error:
                said.append(str(error))
        return said

    with opened(3) as found:
        first, second, closed = run_threads(lambda index: body(found[index], index), 3)
    assert closed == ["it is closed"] * 2
    for said in (first, second):
        assert "has ended or given up" in said[0] and said[0] == said[1]


def test_waiting_for_what_failed_before_raises() -> None:
    with opened(2) as (one, other):
        wait = one.all_reduce(torch.ones(2))
        other.close()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="has ended or given up"):
                wait()


def test_an_interrupt_leaves_nothing_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with opened(2) as (one, other):
        monkeypatch.setattr(shared_memory, "_combine", interrupt)
        wait = one.all_reduce(torch.ones(2))
        other.all_reduce(torch.ones(2))
        with pytest.raises(KeyboardInterrupt):
            wait()
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            one.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match="has ended or given up"):
            other.all_reduce(torch.ones(2))()
            other.all_reduce(torch.ones(2))()
