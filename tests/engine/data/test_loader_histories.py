"""The place in a dataset over random histories of a loader: no sample is repeated or skipped."""

import pytest

from tests.engine.data.histories import Run, check, wrong
from tests.selection import wide

HISTORIES = 500
AT_ONCE = 100


@pytest.mark.parametrize("first", [0, AT_ONCE, *(wide(first) for first in range(2 * AT_ONCE, HISTORIES, AT_ONCE))])
def test_no_sample_is_repeated_or_skipped_whatever_the_history(first: int) -> None:
    replayed, grids, epochs = check(range(first, first + AT_ONCE))
    print(f"{AT_ONCE} histories, {replayed} rows replayed, {epochs} epochs")
    assert replayed > 200 and grids >= 3 and epochs > 50, "histories without kills, regridding or epochs show nothing"


@pytest.mark.parametrize("first", [0, *(wide(first) for first in range(AT_ONCE, HISTORIES, AT_ONCE))])
def test_worker_processes_change_nothing(first: int) -> None:
    check(range(first, first + (2 if first == 0 else AT_ONCE)), processes=True)


def test_the_check_sees_a_repeated_and_a_skipped_sample() -> None:
    stream = [[number] for number in (3, 1, 0, 2, 2, 1, 3, 0)]
    for counted, sound in ((stream, True), (stream[:2] + stream[1:], False), (stream[:2] + stream[3:], False)):
        assert (not wrong(Run(list, {}, 4, counted=counted))) == sound
