"""Training whose products add weight gradients to the flat buckets is that of one process, at the bytes of the plan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.kernels.ops import embedding
from engine.kernels.ops import linear as products
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.tensor import deferred_linear
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone
from tests.engine.parity.launches import differences, settings
from tests.kernels.interpreter import repair
from tests.models import take_rows
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
LAYERS, ROWS, MICROBATCHES, STEPS = 2, 8, 4, 3
LINEAR = 6
"""Linear layers of a block."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way of training the decoder."""

    changes: dict[str, Any]
    tied: bool = False
    layers: int = LAYERS

    def config(self) -> dict[str, Any]:
        """Four microbatches of a data rank, clipping active."""
        config = settings(1, **{"kernels": "reference"} | self.changes)
        data = config["parallel"]["data"]
        return config | {"train_batch_size": ROWS, "train_micro_batch_size_per_gpu": ROWS // MICROBATCHES // data}

    def build(self) -> Decoder:
        """The same model on every rank."""
        torch.manual_seed(1)
        return Decoder(DecoderConfig(vocabulary=32, layers=self.layers, width=16, heads=4, context=8, tied=self.tied))


def batches() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 32, (STEPS, ROWS, 9), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]


@dataclass(frozen=True, slots=True)
class Found:
    """What came out on a rank."""

    parity: Parity | None
    """On rank 0."""
    added: int
    """Products that were added to a bucket."""
    made: int
    """Weight gradients of linear layers that a backward gave to autograd."""
    looked_up: int
    """Gradients of embeddings that were added to a bucket, row by row."""
    uncounted: tuple[str, ...]
    skipped: int

    def __str__(self) -> str:
        added = f"{self.added} and {self.looked_up} of embeddings added, {self.made} made"
        return f"{self.parity}; {added}, {self.skipped} skipped, {self.uncounted}"


def train_each(ways: list[Way]) -> list[Found]:
    """Body of a rank: one way after another."""
    repair()
    counted, looked_up = _count(), _count_rows()
    return [_train(way, counted, looked_up) for way in ways]


def _count() -> list[bool]:
    """Note for each weight gradient whether it was added to a bucket."""
    noted: list[bool] = []
    plain = products.added_to_main

    def noting(*args: Any) -> bool:
        noted.append(plain(*args))
        return noted[-1]

    for module in (products, deferred_linear):
        setattr(module, "added_to_main", noting)  # noqa: B010
    return noted


def _count_rows() -> list[Tensor]:
    """Note the ids of each gradient of an embedding that is added to a bucket."""
    noted: list[Tensor] = []
    plain = embedding.add_rows_

    def noting(into: Tensor, ids: Tensor, *rest: Any) -> None:
        noted.append(ids)
        plain(into, ids, *rest)

    embedding.add_rows_ = noting  # type: ignore[assignment]
    return noted


def _train(way: Way, counted: list[bool], looked_up: list[Tensor]) -> Found:
    counted.clear()
    looked_up.clear()
    config, given = way.config(), batches()
    micro = config["train_micro_batch_size_per_gpu"]
    eng = engine.initialize(way.build, config, loss_sum, take_rows(given[0], 0, micro))
    with eng:
        rows, first = eng.config.micro * eng.config.accumulation, eng.grid.coord().dp
        mine = [take_rows(batch, first * rows, rows) for batch in given]
        reports = [eng.train_batch(mine[0])]  # the plan is checked in the first step, which sends
        before = eng.sent
        reports += [eng.train_batch(batch) for batch in mine[1:]]
        uncounted = differences(eng, before, STEPS - 1)
        run = TrainingRecord(tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports), eng.full_state_dict())
        rank, added, skipped = eng.grid.rank, counted.count(True), eng.skipped_steps
        embeddings = len(looked_up)
    alone = train_alone(way.build, config, given, VerifyOptions(loss_sum)) if rank == 0 else None
    parity = None if alone is None else Parity(run, alone)
    return Found(parity, added, counted.count(False), embeddings, uncounted, skipped)


def check(run_ranks: RunRanks, ways: list[Way], near: float = 1.0) -> None:
    """``near``: a factor on the bounds of the promise."""
    parallel = {"data": 1, "tensor": 1, "pipeline": 1} | ways[0].changes["parallel"]
    ranks = parallel["data"] * parallel["tensor"] * parallel["pipeline"]
    for rank, found in enumerate(run_ranks(train_each, ranks, ways, seconds=300.0)):
        for way, one in zip(ways, found, strict=True):
            named = f"rank {rank}, {way}: {one}"
            fits = one.parity is None or one.parity.holds(1e-6 * near, 1e-5 * near, 1e-5 * near)
            assert fits, named
            assert one.parity is None or min(one.parity.reference.norms) > 0.05, "clipping must be active"
            counted = not one.uncounted and not one.skipped
            assert counted, named
            # in a split backward the head is a layer as any other; elsewhere its loss sums the gradient over chunks
            schedule = way.changes["parallel"].get("schedule", "")
            whole_head = schedule.startswith("zb")
            on_last = parallel["pipeline"] == 1 or rank // parallel["data"] == (0 if schedule == "zb-v" else 1)
            layers = LINEAR * way.layers // parallel["pipeline"] + (whole_head and on_last)
            products = one.added, one.made
            # the first forward of a plan along the sequence is watched, in the layers' own products
            watched = bool(way.changes["parallel"].get("sequence_parallel"))
            assert products == ((STEPS * MICROBATCHES - watched) * layers, 0), named
            if parallel["tensor"] == parallel["pipeline"] == 1:  # of tokens and of positions
                assert one.looked_up == STEPS * MICROBATCHES * 2, named


DATA = {"parallel": {"data": 2}}
ZERO: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "reduce_bucket_size": 900},
    {"stage": 2, "reduce": "microbatch", "reduce_bucket_size": 900},
    {"stage": 3, "reduce": "microbatch"},
]


FEW = [Way(DATA | {"zero_optimization": ZERO[1]}, tied=True), Way(DATA | {"zero_optimization": ZERO[3]})]
ALL = [Way(DATA | {"zero_optimization": zero}) for zero in (*ZERO, {"stage": 2}, {"stage": 3})]
TIED = [Way(way.changes, tied=True) for way in ALL]
RECOMPUTED = [Way(way.changes | {"activation_checkpointing": {"mode": "full"}}) for way in ALL]
TENSOR = [
    Way({"parallel": {"tensor": 2}}),
    Way({"parallel": {"tensor": 2, "sequence_parallel": True}}, tied=True),
    Way({"parallel": {"tensor": 2, "sequence_parallel": True}, "kernels": "triton"}),
    Way({"parallel": {"tensor": 2}, "kernels": "triton"}),
]
INTERPRETED = [Way(DATA | {"kernels": "triton", "zero_optimization": zero}) for zero in ZERO[1:]]


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(FEW, id="ZeRO 1 and 3"),
        wide(ALL, id="ZeRO"),
        wide(TIED, id="tied"),
        wide(RECOMPUTED, id="recomputed"),
        wide(TENSOR, id="tensor"),
        wide(INTERPRETED, id="interpreted"),
    ],
)
def test_training_is_that_of_one_process(run_ranks: RunRanks, ways: list[Way]) -> None:
    check(run_ranks, ways)


@pytest.mark.long
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "1f1b"])
def test_pipelines_with_deferred_weight_gradients(run_ranks: RunRanks, schedule: str, data: int) -> None:
    parallel = {"pipeline": 2, "schedule": schedule, "data": data}
    layers = 4 if schedule == "zb-v" else 2
    check(run_ranks, [Way({"parallel": parallel, "zero_optimization": zero}, layers=layers) for zero in ZERO[1:]])


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_bf16_deviates_by_its_rounding_alone(run_ranks: RunRanks, kernels: str) -> None:
    """One process rounds each gradient to bf16; a product adds its fp32 sums, so that the two differ by rounding."""
    ways = [Way(DATA | {"bf16": {"enabled": True}, "kernels": kernels, "zero_optimization": zero}) for zero in ZERO]
    check(run_ranks, ways, near=1e3)
