"""Results of a first contact: one JSON file for each part, a log of all processes, and a summary."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG, SUMMARY, PROFILE = "log.txt", "summary.md", "profile.txt"
LOG_CHARACTERS = 60_000
"""Maximum characters of one process's output in the log."""
UNTOLD = frozenset({"part", "name", "ok", "seconds", "profile", "packages", "waits"})
"""Fields of a finding that a summary line omits."""
WORDS: Mapping[bool | None, str] = {True: "ok", False: "**failed**", None: "not run"}


@dataclass(slots=True)
class Findings:
    """Findings of a run, written to a folder immediately."""

    folder: Path
    device: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("part-*.json"):
            stale.unlink()
        (self.folder / LOG).write_text("", encoding="utf-8")

    def add(self, part: str, name: str, ok: bool | None, seconds: float, **more: Any) -> None:
        """Writes a finding; ``ok`` None: the case did not run."""
        row = {"part": part, "name": name, "ok": ok, "seconds": round(seconds, 2), **more}
        self.rows.append(row)
        if table := row.pop("profile", None):
            with (self.folder / PROFILE).open("a", encoding="utf-8") as file:
                file.write(f"== {part} / {name}\n{table}\n")
        own = [one for one in self.rows if one["part"] == part]
        text = json.dumps({"device": self.device, "part": part, "rows": own}, indent=1)
        (self.folder / f"part-{part.replace(' ', '-')}.json").write_text(text + "\n", encoding="utf-8")
        (self.folder / SUMMARY).write_text(summary(self.rows, self.device, self.seconds), encoding="utf-8")
        print(f"[{self.seconds:5.0f} s] {WORDS[ok]:10s} {part} / {name} {brief(row)}", flush=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def log(self, title: str, text: str) -> None:
        """Appends the end of a process's output to the log."""
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(f"\n======== {title}\n{text[-LOG_CHARACTERS:]}\n")


def brief(row: Mapping[str, Any], length: int = 400) -> str:
    """Formats the figures of a finding in one line."""
    return " ".join(f"{key}={value}" for key, value in row.items() if key not in UNTOLD)[:length]


def summary(rows: Sequence[Mapping[str, Any]], device: str, seconds: float) -> str:
    """Formats all findings as a table."""
    lines = [f"# First contact, {device}, {seconds:.0f} s", ""]
    if device == "cpu":
        lines += ["**On a CPU, tiny: no figure here means anything.**", ""]
    lines += ["| part | name | result | s | found |", "|---|---|---|---|---|"]
    for row in rows:
        cell = brief(row, 260).replace("|", "/")
        lines.append(f"| {row['part']} | {row['name']} | {WORDS[row['ok']]} | {row['seconds']} | {cell} |")
    return "\n".join([*lines, "", counted(rows)]) + "\n"


def counted(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the numbers of successful, failed and skipped findings."""
    right, wrong, unrun = (sum(row["ok"] is kind for row in rows) for kind in (True, False, None))
    return f"{right} ok, {wrong} failed, {unrun} not run"
