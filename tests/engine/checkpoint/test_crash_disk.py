"""The disk that forgets, on cases small enough to write down."""

from pathlib import Path

from engine.checkpoint.format.filesystem import Files
from tests.engine.checkpoint.crash_disk import CrashDisk, Recorder, Tree, read_tree, write_tree


def after(*operations: tuple[str, str, object]) -> list[Tree]:
    disk = CrashDisk({"old": b"1"})
    for what, path, argument in operations:
        disk.play((what, Path(path), argument))
    return list(disk.states())


def test_what_is_not_forced_may_be_lost() -> None:
    states = after(("create", "new", None), ("write", "new", b"22"))
    assert {"old": b"1", "new": b"22"} in states and {"old": b"1", "new": b""} in states and {"old": b"1"} in states


def test_what_is_forced_is_there() -> None:
    states = after(("create", "new", None), ("write", "new", b"22"), ("sync", "new", None), ("sync folder", "", None))
    assert all(state == {"old": b"1", "new": b"22"} for state in states)


def test_each_change_of_names_comes_alone_or_lacks_alone() -> None:
    states = after(("create", "a", None), ("create", "b", None), ("unlink", "old", None))
    names = {frozenset(state) for state in states}
    assert names >= {frozenset(n) for n in ("ab", ["old", "a"], ["old", "b"], ["old", "a", "b"], "a", "b", ["old"], [])}


def test_a_rename_is_whole_or_absent() -> None:
    names = {tuple(state) for state in after(("rename", "old", Path("new")))}
    assert names == {("old",), ("new",)}


def test_a_file_may_lose_its_name_and_keep_its_place_in_a_renamed_folder() -> None:
    states = after(("make", "t", None), ("create", "t/f", None), ("rename", "t", Path("d")), ("sync folder", "", None))
    assert {"old": b"1", "d": {}} in states and {"old": b"1", "d": {"f": b""}} in states
    assert not any("t" in state for state in states)


def test_what_is_recorded_plays_to_what_is_there(tmp_path: Path) -> None:
    write_tree({"old": b"1", "sub": {"x": b"2"}}, tmp_path / "run")
    before = read_tree(tmp_path / "run")
    files: Files = Recorder(tmp_path / "run")
    run = tmp_path / "run"
    files.make_folder(run / "new")
    file = files.create(run / "new" / "f")
    files.write(file, memoryview(b"abc" * 5000))
    files.truncate(file, 10_001)
    files.sync(file)
    files.close(file)
    files.rename(run / "new", run / "newer")
    files.unlink(run / "sub" / "x")
    files.remove_folder(run / "sub")
    assert isinstance(files, Recorder)
    disk = CrashDisk(before)
    for operation in files.operations:
        disk.play(operation)
    assert next(disk.states()) == read_tree(run) == {"newer": {"f": (b"abc" * 5000)[:10_001]}, "old": b"1"}
