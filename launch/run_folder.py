"""Command line and folder of a reference run. Imports no torch, so ``train.py --help`` responds at once.

A new start in a folder continues its run, or is refused with the reason.

runs/train/
  run.json         text, model, versions and configuration of the last start
  metrics.jsonl    one line for each logged step
  checkpoints/     step-00000250 and so on
runs/train.1/      an earlier run, moved by --fresh
"""

import fcntl
import json
import os
import platform
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import committed
from engine.config.config_file import OVERRIDES_HELP
from engine.data.corpus import Corpus
from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.models.decoder import DecoderConfig


RECORD, METRICS, CHECKPOINTS = "run.json", "metrics.jsonl", "checkpoints"


def open_run(options: Namespace, settings: Mapping[str, Any], corpus: Corpus, shape: "DecoderConfig") -> ExitStack:
    """Creates or reopens the run folder ``options.out``, locks it, and records in it the model sizes ``shape``,
    ``settings``, and a digest of the training text ``corpus``.

    Only rank 0 calls it, before it builds its engine.

    Returns:
        A context that releases the lock at its end.

    Raises:
        EngineError: another process trains in the folder; the run in it has another text, model or seed; or ``--fresh``
            is given, but this process was started in the folder, or the checkpoint folder in ``settings`` is outside
            the run folder and has checkpoints.
    """
    folder: Path = options.out
    if options.fresh and folder.exists():
        if Path.cwd().is_relative_to(folder.resolve()):
            raise EngineError(
                f"--fresh renames {folder}, but this process has been started in it; start it in another folder, or "
                "name another folder with --out."
            )
        _refuse_kept(folder, Path(settings["checkpoint"]["folder"]))
        os.close(_lock(folder))
        folder.rename(_free_name(folder))
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    text = {"name": corpus.name, "files": corpus.files, "bytes": len(corpus.tokens), "digest": corpus.digest}
    versions = {"python": platform.python_version(), "torch": version("torch")}
    record = {"corpus": text, "model": asdict(shape), "versions": versions, "config": settings}
    check_same(folder, record)
    _write_record(lock, json.dumps(record, indent=2) + "\n")
    held = ExitStack()
    held.callback(os.close, lock)
    return held


def check_same(folder: Path, record: Mapping[str, Any]) -> None:
    """Checks that the run in ``folder`` has the text, seed and model sizes of ``record``.

    A folder without a run passes.

    Raises:
        EngineError: text, seed or model sizes differ; the message names the first difference.
    """
    try:
        there = _identity(json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineError(
            f"{folder / RECORD} cannot be read ({type(error).__name__}: {error}), so the run in this folder cannot be "
            f"continued; pass --fresh to rename the folder to {_free_name(folder)} and start over, or --out to name "
            "another folder."
        ) from error
    for name, here in _identity(record).items():
        if there.get(name) != here:
            raise EngineError(
                f"{folder} has a run with {name} {there.get(name)}, but this start has {name} {here}; pass --fresh to "
                f"rename the folder to {_free_name(folder)} and start over, or --out to name another folder."
            )


def go_on(options: Namespace, made: int) -> list[str]:
    """Removes metrics log rows after step ``made``, the step of the loaded checkpoint; returns messages.

    The messages say that rows were removed, or that no steps are left to train. A log outside the run folder is
    left unchanged.
    """
    lines = []
    if cut := _trim(options.out / METRICS, made):
        lines.append(
            f"{cut} lines after step {made} are removed from {options.out / METRICS}: these steps are repeated"
        )
    if made >= options.steps:
        lines.append(
            f"nothing to train: {options.out} has made {made} steps, and --steps is {options.steps}; pass more "
            "steps, or start over with --fresh"
        )
    return lines


def _trim(path: Path, made: int) -> int:
    """Removes rows after step ``made`` and returns their number; a line that a crash cut short counts as one."""
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
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")


def _identity(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"text digest": record["corpus"]["digest"], "seed": record["config"]["seed"], **record.get("model", {})}


def _free_name(folder: Path) -> Path:
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.{n}").exists())
    return folder.with_name(f"{folder.name}.{number}")


def _refuse_kept(folder: Path, kept: Path) -> None:
    inside = kept.absolute().is_relative_to(folder.absolute())
    if not inside and committed(Files(), kept):
        raise EngineError(
            f"--fresh renames {folder}, but the run would continue from checkpoints in checkpoint.folder {kept}; name "
            "another checkpoint.folder."
        )


def _write_record(folder: int, text: str) -> None:
    """Replaces the record in an open folder; a stale temporary file is removed first, and a link not followed."""
    written = f"{RECORD}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(written, dir_fd=folder)
    file = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    with os.fdopen(file, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(written, RECORD, src_dir_fd=folder, dst_dir_fd=folder)


def _lock(folder: Path) -> int:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise EngineError(
            f"another process trains in {folder}; wait until it ends, or name another folder with --out."
        ) from error
    except OSError:  # the file system has no locks
        pass
    return file


DEFAULT_CONFIG = Path("configs/tp2_pp2_zero1.json")
"""Default configuration for a multiple of four ranks."""
DATA_CONFIG = Path("configs/dp_zero1.json")
"""Default configuration for any other number of ranks."""


def training_options(arguments: Sequence[str] | None = None) -> Namespace:
    """Parses the command line of the reference run ``train.py``; every option has a default.

    ``arguments``: words of the command line; None: from ``sys.argv``.
    """
    parser = ArgumentParser(
        prog="train.py",
        description="Train a small byte-level decoder on real text. "
        "Start it with torchrun --nproc_per_node N train.py, or as one process.",
    )
    parser.add_argument("--config", type=Path, default=None, help=(
        f"configuration (default {DEFAULT_CONFIG} for a multiple of 4 ranks, otherwise {DATA_CONFIG})"
    ))  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="text files instead of the built-in text")
    parser.add_argument("--steps", type=_count, default=250, help="optimizer steps in total (default %(default)s)")
    parser.add_argument("--layers", type=_count, default=4, help="blocks of the decoder (default %(default)s)")
    parser.add_argument("--width", type=_count, default=128, help="width of the decoder (default %(default)s)")
    parser.add_argument("--heads", type=_count, default=4, help="attention heads (default %(default)s)")
    parser.add_argument("--context", type=_count, default=128, help="tokens in a window (default %(default)s)")
    parser.add_argument("--sample", type=_count, default=200, help="bytes to generate at the end (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help=(
        "folder of the run, which continues if it exists (default %(default)s)"
    ))  # fmt: skip
    parser.add_argument("--profile", default=None, metavar="A:B", help=(
        "trace steps A to B on all ranks; trine report OUT writes them for ui.perfetto.dev"
    ))  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="start over; the old run moves to a numbered folder")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)  # argparse names the option and the value
    return number
