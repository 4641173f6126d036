"""Bodies that arrive range by range: doubled, out of order, damaged, given up; and messages as JSON."""

import pytest

from engine.checkpoint.format.pieces import Part, Piece
from engine.outer.http.bodies import Arrived, BodyKey, BodyRange, DamagedBodyError, Uploads, digest
from engine.outer.http.values import from_json
from engine.outer.messages import (
    JoinRequest,
    NamedPiece,
    Offer,
    PushKey,
    PushMeta,
    PushShare,
    PushState,
    RankLayout,
    StoreStatus,
)
from engine.web.json_text import dump_json, parse_json

KEY = BodyKey(life=3, rank=1, fragment=0, seq=5)
DATA = bytes(range(10))
WHOLE = digest(DATA)


def add(uploads: Uploads, start: int, stop: int, key: BodyKey = KEY, data: bytes = DATA) -> bytes | None:
    part = memoryview(data)[start:stop]
    body = uploads.add(key, BodyRange(start, len(data), digest(part), digest(data)), part, 0.0)
    return None if body is None else bytes(body)


def test_a_doubled_and_a_late_range_change_nothing() -> None:
    uploads = Uploads()
    assert add(uploads, 0, 4) is None and add(uploads, 0, 4) is None
    assert uploads.arrived(KEY, WHOLE) == Arrived(4, None)
    assert add(uploads, 6, 10) is None and uploads.arrived(KEY, WHOLE) == Arrived(4, None)
    assert add(uploads, 4, 8) is None and add(uploads, 0, 4) is None
    assert uploads.arrived(KEY, WHOLE) == Arrived(8, None)
    assert add(uploads, 8, 10) == DATA


def test_a_complete_body_waits_for_its_result() -> None:
    uploads = Uploads()
    assert add(uploads, 0, 10) == DATA
    assert add(uploads, 10, 10) == DATA  # the store had no space
    uploads.finish(KEY, WHOLE, Arrived(10, PushState.PARTIAL))
    assert uploads.arrived(KEY, WHOLE).state is PushState.PARTIAL and not uploads.under_way
    assert uploads.arrived(KEY, digest(b"")) == Arrived(0, None)


def test_a_range_without_its_beginning_starts_no_body() -> None:
    uploads = Uploads()
    assert add(uploads, 4, 8) is None and not uploads.under_way


def test_another_body_at_its_place_replaces_one() -> None:
    uploads = Uploads()
    add(uploads, 0, 4)
    newer = BodyKey(3, 1, 0, 6)
    add(uploads, 0, 6, newer)
    assert uploads.arrived(KEY, WHOLE) == Arrived(0, None) and uploads.arrived(newer, WHOLE) == Arrived(6, None)


def test_a_damaged_whole_leaves_nothing() -> None:
    uploads = Uploads()
    for start in (0, 5):
        part = memoryview(DATA)[start : start + 5]
        position = BodyRange(start, 10, digest(part), digest(b"another"))
        if start:
            with pytest.raises(DamagedBodyError, match="a body of 10 bytes has another hash"):
                uploads.add(KEY, position, part, 0.0)
        else:
            uploads.add(KEY, position, part, 0.0)
    assert not uploads.under_way


def test_bodies_that_nobody_continues_are_dropped() -> None:
    uploads = Uploads()
    add(uploads, 0, 4)
    uploads.expire(600.0)
    assert uploads.under_way
    uploads.expire(600.1)
    assert not uploads.under_way
    add(uploads, 0, 4)
    uploads.forget_others({4})
    assert not uploads.under_way


@pytest.mark.parametrize(
    "message",
    [
        JoinRequest(1, 2, (("a", (4, 6)), ("b", ())), ({"lr": 0.1},), (0, 0), {"x": [1, {"a": None}]}),
        RankLayout(
            (NamedPiece("a", Part((4, 6), 1, ((0, 2), (3, 6)), (1, 3)).whole()),),
            (NamedPiece("b", Piece(Part((3,)), 1, 3)),),
        ),
        PushMeta(PushKey(1, 0, 2), 1, 2, 3.0, 4, 5, (0.1,), ((1, 2),)),
        PushShare(2.0, float("-inf")),
        Offer(3, -1, 0.5, 2.0, 3, 1),
        StoreStatus((-1, 4), {1: 2}, {1: 3}, {1: 4}, ("1-0-2",), 8, 9),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_its_json(message: object) -> None:
    assert from_json(type(message), parse_json(dump_json(message)), "reply", least=-1) == message


@pytest.mark.parametrize(
    "piece",
    [
        Piece(Part((4, 6), 0, ((0, 5),)), 0, 1), Piece(Part((4, 6), 2, ((0, 1),)), 0, 1),
        Piece(Part((4, 6), 0, ((2, 3), (0, 1))), 0, 1), Piece(Part((4,)), 2, 5), Piece(Part((4,)), 3, 2),
        Piece(Part((4, 6), 1, ((0, 1),), (3, 5)), 0, 1), Piece(Part((4, 6), 0, ((0, 1),), (0, 1)), 0, 1),
        Piece(Part((1 << 40, 1 << 40)), 0, 1), Piece(Part((1,) * 20), 0, 1), Piece(Part((4,), None, ((0, 1),)), 0, 1),
    ],
    ids=str,
)  # fmt: skip
def test_a_piece_outside_its_tensor_is_refused(piece: Piece) -> None:
    with pytest.raises(ValueError, match="outside of a tensor"):
        from_json(Piece, parse_json(dump_json(piece)), "piece")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"life":1,"life":2}', "occurs twice"), ("[" * 5000, "nested too deeply"), ("[1]", "not an object"),
        ('{"life":NaN}', "the number NaN"), ("\xff", "utf-8"),
    ],
)  # fmt: skip
def test_strict_json(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text.encode("latin-1"))
