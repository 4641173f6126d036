"""When sharded parameters are asked for, how much of them is whole at a time, and that gradients leave meanwhile."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
from torch import Tensor, nn

import engine
from engine.engine import Engine
from engine.models.decoder import loss_sum
from engine.zero.layout import Turn
from tests import models
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
LAYERS = 5


def decoder(zero: dict[str, Any], accumulation: int = 2) -> Engine:
    """Seven gather groups of the reference decoder."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": 3} | zero,
        "optimizer": {"type": "AdamW"},
    }
    model = models.decoder(layers=LAYERS)
    return engine.initialize(model, config, loss_sum)


def rows(eng: Engine, step: int) -> dict[str, Tensor]:
    """This rank's share of a step."""
    count = eng.config.micro * eng.config.accumulation
    tokens = models.token_batches(2 * count, step + 1)[step][eng.grid.coord().dp :: 2]
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


class Watch:
    """Notes, in the middle of every block, forward and backward, what the communication has been asked for."""

    def __init__(self, eng: Engine) -> None:
        self.eng = eng
        self.notes: list[tuple[str, int, int, int, int]] = []
        """(direction, block, gathers issued, reductions issued, bytes of whole parameters)."""
        model: Any = eng.module
        self.handles = []
        for index, block in enumerate(model.blocks):
            inner = [module for module in block.modules() if isinstance(module, nn.Linear)][-1]
            self.handles.append(inner.register_forward_hook(partial(self._ran, index)))

    def _ran(self, index: int, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self._note("forward", index)
        if output.requires_grad:
            output.register_hook(lambda _: self._note("backward", index))  # type: ignore[no-untyped-call]

    def _note(self, direction: str, index: int) -> None:
        labels = [record.label for record in self.eng.comm.records]
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in self.eng.module.parameters()}
        self.notes.append(
            (direction, index, labels.count("parameters"), labels.count("gradients"), sum(storages.values()))
        )

    def step(self, number: int) -> None:
        """One step, noted alone."""
        self.notes.clear()
        self.eng.comm.records.clear()
        self.eng.train_batch(rows(self.eng, number))


def moments(zero: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: notes of the second step, of one microbatch."""
    with decoder(zero, accumulation=1) as eng:
        watch = Watch(eng)
        watch.step(0)
        watch.step(1)
        layout = eng.plan.layout(eng.grid.coord())
        by_group = {bucket.gathers: bucket.elements * 4 for bucket in layout.buckets}
        return {"notes": watch.notes, "bytes": [by_group[Turn(0, group),] for group in range(LAYERS + 2)]}


def test_the_next_block_is_asked_for_before_this_one_computes(run_ranks: RunRanks) -> None:
    for seen in run_ranks(moments, 2, {}):
        forward = [note for note in seen["notes"] if note[0] == "forward"]
        backward = [note for note in seen["notes"] if note[0] == "backward"]
        assert [(block, gathers) for _, block, gathers, _, _ in forward] == [(k, k + 3) for k in range(LAYERS)], (
            "before block k computes, the groups before it, its own and the next one are asked for"
        )
        whole = LAYERS + 2
        expected = [(k, whole + LAYERS - k + 1) for k in reversed(range(LAYERS))]
        assert [(block, gathers) for _, block, gathers, _, _ in backward] == expected


@pytest.mark.parametrize("reduce", ["step", "microbatch"])
def test_only_the_last_reduction_is_left_when_backward_ends(run_ranks: RunRanks, reduce: str) -> None:
    for seen in run_ranks(moments, 2, {"reduce": reduce}):
        backward = [note for note in seen["notes"] if note[0] == "backward"]
        # while block k computes, all behind it are under way: blocks k + 1 and up, and the group of norm and head
        assert [reductions for _, _, _, reductions, _ in backward] == [LAYERS - k for k in reversed(range(LAYERS))]


def test_no_more_than_two_groups_are_whole(run_ranks: RunRanks) -> None:
    for seen in run_ranks(moments, 2, {}):
        sizes = seen["bytes"]
        for direction, block, _, _, held in seen["notes"]:
            here, other = block + 1, block + 2 if direction == "forward" else block
            assert held == sizes[here] + sizes[other], (direction, block)


def peaks(grid: dict[str, int], zero: dict[str, Any], schedule: str) -> tuple[int, int, int]:
    """Body of a rank: most bytes whole at a time in a step of many microbatches, the two largest groups, the limit."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "parallel": grid | {"schedule": schedule},
        "zero_optimization": {"stage": 3} | zero,
        "optimizer": {"type": "AdamW"},
    }
    eng = engine.initialize(models.decoder(layers=4), config, loss_sum)
    eng.train_batch(rows(eng, 0))
    most = [0]
    names = {row.name for row in eng.plan.table.held_by(eng.grid.holder())}

    def look(*_: object) -> None:
        mine = [p for name, p in eng.module.named_parameters() if name in names]
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in mine}
        most[0] = max(most[0], sum(storages.values()))

    for module in eng.module.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look)
            module.register_full_backward_hook(look)
    eng.train_batch(rows(eng, 1))
    sizes = sorted(bucket.elements * 4 for bucket in eng.plan.layout(eng.grid.coord()).buckets)
    limit = sum(sizes) if zero.get("gather") == "step" else zero.get("keep_gathered_bytes", 0)
    eng.close()
    return most[0], sizes[-1] + sizes[-2], limit


@pytest.mark.parametrize(
    ("grid", "schedule", "zero"),
    [
        ({"data": 2}, "gpipe", {}),
        wide({"data": 2, "pipeline": 2}, "1f1b", {"keep_gathered_bytes": 60_000}),
        wide({"data": 2}, "gpipe", {"keep_gathered_bytes": 60_000}),
        wide({"data": 2, "pipeline": 2}, "1f1b", {}),
    ],
    ids=str,
)
def test_memory_of_whole_parameters_is_bounded(
    run_ranks: RunRanks, grid: dict[str, int], schedule: str, zero: dict[str, Any]
) -> None:
    for most, two, limit in run_ranks(peaks, prod(grid.values()), grid, zero, schedule):
        assert 0 < most <= two + limit
