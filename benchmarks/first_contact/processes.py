"""Runs a part in a process with a time limit; its results are written at once and survive its failure."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress

from benchmarks.first_contact.findings import Findings
from benchmarks.first_contact.parts import Part

MARK = "RESULT "
"""Prefix of the output lines that contain findings."""
FAREWELL_SECONDS = 5.0
"""Seconds for torchrun to end its workers after it was signalled."""


class Running:
    """Process of a part, in a new session, with its time limit."""

    def __init__(self, part: Part, names: tuple[str, ...], seconds: float, environment: Mapping[str, str]) -> None:
        self.part, self.names, self.began = part, names, time.monotonic()
        self.late, self._told = False, 0
        self._ends = self.began + seconds
        self._file = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 - it is read until the process has ended
        self._process = subprocess.Popen(
            [*part.command, *names],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def ended(self) -> bool:
        """Returns True if the process has ended; kills it after its time limit."""
        if self._process.poll() is None:
            if time.monotonic() < self._ends:
                return False
            self.late = True
        self.end()
        return True

    def end(self) -> None:
        """Kills the process, if it runs, with its descendants."""
        for kind in (signal.SIGTERM, signal.SIGKILL) if self._process.poll() is None else (signal.SIGKILL,):
            try:
                os.killpg(self._process.pid, kind)
            except ProcessLookupError:
                break
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(FAREWELL_SECONDS)
        self._process.wait()

    def close(self) -> None:
        """Kills the process, and discards its output."""
        self.end()
        self._file.close()

    def text(self) -> str:
        """Returns the output of the process so far."""
        return os.pread(self._file.fileno(), 1 << 26, 0).decode(errors="replace")

    def write_news(self, findings: Findings) -> None:
        """Writes findings that the process has printed since the last call."""
        lines = [line for line in self.text().rpartition("\n")[0].splitlines() if line.startswith(MARK)]
        for line in lines[self._told :]:
            one = json.loads(line[len(MARK) :])
            findings.add(self.part.name, one.pop("name"), one.pop("ok"), one.pop("seconds"), **one)
        self._told = len(lines)

    def settle(self, findings: Findings) -> tuple[str, ...]:
        """Writes the remaining findings; returns the cases left after a crash."""
        code, took = self._process.returncode, time.monotonic() - self.began
        findings.log(f"{self.part.name} {' '.join(self.names)} exit code {code} {took:.1f} s", self.text())
        self.write_news(findings)
        last = next((line for line in reversed(self.text().splitlines()) if line.strip()), "")[:300]
        why = "no time left" if self.late else f"ended with {code}"
        if not self.part.names:
            findings.add(self.part.name, "process", code == 0 and not self.late, took, why=why, last=last)
            return ()
        left = self._left()
        if left:
            findings.add(self.part.name, left[0], None if self.late else False, took, why=why, last=last)
        return () if self.late else left[1:]

    def _left(self) -> tuple[str, ...]:
        lines = [line for line in self.text().splitlines() if line.startswith(MARK)]
        done = {json.loads(line[len(MARK) :])["name"] for line in lines}
        return tuple(name for name in self.names if name not in done)
