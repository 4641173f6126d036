"""Runs of pieces: what is folded, and that no piece is left out that shares an element."""

from itertools import product
from typing import Any

import pytest

from engine.checkpoint.format.manifest import StoredPiece
from engine.checkpoint.format.manifest_parts import StoredRuns, fold, run_to_json, runs_from_json
from engine.checkpoint.format.pieces import Part, Piece, runs
from engine.errors import CheckpointError

SHAPE = (12, 10)
PARTS = {
    "whole": [Part(SHAPE)],
    "rows": [Part(SHAPE, 0, ((3 * rank, 3 * rank + 3),)) for rank in range(4)],
    "columns": [Part(SHAPE, 1, ((5 * rank, 5 * rank + 5),)) for rank in range(2)],
    "fused rows": [Part(SHAPE, 0, ((3 * rank, 3 * rank + 3), (6 + 3 * rank, 9 + 3 * rank))) for rank in range(2)],
}
"""How tensor ranks cut a tensor."""


def cut(parts: str, data_ranks: int) -> list[StoredPiece]:
    """Each part in equal shares, the last one smaller."""
    found = []
    for tp, part in enumerate(PARTS[parts]):
        size = -(-part.elements // data_ranks)
        for dp in range(data_ranks):
            piece = Piece(part, min(part.elements, dp * size), min(part.elements, dp * size + size))
            found.append(StoredPiece(f"{dp * len(PARTS[parts]) + tp:03d}", "key", piece))
    return found


def stored(pieces: list[StoredPiece]) -> StoredRuns:
    """Through JSON."""
    files = [f"{number:03d}" for number in range(64)]
    told = [run_to_json(run) for run in fold(pieces, {name: number for number, name in enumerate(files)})]
    return runs_from_json(told, SHAPE, files, "it")


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("data_ranks", [1, 4, 7, 10])
def test_pieces_come_back_and_the_ones_that_share_are_found(parts: str, data_ranks: int) -> None:
    pieces = cut(parts, data_ranks)
    found = stored(pieces)
    assert sorted(found, key=repr) == sorted(pieces, key=repr) and len(found) == len(pieces)
    for other, ranks in product(PARTS, (1, 3)):
        for want in (one.piece for one in cut(other, ranks)):
            shared = [one for one in pieces if len(runs(one.piece, want).length)]
            candidates = list(found.sharing(want))
            assert not [one for one in shared if one not in candidates], (parts, other, want)
            if other == parts or {other, parts} <= {"whole", "rows"}:
                assert sorted(candidates, key=repr) == sorted(shared, key=repr), "and no other"


def test_equal_shares_are_one_run_however_many_they_are() -> None:
    part = Part((4096, 4))
    pieces = [StoredPiece(f"{3 * rank:05d}", "key", Piece(part, 4 * rank, 4 * rank + 4)) for rank in range(4096)]
    (run,) = fold(pieces, {f"{number:05d}": number for number in range(3 * 4096)})
    assert run_to_json(run) == {"file": 0, "key": "key", "rows": None, "flat": [0, 4], "step": 3, "count": 4096}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "endless": ({"step": 1, "count": 2**62}, "not below 64"),
    "in one file": ({"step": 0, "count": 30}, "are no run"),
    "of one": ({"step": 1, "count": 1}, "are no run"),
    "without a step": ({"count": 30}, "whole number"),
    "of nothing": ({"step": 1, "count": 30, "flat": [4, 4]}, "are no run"),
    "too long": ({"step": 1, "count": 31}, "ends outside the part"),
    "too short": ({"step": 1, "count": 29}, "exactly once"),
    "overlapping": ({"step": 1, "count": 29, "flat": [0, 8]}, "ends outside the part"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_run_that_cannot_be_is_refused(how: str) -> None:
    change, words = HOSTILE[how]
    sound = {"file": 0, "key": "key", "rows": None, "flat": [0, 4], "step": 1, "count": 30}
    if how == "without a step":
        del sound["step"]
    with pytest.raises(CheckpointError, match=words):
        runs_from_json([sound | change], SHAPE, [str(number) for number in range(64)], "it")
