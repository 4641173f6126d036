"""Ranks find each other, wait for each other, and notice who leaves. Threads in place of processes."""

import gc
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from engine.parallel.comm.host_barrier import NO_HOST, HostBarrier, host_identity
from tests.parallel.comm.neighbours import exchanges, meet_all, neighbours, run_threads

HOST = host_identity()


def descriptors() -> set[str]:
    """What this process has open."""
    gc.collect()
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def shared_files() -> set[str]:
    """Return the names in shared memory, but for tensors that other test processes share."""
    names = os.listdir("/dev/shm") if Path("/dev/shm").exists() else []
    return {name for name in names if not name.startswith("torch_") or name.startswith(f"torch_{os.getpid()}_")}


def pass_barrier(ranks: list[HostBarrier]) -> None:
    """All of them, once."""

    def body(index: int) -> None:
        ranks[index].arrive()
        ranks[index].meet()

    run_threads(body, len(ranks))


# who takes part


def test_this_system_can_share_memory() -> None:
    assert host_identity() == HOST != NO_HOST and len(HOST) == len(NO_HOST)


@pytest.mark.parametrize(
    "hosts", [(HOST, bytes(reversed(HOST))), (HOST, NO_HOST, HOST), (NO_HOST, NO_HOST)], ids=["two", "one off", "none"]
)
def test_ranks_of_several_hosts_share_nothing_and_all_know(hosts: tuple[bytes, ...]) -> None:
    before = descriptors()
    assert meet_all(hosts, 4096) == [None] * len(hosts)
    assert descriptors() == before


def test_a_rank_that_cannot_map_the_memory_keeps_all_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no memory")

    before = descriptors()
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert meet_all([HOST] * 3, 4096) == [None] * 3
    assert descriptors() == before


def test_a_stranger_who_calls_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = socket.socket.listen
    strangers: list[socket.socket] = []

    def visited(listener: socket.socket, backlog: int) -> None:
        listen(listener, backlog)
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(listener.getsockname())
        stranger.send(bytes(36))
        strangers.append(stranger)

    monkeypatch.setattr(socket.socket, "listen", visited)
    with neighbours(2) as ranks:
        pass_barrier(ranks)
    assert len(strangers) == 2
    for stranger in strangers:
        with stranger, suppress(ConnectionResetError):  # of the last rank, which nobody has to call
            assert stranger.recv(1) == b""


def test_everything_is_closed_and_no_file_was_ever_made() -> None:
    before, files = descriptors(), shared_files()
    for _ in range(3):
        with neighbours(3) as ranks:
            assert shared_files() == files
            pass_barrier(ranks)
        del ranks
    assert descriptors() == before


# the barrier


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_nobody_passes_before_all_have_come(ranks: int) -> None:
    """Each writes its count, passes, and reads that nobody is behind; a second barrier lets nobody run ahead."""
    rounds = 50

    def body(index: int) -> bool:
        one, right = found[index], True
        for count in range(rounds):
            one.memory[index] = count
            one.arrive()
            one.meet()
            right = right and one.memory[:ranks] == bytes([count]) * ranks
            one.arrive()
            one.meet()
        return right

    with neighbours(ranks) as found:
        assert run_threads(body, ranks) == [True] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_waited_for(ranks: int, late: int) -> None:
    order: list[int] = []

    def body(index: int) -> None:
        if index == late:
            time.sleep(0.2)
            order.append(index)
        found[index].arrive()
        found[index].meet()
        if index != late:
            order.append(index)

    with neighbours(ranks) as found:
        run_threads(body, ranks)
    assert order[0] == late and len(order) == ranks


def test_waiting_takes_no_processor_time() -> None:
    with neighbours(2) as (waiting, late):
        waiting.arrive()
        timer = threading.Timer(0.5, late.arrive)
        timer.start()
        spent = time.process_time()
        waiting.meet()
        spent = time.process_time() - spent
        timer.join()
    assert spent < 0.1


# who ends


def test_a_rank_that_does_not_come_is_given_up() -> None:
    with neighbours(2, seconds=0.3) as (waiting, _):
        waiting.arrive()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"index 1 of this axis did not arrive within 0\.3 s"):
            waiting.meet()
        assert 0.2 < time.monotonic() - began < 5


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_everybody_is_told_when_one_leaves(ranks: int) -> None:
    """Whoever fails leaves in turn, so that those who do not wait for the first one hear of it too."""

    def body(one: HostBarrier) -> str:
        if one.index == ranks - 1:
            time.sleep(0.1)
            one.close()
            return "left"
        try:
            one.arrive()
            one.meet()
        except RuntimeError as error:
            one.close()
            return str(error)
        return "passed"

    with neighbours(ranks) as found:
        *others, left = run_threads(lambda index: body(found[index]), ranks)
    assert left == "left" and all("has ended or given up" in said for said in others), others


def test_a_signal_interrupts_the_wait() -> None:
    class StopWaitingError(Exception):
        pass

    def handler(*_: object) -> None:
        raise StopWaitingError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with neighbours(2) as (waiting, _):
            waiting.arrive()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(StopWaitingError):
                waiting.meet()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_who_is_forgotten_leaves_too() -> None:
    before = descriptors()
    found = meet_all([HOST] * 2, 4096)
    assert descriptors() != before
    del found
    assert descriptors() == before


def test_exchanges_give_all_to_all() -> None:
    ways = exchanges(3)
    assert run_threads(lambda i: ways[i](bytes([i])), 3) == [(b"\0", b"\1", b"\2")] * 3
