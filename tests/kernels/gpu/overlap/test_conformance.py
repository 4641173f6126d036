"""What the kernels do to the memory that ranks share is, action by action, what the model of the protocol does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.kernels.gpu.launch_shapes import Tile
from engine.kernels.gpu.overlap.launches import (
    KernelCall,
    launch_gather_product,
    launch_product_scatter,
    launch_sum_slots,
)
from engine.kernels.mailbox import Mailbox
from tests.kernels.gpu.overlap.protocol import Action, program
from tests.kernels.gpu.overlap.turns import mailboxes

RANKS, TILES, MOST, CAPACITY, EPOCH = 2, 3, 4, 4096, 5
SMALL = Tile(16, 16, 16, 4, 2, 2, described=False)
L, K, N = 16 * TILES - 5, 16, 16

Step = tuple[str, int, int, int, int]
"""What is done, owner, writer, tile and parity; the tile of a slot is told by the signal beside it, and is 0."""


@contextmanager
def recorded(box: Mailbox) -> Iterator[list[Step]]:
    """The actions of kernels on the memory of ``box``, each once if it is done element by element."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[Step] = []
    names = ("create_masked_load", "create_masked_store", "create_load", "create_store", "create_atomic_rmw")
    own = {name: getattr(InterpreterBuilder, name) for name in names}

    def noting(name: str) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            place = args[1] if name == "create_atomic_rmw" else args[0]
            step = _step(box, name, int(place.data.flat[0]))
            if step is not None and (not found or found[-1] != step):
                found.append(step)
            return own[name](self, *args, **named)

        return call

    for name in names:
        setattr(InterpreterBuilder, name, noting(name))
    try:
        yield found
    finally:
        for name in names:
            setattr(InterpreterBuilder, name, own[name])


def _step(box: Mailbox, name: str, address: int) -> Step | None:
    for owner in range(RANKS):
        arrival, slot = (address - int(table[owner]) for table in (box.arrivals, box.slots))
        if 0 <= arrival < 4 * 2 * RANKS * MOST:
            turn, tile = divmod(arrival // 4, MOST)
            return ("arrival", owner, turn % RANKS, tile, turn // RANKS)
        if 0 <= slot < 2 * RANKS * CAPACITY:
            turn = slot // CAPACITY
            return ("write" if "store" in name else "read", owner, turn % RANKS, 0, turn // RANKS)
    return None


def _expected(action: Action) -> Step:
    place = action.place
    if place.kind == "arrival":
        return ("arrival", place.owner, place.writer, place.tile, place.parity)
    return (action.what, place.owner, place.writer, 0, place.parity)


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_kernels_do_what_the_model_does(kind: str) -> None:
    boxes, buffers = mailboxes(RANKS, CAPACITY, MOST)
    matrix = torch.ones(K, N)
    calls = [KernelCall(box, EPOCH, SMALL) for box in boxes]
    halves: list[tuple[list[Step], list[Step]]] = []
    for call in calls:
        with recorded(call.mailbox) as steps:
            if kind == "gather":
                launch_gather_product(torch.ones(1, L, K), matrix, None, call, "push")
            else:
                launch_product_scatter(torch.ones(1, RANKS, L, K), matrix, None, call, torch.float32)
        halves.append((steps, []))
    for call, (_, last) in zip(calls, halves, strict=True):
        with recorded(call.mailbox) as steps:
            if kind == "gather":
                launch_gather_product(torch.ones(1, L, K), matrix, None, call, "multiply")
            else:
                launch_sum_slots(1, L, N, call, torch.float32)
        last += steps
    assert all(buffer.slot(EPOCH, 0, (L, K), torch.float32).any() for buffer in buffers)
    for rank, (first, last) in enumerate(halves):
        actions = [action for action in program(rank, RANKS, TILES, EPOCH, kind) if action.epoch == EPOCH]
        assert first + last == [_expected(action) for action in actions]
