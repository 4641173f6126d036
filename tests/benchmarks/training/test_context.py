"""The benchmark of context parallelism: its rows, the error of a peer as a cell, and a tiny run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.harness.footprint import Footprint
from benchmarks.harness.report import Sample
from benchmarks.peers.sequence_ranks import Ulysses
from benchmarks.peers.trine import make_config
from benchmarks.peers.workload import Mode, Workload
from benchmarks.training import context
from benchmarks.training.cell_tables import COLUMNS, NOTE, Table, cells, startable
from engine.models.decoder import DecoderConfig

TINY = Workload(DecoderConfig(layers=2, width=32, heads=4), sequences=2, epsilon=context.EPSILON, model="llama")


def test_each_method_is_a_row_and_reaches_the_configuration() -> None:
    modes = context.contenders(2, 64, ("auto", "ring"))
    assert [mode.name for mode in modes][1:3] == ["64 tokens, Trine cp2 auto", "64 tokens, Trine cp2 ring"]
    parallel = [make_config(mode, TINY)["parallel"] for mode in modes[:3]]
    assert parallel == [
        {"data": 2},
        {"data": 1, "context": {"size": 2, "method": "auto"}},
        {"data": 1, "context": {"size": 2, "method": "ring"}},
    ]


def test_every_row_computes_the_same_tokens_a_step() -> None:
    for table in context.tables((2, 4), (64, 128), context.METHODS, TINY):
        assert table.equal == tuple(mode.name for mode in table.modes)
        for mode in table.modes:
            sequences = table.workload.sequences // (mode.data_ranks * mode.accumulation)
            assert sequences == 1, "one sequence a microbatch"


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_ulysses_add_up_to_the_gradient_of_one_process(ranks: int) -> None:
    rows, table = torch.randint(8, (2, 16 + 1)), torch.randn(8, 8, requires_grad=True)
    mode = next(mode for mode in context.contenders(ranks, 16) if mode.kind == "deepspeed")
    for rank in range(ranks):
        peer = object.__new__(Ulysses)
        peer._mode, peer._rank, peer._engine = replace(mode, accumulation=2), rank, _Engine(table)
        peer.step(rows)
    losses = torch.stack([torch.nn.functional.cross_entropy(table[row[:-1]], row[1:]) for row in rows])
    (wanted,) = torch.autograd.grad(losses.sum(), table)  # DeepSpeed divides by the microbatches
    torch.testing.assert_close(table.grad, wanted)


class _Engine(SimpleNamespace):
    """DeepSpeed's engine whose model is a table of logits; gradients add up over ranks, as its all-reduce does."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(backward=Tensor.backward, step=lambda: None)
        self.table = table

    def __call__(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return self.table[tokens]


def test_the_note_of_a_peer_is_the_last_column() -> None:
    modes = context.contenders(2, 64, ())
    sample = Sample(modes[0].name, 1.0, 1.0, 1.0, 5.0, None, Footprint(*[0] * 7))
    found = cells(Table(modes, TINY), [[replace(sample, mode=mode.name) for mode in modes]])
    assert {row: text for (row, column), text in found.items() if column == NOTE} == {
        "64 tokens, DeepSpeed Ulysses, 2 ranks": context.SUMMED
    }


@pytest.mark.long
def test_a_peer_that_cannot_run_has_its_error_as_a_cell() -> None:
    sizes = replace(TINY, decoder=replace(TINY.decoder, context=32))
    torch: Mode = next(mode for mode in context.contenders(2, 32) if mode.kind == "context_parallel")
    left, refused = startable(Table((torch,), sizes))
    assert not left.modes
    assert refused[torch.name, COLUMNS[0]].startswith("NotImplementedError")


@pytest.mark.long
def test_a_tiny_llama_on_context_ranks_trains_as_data_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert context.main(["--ranks", "2", "--lengths", "32", "--width", "32", "--rounds", "1", "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "32 tokens, Trine cp2 auto" in shown and "pass" in shown
