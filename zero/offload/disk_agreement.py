"""Whether all ranks have updated from their disks: an update of which one rank has lost a part is none on any rank.

The ranks ask each other once an update, when their last bucket on disk is written. Only where one has failed do they
say more.
"""

import torch

from engine.parallel.comm.agreement import first_rank, take_from
from engine.parallel.comm.comm import Comm

LABEL = "disk"


class DiskAgreement:
    """What the ranks of the world say of their disks; every call is collective over the world, label "disk"."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device

    def first(self, own: bool) -> int | None:
        """The first rank whose ``own`` is true; None if there is none. One all-reduce of 8 bytes, none on one rank."""
        if self._comm.grid.world_size == 1:
            return 0 if own else None
        return first_rank(own, self._comm, self._device, LABEL)

    def sentence(self, rank: int, own: str) -> str:
        """What ``rank`` has to say, on every rank: two all-reduces, of its length and of its bytes."""
        if self._comm.grid.world_size == 1:
            return own
        says = self._comm.grid.rank == rank
        text = own.encode(errors="backslashreplace") if says else b""
        length = torch.tensor([len(text)], dtype=torch.int64, device=self._device)
        self._comm.all_reduce(length, "world", LABEL).wait()
        data = torch.zeros(int(length), dtype=torch.uint8, device=self._device)
        if says:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        take_from(data, says, self._comm, "world", LABEL)
        return data.cpu().numpy().tobytes().decode(errors="replace")
