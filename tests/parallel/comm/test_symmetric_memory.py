"""Memory that ranks of one host share: kernels of real processes, late at random, and a rank that ends."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.overlap.places import virtual_ranks
from engine.errors import EngineError
from engine.parallel.comm.backend import RecordingBackend
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.symmetric_memory import SharedBytes, SlotSizes, SymmetricBuffer
from engine.parallel.grid import Grid
from engine.parallel.tensor.overlap.fused_moves import gather_in_kernel, scatter_in_kernel
from engine.parallel.tensor.overlap.fused_sum import multiply_and_sum, sums_in_kernel
from engine.parallel.tensor.overlap.moves import PLAIN_MOVES, Route
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.kernels.interpreter import repair
from tests.parallel.tensor.sharded import open_comm
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
B, L, K, N = 1, 5, 8, 16


def axis_of(seconds: float = 60.0) -> TensorAxis:
    comm = open_comm()
    axis = TensorAxis(comm)
    sizes = SlotSizes(ranks=axis.size, capacity=1 << 12, most=4)
    axis.symmetric = comm.open_symmetric("tp", sizes, seconds)
    assert axis.symmetric is not None
    return axis


def whole_numbers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def late(calls: int, most: float) -> tuple[int, list[str]]:
    """Body of a rank: calls of both kinds, each after a random rest; where a result is not that of collectives."""
    repair()
    axis, wrong = axis_of(), list[str]()
    rest = torch.Generator().manual_seed(100 + axis.index)
    for call in range(calls):
        dtype = (torch.float32, torch.bfloat16)[call // 2 % 2]
        route = Route(axis, "column inputs")
        matrix = whole_numbers(K, N, seed=call, dtype=dtype)
        time.sleep(most * float(torch.rand(1, generator=rest)))
        if call % 2:
            part = whole_numbers(B, L, K, seed=10 * call + axis.index, dtype=dtype)
            bias = whole_numbers(N, seed=call, dtype=dtype)
            found, wanted = (gather(part, matrix, bias, route) for gather in (gather_in_kernel, PLAIN_MOVES.gather))
            wrong += [f"gather {call}"] * (not all(map(torch.equal, found, wanted)))
        else:
            whole = whole_numbers(B, axis.size * L, K, seed=10 * call + axis.index, dtype=dtype)
            plus = whole_numbers(B, axis.size * L, N, seed=99 + axis.index, dtype=dtype)
            both = [move(whole, matrix, plus, dtype, route)() for move in (scatter_in_kernel, PLAIN_MOVES.scatter)]
            wrong += [f"scatter {call}"] * (not torch.equal(*both))
    made = axis.symmetric.next_epoch() - 1 if axis.symmetric else 0
    axis._comm.close()
    return made, wrong


@pytest.mark.parametrize(("ranks", "calls"), [(2, 4), wide(2, 40), wide(4, 12), wide(8, 6)])
def test_kernels_of_processes_equal_collectives_bit_for_bit(run_ranks: RunRanks, ranks: int, calls: int) -> None:
    assert run_ranks(late, ranks, calls, 0.01, seconds=250.0) == [(calls, [])] * ranks


def switched(calls: int, most: float) -> tuple[int, list[str]]:
    """Body of a rank: sums by a switch, which is emulated, between calls of another kind, late at random."""
    repair()
    axis, wrong = axis_of(), list[str]()
    assert axis.symmetric is not None
    axis.symmetric.mailbox = replace(axis.symmetric.mailbox, multicast=1)
    rest = torch.Generator().manual_seed(100 + axis.index)
    layer = torch.nn.Linear(K, N, bias=False)
    for call in range(calls):
        time.sleep(most * float(torch.rand(1, generator=rest)))
        layer.weight.data = whole_numbers(N, K, seed=10 * call + axis.index, dtype=torch.float32)
        x = whole_numbers(B, axis.size * L, K, seed=99 * call + axis.index, dtype=torch.float32)
        assert sums_in_kernel(layer, x, axis)
        wanted = x @ layer.weight.t()
        axis.all_reduce(wanted, "row outputs")
        wrong += [f"sum {call}"] * (not torch.equal(multiply_and_sum(layer, x, axis), wanted))
        part, matrix = x[:, :L].contiguous(), layer.weight.detach().t()
        pair = [
            gather(part, matrix, None, Route(axis, "column inputs"))
            for gather in (gather_in_kernel, PLAIN_MOVES.gather)
        ]
        wrong += [f"gather {call}"] * (not all(map(torch.equal, *pair)))
    made = axis.symmetric.next_epoch() - 1
    axis._comm.close()
    return made, wrong


@pytest.mark.parametrize(("ranks", "calls"), [wide(3, 10), wide(4, 6), wide(8, 3)])
def test_sums_by_a_switch_equal_collectives_bit_for_bit(run_ranks: RunRanks, ranks: int, calls: int) -> None:
    assert run_ranks(switched, ranks, calls, 0.01, seconds=250.0) == [(3 * calls, [])] * ranks


def abandoned() -> str:
    """Body of a rank: the last one lives and does not make its call."""
    repair()
    axis = axis_of(0.05)
    part = whole_numbers(B, L, K, seed=1, dtype=torch.float32)
    if axis.index == axis.size - 1:
        time.sleep(1.5)
        axis._comm.close()
        return ""
    with pytest.raises(EngineError) as caught:
        gather_in_kernel(part, whole_numbers(K, N, seed=2, dtype=torch.float32), None, Route(axis, "column inputs"))
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named(run_ranks: RunRanks) -> None:
    said, nothing = run_ranks(abandoned, 2)
    assert nothing == "" and "tile 0 of tensor rank 1 in call 1 has not come in time" in said
    assert "'column inputs' over tp" in said


@pytest.mark.parametrize(
    ("ended", "sentence"),
    [
        ((0, 0), "tile 6 of tensor rank 1 in call 5 has not come in time: that rank has ended, hangs, or makes"),
        ((0, 1), "rank 9 has ended or closed its engine before tile 6 of tensor rank 1 in call 5 came; look for"),
        ((1, 2), "rank 9 has ended .* tile 6 of tensor rank 1 in call 5 came, and rank 8 before it; look for"),
    ],
)
def test_a_step_tells_of_a_rank_that_has_ended_from_one_that_is_late(ended: tuple[int, int], sentence: str) -> None:
    """What a GPU is asked once a step."""
    sizes = SlotSizes(ranks=2, capacity=64, most=8)
    own = torch.zeros(sizes.total, dtype=torch.uint8)
    memory = SharedBytes(parts=(own, own), index=0, close=lambda: None)
    buffer = SymmetricBuffer(memory, sizes, 1.0, peers=(8, 9))
    comm = Comm(Grid(), RecordingBackend(Grid()))
    comm._symmetric["tp", buffer.sizes] = buffer
    comm.check_kernels()
    buffer.mailbox.status[0] = 5 << 32 | 1 << 24 | 7
    buffer._ended[:] = torch.tensor(ended)
    assert int(buffer.mailbox.arrivals[2]) == buffer._ended.data_ptr()
    with pytest.raises(EngineError, match=sentence):
        comm.check_kernels()


def too_large() -> tuple[int, bool]:
    """Body of a rank: what does not fit goes by collectives."""
    repair()
    axis = axis_of()
    part = whole_numbers(1, 64, 64, seed=axis.index, dtype=torch.float32)
    route, matrix = Route(axis, "column inputs"), whole_numbers(64, N, seed=1, dtype=torch.float32)
    found, wanted = (gather(part, matrix, None, route) for gather in (gather_in_kernel, PLAIN_MOVES.gather))
    return axis.symmetric.next_epoch() if axis.symmetric else 0, torch.equal(found[0], wanted[0])


def test_what_does_not_fit_goes_by_collectives(run_ranks: RunRanks) -> None:
    assert run_ranks(too_large, 2) == [(1, True)] * 2


def test_a_status_that_was_brought_is_read_once_in_place_of_the_live_one() -> None:
    buffer, _ = virtual_ranks(SlotSizes(ranks=2, capacity=1 << 12, most=4), 1.0, torch.device("cpu"))
    buffer.mailbox.status.fill_((7 << 32) | (1 << 24) | 3)
    buffer.bring_status()
    buffer.mailbox.status.zero_()  # a later kernel's word is for a later check
    with pytest.raises(RuntimeError, match="tile 2 of tensor rank 1 in call 7 has not come in time"):
        buffer.check()
    buffer.check()
    buffer.close()
