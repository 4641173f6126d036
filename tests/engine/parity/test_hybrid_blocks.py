"""Lists of blocks of several classes, and stages that begin inside a block: trained as in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import Parity, TrainingRecord, train_alone, verify
from engine.zero.reduce.microbatch_reducer import MicrobatchReducer
from engine.zero.reduce.reducer import Backward
from tests import models
from tests.engine.parity.launches import settings

RunRanks = Callable[..., list[Any]]


class LinearAttention(nn.Module):
    """A decaying sum along the sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.out(torch.tanh(torch.cumsum(self.mix(self.norm(x)) * self.decay, 1)))
        return out


class Hybrid(nn.Module):
    """Attention and linear attention in turns."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.head = nn.Embedding(models.VOCABULARY, width), nn.Linear(width, models.VOCABULARY)
        self.layers = nn.ModuleList(
            LinearAttention(width) if index % 2 else models.NanoBlock(width, 2) for index in range(4)
        )

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Wrapper(nn.Module):
    """What an adapter library puts around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Hybrid()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        out: Tensor = self.inner(ids, targets)
        return out


def train(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Body of a rank."""
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(8, 3)]
    return [verify(Wrapper, settings(2, parallel=parallel, **rest), batches) for parallel, rest in cases]


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"activation_checkpointing": {"mode": "full"}}),
    ({"split": ["inner.layers.2.proj"]}, {}),
    ({"split": ["inner.layers.1.out"]}, {"activation_checkpointing": {"mode": "full"}}),
    ({"split": ["inner.layers.1.out"], "schedule": "zb-h1"}, {"zero_optimization": {"stage": 1}}),
]


def test_blocks_of_several_classes_are_cut_as_in_one_process(run_ranks: RunRanks) -> None:
    for case, result in zip(CASES, run_ranks(train, 2, CASES)[0], strict=True):
        assert result.holds(), f"{case}: {result}"
        assert min(result.reference.norms) > 0.05, "clipping must be active"


class Chosen(nn.Module):
    """Experts that compute the rows of the batch that choose them, where there are any."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if (rows := (chosen == index).nonzero().flatten()).numel():
                out = out.index_add(0, rows, expert(x[rows]) * shares[rows, None])
        return x + self.dropout(out)  # type: ignore[no-any-return]


class Mixed(Chosen):
    """Another class, so that the list of blocks is of several and only lists of experts are of one."""

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1).unbind(-1)
        mixed = sum(share[:, None] * expert(x) for share, expert in zip(shares, self.experts, strict=True))
        return x + self.dropout(mixed)  # type: ignore[no-any-return]


class Rows(nn.Module):
    """A chain over rows [B, W]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.head = nn.Linear(width, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList([Chosen(width, 3), Mixed(width, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def test_experts_chosen_by_content_stay_in_their_block() -> None:
    batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(3))]
    found = verify(Rows, settings(2), batches, threads=2)
    assert found is not None and found.holds(), str(found)


def undropped() -> nn.Module:
    """Rows without dropout."""
    model = Rows()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def looped(config: dict[str, Any], batch: Tensor, world: World) -> TrainingRecord:
    """Body of a rank: two steps of an own loop over the stages, on two microbatches of eight rows each."""
    with engine.initialize(undropped, config, example_batch=batch[:8], world=world) as eng:
        eng.open_pipeline()
        reports = []
        for _ in range(2):
            for rows in torch.chunk(batch, 4)[2 * eng.grid.row_rank :][:2]:
                eng.backward(eng(rows))
                report = eng.step()
            assert report is not None
            reports.append(report)
        weights = eng.full_state_dict()
    return TrainingRecord(tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports), weights)


def test_a_loop_over_stages_chooses_other_experts_on_each_data_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    backward, unequal = MicrobatchReducer.backward, list[bool]()

    def watched(reducer: MicrobatchReducer, which: Backward) -> Any:
        unequal.append(which.unequal)
        return backward(reducer, which)

    monkeypatch.setattr(MicrobatchReducer, "backward", watched)
    batch = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))
    batch[16:] = batch[16]  # the second data rank's rows choose one expert, those of the first choose all
    config = settings(2, parallel={"data": 2}, zero_optimization={"stage": 3, "reduce": "microbatch"})
    config |= {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8}
    ranks = run_thread_ranks(4, partial(looped, config, batch))
    alone = train_alone(undropped, config, [batch] * 2, world=World(0, 4, 0, torch.device("cpu")))
    assert Parity(ranks[0], alone).holds(), str(Parity(ranks[0], alone))
    assert any(unequal), "otherwise a rank may reduce a bucket while another one gathers"


@pytest.mark.long
def test_blocks_of_several_classes_are_sharded_and_cut(run_ranks: RunRanks) -> None:
    cases = [({"tensor": 2}, {}), ({"tensor": 2, "split": ["inner.layers.2"]}, {"zero_optimization": {"stage": 1}})]
    for case, result in zip(cases, run_ranks(train, 4, cases)[0], strict=True):
        assert result.holds(), f"{case}: {result}"


class Selecting(Hybrid):
    """Code between the layers selects rows by content; so does the loss."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index in (0, 2):
                x = x + x[x[..., 0] > 0].mean(0)
        logits = self.head(x)
        picked = logits[..., 0] >= logits[..., 0].min(1, keepdim=True).values + 0.01
        return F.cross_entropy(logits[picked], targets[picked])


def test_code_between_stages_selects_rows() -> None:
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(8, 2)]
    result = verify(Selecting, settings(2, parallel={"pipeline": 2}), batches, threads=2)
    assert result is not None and result.holds(), str(result)
