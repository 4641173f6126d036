"""Checkpoints of other engines, read without executing their contents.

pickle_values        a pickle's values; nothing is imported or called
torch_file           a file of torch.save: the values, and the position of each tensor's bytes
deepspeed_zero       elements of each parameter in the files of ZeRO
deepspeed_folder     DeepSpeed's folders -> ForeignContents
torch_dcp            folders of torch.distributed.checkpoint -> ForeignContents
megatron             Megatron's torch format -> ForeignContents
foreign_step         ForeignContents as an open checkpoint, which any grid loads
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.checkpoint.foreign.deepspeed_folder import is_deepspeed, read_deepspeed
from engine.checkpoint.foreign.foreign_step import ForeignContents, ForeignStep
from engine.checkpoint.foreign.megatron import is_megatron, read_megatron
from engine.checkpoint.foreign.torch_dcp import METADATA, read_dcp
from engine.checkpoint.format.filesystem import Files, read_all
from engine.checkpoint.format.step_folders import is_step
from engine.checkpoint.format.step_reader import OpenCheckpoint, StepReader

logger = logging.getLogger("trine")


def foreign_folder(files: Files, folder: Path) -> Path | None:
    """Returns the DeepSpeed, Megatron or torch.distributed.checkpoint checkpoint at ``folder``; None if there is none.

    It is ``folder`` itself, or the subfolder that a file such as "latest" names.
    """
    for place in (folder, *_tag_folders(files, folder)) if files.is_folder(folder) else ():
        if _reader(files.names(place)) is not None:
            return place
    return None


def open_checkpoint(files: Files, folder: Path, optimizer: bool = True) -> OpenCheckpoint:
    """Opens the checkpoint in ``folder``, saved by this engine or by another one.

    ``optimizer``: True to read the optimizer state of another engine's checkpoint too.
    """
    return StepReader(files, folder) if is_step(files, folder) else open_foreign(files, folder, optimizer)


def open_foreign(files: Files, folder: Path, optimizer: bool = True) -> ForeignStep:
    """Opens a checkpoint of DeepSpeed, Megatron or torch.distributed.checkpoint.

    Client state that JSON cannot express is left out, with a logged warning.

    Args:
        optimizer: True to read optimizer state too.

    Raises:
        CheckpointError: the folder is damaged, or has unreadable contents.
    """
    read = _reader(files.names(folder)) or read_dcp
    contents, dropped = read(files, folder, optimizer)
    if dropped:
        logger.warning("%s: client state without a JSON form is left out: %s", folder, ", ".join(dropped[:5]))
    return ForeignStep(files, folder, contents)


def _reader(names: Sequence[str]) -> Callable[[Files, Path, bool], tuple[ForeignContents, list[str]]] | None:
    """Returns the reader of a folder with these names."""
    if is_deepspeed(names):
        return read_deepspeed
    if METADATA in names:
        return read_dcp
    return read_megatron if is_megatron(names) else None


def _tag_folders(files: Files, folder: Path) -> Iterator[Path]:
    """Yields the folders that a hint file names."""
    names = files.names(folder)
    for hint in ("latest_universal", "latest", "latest_checkpointed_iteration.txt"):
        if hint in names:
            tag = bytes(read_all(files, folder, hint, 1 << 12)).decode(errors="replace").strip()
            tag = f"iter_{int(tag):07d}" if hint.endswith(".txt") and re.fullmatch(r"\d{1,12}", tag) else tag
            if tag in names and files.is_folder(folder / tag):
                yield folder / tag
