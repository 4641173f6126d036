"""What the kernels do to the memory that ranks share is, action by action, what the model of the protocol does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from engine.kernels.gpu.launch_shapes import Tile
from engine.kernels.gpu.overlap.expert_matmul import (
    launch_collect_rows,
    launch_dispatch_product,
    launch_product_return,
)
from engine.kernels.gpu.overlap.launches import (
    KernelCall,
    launch_collect_slots,
    launch_gather_product,
    launch_multicast_sum,
    launch_product_scatter,
    launch_sum_slots,
)
from engine.kernels.gpu.overlap.signals import LOOKS_BETWEEN
from engine.kernels.overlap import ExpertRows, Mailbox, Missing, read_status
from tests.kernels.gpu.overlap.protocol import Action, Tiles, program
from tests.kernels.gpu.overlap.turns import PATIENCE, mailboxes

RANKS, TILES, MOST, CAPACITY, EPOCH = 2, 3, 4, 4096, 5
SMALL = Tile(16, 16, 16, 4, 2, 2, described=False)
L, K, N = 16 * TILES - 5, 16, 16
LOOKS = int(LOOKS_BETWEEN.value)

Step = tuple[str, int, int, int, int]
"""What is done, owner, writer, tile and parity; the tile of a slot is told by the signal beside it, and is 0."""


@contextmanager
def recorded(box: Mailbox, every: bool = False) -> Iterator[list[Step]]:
    """The actions of kernels on the memory of ``box``, each once if it is done element by element, or ``every`` one."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[Step] = []
    names = ("create_masked_load", "create_masked_store", "create_load", "create_store", "create_atomic_rmw")
    own = {name: getattr(InterpreterBuilder, name) for name in names}

    def noting(name: str) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            place = args[1] if name == "create_atomic_rmw" else args[0]
            step = _step(box, name, int(place.data.flat[0]))
            if step is not None and (every or not found or found[-1] != step):
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
    word = address - int(box.arrivals[RANKS])
    if 0 <= word < 4 * RANKS:
        return ("ended", box.rank, word // 4, 0, 0)
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


def _phases(kind: str, call: KernelCall, rows: ExpertRows) -> list[Callable[[], object]]:
    """What a rank launches; each phase needs what all ranks have done in the one before."""
    matrices = torch.ones(2, K, N)
    part, whole = torch.ones(1, L, K), torch.ones(1, RANKS, L, K)
    if kind == "gather":
        both = partial(launch_gather_product, part, matrices[0], None, call)
        return [partial(both, "push"), partial(both, "multiply")]
    if kind == "dispatch":
        dispatch = partial(launch_dispatch_product, torch.ones(rows.own, K), matrices, rows, call)
        return [partial(dispatch, "push"), partial(dispatch, "multiply")]
    if kind == "return":
        product = partial(launch_product_return, torch.ones(rows.here, K), matrices, rows, call)
        return [product, partial(launch_collect_rows, N, rows, call, torch.float32)]
    scatter = partial(launch_product_scatter, whole, matrices[0], None, call, torch.float32)
    if kind == "scatter":
        return [scatter, partial(launch_sum_slots, 1, L, N, call, torch.float32)]
    collect = partial(launch_collect_slots, torch.empty(L, N), replace(call, epoch=EPOCH + 1))
    return [partial(scatter, True), partial(launch_multicast_sum, L, N, call, torch.float32), collect]


COUNTS = ((3, 17, 0, 0), (0, 1, 30, 0))
"""Rows of each rank for each of four experts; rank 0 has none for those of rank 1."""


@pytest.mark.parametrize("kind", ["gather", "scatter", "switch", "dispatch", "return"])
def test_kernels_do_what_the_model_does(kind: str) -> None:
    boxes, memory = mailboxes(RANKS, CAPACITY, MOST)
    views = [ExpertRows(counts=torch.tensor(COUNTS), rank=rank) for rank in range(RANKS)]
    todo = [_phases(kind, KernelCall(box, EPOCH, SMALL), rows) for box, rows in zip(boxes, views, strict=True)]
    done: list[list[Step]] = [[] for _ in boxes]
    for phase in zip(*todo, strict=True):
        for box, launch, steps in zip(boxes, phase, done, strict=True):
            with recorded(box) as found:
                launch()
            steps += found
    assert memory.any()  # kept until here, since the kernels know its address only
    tiles: Tiles = ((3, 0), (1, 2)) if kind in ("dispatch", "return") else TILES
    for rank, steps in enumerate(done):
        actions = [action for action in program(rank, RANKS, tiles, EPOCH + 1, kind) if action.epoch >= EPOCH]
        wanted = [action for action in actions if action.epoch == EPOCH or kind == "switch"]
        assert steps == [_expected(action) for action in wanted]


def test_a_look_at_who_has_ended_follows_some_looks_at_a_signal() -> None:
    boxes, memory = mailboxes(RANKS, CAPACITY, MOST)
    rows = ExpertRows(counts=torch.zeros(RANKS, 4, dtype=torch.long), rank=0)
    ended = memory[0, (2 * RANKS * CAPACITY + 4 * 2 * RANKS * MOST) // 4 :]
    push, multiply = _phases("dispatch", KernelCall(boxes[0], EPOCH, SMALL), rows)
    push()
    looks = []
    for gone in (False, True):
        ended[1] = gone
        boxes[0].status.zero_()
        with recorded(boxes[0], every=True) as steps:
            multiply()
        assert read_status(int(boxes[0].status)) == Missing(rank=1, tile=0, epoch=EPOCH)
        kinds = [step[0] for step in steps if step[2] == 1]
        looks.append((kinds.count("arrival"), kinds.count("ended")))
        assert kinds[-1] == "arrival", "the last look is at the signal"
    assert looks == [(PATIENCE + 1, PATIENCE // LOOKS), (LOOKS + 1, 1)]
