"""The files of one bucket: two slots of moments, of which one is valid while the other one is written.

    slot a     moments of step 4      valid
    slot b     moments of step 5      being written; valid as soon as all ranks have made step 5

A step that fails on any rank leaves all ranks with the slots of the step before. Between updates the optimizer's state
is a view of the valid slot, which is mapped, so that whoever reads it gets the values without a copy that would last.
"""

from collections.abc import MutableMapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.zero.offload.block_file import BlockFile, BlocksUnderWay
from engine.zero.offload.direct_io import whole_sectors

MomentState = MutableMapping[Tensor, Any]
"""Optimizer tensor -> its moments by name, as ``torch.optim.Optimizer.state``."""
FoundMoment = tuple[Tensor, str, Tensor]
"""Optimizer tensor, name, moment."""


class MomentPlace(NamedTuple):
    """Place of one moment in a slot."""

    weights: Tensor
    name: str
    dtype: torch.dtype
    start: int

    def of(self, memory: Tensor) -> Tensor:
        """The moment in a copy of the slot, uint8 [bytes]."""
        size = self.weights.numel() * self.dtype.itemsize
        return memory[self.start : self.start + size].view(self.dtype).view(self.weights.shape)


class BucketFiles:
    """Both slots, with room for the moments that were ``found``.

    Raises:
        EngineError: the disk is full or refuses.
    """

    def __init__(self, folder: Path, name: str, found: Sequence[FoundMoment]) -> None:
        end = 0
        self.places: list[MomentPlace] = []
        for weights, kind, moment in found:  # of whole multiples of the layout's alignment, so each begins aligned
            self.places.append(MomentPlace(weights, kind, moment.dtype, end))
            end += moment.nbytes
        self.size = whole_sectors(end)
        """Bytes of a slot."""
        self.slots: list[BlockFile] = []
        try:
            for letter in "ab":
                self.slots.append(BlockFile(folder / f"bucket-{name}-{letter}", self.size))
        except EngineError:
            self.close()
            raise
        self._mapped = [
            torch.from_file(str(slot.path), shared=True, size=self.size, dtype=torch.uint8) for slot in self.slots
        ]
        self._views = [[place.of(mapped) for place in self.places] for mapped in self._mapped]
        self.valid: int | None = None
        """The slot that has the moments of the last step; None: neither."""
        self._fresh = 0
        self._version = 0

    def fits(self, found: Sequence[FoundMoment]) -> bool:
        """Whether a slot has a place for each of these moments, and no others."""
        kinds = [(id(weights), name, moment.dtype) for weights, name, moment in found]
        return [(id(place.weights), place.name, place.dtype) for place in self.places] == kinds

    def shown(self, state: MomentState) -> bool:
        """Whether ``state`` is what the valid slot has."""
        return self.valid is not None and all(
            state.get(place.weights, {}).get(place.name) is view
            for place, view in zip(self.places, self._views[self.valid], strict=True)
        )

    def start_read(self, page: Tensor, threads: Executor) -> BlocksUnderWay:
        """Start to read the valid slot; its blocks are checked, unless the program has written into a view."""
        assert self.valid is not None
        checked = self._version == self._mapped[self.valid]._version
        return self.slots[self.valid].start_read(page.numpy().data[: self.size], threads, checked)

    def lend(self, page: Tensor, state: MomentState) -> None:
        """Give the optimizer the moments in ``page``."""
        for place in self.places:
            state[place.weights][place.name] = place.of(page)

    def start_write(self, page: Tensor, state: MomentState, threads: Executor) -> BlocksUnderWay:
        """Bring the moments of ``state`` into ``page``, and start to write them into the slot that is not valid."""
        now = [state[place.weights][place.name] for place in self.places]
        there = [place.of(page) for place in self.places]
        if any(moment.data_ptr() != place.data_ptr() for moment, place in zip(now, there, strict=True)):
            for place, moment in zip(there, [moment.clone() for moment in now], strict=True):
                place.copy_(moment)
        self._fresh = 0 if self.valid != 0 else 1
        self._show(state, self._fresh)
        return self.slots[self._fresh].start_write(page.numpy().data[: self.size], threads)

    def commit(self) -> None:
        """The slot that was written is the valid one from now on."""
        self.valid, self._version = self._fresh, self._mapped[self._fresh]._version

    def show(self, state: MomentState) -> None:
        """Give the optimizer views of the valid slot."""
        if self.valid is not None:
            self._show(state, self.valid)

    def close(self) -> None:
        """Delete the files."""
        for slot in self.slots:
            slot.close()

    def _show(self, state: MomentState, slot: int) -> None:
        for place, view in zip(self.places, self._views[slot], strict=True):
            state[place.weights][place.name] = view
