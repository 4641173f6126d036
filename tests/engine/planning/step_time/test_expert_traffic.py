"""Traffic of shared experts in a plan, compared with the counted bytes of steps with random routing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.engine import Engine
from engine.parallel.comm.comm import Comm
from engine.parallel.experts.dispatch import Dispatch
from engine.parallel.experts.forms import expert_bounds
from engine.planning.cost_model.expert_exchange import ExpertExchange
from engine.planning.cost_model.workload import DecoderShape, ExpertWork, Workload
from engine.planning.step_time.expert_traffic import ExpertTraffic, expert_traffic
from tests.engine.parity.expert_runs import TOKENS, WORDS, own_batch, run
from tests.parallel.experts.moe import WIDTH, Listed, Stacked, on_expert_ranks

BLOCKS, CHOSEN, STEPS = 2, 2, 12


class Drawn(nn.Module):
    """Stacked experts with a routing that hashes the values of a row: each set of experts is equally likely."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate, self.moe = nn.Linear(WIDTH, experts), Stacked(experts, inner=6)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, index = (self.gate(rows) + hashed(rows, self.moe.num_experts)).softmax(-1).topk(CHOSEN)
        found: Tensor = self.moe(rows, index, weights)
        return x + found.view_as(x)


class DrawnList(Listed):
    """Listed experts with such a routing."""

    def scores(self, x: Tensor) -> Tensor:
        """Returns the scores of the experts for each row."""
        return super().scores(x) + hashed(x, len(self.experts))


def hashed(rows: Tensor, experts: int) -> Tensor:
    """Returns numbers from 0 to 100 that rows decide, without a gradient."""
    each = torch.arange(1, experts + 1) * 7919.0
    return 100 * (1e4 * torch.sin(rows.detach().sum(-1, keepdim=True) * each)).remainder(1)


class Model(nn.Module):
    """Embedding, blocks of experts, head."""

    def __init__(self, kind: type[nn.Module], experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(4096, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(kind(experts) for _ in range(BLOCKS))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def workload(experts: int) -> Workload:
    """Returns the workload of the model, as far as the traffic of experts reads it."""
    work = DecoderShape(layers=BLOCKS, width=WIDTH, heads=1, vocabulary=WORDS, context=TOKENS).workload()
    return replace(work, experts=ExpertWork(0.0, experts, CHOSEN, BLOCKS))


def counted(
    kind: type[nn.Module], experts: int, parallel: Mapping[str, Any], changes: Mapping[str, Any]
) -> list[tuple[float, ExpertTraffic]]:
    """Returns, for each rank, bytes that a step sends over the axis "ep" on average, and what its plan expects."""

    def drawn(eng: Engine, step: int) -> dict[str, Tensor]:
        own = own_batch(eng, step)
        ids = torch.randint(0, 4096, own["input_ids"].shape, generator=torch.Generator().manual_seed(17 * step))
        return {"input_ids": ids.roll(1 + eng.grid.row_rank, -1), "labels": own["labels"]}

    def after(eng: Engine) -> tuple[float, ExpertTraffic]:
        rows = [r for r in eng.sent.rows() if r.axis == "ep" and r.label != "batch check" and "gradient" not in r.label]
        planned = expert_traffic(eng.plan, workload(experts), eng.grid.coord())
        assert planned is not None
        return sum(row.bytes for row in rows) / STEPS, planned

    return run(parallel, changes, lambda: Model(kind, experts), after, drawn, steps=STEPS).extra


@pytest.mark.parametrize(
    ("kind", "experts", "parallel", "mode"),
    [
        pytest.param(Drawn, 5, {"data": 2, "expert": 2}, "none", marks=pytest.mark.long),
        (Drawn, 8, {"data": 3, "expert": 3}, "full"),
        pytest.param(Drawn, 8, {"data": 4, "expert": 2}, "selective", marks=pytest.mark.long),
        pytest.param(Drawn, 8, {"data": 2, "expert": 2, "tensor": 2}, "none", marks=pytest.mark.long),
        pytest.param(Drawn, 8, {"data": 2, "expert": 2, "pipeline": 2}, "none", marks=pytest.mark.long),
        pytest.param(DrawnList, 5, {"data": 2, "expert": 2}, "none", marks=pytest.mark.long),
        pytest.param(DrawnList, 8, {"data": 3, "expert": 3}, "full", marks=pytest.mark.long),
    ],
)
def test_steps_with_random_routing_send_the_expected_bytes(
    kind: type[nn.Module], experts: int, parallel: dict[str, Any], mode: str
) -> None:
    rows = 12
    changes = {"train_batch_size": rows, "activation_checkpointing": {"mode": mode}}
    for sent, planned in counted(kind, experts, parallel, changes):
        calls = STEPS * rows * BLOCKS * TOKENS  # tokens of all ranks and steps; each sends 0 to 2 rows
        spread = planned.expected * 5 / calls**0.5
        assert abs(sent - planned.expected) <= spread, (sent, planned.expected, spread)
        assert sent < planned.most
        assert planned.placement == ((experts, expert_bounds(experts, parallel["expert"])),)


@pytest.mark.parametrize(("ranks", "rounds"), [(4, 1), (8, 3)])
def test_a_round_of_a_dispatch_has_as_many_rows_as_the_plan_says(ranks: int, rounds: int) -> None:
    exchange = ExpertExchange(experts=8, chosen=2, ranks=ranks, tokens=9, width=4)

    def body(comm: Comm) -> tuple[int, int]:
        numbers = torch.tensor([[2, 3]] * 9)  # all tokens go to one or two ranks
        found = Dispatch(numbers, torch.tensor(expert_bounds(8, ranks)), comm).rounds
        return len(found), max(max(each.gets) for each in found)

    assert max(on_expert_ranks(ranks, body)) == (rounds, exchange.limit) and exchange.rounds_repeat == (rounds > 1)
