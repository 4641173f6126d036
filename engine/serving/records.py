"""Records of the ledger in its journal, and the commands that a start runs again."""

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from engine.serving.commands import Failure, encode
from engine.serving.entry import FutureEntry
from engine.serving.journal import JournalRecord
from engine.serving.line import ModelLine


def digest_of(entry: FutureEntry) -> str:
    """Returns the SHA-256 of route and command: equal for repeats of a request, whatever the order of its fields."""
    assert entry.command is not None
    return sha256(entry.route.encode() + b"\0" + encode(entry.command)).hexdigest()


def record_of(entry: FutureEntry) -> JournalRecord:
    """Returns the journal's record of an accepted command."""
    values = {
        "session": entry.session, "line": entry.line, "number": entry.number, "route": entry.route,
        "about": dict(entry.about), "digest": entry.digest,
    }  # fmt: skip
    if entry.command is None:
        assert isinstance(entry.result, Failure)
        return JournalRecord(f"entry/{entry.key}", values | {"error": entry.result.error})
    return JournalRecord(f"entry/{entry.key}", values, encode(entry.command))


def snapshot_record(line: ModelLine, kept: Iterable[FutureEntry]) -> JournalRecord:
    """Returns the journal's record of a snapshot: its last command, and the results that clients may ask again."""
    bodies, rows = list[bytes](), list[Any]()
    for entry in kept:
        assert entry.result is not None
        bodies.append(encode(entry.result))
        rows.append([entry.key, entry.number, entry.route, dict(entry.about), entry.digest, len(bodies[-1])])
    values = {"session": line.session, "number": line.covered, "name": line.snapshot, "results": rows}
    return JournalRecord(f"snapshot/{line.model}", values, b"".join(bodies))
