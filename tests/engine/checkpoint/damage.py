"""Ways to damage a checkpoint on the disk, by a seed, and to undo it."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096


@dataclass(frozen=True)
class Fault:
    """What was done."""

    what: str
    files: tuple[str, ...]
    at: int = -1
    """Byte, -1 where the whole file is another."""
    length: int = 0


def files_of(step: Path) -> list[str]:
    return sorted(path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file())


@contextmanager
def damaged(step: Path, other: Path, seed: int) -> Iterator[Fault]:
    """The checkpoint with one fault; as it was afterwards. ``other``: an earlier step of the same run."""
    random_ = random.Random(seed)
    while True:
        what = random_.choice(sorted(_FAULTS))
        file = random_.choice(files_of(step))
        second = random_.choice(files_of(step))
        held = {name: (step / name).read_bytes() for name in {file, second}}
        fault = _FAULTS[what](step, other, (file, second), random_)
        after = {name: (step / name).read_bytes() if (step / name).exists() else None for name in held}
        if fault is not None and after != held:
            break
    try:
        yield fault
    finally:
        for name, data in held.items():
            (step / name).write_bytes(data)


def _patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def _bits(step: Path, other: Path, names: tuple[str, str], random_: random.Random) -> Fault | None:
    path = step / names[0]
    data = path.read_bytes()
    at = random_.randrange(len(data))
    _patch(path, at, bytes([data[at] ^ random_.randrange(1, 256)]))
    return Fault("bits", names[:1], at, 1)


def _cut(step: Path, other: Path, names: tuple[str, str], random_: random.Random) -> Fault | None:
    path = step / names[0]
    at = random_.randrange(path.stat().st_size)
    os.truncate(path, at)
    return Fault("cut", names[:1], at)


def _longer(step: Path, other: Path, names: tuple[str, str], random_: random.Random) -> Fault | None:
    path = step / names[0]
    data = path.read_bytes()
    more = random_.choice((b"\0", b" ", b"\n", b"}", random_.randbytes(100), bytes(PAGE), data[-PAGE:]))
    path.write_bytes(data + more)
    return Fault("longer", names[:1], len(data))


def _zeros(step: Path, other: Path, names: tuple[str, str], random_: random.Random) -> Fault | None:
    path = step / names[0]
    size = path.stat().st_size
    at = random_.randrange(-(-size // PAGE)) * PAGE
    _patch(path, at, bytes(min(PAGE, size - at)))
    return Fault("zeros", names[:1], at, min(PAGE, size - at))


def _page(step: Path, other: Path, names: tuple[str, str], random_: random.Random) -> Fault | None:
    """A page of this or of another file, in place of a page."""
    data = (step / names[0]).read_bytes()
    source = (step / random_.choice(names)).read_bytes()
    at, from_ = (random_.randrange(-(-len(whole) // PAGE)) * PAGE for whole in (data, source))
    page = source[from_ : from_ + PAGE][: len(data) - at]
    _patch(step / names[0], at, page)
    return Fault("page", names[:1], at, len(page))


def _swapped(step: Path, other: Path, names: tuple[str, str], random_: random.Random) -> Fault | None:
    first, second = (step / name for name in names)
    if first != second:
        held = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(held)
    return Fault("swapped", names)


def _missing(step: Path, other: Path, names: tuple[str, str], random_: random.Random) -> Fault | None:
    (step / names[0]).unlink()
    return Fault("missing", names[:1])


def _older(step: Path, other: Path, names: tuple[str, str], random_: random.Random) -> Fault | None:
    if not (other / names[0]).exists():
        return None
    shutil.copyfile(other / names[0], step / names[0])
    return Fault("older", names[:1])


def _older_pair(step: Path, other: Path, names: tuple[str, str], random_: random.Random) -> Fault | None:
    if not all((other / name).exists() for name in names):
        return None
    for name in names:
        shutil.copyfile(other / name, step / name)
    return Fault("older", names)


_FAULTS: dict[str, Callable[[Path, Path, tuple[str, str], random.Random], Fault | None]] = {
    "bits": _bits, "bits again": _bits, "cut": _cut, "longer": _longer, "missing": _missing, "older": _older,
    "older pair": _older_pair, "page": _page, "swapped": _swapped, "zeros": _zeros,
}  # fmt: skip
