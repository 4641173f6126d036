"""Sessions, training runs, samplers and saved weights by their ids. Paths of clients are looked up, and name no file.

    tinker://RUN/weights/NAME            with the optimizer's state
    tinker://RUN/sampler_weights/NAME    weights to sample from

RUN is the id of a model, SESSION:train:NUMBER. Names of files are made from it and a number.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from engine.serving.bookkeeping.entry import FutureEntry, RequestRefusedError
from engine.serving.bookkeeping.journal import JournalRecord
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.session import HOUSE
from engine.serving.commands import DropWeights, Failure, Result, SaveWeights

SESSION, RUN, SAMPLER, WEIGHTS = "session", "run", "sampler", "weights"
KIND = ("base_model", "is_lora", "lora_rank", "train_unembed", "train_mlp", "train_attn")
"""Facts about the parameters of a run that its saved weights repeat."""
UNNAMED_SAVES = 8
"""Number of saves of a model without a name that are retained: samplers of a training loop take the newest."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def now() -> str:
    """Returns the current time in UTC as ISO 8601 text."""
    return datetime.now(UTC).isoformat()


def check_name(name: str) -> str:
    """Returns ``name``, the name under which a client saves weights, if it is valid.

    Raises:
        RequestRefusedError: it has more than 128 characters, does not begin with an ASCII letter or digit, or has a
            character other than these, ".", "_" and "-".
    """
    if not _NAME.fullmatch(name):
        raise RequestRefusedError(
            f'the name {name[:60]!r} of a save is refused; give at most 128 letters, digits, ".", "_" and "-".'
        )
    return name


class Directory:
    """Directory of a service's client sessions, training runs, sampling sessions and saved weights.

    An entry is a mapping of JSON values, stored in the ledger.

    Args:
        ledger: record of the service's commands and results; its callback for results becomes ``record_result``.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._by_attempt = {note["attempt"]: name for name, note in self.notes(SESSION).items() if note.get("attempt")}
        ledger.on_finish = self.record_result

    def notes(self, kind: str) -> dict[str, Mapping[str, Any]]:
        """Returns the entries of ``kind`` ("session", "run", "sampler" or "weights") by id."""
        return self.ledger.notes.setdefault(kind, {})

    def session_of_attempt(self, attempt: str) -> str | None:
        """Returns the id of the open session with idempotency key ``attempt``; None if there is none."""
        found = self._by_attempt.get(attempt) if attempt else None
        return found if found in self.ledger.sessions else None

    def open_session(self, name: str, attempt: str, values: Mapping[str, Any]) -> JournalRecord:
        """Opens the client session ``name`` with ``values``, such as its tags.

        ``attempt``: idempotency key of the request; empty: none. Returns a record, which the caller appends to the
        service's journal on disk.
        """
        self.ledger.open_session(name)
        if attempt:
            self._by_attempt[attempt] = name
        return self.ledger.note(SESSION, name, {"attempt": attempt, "time": now(), **values})

    def forget_sessions(self) -> None:
        """Removes ended client sessions, with their sampling sessions and their weights saved without a name."""
        for name in [one for one in self.notes(SESSION) if one not in self.ledger.sessions]:
            self._by_attempt.pop(self.notes(SESSION).pop(name).get("attempt"), None)
            for own in [one for one in self.notes(SAMPLER) if one.startswith(f"{name}:")]:
                self._drop(SAMPLER, own)
            for path, note in list(self.notes(WEIGHTS).items()):
                if note.get("unnamed") and path.startswith(f"tinker://{name}:"):
                    self.remove_weights(path)

    def run(self, model: str) -> Mapping[str, Any]:
        """Returns facts about the training run with the id ``model``, such as "base_model" and "lora_rank".

        Raises:
            RequestRefusedError: 404, there is no such run.
        """
        return self._found(RUN, model, "model", "create it first")

    def sampler(self, name: str) -> Mapping[str, Any]:
        """Returns "base_model" and "model_path" of the sampling session with the id ``name``.

        Raises:
            RequestRefusedError: 404, there is no such session.
        """
        return self._found(SAMPLER, name, "sampling session", "create it first")

    def weights(self, path: str) -> Mapping[str, Any]:
        """Returns facts about the weights saved under ``path``, such as "run", "time" and "expires_at".

        Raises:
            RequestRefusedError: 404, there are no such weights.
        """
        return self._found(WEIGHTS, path, "path of saved weights", "save them, or give another path")

    def session(self, name: str) -> Mapping[str, Any]:
        """Returns facts about the client session with the id ``name``, such as "time" and "tags".

        Raises:
            RequestRefusedError: 404, there is no such session.
        """
        return self._found(SESSION, name, "session", "list sessions for those that are open")

    def sessions(self) -> list[str]:
        """Returns the ids of the clients' sessions, newest first."""
        return [name for name in reversed(self.notes(SESSION)) if name != HOUSE]

    def _found(self, kind: str, name: str, noun: str, remedy: str) -> Mapping[str, Any]:
        """Returns a note.

        Raises:
            RequestRefusedError: 404, there is none.
        """
        found = self.notes(kind).get(name)
        if found is None:
            raise RequestRefusedError(f"{noun} {name[:160]!r} is unknown; {remedy}.", 404)
        return found

    def record_result(self, entry: FutureEntry, result: Result) -> list[JournalRecord]:
        """Records the training run or saved weights that the command of ``entry`` has made, if any.

        Returns records that must be in the service's journal on disk before a client sees ``result``.
        """
        if isinstance(result, Failure):
            return []
        if entry.route == "create_model" or (entry.route == "load_weights" and "run" in entry.about):
            model = entry.about["model_id"]
            return [self.ledger.note(RUN, model, entry.about["run"])]
        if isinstance(entry.command, SaveWeights) and entry.route in ("save_weights", "save_weights_for_sampler"):
            return self._record_save(entry, entry.command)
        if isinstance(entry.command, SaveWeights) and entry.route == "save-ended":
            model = entry.command.model
            values = self._weights_note(entry.command, {}, f"tinker://{model}/weights/ended")
            return [self.ledger.note(WEIGHTS, f"tinker://{model}/weights/ended", values)]
        return []

    def _record_save(self, entry: FutureEntry, command: SaveWeights) -> list[JournalRecord]:
        about, path = entry.about, entry.about["path"]
        old = self.notes(WEIGHTS).get(path)
        records = [self.ledger.note(WEIGHTS, path, self._weights_note(command, about, path, entry.key))]
        if old is not None and old["name"] != command.name:
            self._drop_files(old["name"])
        if (sampler := about.get("sampler")) is not None:
            values = {"base_model": self.run(command.model)["base_model"], "model_path": path}
            records.append(self.ledger.note(SAMPLER, sampler, values))
            prefix = f"tinker://{command.model}/"
            unnamed = [one for one, note in self.notes(WEIGHTS).items() if note["unnamed"] and one.startswith(prefix)]
            for own in unnamed[:-UNNAMED_SAVES]:
                self.remove_weights(own)
        return records

    def _weights_note(
        self, command: SaveWeights, about: Mapping[str, Any], path: str, key: str = ""
    ) -> Mapping[str, Any]:
        run = self.notes(RUN).get(command.model, {})
        seconds = about.get("ttl_seconds")
        expires = None if seconds is None else (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        return {name: run.get(name) for name in (*KIND, "seed")} | {
            "name": command.name, "key": key, "run": command.model, "optimizer": command.optimizer, "time": now(),
            "expires_at": expires, "user_metadata": about.get("user_metadata"),
            "unnamed": about.get("sampler") is not None, "kind": path.split("/")[3],
        }  # fmt: skip

    def remove_weights(self, path: str) -> None:
        """Removes the weights saved under ``path``, if there are any.

        Their files are deleted too, unless a restart of the service would load them.
        """
        note = self.notes(WEIGHTS).get(path)
        if note is not None:
            self._drop(WEIGHTS, path)
            self._drop_files(note["name"])

    def _drop_files(self, name: str) -> None:
        if not self.ledger.loads(name):
            self.ledger.run_internal("drop", DropWeights(name))

    def _drop(self, kind: str, name: str) -> None:
        del self.notes(kind)[name]
        self.ledger.append(JournalRecord(f"note/{kind}/{name}", {"gone": True}))
        self.ledger.forget(f"note/{kind}/{name}")

    def remove_expired(self) -> None:
        """Removes all saved weights that have expired."""
        time = now()
        for path in [one for one, note in self.notes(WEIGHTS).items() if (note["expires_at"] or time) < time]:
            self.remove_weights(path)

    def checkpoints(self, run: str | None = None) -> list[dict[str, Any]]:
        """Returns descriptions of the weights saved in the training run ``run`` (None: in all runs), newest first.

        Saves for sampling without a path are left out. Each entry has the JSON form of the Tinker training API.
        """
        found = [
            _checkpoint(path, note)
            for path, note in list(self.notes(WEIGHTS).items())
            if not note["unnamed"] and run in (None, note["run"])
        ]
        return sorted(found, key=lambda one: str(one["time"]), reverse=True)

    def training_run(self, model: str) -> dict[str, Any]:
        """Returns facts about the training run of ``model``, in the JSON form of the Tinker training API.

        Raises:
            RequestRefusedError: 404, there is no such run.
        """
        note, saved = self.run(model), self.checkpoints(model)
        of_kind = {one["checkpoint_type"]: one for one in reversed(saved)}
        return {
            "training_run_id": model, "base_model": note["base_model"], "model_owner": "trine",
            "is_lora": note["is_lora"], "lora_rank": note["lora_rank"], "corrupted": False,
            "last_request_time": note["time"], "last_checkpoint": of_kind.get("training"),
            "last_sampler_checkpoint": of_kind.get("sampler"), "user_metadata": note.get("user_metadata"),
        }  # fmt: skip


def _checkpoint(path: str, note: Mapping[str, Any]) -> dict[str, Any]:
    kind = "training" if note["kind"] == "weights" else "sampler"
    kept = {name: note[name] for name in ("time", "expires_at", "user_metadata")}
    name = "/".join(path.split("/")[3:])
    return {"checkpoint_id": name, "checkpoint_type": kind, "tinker_path": path, "public": False, **kept}
