"""Convolutions, shifts and recurrences over sequences that context ranks share: equal to one process, in few bytes."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.parallel.comm.threads import run_thread_ranks
from engine.planning.analysis import PlanRequest
from engine.planning.plan import build_plan
from engine.precision.dtypes import make_precision
from engine.program.program import Program
from engine.verify import verify
from tests.parallel.context.recurrent_models import FAMILIES, OWN, VOCABULARY, WIDTH, batches
from tests.parallel.context.test_context_training import check_parity, config_of
from tests.parallel.context.test_nested_axes import GRIDS
from tests.planned_traffic import traffic_differs
from tests.selection import wide

CP = {"data": 1, "context": 2}
FIRST = ("causal conv", "scan")
"""Layers of the default suite."""
GATHERED = {"trap": (), "custom function": ("_Function",)}
"""Layers without a state, and the names in the note about gathers."""


@pytest.mark.parametrize(
    ("layer", "layout"),
    [
        (name, layout) if name in FIRST and layout == "cp2" else wide(name, layout)
        for name in OWN
        for layout in ("cp2", "cp3", "cp4", "dp2 x cp2, ZeRO 3")
    ],
)
def test_layers_along_positions_train_as_one_process(layer: str, layout: str) -> None:
    check_parity(OWN[layer], batches(), layout)


@pytest.mark.parametrize(
    ("family", "layout", "packed"),
    [wide(name, layout, packed) for name in FAMILIES for layout in ("cp2", "cp3", "cp4") for packed in (False, True)],
)
def test_families_with_recurrences_train_as_one_process(family: str, layout: str, packed: bool) -> None:
    check_parity(FAMILIES[family], batches(documents=(0, 7, 8, 21) if packed else (0,)), layout)


@pytest.mark.parametrize("layout", ["cp2", wide("cp4")])
def test_a_reset_in_place_at_a_border_reaches_the_next_rank(layout: str) -> None:
    check_parity(OWN["reset in place"], batches(documents=(0, 18)), layout)


@pytest.mark.parametrize("mode", [wide("full"), wide("selective")])
@pytest.mark.parametrize("layer", ["stacked loop", "causal conv", "scan", "LSTM"])
def test_recomputation_sends_states_again(layer: str, mode: str) -> None:
    more = {"activation_checkpointing": {"mode": mode}}
    result = verify(lambda: _Blocks(OWN[layer]), config_of(CP) | more, batches(), None, threads=2)
    assert result is not None and result.holds(), str(result)


class _Recurrent(nn.Module):
    """A recurrence between two layers; all of it is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.gru = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        logits = self.head(self.gru(self.table(input_ids))[0])
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels)


def test_small_buckets_do_not_keep_a_rank_from_its_neighbours_state() -> None:
    # the weights of the layer fill more buckets than are reduced at a time, before its state is passed on
    zero = {"zero_optimization": {"stage": 2, "reduce": "microbatch", "reduce_bucket_size": WIDTH}}
    result = verify(_Recurrent, config_of(CP) | zero, batches()[:1], None, threads=2)
    assert result is not None and result.holds(), str(result)


@pytest.mark.parametrize(
    ("layer", "grid"),
    [wide(name, grid) for name in ("causal conv", "stacked loop", "scan", "GRU") for grid in GRIDS],
)
def test_blocks_along_positions_train_on_context_and_other_axes(layer: str, grid: str) -> None:
    sizes, stage = GRIDS[grid]
    parallel = {"data": 1, **sizes}
    ranks = math.prod(parallel.get(axis, 1) for axis in ("data", "context", "tensor", "pipeline"))
    result = verify(lambda: _Blocks(OWN[layer]), config_of(parallel, stage), batches(), None, threads=ranks)
    assert result is not None and result.holds(), str(result)


class _Blocks(nn.Module):
    """Two blocks of one layer, between a table and a head."""

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__()
        inner = [build() for _ in range(2)]
        self.table, self.head = inner[0].table, inner[0].head
        self.layers = nn.ModuleList(_Block(one) for one in inner)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        rows = self.table(input_ids)
        for layer in self.layers:
            rows = layer(rows, position_ids)
        return nn.functional.cross_entropy(self.head(rows).transpose(1, 2), labels)


class _Block(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        del inner.table, inner.head

    def forward(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows + torch.tanh(self.inner.mix(self.inner, rows, positions))


def _planned(build: Callable[[], nn.Module], length: int, ranks: int, world: Any) -> Any:
    one = {"train_batch_size": 1, "parallel": {"data": 1, "context": ranks}}
    given = batches(1, length, 2)
    with engine.initialize(build(), config_of(CP) | one, world=world) as eng:
        eng.train_batch(given[0])
        differs = traffic_differs(eng, lambda _, step: given[step], [1])
        sent = {row.label: row.bytes for row in eng.plan.rank(eng.grid.rank).traffic if row.axis == "cp"}
        return differs, sent, [note for note in eng.plan.notes if "gathered" in note]


def _sent(layer: str, length: int = 36, ranks: int = 2) -> list[Any]:
    found = run_thread_ranks(ranks, partial(_planned, OWN[layer], length, ranks))
    assert all(not differs for differs, _, _ in found), found
    return [(sent, notes) for _, sent, notes in found]


ROW = WIDTH * 4
"""Bytes of a row of one sequence, fp32."""


@pytest.mark.parametrize(
    ("layer", "rows"),
    [("causal conv", 3), wide("shift by pad", 1), wide("shift by cut", 2), wide("shift by roll", 1),
     wide("shift by cat", 1), wide("padded conv", 4)],
)  # fmt: skip
def test_the_halo_of_a_zigzag_sharding_is_that_of_the_formula(layer: str, rows: int) -> None:
    # chunks of ranks 0 1 1 0: forward, rank 0 sends at the first border and rank 1 at the third; a roll adds a border
    # within rank 0; backward, gradients go the other way
    for sent, notes in _sent(layer):
        assert sent["halo"] == 2 * rows * ROW and not notes


@pytest.mark.parametrize("layer", ["reset loop", *map(wide, ("stacked loop", "written loop", "GRU", "LSTM", "scan"))])
def test_a_state_passes_each_border_once(layer: str) -> None:
    states = {"GRU": 2, "LSTM": 2}.get(layer, 1)  # two layers; hidden state and cell
    first, second, third = (sent["state"] for sent, _ in _sent(layer, ranks=3))
    # forward to the next rank, and its gradient to the one before
    assert (first, second, third) == (states * ROW, 2 * states * ROW, states * ROW)


@pytest.mark.parametrize("layer", [wide("stacked loop"), wide("GRU"), wide("scan")])
def test_states_of_several_blocks_are_planned(layer: str) -> None:
    for differs, sent, _ in run_thread_ranks(2, partial(_planned, lambda: _Blocks(OWN[layer]), 36, 2)):
        assert not differs and "state" in sent


@pytest.mark.parametrize("layer", [wide("stacked loop"), wide("scan"), wide("cumsum"), wide("causal conv")])
def test_bytes_do_not_depend_on_the_length(layer: str) -> None:
    (short, _), (long, _) = _sent(layer, 40)[0], _sent(layer, 640)[0]
    assert {label: count for label, count in short.items() if label in ("state", "halo", "column inputs")} == {
        label: count for label, count in long.items() if label in ("state", "halo", "column inputs")
    }


def _planned_state(family: str, length: int) -> dict[str, int]:
    ids = torch.zeros(1, length, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids}
    config, model = (
        load_config(config_of(CP) | {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}, 2),
        FAMILIES[family](),
    )
    program = Program(model, None, make_precision(config, model), torch.device("cpu"))
    plan = build_plan(config, PlanRequest(program, example))
    return {row.label: row.bytes for row in plan.rank(0).traffic if row.axis == "cp" and row.label in ("state", "halo")}


@pytest.mark.parametrize("family", [wide("Mamba2"), wide("Qwen3Next")])
def test_the_payload_of_a_family_is_constant_from_1024_to_65536_tokens(family: str) -> None:
    planned = [_planned_state(family, length) for length in (1024, 65536)]
    assert planned[0] == planned[1] and planned[0]["state"] > 0 and planned[0]["halo"] > 0


@pytest.mark.parametrize("layer", ["trap", wide("custom function")])
def test_what_cannot_be_followed_is_gathered_and_named(layer: str) -> None:
    for sent, notes in _sent(layer):
        assert "state" not in sent
        assert all(any(name in note for note in notes) for name in GATHERED[layer]), notes


def test_a_custom_function_of_single_positions_gathers_nothing() -> None:
    for sent, notes in _sent("custom function of positions"):
        assert not notes and {"column inputs", "loss"} <= set(sent) and "row outputs" not in sent, (sent, notes)


@pytest.mark.parametrize("family", [wide("RecurrentGemma")])
def test_a_family_with_a_custom_function_passes_its_state(family: str) -> None:
    for differs, sent, notes in run_thread_ranks(2, partial(_planned, FAMILIES[family], 36, 2)):
        assert not differs and not notes and {"state", "halo"} <= set(sent), (differs, sent, notes)


def _trained(layer: str) -> list[float]:
    with engine.initialize(OWN[layer](), config_of(CP)) as eng:
        return [eng.train_batch(batch).loss for batch in batches()]


@pytest.mark.parametrize("layer", [wide("stacked loop"), wide("causal conv"), wide("scan")])
def test_processes_train_as_threads(layer: str, run_ranks: Callable[..., list[Any]]) -> None:
    def train(world: Any) -> list[float]:
        with engine.initialize(OWN[layer](), config_of(CP), world=world) as eng:
            return [eng.train_batch(batch).loss for batch in batches()]

    first, second = run_ranks(_trained, 2, layer)
    assert first == second == pytest.approx(run_thread_ranks(2, train)[0], rel=1e-6)
