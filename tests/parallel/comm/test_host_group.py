"""What all ranks tell each other through rank 0, and what becomes of it when one is lost."""

from collections.abc import Callable

import pytest

from engine.errors import EngineError
from engine.parallel.comm.host_group import HostGroup, Wait, announce, collect


class Desk:
    """Rank 0 of four, in one process: the others have sent what they had, and take what they get; one may be lost."""

    rank, size = 0, 4

    def __init__(self, lost: int = 0) -> None:
        self._lost = lost
        self._inbox = {
            rank: len(text).to_bytes(8, "little") + text for rank, text in enumerate((b"", b"a", b"", b"cc"))
        }
        self.told: dict[int, bytes] = {}

    def send(self, data: memoryview, to: int) -> Wait:
        """Gone at once, unless the rank is."""
        return self._answer(to, lambda: self.told.update({to: self.told.get(to, b"") + bytes(data)}))

    def receive(self, target: memoryview, source: int) -> Wait:
        """What there is."""

        def take() -> None:
            target[:], self._inbox[source] = self._inbox[source][: len(target)], self._inbox[source][len(target) :]

        return self._answer(source, take)

    @property
    def unheard(self) -> list[int]:
        """Ranks that still wait to be heard."""
        return [rank for rank, left in self._inbox.items() if left and rank not in (0, self._lost)]

    def _answer(self, other: int, act: Callable[[], None]) -> Wait:
        def lose() -> None:
            raise EngineError(f"rank 0 has lost rank {other}")

        return lose if other == self._lost else act


def test_rank_0_hears_all() -> None:
    desk = Desk()
    host: HostGroup = desk
    assert collect(host, b"own") == [b"own", b"a", b"", b"cc"]
    assert announce(host, b"so be it") == b"so be it"
    assert set(desk.told) == {1, 2, 3} and {text[8:] for text in desk.told.values()} == {b"so be it"}


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_lost_rank_keeps_nobody_waiting(lost: int) -> None:
    desk = Desk(lost)
    with pytest.raises(EngineError, match=f"has lost rank {lost}"):
        collect(desk, b"own")
    assert desk.unheard == [], "whoever is not heard waits until the timeout"
    with pytest.raises(EngineError, match=f"has lost rank {lost}"):
        announce(desk, b"it failed")
    assert sorted(desk.told) == [rank for rank in (1, 2, 3) if rank != lost]
