"""Senders and receivers that are killed at random bytes: every receiver has the old version or the new one, in time."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

import pytest
from torch import Tensor

from engine.errors import EngineError
from engine.weights_out.commit import CommitGroup
from engine.weights_out.reader import WeightReader
from engine.weights_out.receiver import Target, WeightReceiver
from tests.engine.weights_out.trainer import KilledError, Trainer, breaks, has, random_weights, targets

KILLS = int(os.environ.get("TRINE_WEIGHT_KILLS", "200"))
OLD, NEW = random_weights(1), random_weights(2)
DEADLINE = 0.4
SLACK = 3.0
"""Seconds by which a loaded machine may be late; the next retry of a request would be later."""
FIRST, SENDER = "http://owner0", "http://owner1"
Victim = int | str | None
"""Receiver by its part, sender by its address, or all senders."""


@dataclass(slots=True)
class Life:
    """One receiver process: its live tensors, and what its update of the new version came to."""

    part: int
    parts: int
    live: dict[str, Target]
    receiver: WeightReceiver
    reader: WeightReader
    result: Any = None
    seconds: float = 0.0
    killed: bool = False

    def update(self) -> None:
        """Takes the newest version over."""
        began = monotonic()
        try:
            self.result = self.receiver.update()
        except EngineError as error:
            self.result = error
        except KilledError:
            self.killed = True
        self.seconds = monotonic() - began

    def version(self) -> str:
        """The version in the live tensors, by their bits."""
        found = [
            name for name, weights in (("old", OLD), ("new", NEW)) if has(self.live, weights, self.part, self.parts)
        ]
        return found[0] if found else "mixed"


@dataclass(slots=True)
class Group:
    """Receivers of all parts, on the old version; the new one is published."""

    folder: Path
    parts: int
    trainer: Trainer = field(default_factory=lambda: Trainer(2))
    make_group: Callable[[Path, int, int], CommitGroup] = CommitGroup
    lives: list[Life] = field(default_factory=list)

    def start(self) -> None:
        """Brings all to the old version."""
        self.trainer.publish(OLD)
        for part in range(self.parts):
            self.lives.append(self.life(part, self.make_group))
        self.update()
        assert [life.version() for life in self.lives] == ["old"] * self.parts
        self.trainer.publish(NEW)

    def life(self, part: int, make: Callable[[Path, int, int], CommitGroup] = CommitGroup) -> Life:
        """Starts a receiver process."""
        live, reader = targets(part, self.parts), self.trainer.reader(DEADLINE * 20)
        group = make(self.folder, part, self.parts) if self.parts > 1 else None
        return Life(part, self.parts, live, WeightReceiver(reader, live, group=group), reader)

    def update(self) -> None:
        """Updates all at once."""
        threads = [Thread(target=life.update) for life in self.lives]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def killed(folder: Path, parts: int, byte: int, victim: Victim) -> list[Life]:
    """Kills all senders, one of them or a receiver after ``byte`` bytes of replies for one receiver; returns all
    receivers.
    """
    group, deadline = Group(folder, parts), DEADLINE
    if isinstance(victim, str):
        group.trainer, deadline = Trainer(2, copies=True), DEADLINE * 5
    group.start()
    for life in group.lives:
        life.reader.deadline = deadline
        network: Any = life.reader._connect
        if isinstance(victim, str):
            network.victim, network.passed = victim, 0
        if victim == life.part or not isinstance(victim, int):
            network.life = network.passed + (byte if life.part == (victim or 0) else byte // 2)
            network.kills = KilledError() if isinstance(victim, int) else None
    group.update()
    if victim == SENDER:
        assert {life.version() for life in group.lives} == {"new"}, "the other rank serves the same elements"
    alive = [life for life in group.lives if not life.killed]
    assert {life.version() for life in alive} <= {"old", "new"}
    assert len({life.version() for life in alive}) <= 1, "all of the group, or none"
    assert all(life.seconds < deadline + SLACK for life in group.lives)
    assert all(life.version() == ("new" if life.result and not isinstance(life.result, EngineError) else "old")
               for life in alive)  # fmt: skip
    return group.lives


def kill(folder: Path, numbers: list[int], victims: list[Victim], parts: int) -> set[str]:
    """Kills at each byte; returns the versions that the receivers ended with."""
    seen = set()
    for index, byte in enumerate(numbers):
        lives = killed(folder / str(index), parts, byte, victims[index % len(victims)])
        seen |= {life.version() for life in lives if not life.killed}
    return seen


def test_a_sender_that_is_killed_leaves_the_old_version_or_the_new_one(tmp_path: Path) -> None:
    numbers = [*breaks(5, 0, 1_400_000, 3), 10**9]
    assert kill(tmp_path, numbers, [None], 1) == {"old", "new"}


def test_a_sender_that_is_killed_does_not_end_a_version_that_another_rank_has(tmp_path: Path) -> None:
    assert kill(tmp_path, [0, *breaks(2, 0, 700_000, 8)], [SENDER], 1) == {"new"}
    assert kill(tmp_path / "first", breaks(2, 100_000, 700_000, 8), [FIRST], 1) == {"new"}


def test_a_group_of_three_is_never_mixed(tmp_path: Path) -> None:
    numbers = [*breaks(4, 0, 500_000, 4), 10**9]
    assert kill(tmp_path, numbers, [None, 1, SENDER], 3) == {"old", "new"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "victims"), [(1, [None, SENDER]), (1, [0, FIRST]), (2, [None, 0, 1, SENDER]), (3, [None, 0, 1, 2, FIRST])]
)
def test_two_hundred_kills(tmp_path: Path, parts: int, victims: list[Victim]) -> None:
    numbers = breaks(KILLS // 4, 0, 1_600_000 // parts, 5 + parts)
    assert kill(tmp_path, numbers, victims, parts) <= {"old", "new"}


@dataclass(frozen=True, slots=True)
class DyingGroup(CommitGroup):
    """Group whose process is killed at one operation on the shared folder, before or after it."""

    left: list[float] = field(default_factory=lambda: [float("inf")])
    after: bool = False

    def _count(self) -> None:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise KilledError

    def _write(self, name: str, text: str) -> None:
        if not self.after:
            self._count()
        CommitGroup._write(self, name, text)
        if self.after:
            self._count()

    def _decision(self, attempt: str) -> str | None:
        found = CommitGroup._decision(self, attempt)
        self._count()
        return found


def at_operation(folder: Path, victim: int, operation: int, after: bool) -> tuple[list[Life], Group]:
    """Kills a receiver at an operation of the decision."""

    def make(path: Path, member: int, members: int) -> CommitGroup:
        return (
            DyingGroup(path, member, members, after=after) if member == victim else CommitGroup(path, member, members)
        )

    group = Group(folder, 2, make_group=make)
    group.start()
    for life in group.lives:
        life.reader.deadline = DEADLINE
    dying: Any = group.lives[victim].receiver._group
    dying.left[0] = operation
    group.update()
    return group.lives, group


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("operation", [0, 1, 2, 4])
def test_a_receiver_killed_while_it_decides_does_not_divide_the_group(
    tmp_path: Path, operation: int, after: bool
) -> None:
    lives, group = at_operation(tmp_path, 1, operation, after)
    other = lives[0]
    assert other.version() in ("old", "new") and other.seconds < DEADLINE + SLACK
    if not lives[1].killed:
        assert lives[1].version() == other.version()
        return
    again = group.life(1)
    group.lives = [other, again]
    for life in group.lives:
        life.reader.deadline = DEADLINE * 20
    group.update()  # the one that starts again takes over what the group has decided, or both meet
    assert [life.version() for life in group.lives] == ["new", "new"]


def test_receivers_that_were_late_meet_at_the_next_attempt(tmp_path: Path) -> None:
    group = Group(tmp_path, 2)
    group.start()
    group.lives[0].reader.deadline = DEADLINE
    group.lives[0].update()
    assert group.lives[0].version() == "old" and "not all 2 receivers of" in str(group.lives[0].result)
    group.lives[0].reader.deadline = DEADLINE * 20
    group.update()
    assert [life.version() for life in group.lives] == ["new", "new"]


def test_a_sender_that_hangs_costs_the_deadline(tmp_path: Path) -> None:
    group = Group(tmp_path, 1)
    group.start()
    (life,) = group.lives
    life.reader.deadline = DEADLINE
    image = group.trainer.images[1]
    with image._lock:  # the owner answers nothing
        life.update()
    assert life.version() == "old" and "has not arrived within 0.4 s" in str(life.result)
    assert life.seconds < DEADLINE + SLACK


def test_a_version_that_is_replaced_while_it_is_read_is_dropped(tmp_path: Path) -> None:
    group = Group(tmp_path, 1)
    group.start()
    (life,) = group.lives
    read = WeightReader.fetch

    def replaced(*given: Any) -> Any:
        later: dict[str, Tensor] = {**NEW, "head.count": NEW["head.count"] + 1}
        group.trainer.publish(later)
        return read(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightReader, "fetch", replaced)
        life.update()
    assert life.version() == "old" and "version 2 is over, and version 3 has replaced it" in str(life.result)
