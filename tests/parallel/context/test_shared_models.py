"""Packed documents shared by work in models with convolutions, on pipeline stages, and where a state passes along."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.context import balance as balances
from engine.parallel.context.balance import EVEN, work_balance, work_of_documents
from engine.parallel.context.choose import AttentionRates, AttentionSizes, choose_method
from engine.parallel.context.cuts import contiguous, zigzag
from engine.parallel.context.recurrence.followed import ContextPlan
from engine.parallel.context.sequences import ContextOfSequences
from engine.parallel.tensor.tp_axis import DryAxis
from engine.verify import verify
from tests.parallel.context.recurrent_models import FAMILIES, OWN, VOCABULARY, WIDTH
from tests.parallel.context.test_context_training import llama
from tests.parallel.context.test_shared_by_work import LENGTH, packed, settings
from tests.planned_traffic import traffic_differs
from tests.selection import wide


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of short sequences."""
    monkeypatch.setattr(balances, "LEAST_CHUNK", 4)


class Blocks(nn.Module):
    """Blocks between a table and a head; ``cut``: modules pass rows without the first position."""

    layer: Any

    def __init__(self, layer: str | None = None, cut: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.cut = None if layer is None else OWN[layer]().mix, cut
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        if self.layer is not None:
            x = x + self.layer(self, x, position_ids)
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) + x
            if self.cut and not number:
                x = x[:, 1:]
        return functional.cross_entropy(self.head(x).transpose(1, 2), labels[:, int(self.cut) :])


class Ran(NamedTuple):
    """Plan of a rank, its notes, and differences of a step's traffic to the plan."""

    plan: ContextPlan
    notes: str
    differs: list[str]


def _train(build: Any, config: dict[str, Any], world: World) -> Ran:
    rows = config["train_batch_size"]
    batches = packed(rows=rows, steps=1)
    with engine.initialize(build(), config, world=world) as eng:
        eng.train_batch(batches[0])
        differs = traffic_differs(eng, lambda _, step: batches[step], [0])
        return Ran(eng.plan.context, "\n".join(eng.plan.notes), differs)


def _check(build: Any, parallel: dict[str, Any], threads: int, rows: int = 1, **more: Any) -> Ran:
    """Trains as one process; returns the figures of rank 0."""
    config = settings(parallel, 1, **more) | {"train_batch_size": rows}
    result = verify(build, config, packed(rows=rows), None, threads=threads)
    assert result is not None and result.holds(), str(result)
    runs = run_thread_ranks(threads, partial(_train, build, config))
    assert not any(run.differs for run in runs) or rows > 1
    return runs[0]


@pytest.mark.parametrize(
    ("layer", "ranks"),
    [
        (layer, ranks) if (layer, ranks) == ("causal conv", 3) else wide(layer, ranks)
        for layer in (
            "causal conv",
            "padded conv",
            "centred conv",
            "shift by pad",
            "shift by roll",
            "shift by cat",
            "flip",
            "cumsum",
            "linear attention",
        )
        for ranks in (2, 3, 4)
    ],
)
def test_rows_at_borders_of_chunks_are_sent(layer: str, ranks: int) -> None:
    run = _check(OWN[layer], {"context": ranks}, ranks)
    assert run.plan.by_work and run.plan.halo == (layer not in ("cumsum", "linear attention"))
    assert max(run.plan.pairs) * ranks <= EVEN * sum(run.plan.pairs)


def _call(world: World) -> None:
    with engine.initialize(OWN["causal conv"](), settings({"context": 2}), world=world) as eng:
        for batch in packed(steps=2):
            eng.backward(eng(batch))
            eng.step()


def test_a_script_whose_forwards_do_not_share_work_has_one_note(caplog: pytest.LogCaptureFixture) -> None:
    run_thread_ranks(2, _call)
    notes = [one for one in caplog.messages if "packed documents keep two chunks a rank" in one]
    assert len(notes) == 1 and "eng.train_batch shares them" in notes[0]


@pytest.mark.parametrize("ranks", [wide(2), wide(3), wide(4)])
@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": {"mode": "full"}}], ids=str)
def test_convolutions_beside_attention_are_shared_by_work(ranks: int, more: dict[str, Any]) -> None:
    run = _check(FAMILIES["Lfm2"], {"context": ranks}, ranks, **more)
    assert run.plan.by_work and run.plan.halo and run.plan.pairs


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("need", {}),
        *(wide(method, {}) for method in ("gather", "ring", "heads")),
        *(wide("auto", {"schedule": schedule}) for schedule in ("gpipe", "zb-h1", "zb-v", "dualpipe-v")),
        wide("auto", {"schedule": "interleaved", "virtual_stages": 2}),
        wide("need", {"tensor": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", [None, wide("full"), wide("selective")])
def test_pipeline_stages_know_the_positions_of_messages(method: str, more: dict[str, Any], mode: str | None) -> None:
    parallel = {"pipeline": 2, **more, "context": {"size": 2, "method": method}}
    layers = rows = 4 if "schedule" in more else 2
    recompute: dict[str, Any] = {"activation_checkpointing": {"mode": mode}} if mode else {}
    run = _check(partial(llama, layers=layers), parallel, 4 * more.get("tensor", 1), rows, **recompute)
    assert run.plan.by_work and max(run.plan.pairs) * 2 <= EVEN * sum(run.plan.pairs)


@pytest.mark.parametrize(("layer", "cut"), [(None, True), wide("causal conv", False)])
def test_stages_that_cannot_place_messages_keep_two_chunks(layer: str | None, cut: bool) -> None:
    run = _check(partial(Blocks, layer, cut), {"pipeline": 2, "context": 2}, 4, 2)
    assert not run.plan.by_work and "keep two chunks a rank" in run.notes
    (work,) = work_of_documents([("position_ids", packed(steps=1)[0]["position_ids"])]).values()
    assert run.plan.pairs == work_balance(work, zigzag(LENGTH, 2)).pairs


def test_a_model_that_cannot_be_traced_keeps_two_chunks() -> None:
    run = run_thread_ranks(2, partial(_train, OWN["differences"], settings({"context": 2}, 1)))[0]
    assert not run.plan.by_work and "packed documents keep two chunks a rank: nothing that the forward" in run.notes


def test_a_state_that_passes_along_keeps_neighbouring_positions() -> None:
    context = ContextOfSequences(DryAxis(4, name="cp"), in_blocks=True)
    context.begin({LENGTH: np.arange(LENGTH) + 1}, sharing=False)
    own = contiguous(LENGTH, 4)
    assert context.positions_of(LENGTH) == own
    assert context.uneven(own, True) == work_balance(np.arange(LENGTH) + 1, own).most_over_mean > 1.7
    context.begin({})
    assert context.uneven(own, True) > 1.7 and context.uneven(own, False) == 1.0


def test_heads_are_chosen_where_positions_have_unequal_work() -> None:
    rates = AttentionRates(4e14, 5e13, 2e-5, "fast links")
    form = AttentionSizes(
        ranks=8, rows=1, queries=2**16, keys=2**16, heads=32, key_heads=8, width=256, element=2, causal=True
    )
    assert choose_method(form, None, rates)[0] == "gather"
    assert choose_method(form._replace(uneven=1.8), None, rates)[0] == "heads"


@pytest.mark.parametrize("family", [wide("Jamba"), wide("Qwen3Next")])
def test_the_banner_names_models_with_a_state(family: str) -> None:
    run = _check(FAMILIES[family], {"context": 2}, 2)
    assert not run.plan.by_work and "a state passes along them" in run.notes
