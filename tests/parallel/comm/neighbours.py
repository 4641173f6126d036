"""Ranks of one host as threads of this process: each has its own sockets and its own map of the shared memory."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from engine.parallel.comm.host_barrier import Exchange, HostBarrier, host_identity, open_neighbours

Result = TypeVar("Result")
PATIENCE = 20.0


def run_threads(body: Callable[[int], Result], ranks: int) -> list[Result]:
    """``body(index)`` on every rank at once; all results, or the first error."""
    with ThreadPoolExecutor(ranks) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(body, index) for index in range(ranks)]]


def exchanges(ranks: int) -> list[Exchange]:
    """For every rank what tells the others its bytes."""
    barrier, table = threading.Barrier(ranks, timeout=PATIENCE), [b""] * ranks

    def make(index: int) -> Exchange:
        def exchange(data: bytes) -> Sequence[bytes]:
            table[index] = data
            barrier.wait()
            found = tuple(table)
            barrier.wait()
            return found

        return exchange

    return [make(index) for index in range(ranks)]


def meet_all(hosts: Sequence[bytes], shared_bytes: int, seconds: float = PATIENCE) -> list[HostBarrier | None]:
    """What each of the ranks on ``hosts`` is given."""
    ways, ranks = exchanges(len(hosts)), len(hosts)
    return run_threads(lambda i: open_neighbours(i, ranks, hosts[i], shared_bytes, seconds, ways[i]), ranks)


@contextmanager
def neighbours(ranks: int, shared_bytes: int = 4096, seconds: float = PATIENCE) -> Iterator[list[HostBarrier]]:
    """All ranks of one host, which leave at the end."""
    found = [one for one in meet_all([host_identity()] * ranks, shared_bytes, seconds) if one is not None]
    assert len(found) == ranks
    try:
        yield found
    finally:
        for one in found:
            one.close()
