"""Packed documents of unequal lengths: context ranks compute nearly as many pairs, and train as one process."""

from collections import Counter
from functools import partial
from threading import current_thread
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import engine
from engine.kernels.ops.attention_block import BlockRule, attend
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.context import attention, recipe_mode
from engine.parallel.context import balance as balances
from engine.parallel.context import recipe as recipes
from engine.parallel.context.balance import EVEN, WorkBalance, by_work, work_balance, work_of_documents
from engine.verify import verify
from tests.parallel.context.test_balance import documents, places_of
from tests.parallel.context.test_context_training import config_of, llama
from tests.planned_traffic import traffic_differs
from tests.selection import wide

LENGTH, STEPS = 96, 3
LAYERS, KEY_BYTES = 2, 2 * 16 * 4
"""Layers of the model, and bytes of the key and value of a position."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, masks and blocks of rows of short sequences."""
    monkeypatch.setattr(balances, "LEAST_CHUNK", 4)
    monkeypatch.setattr(recipes, "_LARGE", 64)
    monkeypatch.setattr(recipe_mode, "_LONG", 8)
    monkeypatch.setattr(recipes, "_ROWS", 512)
    monkeypatch.setattr(recipes, "_LINES", 10)


def packed(
    length: int = LENGTH, rows: int = 1, steps: int = STEPS, draws: str = "heavy tail"
) -> list[dict[str, Tensor]]:
    draw, found = torch.Generator().manual_seed(1), []
    for step in range(steps):
        places = torch.stack([places_of(documents(draws, length, 4 * step + row)) for row in range(rows)])
        ids = torch.randint(0, 61, (rows, length), generator=draw)
        labels = ids.masked_fill(places == 0, -100)
        found.append({"input_ids": ids, "labels": labels, "position_ids": places})
    return found


def settings(parallel: dict[str, Any], rows: int = 1, **more: Any) -> dict[str, Any]:
    return config_of({"data": 1, **parallel}, 1, **more) | {
        "train_batch_size": rows, "train_micro_batch_size_per_gpu": rows,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "method", "more"),
    [
        (2, "auto", {}),
        *(wide(ranks, method, {}) for ranks in (2, 3, 4) for method in ("gather", "ring", "heads", "need")),
        wide(2, "auto", {"tensor": 2}),
        wide(2, "auto", {"tensor": 2, "sequence_parallel": True}),
        wide(2, "auto", {"pipeline": 2}),
        wide(2, "auto", {"data": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("attention", ["sdpa", wide("eager")])
def test_documents_shared_by_work_train_as_one_process(
    ranks: int, method: str, more: dict[str, Any], attention: str
) -> None:
    rows = more.get("data", 1) * (2 if "pipeline" in more else 1)
    parallel = {**more, "context": {"size": ranks, "method": method}}
    threads = ranks
    for axis in ("tensor", "pipeline", "data"):
        threads *= more.get(axis, 1)
    config = settings(parallel, 1) | {"train_batch_size": rows}
    result = verify(lambda: llama(attention), config, packed(rows=rows), None, threads=threads)
    assert result is not None and result.holds(), str(result)


class Run(NamedTuple):
    """Figures of a rank: bytes of keys in a step with other documents, and differences to the plan in one with those
    of the example.
    """

    thread: str
    sent: int
    needed: int
    """Bytes of the keys of this rank that queries of others need, forward and twice backward."""
    differs: list[str]
    planned: tuple[int, ...]
    """Pairs of each rank in a head, for the documents of the example."""
    notes: tuple[str, ...]


def _train(method: str, ranks: int, batches: list[dict[str, Tensor]], world: World) -> Run:
    """Trains three steps, on the example, on other documents, and on the example again."""
    with engine.initialize(llama(), settings({"context": {"size": ranks, "method": method}}), world=world) as eng:
        eng.train_batch(batches[0])
        before = eng.sent
        eng.train_batch(batches[1])
        sent = sum(row.bytes for row in eng.sent.since(before).rows() if row.label.startswith("key"))
        differs = traffic_differs(eng, lambda _, step: batches[step], [0])
        needed = _needed(batches[1], ranks, eng.grid.rank)
        return Run(current_thread().name, sent, needed, differs, eng.plan.context.pairs, eng.plan.notes)


def _needed(batch: dict[str, Tensor], ranks: int, rank: int) -> int:
    """Returns the bytes of forward and backward: keys twice from this rank, and gradients of keys to their ranks."""
    (places,) = batch["position_ids"].tolist()
    (work,) = work_of_documents([("position_ids", batch["position_ids"])]).values()
    held = [set(own.tolist()) for own in by_work(work, ranks).ranks]
    wanted = [{key for query in own for key in range(query - places[query], query + 1)} for own in held]
    given = sum(len(held[rank] & wanted[other]) for other in range(ranks) if other != rank)
    taken = sum(len(held[other] & wanted[rank]) for other in range(ranks) if other != rank)
    return LAYERS * KEY_BYTES * (2 * given + taken)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """Pairs by thread: those that a query sees, and those that its blocks compute."""
    found: dict[str, Counter[str]] = {}

    def counting(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
        one = found.setdefault(current_thread().name, Counter())
        if not q.is_meta and rule.mask is not None:
            one["seen"] += int(rule.mask.sum())
            one["computed"] += q.shape[0] * q.shape[-2] * k.shape[-2]
        return attend(q, k, v, rule)

    monkeypatch.setattr(attention, "attend", counting)
    return found


@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        (ranks, method) if (ranks, method) in ((4, "gather"), (3, "need")) else wide(ranks, method)
        for ranks in (2, 3, 4)
        for method in ("gather", "ring", "need")
    ],
)
def test_ranks_compute_the_pairs_that_were_planned(ranks: int, method: str, counted: dict[str, Counter[str]]) -> None:
    batches, planned = packed(1152, steps=2), [0] * ranks
    balances = [_balance_of(batch, ranks) for batch in batches]
    for balance in (*balances, balances[0]):
        assert balance.most_over_mean <= EVEN
        planned = [all_steps + pairs for all_steps, pairs in zip(planned, balance.pairs, strict=True)]
    results = run_thread_ranks(ranks, partial(_train, method, ranks, batches))
    for rank, run in enumerate(results):
        pairs = counted[run.thread]
        assert pairs["seen"] == LAYERS * planned[rank]
        assert pairs["computed"] <= 1.25 * pairs["seen"], "blocks of rows compute a few pairs that are hidden"
        assert not run.differs and run.planned == balances[0].pairs, run.differs
        assert any(f"{max(run.planned):,} pairs" in note for note in run.notes)
        assert method != "need" or run.sent == run.needed
    total = sum(pairs["computed"] for pairs in counted.values())
    assert max(pairs["computed"] for pairs in counted.values()) <= 1.10 * total / ranks


def _balance_of(batch: dict[str, Tensor], ranks: int) -> WorkBalance:
    (work,) = work_of_documents([("position_ids", batch["position_ids"])]).values()
    return work_balance(work, by_work(work, ranks))
