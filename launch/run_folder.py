"""The folder of a reference run. Whoever starts in it again goes on with that run, or is told why not.

runs/train/
  run.json         text, model, versions and configuration of the last start
  metrics.jsonl    a line for each logged step
  checkpoints/     step-00000250 and so on
runs/train.1/      a run that --fresh has put aside
"""

import fcntl
import json
import os
import platform
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import committed
from engine.data.corpus import Corpus
from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.models.decoder import DecoderConfig


RECORD, METRICS, CHECKPOINTS = "run.json", "metrics.jsonl", "checkpoints"


def open_run(options: Namespace, settings: Mapping[str, Any], corpus: Corpus, shape: "DecoderConfig") -> int:
    """Make the folder or take it up again, and record what this start depends on. Rank 0 calls it, before the others.

    Returns:
        The open folder, which keeps others out until it is closed or the process ends, however it ends.

    Raises:
        EngineError: another process trains there; the run there has other text, another model or another seed, so that
            it cannot go on; ``--fresh`` beside checkpoints that are kept elsewhere.
    """
    folder: Path = options.out
    if options.fresh and folder.exists():
        _refuse_kept(folder, Path(settings["checkpoint"]["folder"]))
        os.close(_lock(folder))
        folder.rename(_free_name(folder))
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    text = {"name": corpus.name, "files": corpus.files, "bytes": len(corpus.tokens), "digest": corpus.digest}
    versions = {"python": platform.python_version(), "torch": version("torch")}
    record = {"corpus": text, "model": asdict(shape), "versions": versions, "config": settings}
    check_same(folder, record)
    written = folder / f"{RECORD}.tmp"
    written.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    written.replace(folder / RECORD)
    return lock


def check_same(folder: Path, record: Mapping[str, Any]) -> None:
    """Compare with the run that is there; the number of processes, batch size and learning rate may change.

    Raises:
        EngineError: the first difference after which samples would be repeated or skipped, or weights not fit.
    """
    try:
        there = _identity(json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(
            f"{folder / RECORD} cannot be read ({error}), so it is not known what this run is; {_remedy(folder)}"
        ) from error
    for name, here in _identity(record).items():
        if there.get(name) != here:
            raise EngineError(
                f"{folder} holds a run with {name} {there.get(name)}, and this start has {name} {here}; "
                f"{_remedy(folder)}"
            )


def go_on(options: Namespace, made: int) -> list[str]:
    """Cut the log back to the checkpoint that was loaded; lines that say so. Nothing to a new run.

    The rows beyond it are of steps that are trained again. A log that lies elsewhere is left alone.
    """
    lines = []
    if cut := _trim(options.out / METRICS, made):
        lines.append(f"{cut} lines beyond step {made} are cut from {options.out / METRICS}: they are trained again")
    if made >= options.steps:
        lines.append(
            f"nothing to train: {options.out} has made {made} steps, and --steps asks for {options.steps}; give more, "
            "or start over with --fresh"
        )
    return lines


def _trim(path: Path, made: int) -> int:
    """Rows cut; a line that a crash has torn counts as one."""
    if not path.exists():
        return 0
    rows = path.read_bytes().splitlines(keepends=True)
    kept = 0
    while kept < len(rows) and _step(rows[kept]) <= made:
        kept += 1
    os.truncate(path, sum(map(len, rows[:kept])))
    return len(rows) - kept


def _step(row: bytes) -> float:
    try:
        return int(json.loads(row)["step"]) if row.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _identity(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"text digest": record["corpus"]["digest"], "seed": record["config"]["seed"], **record.get("model", {})}


def _remedy(folder: Path) -> str:
    return f"--fresh keeps it as {_free_name(folder)} and starts over, --out names another folder."


def _free_name(folder: Path) -> Path:
    number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.{n}").exists())
    return folder.with_name(f"{folder.name}.{number}")


def _refuse_kept(folder: Path, kept: Path) -> None:
    inside = kept.absolute().is_relative_to(folder.absolute())
    if not inside and committed(Files(), kept):
        raise EngineError(
            f"--fresh puts {folder} aside, but checkpoint.folder {kept} of the configuration has checkpoints, from "
            "which the run would go on; name another one there."
        )


def _lock(folder: Path) -> int:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise EngineError(
            f"another process trains in {folder}; wait for its end, or name another folder with --out."
        ) from error
    except OSError:  # a file system without locks
        pass
    return file
