"""Which ranks share the memory of a host, and which rank keeps the copy of another one."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.checkpoint.format.strict_json import dump, parse
from engine.errors import CheckpointError
from engine.parallel.comm.host_barrier import host_identity
from engine.parallel.comm.host_group import HostGroup, announce, collect

SHARED = Path("/dev/shm")
"""The folder of a host that lies in its memory and outlives its processes."""


@dataclass(frozen=True)
class HostMap:
    """The ranks of each host, in order."""

    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}

    def is_first(self, rank: int) -> bool:
        """Whether this rank acts for its host."""
        return self.hosts[self._host_of[rank]][0] == rank

    def keeper(self, rank: int) -> int | None:
        """The rank on the next host that keeps the copy of ``rank``; None if there is one host."""
        host = self._host_of[rank]
        following = self.hosts[(host + 1) % len(self.hosts)]
        return following[self.hosts[host].index(rank) % len(following)] if len(self.hosts) > 1 else None

    def kept(self, rank: int) -> list[int]:
        """The ranks whose copies ``rank`` keeps, ascending."""
        return [other for other in sorted(self._host_of) if self.keeper(other) == rank]


def find_hosts(host: HostGroup, identity: str) -> HostMap:
    """Learn who shares a memory, from the ``memory_identity`` of every rank. Collective, some bytes a rank.

    Raises:
        EngineError: a rank cannot be reached.
    """
    told = collect(host, identity.encode())
    groups: dict[bytes, list[int]] = {}
    for rank, other in enumerate(told or []):
        groups.setdefault(other, []).append(rank)
    answer = parse(announce(host, dump({"hosts": list(groups.values())})), "rank 0's message")
    return HostMap(tuple(tuple(ranks) for ranks in answer["hosts"]))


def memory_identity(shared: Path) -> str:
    """Equal for two processes that have the same folder in memory; containers of one machine have their own.

    Raises:
        CheckpointError: there is no such folder.
    """
    try:
        return f"{host_identity().hex()} {os.stat(shared).st_dev} {shared}"
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.memory_every keeps copies in {shared}, which is not there ({error.strerror}); mount a tmpfs "
            "there, or leave it out."
        ) from error
