"""Weight gradients of one microbatch that are computed while collectives of another one travel."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.verify import Parity, verify
from tests.engine.parity.launches import settings
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
SHAPE = DecoderConfig(vocabulary=32, layers=4, width=16, heads=4, context=8)


def trained(parallel: dict[str, Any], recompute: str) -> tuple[Parity | None, Counter[str]]:
    """Body of a rank: two steps of four microbatches, and what happened while a collective over tp was under way."""
    seen: Counter[str] = Counter()
    flying: list[int] = []
    begin, ahead = Comm.all_reduce, DeferredWeightGrads._next

    def all_reduce(self: Comm, tensor: Tensor, axis: Any, label: str, op: Any = "sum") -> Pending:
        pending = begin(self, tensor, axis, label, op)
        if axis == "tp":
            flying.append(1)
            wait = pending._wait

            def landed() -> None:
                flying.pop()
                if wait is not None:
                    wait()

            pending._wait = landed
        return pending

    def compute(self: DeferredWeightGrads) -> Any:
        seen["beside" if flying else "alone"] += 1
        return ahead(self)

    tokens = torch.randint(0, 32, (2, 8, 9), generator=torch.Generator().manual_seed(3))
    batches = [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]
    config = settings(2, parallel=parallel, activation_checkpointing={"mode": recompute}) | {"train_batch_size": 8}

    def build() -> Decoder:
        torch.manual_seed(1)
        return Decoder(SHAPE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "all_reduce", all_reduce)
        patch.setattr(DeferredWeightGrads, "_next", compute)
        return verify(build, config, batches, loss_sum), seen


def trained_both(parallel: dict[str, Any], recompute: str) -> Any:
    """Body of a rank: as it is, and with nothing computed ahead."""
    filled = trained(parallel, recompute)
    TensorAxis.filling_waits = lambda *_: nullcontext()  # type: ignore[assignment]
    return filled, trained(parallel, recompute)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("zb-h1", "none"), wide("zb-h1", "selective"), wide("zb-h1", "full"), wide("zb-v", "none")],
)
def test_they_are_computed_in_the_waits_to_the_same_bit(run_ranks: RunRanks, schedule: str, recompute: str) -> None:
    parallel = {"tensor": 2, "overlap": "chunks", "schedule": schedule}
    results = run_ranks(trained_both, 4, parallel | ({"virtual_stages": 2} if schedule == "zb-v" else {}), recompute)
    for (_, filled), (_, plain) in results:
        assert sum(filled.values()) == sum(plain.values()) and not plain["beside"]
    assert any(filled["beside"] for (_, filled), _ in results)
    (run, _), (other, _) = results[0]
    assert run.holds(), str(run)
    assert run.engine.losses == other.engine.losses and run.engine.norms == other.engine.norms
    torch.testing.assert_close(run.engine.weights, other.engine.weights, rtol=0, atol=0)
