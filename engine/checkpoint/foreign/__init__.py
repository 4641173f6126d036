"""Checkpoints of other engines, read without running anything that is in them.

pickle_values        a pickle's values; nothing is imported or called
torch_file           a file of torch.save: the values, and where each tensor's bytes are
deepspeed_zero       which elements of a parameter are in which file of ZeRO
deepspeed_folder     DeepSpeed's folders -> ForeignContents
foreign_step         ForeignContents as an open checkpoint, which any grid loads
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from engine.checkpoint.foreign.deepspeed_folder import is_deepspeed, read_deepspeed
from engine.checkpoint.foreign.foreign_step import ForeignStep
from engine.checkpoint.format.filesystem import Files, read_all
from engine.checkpoint.format.step_folders import is_step
from engine.checkpoint.format.step_reader import OpenCheckpoint, StepReader

logger = logging.getLogger("trine")


def foreign_folder(files: Files, folder: Path) -> Path | None:
    """The folder of another engine's checkpoint: ``folder``, or the one that its file "latest" names."""
    for place in (folder, *_tag_folders(files, folder)) if files.is_folder(folder) else ():
        if is_deepspeed(files.names(place)):
            return place
    return None


def open_checkpoint(files: Files, folder: Path, optimizer: bool = True) -> OpenCheckpoint:
    """Open a checkpoint of this engine, or one that ``foreign_folder`` has found."""
    return StepReader(files, folder) if is_step(files, folder) else open_foreign(files, folder, optimizer)


def open_foreign(files: Files, folder: Path, optimizer: bool = True) -> ForeignStep:
    """Open the checkpoint of another engine.

    Args:
        optimizer: the optimizer's state is wanted.

    Raises:
        CheckpointError: the folder is damaged, or holds what cannot be read.
    """
    contents, dropped = read_deepspeed(files, folder, optimizer)
    if dropped:
        logger.warning("%s: client state that is no JSON is left out: %s", folder, ", ".join(dropped[:5]))
    return ForeignStep(files, folder, contents)


def _tag_folders(files: Files, folder: Path) -> Iterator[Path]:
    for name in ("latest_universal", "latest"):
        if name in files.names(folder):
            tag = bytes(read_all(files, folder, name, 1 << 12)).decode(errors="replace").strip()
            if tag and "/" not in tag and "\0" not in tag and tag not in (".", "..") and files.is_folder(folder / tag):
                yield folder / tag
