"""Futures' ids and the journal: an id is answered after its command is on disk, and never if it cannot be."""

import os
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.restart import open_ledger
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.wire.application import ServiceApplication
from tests.engine.serving.wire.tinker_calls import BASE, MODEL


def test_an_id_is_answered_after_its_command_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, may_sync, real = FairQueue(), Event(), os.fsync
    ledger, restart = open_ledger(queue, tmp_path, LedgerLimits())
    assert ledger.journal is not None and list(restart.entries()) == []
    may_sync.set()
    monkeypatch.setattr(os, "fsync", lambda file: (may_sync.wait(20), real(file)))
    replies = list[Any]()
    with TestClient(ServiceApplication(ledger, MODEL)) as client:
        session = client.post("/api/v1/create_session", json={"tags": []}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
        may_sync.clear()
        thread = Thread(target=lambda: replies.append(client.post("/api/v1/create_model", json=body)))
        thread.start()
        thread.join(0.3)
        assert replies == [] and queue.next(0) is None
        may_sync.set()
        thread.join(20)
        assert replies[0].json()["request_id"] == f"{session}:train:0:create" and queue.next(1) is not None
    ledger.journal.close()


def test_a_journal_that_cannot_be_written_is_503_and_the_request_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, restart = open_ledger(FairQueue(), tmp_path, LedgerLimits())
    assert ledger.journal is not None and list(restart.entries()) == []
    real, is_full = os.write, [False]

    def write(file: int, data: Any) -> int:
        if is_full[0] and len(data) > 60:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    with TestClient(ServiceApplication(ledger, MODEL)) as client:
        session = client.post("/api/v1/create_session", json={"tags": []}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
        is_full[0] = True
        reply = client.post("/api/v1/create_model", json=body)
        assert (
            reply.status_code == 503
            and "No space left" in reply.json()["detail"]
            and reply.headers["retry-after"] == "5"
        )
        is_full[0] = False
        assert client.post("/api/v1/create_model", json=body).status_code == 200
    ledger.journal.close()
