"""Decision of several receivers whether to take a version over: all of them, or none.

    prepared   each receiver with all blocks of the version writes "VERSION.ATTEMPT.prepared-I"
    decided    the first file "VERSION.ATTEMPT.decided" counts: "commit" once all are prepared, "abort" at a deadline

The files lie in a folder that all receivers share. There is no coordinator: any receiver decides, a decision is made by
an exclusive link and never changes, and a receiver that starts again reads it. So a kill at any moment leaves all on
the old version, or all on the new one.
"""

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from engine.errors import EngineError

_COMMIT, _ABORT = "commit", "abort"
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class CommitGroup:
    """Group of receivers that together either take over a version of published weights or drop it.

    The receivers agree through files in a shared folder.

    Args:
        folder: shared folder; it is created.
        member: number of this receiver, from 0.
        members: number of receivers.
    """

    folder: Path
    member: int
    members: int

    def __post_init__(self) -> None:
        if not 0 <= self.member < self.members:
            raise EngineError(
                f"CommitGroup got member = {self.member} and members = {self.members}, but member must be at least 0 "
                "and less than members; number the receivers of the group from 0."
            )
        self.folder.mkdir(parents=True, exist_ok=True)

    def settle(self, version: str, until: float) -> bool:
        """Announces that this receiver has prepared ``version``, and waits for the decision of the group.

        Returns True if all receivers take the version over, False if they drop it.

        Args:
            until: time (``monotonic``) at which this receiver makes the group drop the version, unless the group has
                decided.
        """
        attempt = self._attempt(version)
        self._write(f"{attempt}.prepared-{self.member}", "")
        while True:
            if (decision := self._decision(attempt)) is None:
                if all((self.folder / f"{attempt}.prepared-{i}").exists() for i in range(self.members)):
                    decision = self._decide(attempt, _COMMIT)
                elif monotonic() >= until:
                    decision = self._decide(attempt, _ABORT)
            if decision is not None:
                break
            sleep(_POLL_SECONDS)
        if decision == _COMMIT:
            self._forget_others(version)
        return decision == _COMMIT

    def _attempt(self, version: str) -> str:
        """Returns the first attempt that was not decided against: receivers that were late try again together."""
        number = 0
        while self._decision(f"{version}.{number}") == _ABORT:
            number += 1
        return f"{version}.{number}"

    def _decision(self, attempt: str) -> str | None:
        try:
            return (self.folder / f"{attempt}.decided").read_text()
        except FileNotFoundError:
            return None

    def _decide(self, attempt: str, decision: str) -> str:
        """Returns the decision of whoever was first."""
        self._write(f"{attempt}.decided", decision)
        found = self._decision(attempt)
        assert found is not None, "a decision stays until all have left its version"
        return found

    def _write(self, name: str, text: str) -> None:
        """Makes a file with its whole content, unless it exists."""
        draft = self.folder / f".{secrets.token_hex(8)}"
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            with suppress(FileExistsError):
                os.link(draft, self.folder / name)
        finally:
            draft.unlink()

    def _forget_others(self, version: str) -> None:
        """Removes what this receiver has written for earlier versions: all have the new one, or will read it."""
        for path in self.folder.glob(f"*.prepared-{self.member}"):
            if not path.name.startswith(f"{version}."):
                path.unlink(missing_ok=True)
        if self.member == 0:
            for path in self.folder.glob("*.decided"):
                if not path.name.startswith(f"{version}."):
                    path.unlink(missing_ok=True)
