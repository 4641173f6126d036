"""A rank that is killed inside a kernel: the others are told by the system, not by time."""

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.errors import EngineError
from engine.kernels.dispatch import REFERENCE
from engine.kernels.overlap import ExpertRows
from engine.parallel.comm.symmetric_memory import PeerWatch, SlotSizes
from engine.parallel.tensor.overlap.fused_moves import gather_in_kernel, scatter_in_kernel
from engine.parallel.tensor.overlap.moves import Route
from engine.parallel.tensor.overlap.routed_products import ExpertRoute, dispatch_product
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.kernels.interpreter import repair
from tests.launches import Launch, Line
from tests.parallel.tensor.sharded import open_comm
from tests.selection import wide

TIME_OUT = 600.0
"""Seconds of a wait: a test that needs them fails."""
ROWS, WIDTH = 5, 16


def dies_at_signal(number: int, line: Line) -> None:
    """Kill this process before its ``number``-th signal from now on."""
    from triton._C.libtriton.ir import MEM_SEMANTIC
    from triton.runtime.interpreter import InterpreterBuilder

    own, seen = InterpreterBuilder.create_atomic_rmw, [0]

    def signalling(self: Any, operation: Any, place: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
        seen[0] += order == MEM_SEMANTIC.RELEASE
        if seen[0] == number:
            line(("killed at", time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self, operation, place, value, mask, order, scope)

    InterpreterBuilder.create_atomic_rmw = signalling


def one_call(axis: TensorAxis, kind: str) -> None:
    part, matrix = torch.ones(1, ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    if kind == "gather":
        gather_in_kernel(part, matrix, None, Route(axis, "column inputs"))
    elif kind == "scatter":
        whole = torch.ones(1, axis.size * ROWS, WIDTH)
        scatter_in_kernel(whole, matrix, None, torch.float32, Route(axis, "row outputs"))()
    else:
        assert axis.symmetric is not None
        rows = ExpertRows(counts=torch.full((axis.size, axis.size), ROWS), rank=axis.index)
        route = ExpertRoute(rows=rows, buffer=axis.symmetric, kernels=REFERENCE)
        dispatch_product(torch.ones(axis.size * ROWS, WIDTH), matrix[None], route)


def calls(line: Line, kind: str) -> None:
    """Body of a rank: the last one is killed in its second call, after it has signalled one rank."""
    repair()
    dist.init_process_group("gloo")
    axis = TensorAxis(open_comm())
    axis.symmetric = axis._comm.open_symmetric("tp", SlotSizes(ranks=axis.size, capacity=1 << 12, most=4), TIME_OUT)
    one_call(axis, kind)
    if axis.index == axis.size - 1:
        dies_at_signal(2, line)
    with pytest.raises(EngineError) as caught:
        one_call(axis, kind)
        one_call(axis, kind)
    line((str(caught.value), time.monotonic()))
    os._exit(0)


@pytest.mark.parametrize(
    ("kind", "ranks"), [("gather", 2), wide("gather", 4), wide("scatter", 3), wide("dispatch", 3)], ids=str
)
def test_the_others_say_who_has_ended_long_before_their_time_is_over(kind: str, ranks: int) -> None:
    with Launch(calls, ranks, kind) as launch:
        *others, victim = launch.end(100.0)
    assert victim.code == -signal.SIGKILL and victim.said[0][0] == "killed at"
    assert [rank.code for rank in others] == [0] * (ranks - 1), others[0].error
    for rank in others:
        sentence, at = rank.said[-1]
        assert "has ended or closed its engine before tile 0 of tensor rank" in sentence
        assert "in time" not in sentence
        print(f"raised {at - victim.said[0][1]:.3f} s after the kill: {sentence}")
    named = [f"rank {ranks - 1} has ended" in rank.said[-1][0] for rank in others]
    assert any(named), "whoever waits for the dead rank names it; others may wait for those first"


def seen(ended: torch.Tensor) -> list[int]:
    """Who has ended, once anybody has."""
    deadline = time.monotonic() + 60
    while not ended.any() and time.monotonic() < deadline:
        time.sleep(0.001)
    found: list[int] = ended.tolist()
    return found


def test_whoever_ends_is_written_down_alone() -> None:
    links = {index: socket.socketpair() for index in (0, 2, 3)}
    ended = torch.zeros(4, dtype=torch.int32)
    watch = PeerWatch({index: own.fileno() for index, (own, _) in links.items()}, ended)
    links[2][1].close()
    assert seen(ended) == [0, 0, 1, 0]
    links[0][1].close()
    deadline = time.monotonic() + 60
    while ended[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    watch.close()
    watch.close()
    links[3][1].close()
    assert ended.tolist() == [2, 0, 1, 0], "in the order in which they end, and nobody watches any more"
    for pair in links.values():
        for link in pair:
            link.close()


RANK_WITH_A_CHILD = """
import socket, subprocess, sys
link = socket.socket(socket.AF_UNIX)
link.connect(chr(0) + sys.argv[1])
child = subprocess.Popen(["sleep", "100"], pass_fds=[link.fileno()])
print(child.pid, flush=True)
child.wait()
"""


def test_children_that_a_rank_leaves_behind_do_not_hide_its_end() -> None:
    address, ended = f"trine-{os.getpid()}-{time.monotonic_ns()}", torch.zeros(2, dtype=torch.int32)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen(1)
        command = [sys.executable, "-c", RANK_WITH_A_CHILD, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
            link, _ = listener.accept()
            assert rank.stdout is not None
            child = int(rank.stdout.readline())
            watch = PeerWatch({1: link.fileno()}, ended)
            rank.kill()
            try:
                assert seen(ended) == [0, 1]
                link.setblocking(False)
                with pytest.raises(BlockingIOError):
                    link.recv(1)  # its socket is still open
            finally:
                watch.close()
                os.kill(child, signal.SIGKILL)
                link.close()
