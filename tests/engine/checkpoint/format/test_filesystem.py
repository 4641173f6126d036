"""Operations on real files."""

import os
import socket
from pathlib import Path

import pytest

from engine.checkpoint.format.filesystem import Files, opened, read_all, remove_tree
from engine.errors import CheckpointError

FILES = Files()


def read(root: Path, name: str) -> bytes:
    return bytes(read_all(FILES, root, name, 100))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "model").mkdir(parents=True)
    (tmp_path / "root" / "model" / "x").write_bytes(b"inside")
    (tmp_path / "outside").write_bytes(b"outside")
    return tmp_path / "root"


def test_a_file_in_a_folder_is_read(root: Path) -> None:
    assert read(root, "model/x") == b"inside"


def test_links_are_refused(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "outside")
    (root / "folder").symlink_to(root.parent)
    (root / "loop").symlink_to("loop")
    for name in ("link", "folder/outside", "loop", "loop/x"):
        with pytest.raises(CheckpointError, match=f"{name} is a link, or its path contains one"):
            read(root, name)


def test_what_is_no_file_is_refused_and_does_not_block(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(root / "socket"))
        for name in ("pipe", "socket", "model", "model/x/y", "missing", "missing/x"):
            with pytest.raises(CheckpointError, match=name):
                read(root, name)


def test_no_descriptor_is_left_open(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "link").symlink_to("model")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("model/x", "pipe", "link", "link/x", "missing", "model", "missing/x", "model/x/y"):
        try:
            read(root, name)
        except CheckpointError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_beyond_the_limit_takes_no_memory(root: Path) -> None:
    os.truncate(root / "model" / "x", 1 << 40)
    with pytest.raises(
        CheckpointError, match=r"model/x is damaged: it has 1,099,511,627,776 bytes, but at most 100 are allowed"
    ):
        read(root, "model/x")


def test_nothing_is_written_over(root: Path) -> None:
    with pytest.raises(FileExistsError):
        FILES.create(root / "model" / "x")
    (root / "link").symlink_to(root.parent / "new")
    with pytest.raises(FileExistsError):
        FILES.create(root / "link")
    assert not (root.parent / "new").exists()


@pytest.mark.parametrize("sizes", [[1], [4096], [4096, 1], [1, 4096], [5000, 3000, 8192], [1 << 20, 7]])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_writes_of_any_size_and_alignment_follow_one_another(root: Path, sizes: list[int], offset: int) -> None:
    """Past the page cache only whole pages at aligned addresses go; the rest takes the way through it."""
    data = [bytes([index + 1]) * (offset + size) for index, size in enumerate(sizes)]
    file = FILES.create(root / "new")
    for part in data:
        FILES.write(file, memoryview(part)[offset:])
    FILES.sync(file)
    FILES.close(file)
    assert (root / "new").read_bytes() == b"".join(part[offset:] for part in data)


def test_a_removed_tree_spares_what_links_lead_to(root: Path) -> None:
    (root / "model" / "file").symlink_to(root.parent / "outside")
    (root / "model" / "folder").symlink_to(root.parent)
    remove_tree(FILES, root)
    assert not root.exists() and (root.parent / "outside").read_bytes() == b"outside"


class Swapping(Files):
    """Puts a link in place of a folder while it is being removed."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._folder, self._target = folder, target

    def unlink(self, path: Path, parent: int | None = None) -> None:
        super().unlink(path, parent)
        if not self._folder.is_symlink():
            self._folder.rename(self._folder.with_name("aside"))
            self._folder.symlink_to(self._target)


def test_a_folder_that_becomes_a_link_while_it_is_removed_leads_nowhere(root: Path) -> None:
    outside = root.parent / "mine"
    for folder in (root / "model", outside):
        folder.mkdir(exist_ok=True)
        for name in ("a", "b"):
            (folder / name).write_text("mine")
    with pytest.raises(OSError, match=r"root/model'|/model'"):
        remove_tree(Swapping(root / "model", outside), root / "model")
    assert sorted(path.name for path in outside.iterdir()) == ["a", "b"]


def test_an_error_while_reading_names_the_file(root: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"model/x cannot be read \(Input/output error\)"),
        opened(FILES, root, "model/x"),
    ):
        raise OSError(5, "Input/output error")
