"""Rounds of matrices: the next one travels while one is computed, and the calls have one order on all ranks."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.zero.optim.matrix.matrix_updates import MatrixUpdates, staggered
from tests.engine.parity.test_parity_preconditioned import SOAP
from tests.parallel.comm.small_decoder import batch, on_threads


def test_the_newest_round_begins_before_older_ones_go_on() -> None:
    def one(name: str) -> Iterator[str]:
        for part in ("starts", "computes", "applies"):
            yield f"{name} {part}"

    assert list(staggered(one(name) for name in "abc")) == [
        "a starts",
        "b starts", "a computes",
        "c starts", "b computes", "a applies",
        "c computes", "b applies",
        "c applies",
    ]  # fmt: skip


def watched(eng: Engine) -> list[str]:
    """What happens in a step to the matrices of a rank, in order: starts and ends of calls, and updates."""
    events: list[str] = []
    comm, (updates,) = eng._runtime.comm, eng._runtime.optimizer.whole
    assert isinstance(updates, MatrixUpdates)
    begin, update, gather, calls = comm.all_to_all, updates._update, comm.all_gather, iter(range(10**6))

    def all_to_all(received: Tensor, given: Tensor, members: Any, label: str, axis: Any = "dp") -> Any:
        pending, name = begin(received, given, members, label, axis), f"{axis} {next(calls)}"
        events.append(f"start {name}")
        return pending.then(lambda: events.append(f"end {name}"))

    def all_gather(full: Tensor, shard: Tensor, axis: Any, label: str) -> Any:
        events.append(f"{label} gathered")
        return gather(full, shard, axis, label)

    def compute(kinds: Sequence[Tensor], name: str, step: Any) -> Tensor:
        if events[-1] != "compute":
            events.append("compute")
        return update(kinds, name, step)

    eng.train_batch(batch(eng, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_to_all", all_to_all)
        patch.setattr(comm, "all_gather", all_gather)
        patch.setattr(updates, "_update", compute)
        eng.train_batch(batch(eng, 1))
    return events


MATRICES = [{"match": "blocks.*", "type": "Muon", "params": {"lr": 0.02}}, {"type": "AdamW"}]


@pytest.mark.parametrize(
    "optimizer", [MATRICES, [{"match": "blocks.*", **SOAP}, {"type": "AdamW"}]], ids=["muon", "soap"]
)
def test_a_round_is_gathered_while_the_one_before_is_computed(optimizer: Any) -> None:
    changes = {
        "parallel": {"data": 2}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}, "optimizer": optimizer,
    }  # fmt: skip
    for events in on_threads(2, changes, watched, layers=4):
        calls = [each for each in events if "gathered" not in each]
        # gathers of rounds 0 to 3 are calls 0, 1, 3 and 5, ways back 2, 4, 6 and 7
        assert calls == [
            "start dp 0",
            "start dp 1", "end dp 0", "compute", "start dp 2",
            "start dp 3", "end dp 1", "compute", "start dp 4", "end dp 2",
            "start dp 5", "end dp 3", "compute", "start dp 6", "end dp 4",
            "end dp 5", "compute", "start dp 7", "end dp 6",
            "end dp 7",
        ]  # fmt: skip
        early = [each for each in events[events.index("end dp 2") : events.index("end dp 7")] if "gathered" in each]
        assert early, "parameters are gathered while later matrices are on their way"


def test_tensor_ranks_meet_beside_the_products_too() -> None:
    changes = {"parallel": {"data": 1, "tensor": 2}, "optimizer": MATRICES}
    first, second = on_threads(2, changes, watched, layers=4)
    assert first == second
    computed = [index for index, each in enumerate(first) if each == "compute"]
    for before, after in pairwise(computed):
        started = {each.removeprefix("start ") for each in first[:before] if each.startswith("start ")}
        ended = {each.removeprefix("end ") for each in first[: before + 1] if each.startswith("end ")}
        assert started - ended, f"something is under way at event {before}, of {first[: after + 1]}"
    assert len(computed) == 4 and torch.is_grad_enabled()
