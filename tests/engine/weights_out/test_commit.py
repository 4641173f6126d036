"""The decision of a group of receivers: one for all, at any order of arrival."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import pytest

from engine.errors import EngineError
from engine.weights_out.commit import CommitGroup


def test_all_commit_once_all_are_prepared(tmp_path: Path) -> None:
    groups = [CommitGroup(tmp_path, member, 3) for member in range(3)]
    for version in ("a-000001", "a-000002"):
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda group: group.settle(version, monotonic() + 30), groups)) == [True] * 3  # noqa: B023
    assert not [path.name for path in tmp_path.iterdir() if "a-000001" in path.name or path.name.startswith(".")]


def test_nobody_commits_before_all_are_prepared(tmp_path: Path) -> None:
    for member in range(2):
        assert not CommitGroup(tmp_path, member, 3).settle(f"a-00000{member}", monotonic() + 0.05)
    first, second = (CommitGroup(tmp_path, member, 3) for member in (0, 1))
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(group.settle, "a-000009", monotonic() + 0.1) for group in (first, second)]
        assert [each.result() for each in found] == [False, False]


def test_the_first_decision_counts_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others decide between the last look of a receiver and its deadline."""
    group, looks = CommitGroup(tmp_path, 0, 2), []
    look = CommitGroup._decision

    def slow(self: CommitGroup, attempt: str) -> str | None:
        found = look(self, attempt)
        looks.append(found)
        if len(looks) == 2:  # the first one finds the attempt
            (tmp_path / f"{attempt}.decided").write_text("commit")
        return found

    monkeypatch.setattr(CommitGroup, "_decision", slow)
    assert group.settle("a-000001", monotonic() - 1)


def test_a_receiver_that_starts_again_reads_the_decision(tmp_path: Path) -> None:
    groups = [CommitGroup(tmp_path, member, 2) for member in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda group: group.settle("a-000001", monotonic() + 30), groups))
    assert CommitGroup(tmp_path, 1, 2).settle("a-000001", monotonic() - 1), "nobody waits for it"


def test_members_count_from_zero(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="got member = 2 and members = 2, but member must be"):
        CommitGroup(tmp_path, 2, 2)
