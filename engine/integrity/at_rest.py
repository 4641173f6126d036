"""Digests of what a rank holds: taken after every update, compared before the next one reads it.

    update s -> take                         all state is at rest                          compare -> update s + 1
               digests of all weights, masters and moments                      the first difference is kept

Both send nothing and do not wait for the device; the host reads every ``integrity.every`` steps whether there was a
difference. One comparison every N steps would not do: a shard has no copy, and each update hides what was before it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.integrity.digest import digest_length, flipped_places, write_digest
from engine.integrity.finding import Finding
from engine.zero.phases.state_inventory import StateInventory, StateTensor


class Writes:
    """The writes of the program that torch counts; a bit that flips by itself is none.

    A tensor that has been replaced counts as written. Writes through ``parameter.data`` are not counted by torch.
    """

    def __init__(self, held: Sequence[StateTensor]) -> None:
        self._seen = [(each.tensor, _versions(each)) for each in held]

    def since(self, held: Sequence[StateTensor]) -> list[bool] | None:
        """For each tensor, whether the program has written it; None if there are others now."""
        if len(held) != len(self._seen):
            return None
        return [
            before is not each.tensor or versions != _versions(each)
            for each, (before, versions) in zip(held, self._seen, strict=True)
        ]


def _versions(held: StateTensor) -> tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(tensor._version for tensor in (held.tensor, *held.writers))


class AtRest:
    """The digests of one rank."""

    def __init__(self, inventory: StateInventory, device: torch.device) -> None:
        self._inventory, self._device = inventory, device
        self._lasting = [
            each
            for each in (*inventory.weights(), *inventory.masters())
            if each.tensor.numel() and not each.tensor.is_meta
        ]
        self.held: list[StateTensor] = []
        self._writes: Writes | None = None
        self._taken = self._now = self._fault = torch.zeros(0, dtype=torch.int64, device=device)
        self._update = torch.full((), -1, dtype=torch.int64, device=device)
        """The update after which the digests differ that ``_fault`` is about; -1: none so far."""
        self._found: list[Finding] = []
        self._taken_after = 0

    def take(self, update: int) -> None:
        """Take the digests of everything, ``update`` updates after the start."""
        held = self._all()
        sizes = [digest_length(each.tensor) for each in held]
        if sizes != [digest_length(each.tensor) for each in self.held]:
            self._keep_found()
            self._taken = torch.zeros(sum(sizes), dtype=torch.int64, device=self._device)
            self._now, self._fault = torch.zeros_like(self._taken), torch.zeros_like(self._taken)
        self.held, self._taken_after = held, update
        self._write(self._taken, [True] * len(held))
        self._writes = Writes(held)

    def _all(self) -> list[StateTensor]:
        return [*self._lasting, *self._inventory.moments()]

    def compare(self) -> None:
        """Compare with what is held now; what the program has written since is left out."""
        held = self._all()
        written = self._writes.since(held) if self._writes is not None else None
        if written is None:
            return
        self._now.copy_(self._taken)
        self._write(self._now, [not each for each in written])
        difference = self._now.sub_(self._taken)
        first = (difference != 0).any() & (self._update < 0)
        self._fault = torch.where(first, difference, self._fault)
        self._update = torch.where(first, self._taken_after, self._update)

    @property
    def noticed(self) -> Tensor:
        """Whether there was a difference, a 0-dim tensor on the device."""
        return (self._update >= 0) | bool(self._found)

    def findings(self, rank: int) -> list[Finding]:
        """What has changed since the last call; waits for the device."""
        self._keep_found()
        found, self._found = self._found, []
        return [finding.of(rank) for finding in found]

    def forget(self) -> None:
        """Drop all digests and differences."""
        self.held, self._writes, self._found = [], None, []
        self._update.fill_(-1)

    def digests(self) -> list[Tensor]:
        """The digests that were taken last, one for each of ``held``."""
        return self._parts(self._taken)

    def _write(self, target: Tensor, wanted: Sequence[bool]) -> None:
        for each, out, now in zip(self.held, self._parts(target), wanted, strict=True):
            if now:
                write_digest(each.tensor, out)

    def _parts(self, digests: Tensor) -> list[Tensor]:
        """The digest of each tensor."""
        return list(torch.split(digests, [digest_length(each.tensor) for each in self.held]))

    def _keep_found(self) -> None:
        """Put a difference into words while the tensors that it is about are still known."""
        update = int(self._update)
        if update < 0:
            return
        self._update = torch.full_like(self._update, -1)
        for each, difference in zip(self.held, self._parts(self._fault.cpu()), strict=True):
            for place in flipped_places(difference.tolist(), each.tensor):
                self._found.append(Finding.at_rest(each, place, update))
