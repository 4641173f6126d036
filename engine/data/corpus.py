"""Training text: the built-in corpus, which needs no download, or the user's own files. Imports no torch.

Tokens are bytes, so the vocabulary has 256 entries and no tokenizer is involved. Documents follow each other without a
separator, in an order that depends only on their names, so every rank sees the same corpus.
"""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError

Split: TypeAlias = Literal["train", "validation"]
Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]

BYTE_VOCABULARY = 256
VALIDATION_ONE_IN = 10


# pydoc_data holds only the articles, which are included as prose; its source would repeat them.
SKIPPED_FOLDERS = frozenset(
    ["__pycache__", "dist-packages", "idle_test", "pydoc_data", "site-packages", "test", "tests"]
)


# These files are written per build or per machine; they would give two machines with the same Python different digests.
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Training or validation split of a text, as one sequence of tokens.

    ``tokens``: unsigned integers [n], possibly memory-mapped, all below ``vocabulary``. ``files``: number of documents.
    ``digest``: hash (16 hex digits) of the documents; losses are comparable only between equal digests.
    """

    name: str
    tokens: Tokens
    files: int
    digest: str
    vocabulary: int = BYTE_VOCABULARY


def builtin_corpus(split: Split) -> Corpus:
    """Returns a split of the built-in corpus: source files and help texts of Python's standard library, about 11 MB, as
    bytes.

    One file in ten is validation, chosen by a hash of its relative path.

    Raises:
        EngineError: the interpreter has no library sources, or ``split`` is neither "train" nor "validation".
    """
    _check_split(split)
    root = Path(sysconfig.get_path("stdlib"))
    validation = split == "validation"
    sources = [name for name in _source_names(root) if _held_out(name) == validation]
    documents = [(name, _read(root / name)) for name in sources]
    documents += [(name, text) for name, text in _articles() if _held_out(name) == validation]
    documents = [(name, text) for name, text in documents if text]
    if not documents:
        raise EngineError(
            f"The standard library at {root} has no readable *.py files to train on. "
            "Give your own text with --data FILE."
        )
    tokens = np.frombuffer(b"".join(text for _, text in documents), dtype=np.uint8)
    return Corpus("stdlib", tokens, len(documents), _digest(documents))


def text_corpus(paths: Sequence[str | Path], split: Split) -> Corpus:
    """Returns a split of the user's own files, as bytes.

    A single file's last tenth is validation. With several files, one file in ten is validation, chosen by a hash of its
    path; each split has at least one file.

    Raises:
        EngineError: no file is given, or a file is missing, unreadable, empty, too short or given twice.
    """
    _check_split(split)
    mapped = _map_files(paths)
    if len(mapped) == 1:
        [(name, whole)] = mapped.items()
        chosen = {name: _side_of_one(name, whole, split)}
    else:
        held_out = _held_out_files({name: tokens.size for name, tokens in mapped.items()})
        names = held_out if split == "validation" else mapped.keys() - held_out
        chosen = {name: mapped[name] for name in sorted(names)}
    parts = list(chosen.values())
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
    title = min(mapped) if len(mapped) == 1 else f"{min(mapped)} and {len(mapped) - 1} more"
    digest = _digest((name, part.data) for name, part in chosen.items())
    return Corpus(title, tokens, len(chosen), digest)


def _check_split(split: str) -> None:
    if split not in ("train", "validation"):
        raise EngineError(f"split = {split!r} is not a split of a corpus. Choose 'train' or 'validation'.")


def _name_hash(name: str) -> bytes:
    # fsencode, because a file name need not be valid UTF-8.
    return hashlib.sha256(os.fsencode(name)).digest()


def _held_out(name: str) -> bool:
    """Returns True if the document belongs to validation; only its name decides."""
    return int.from_bytes(_name_hash(name)[:8], "big") % VALIDATION_ONE_IN == 0


def _digest(documents: Iterable[tuple[str, bytes | memoryview]]) -> str:
    """Returns 16 hex digits over names, lengths and bytes; the lengths keep shifted boundaries from colliding."""
    total = hashlib.sha256()
    for name, content in documents:
        total.update(_name_hash(name) + len(content).to_bytes(8, "big"))
        total.update(content)
    return total.hexdigest()[:16]


def _source_names(root: Path) -> list[str]:
    """Returns the relative paths of the library's ``*.py`` files, in the same order on every file system."""
    names = []
    for folder, subfolders, files in os.walk(root):
        # assigned in place, so that os.walk does not descend
        subfolders[:] = [name for name in subfolders if _belongs(name)]
        inside = Path(folder).relative_to(root)
        names += [(inside / name).as_posix() for name in files if name.endswith(".py") and _belongs(name)]
    return sorted(names)


def _belongs(name: str) -> bool:
    return name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)


def _articles() -> list[tuple[str, bytes]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it separately from Python
        return []
    return [(f"pydoc_data/topics/{title}", text.encode()) for title, text in sorted(topics.items())]


def _read(path: Path) -> bytes:
    """Returns the content of a file, or b"" if it is unreadable."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _map_files(paths: Sequence[str | Path]) -> dict[str, Tokens]:
    """Maps every file; keys are paths below the common folder, so that moving the folder keeps the split."""
    if not paths:
        raise EngineError(
            "The list of data files is empty, but a text corpus needs at least one. "
            "Give --data FILE, or leave --data out to train on the built-in corpus."
        )
    whole = [Path(path).resolve() for path in paths]
    for path, times in Counter(whole).items():
        if times > 1:
            raise EngineError(f"Data file {path} was given {times} times; a file counts once. Give this file once.")
    common = os.path.commonpath([path.parent for path in whole])
    return {path.relative_to(common).as_posix(): _map_file(path) for path in whole}


def _map_file(path: Path) -> Tokens:
    try:
        if not path.is_file():
            raise EngineError(
                f"Data file {path} is missing or is not a file; --data takes existing files. Check the path."
            )
        # check first, because an empty file cannot be mapped
        if path.stat().st_size == 0:
            raise EngineError(f"Data file {path} is empty; every file needs at least 1 byte. Leave this file out.")
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise EngineError(
            f"Data file {path} cannot be read ({error.strerror}); --data takes readable text files. "
            "Check its permissions."
        ) from error


def _side_of_one(name: str, tokens: Tokens, split: Split) -> Tokens:
    shortest = 2 * VALIDATION_ONE_IN
    if tokens.size < shortest:
        raise EngineError(
            f"Data file {name} has {tokens.size} bytes; a single file needs at least {shortest}, because its "
            "last tenth is validation. Give a longer file or several files."
        )
    border = tokens.size - tokens.size // VALIDATION_ONE_IN
    return tokens[border:] if split == "validation" else tokens[:border]


def _held_out_files(sizes: dict[str, int]) -> set[str]:
    """Returns the validation files among two or more files; both sides of the split are nonempty."""
    chosen = {name for name in sizes if _held_out(name)} or {min(sizes, key=lambda name: (sizes[name], name))}
    if len(chosen) == len(sizes):
        chosen.remove(max(sizes, key=lambda name: (sizes[name], name)))
    return chosen
