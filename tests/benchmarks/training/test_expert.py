"""The benchmark of experts: its rows, its cells, and rows that are sent alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.harness.footprint import Footprint
from benchmarks.harness.report import Sample
from benchmarks.harness.sent_bytes import RingCounter, ring_bytes
from benchmarks.peers.expert_rows import DispatchedRows, ExchangedRows
from benchmarks.peers.models import CHOSEN, EXPERTS, make
from benchmarks.peers.workload import Workload
from benchmarks.training import cell_tables, expert
from engine.models.decoder import DecoderConfig

RunRanks = Callable[..., list[Any]]
TINY = Workload(DecoderConfig(layers=2, width=32, heads=2, context=16), sequences=4, epsilon=expert.EPSILON)


@pytest.mark.parametrize("uneven", [1, expert.UNEVEN])
def test_rows_come_back_and_send_the_bytes_of_bare_calls(run_ranks: RunRanks, uneven: int) -> None:
    table = ring_bytes("all_gather_into_tensor", 2 * 5 * 8, 2)
    for dispatched, exchanged in run_ranks(sent_rows, 2, uneven):
        assert abs(dispatched - table - exchanged) < 8  # halves of bytes are cut off


def sent_rows(uneven: int) -> tuple[int, int]:
    """Returns the bytes of a step of dispatched rows and of bare calls."""
    (plain, trine), workload = next(
        (one.modes, one.workload) for one in expert.tables("rows", 2, TINY) if one.workload.uneven == uneven
    )
    with RingCounter() as bare:
        ExchangedRows(plain, workload).step(torch.empty(0))
    counts = ring_bytes("all_to_all_single", 2 * 8, 2)
    rows = DispatchedRows(trine, workload)
    with RingCounter() as counter:
        rows.step(torch.empty(0))
    torch.testing.assert_close(rows.y, rows.x)
    torch.testing.assert_close(rows.x.grad, torch.ones_like(rows.x))
    return counter.sent, bare.sent - counts


def test_cells_name_the_row_that_others_stand_beside() -> None:
    _, table = expert.tables("rows", 2, TINY)
    seconds = dict(zip((mode.name for mode in table.modes), (0.2, 0.5), strict=True))
    size = Footprint(1_000_000, 7, 2_000_000, 0, 3_000_000, 0, 0)
    rounds = [[Sample(name, 1.0, spent, 0.0, 5.0, None, size) for name, spent in seconds.items()]]
    found = cell_tables.cells(table, rounds)
    plain, trine = seconds
    assert [found[trine, column] for column in cell_tables.COLUMNS] == [
        "500.0", f"2.50 x {plain}", "1.00", "7", "2.00", "3.00", "",
    ]  # fmt: skip
    assert found[plain, "beside"] == ""


def test_losses_of_equal_models_are_compared() -> None:
    (table,) = expert.tables("step", 2, TINY)
    size = Footprint(0, 0, 0, 0, 0, 0, 0)

    def rounds(*losses: float) -> list[list[Sample]]:
        pairs = zip(table.modes, losses, strict=True)
        return [[Sample(mode.name, 1.0, 1.0, 0.0, loss, None, size) for mode, loss in pairs]]

    assert cell_tables.equal_losses(table, rounds(5.0, 5.0, 6.0))
    assert not cell_tables.equal_losses(table, rounds(5.0, 5.1, 6.0))


def test_a_dense_model_has_the_parameters_of_one_token() -> None:
    dense, mixture = (make(name, TINY.decoder) for name in ("dense", "mixture"))
    owned = {name: p.numel() for name, p in mixture.named_parameters() if ".gate." not in name}
    used = sum(count * CHOSEN / EXPERTS if ".experts." in name else count for name, count in owned.items())
    assert sum(p.numel() for p in dense.parameters()) == used


@pytest.mark.long
def test_a_tiny_mixture_on_expert_ranks_trains_as_data_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--rows layer,step --ranks 2 --width 32 --sequences 4 --rounds 1 --steps 2"
    assert expert.main(command.split()) == 0
    assert "pass" in capsys.readouterr().out
