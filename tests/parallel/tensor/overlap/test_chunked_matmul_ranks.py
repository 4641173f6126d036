"""Between real processes: rows that travel in pieces end where they would have, and as many bytes are sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.parallel.tensor.overlap.chunked_matmul import Pieced
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.parallel.tensor.overlap.test_chunked_matmul import Column, Row
from tests.parallel.tensor.sharded import open_comm

RunRanks = Callable[..., list[Any]]


def in_pieces(pieces: int) -> list[list[tuple[str, int, int]]]:
    """Body of a rank: calls and bytes of a layer of each kind; its results are those of the plain form."""
    sent = []
    for kind in (Column, Row):
        comm = open_comm()
        axis = TensorAxis(comm)
        one, other = (kind(axis, True, True, False, (3,)) for _ in range(2))
        found = one.results(one.pieces(Pieced(axis, kind.label, pieces)))
        sent.append([(row.label, row.calls, row.bytes) for row in comm.tally.rows()])
        expected = other.results(other.plain())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        comm.close()
    return sent


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_and_bytes(run_ranks: RunRanks, ranks: int) -> None:
    whole = 3 * 8 * 4 * (ranks - 1) // ranks
    for pieces in (1, 2):
        column = [("column inputs", 2 * pieces, 2 * whole * 6)]
        row = [("row outputs", 2 * pieces, 2 * whole * 10)]
        assert run_ranks(in_pieces, ranks, pieces) == [[column, row]] * ranks
