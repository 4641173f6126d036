"""Optimizer moments on disk: read to host buffers for the update of their bucket, and written back.

    disk    | read 0 | read 1 | before 0 | read 2 | write 0 | before 1 ...      threads
    host             | update 0          | update 1         | update 2 ...

New moments are written to a second slot (``BucketFiles``), and the old weights to another file, so an update that fails
on any rank is undone on all ranks and repeated once. After a second failure all ranks raise the same error, with the
state of the step before. Loaded state is written to a slot before its update.

One bucket has two slots; one is valid while the other is written:

    slot a     moments of step 4      valid
    slot b     moments of step 5      being written; valid as soon as all ranks have made step 5

Between updates, the optimizer's state tensors are views of the memory-mapped valid slot.

Ranks compare success once per update, after the last bucket is written; more is exchanged only after a failure.
"""

import logging
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.parallel.comm.agreement import first_rank, take_from
from engine.parallel.comm.comm import Comm
from engine.zero.offload.block_file import DEPTH, BlockFile, BlocksUnderWay, MomentBuffers, whole_sectors
from engine.zero.offload.scratch_folder import ScratchFolder

LABEL = "disk"


class DiskAgreement:
    """Agreement of all ranks on disk failures. Every call is collective over the world, label "disk"."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device

    def first(self, own: bool) -> int | None:
        """Returns the lowest rank with a failure; None if there is none. ``own``: True if this rank has one. One
        all-reduce of 8 bytes.
        """
        if self._comm.grid.world_size == 1:
            return 0 if own else None
        return first_rank(own, self._comm, self._device, LABEL)

    def sentence(self, rank: int, own: str) -> str:
        """Returns the error message ``own`` of the rank ``rank`` on all ranks, and ignores the other ranks' ``own``.
        Two all-reduces: of the message's length, then of its bytes.
        """
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


MomentState = MutableMapping[Tensor, Any]
"""Moments by name of each optimizer tensor, as ``torch.optim.Optimizer.state``."""
FoundMoment = tuple[Tensor, str, Tensor]
"""Triple (optimizer tensor, name of the moment, moment)."""


class MomentPlace(NamedTuple):
    """Place of one moment of the optimizer tensor ``weights`` in the file of a bucket: the moment's name and dtype, and
    byte position ``start``.
    """

    weights: Tensor
    name: str
    dtype: torch.dtype
    start: int

    def of(self, memory: Tensor) -> Tensor:
        """Returns the moment as a view of ``memory``, uint8 [bytes], which has a copy of the file. The view has the
        shape of ``weights``.
        """
        size = self.weights.numel() * self.dtype.itemsize
        return memory[self.start : self.start + size].view(self.dtype).view(self.weights.shape)


class BucketFiles:
    """Two files, called slots, for one bucket's moments. The valid slot has the moments of the last committed update;
    the next update writes the other slot.

    Args:
        found: the moments that must fit into each slot.

    Raises:
        EngineError: the disk is full or fails.
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
        """Returns True if the slots (files) are laid out for the moments ``found``: the same optimizer tensors, names
        and dtypes in the same order.
        """
        kinds = [(id(weights), name, moment.dtype) for weights, name, moment in found]
        return [(id(place.weights), place.name, place.dtype) for place in self.places] == kinds

    def shown(self, state: MomentState) -> bool:
        """Returns True if the moments in the optimizer's ``state`` are memory-mapped views of the last committed file.
        False if code has replaced any of them.
        """
        return self.valid is not None and all(
            state.get(place.weights, {}).get(place.name) is view
            for place, view in zip(self.places, self._views[self.valid], strict=True)
        )

    def start_read(self, page: Tensor, threads: Executor) -> BlocksUnderWay:
        """Starts to read the last committed moments into the host buffer ``page``, and returns a handle. Checks block
        hashes, unless code has written to memory-mapped views of the file.
        """
        assert self.valid is not None
        checked = self._version == self._mapped[self.valid]._version
        return self.slots[self.valid].start_read(page.numpy().data[: self.size], threads, checked)

    def lend(self, page: Tensor, state: MomentState) -> None:
        """Replaces the moments in the optimizer's ``state`` by views of ``page``, a host buffer with a copy of a slot
        (file).
        """
        for place in self.places:
            state[place.weights][place.name] = place.of(page)

    def start_write(self, page: Tensor, state: MomentState, threads: Executor) -> BlocksUnderWay:
        """Copies the moments in ``state`` to the host buffer ``page``, and starts to write it to the slot (file) that
        is not valid. Returns a handle. Replaces the moments in ``state`` by memory-mapped views of this file, even
        before the write has ended.
        """
        now = [state[place.weights][place.name] for place in self.places]
        there = [place.of(page) for place in self.places]
        if any(moment.data_ptr() != place.data_ptr() for moment, place in zip(now, there, strict=True)):
            for place, moment in zip(there, [moment.clone() for moment in now], strict=True):
                place.copy_(moment)
        self._fresh = 0 if self.valid != 0 else 1
        self._show(state, self._fresh)
        return self.slots[self._fresh].start_write(page.numpy().data[: self.size], threads)

    def commit(self) -> None:
        """Makes the slot (file) of the last ``start_write`` the valid one. Call it after the write has ended."""
        self.valid, self._version = self._fresh, self._mapped[self._fresh]._version

    def show(self, state: MomentState) -> None:
        """Replaces the moments in the optimizer's ``state`` by memory-mapped views of the file with the last committed
        moments. Does nothing before the first commit.
        """
        if self.valid is not None:
            self._show(state, self.valid)

    def close(self) -> None:
        """Deletes both files."""
        for slot in self.slots:
            slot.close()

    def _show(self, state: MomentState, slot: int) -> None:
        for place, view in zip(self.places, self._views[slot], strict=True):
            state[place.weights][place.name] = view


logger = logging.getLogger("trine")


class DiskMoments:
    """Store of optimizer moments on disk. An update loads the moments of one bucket after the other into host memory,
    and writes the updated ones back.

    A set is the list of one bucket's optimizer tensors. Sets are visited in the order of an :class:`UpdateOrder`.

    Args:
        sets: the optimizer tensors of each bucket; empty for a bucket that is not on disk.
        state: the optimizer's moments by tensor and name.
        buffers: host memory for moments that are read, updated or written.
        agreement: collectives by which all ranks agree on disk failures.
    """

    def __init__(
        self,
        folder: ScratchFolder,
        sets: Sequence[Sequence[Tensor]],
        state: MomentState,
        buffers: MomentBuffers,
        agreement: DiskAgreement,
    ) -> None:
        self._folder, self._sets, self._state, self._buffers = folder, sets, state, buffers
        self._agreement = agreement
        self._last = max((number for number, tensors in enumerate(sets) if tensors), default=-1)
        self._files: dict[int, BucketFiles] = {}
        self._replaced: dict[int, BucketFiles] = {}
        """Files with state that no longer fits, until all ranks agree on the update that has replaced them."""
        self._before: dict[int, BlockFile] = {}
        """The weights from before the last update of each bucket."""
        self._made = 0
        self._told = False
        self._reads: dict[int, tuple[Tensor, BlocksUnderWay]] = {}
        self._pages: dict[int, Tensor] = {}
        self._kept: dict[int, tuple[Tensor, BlocksUnderWay]] = {}
        """The weights from before this update in the page of each bucket, and their write."""
        self._touched: list[int] = []
        """Buckets that this update has changed."""
        self._under_way: list[BlocksUnderWay] = []
        self._failure: EngineError | None = None
        self._agreed: tuple[int | None] | None = None
        """The first rank that has failed in this update, once the ranks have asked each other."""
        self._lost: EngineError | None = None
        self._unreadable = False
        self._threads = ThreadPoolExecutor(max_workers=DEPTH, thread_name_prefix="trine-moments")

    # ------------------------------------------------------------------ an update of all ranks

    def update(self, attempt: Callable[[], None], put_back: Callable[[], None]) -> None:
        """Runs an update on all ranks. If a disk of any rank fails, the update is undone on all ranks and repeated
        once. Collective over the world.

        Args:
            attempt: callback that updates the optimizer tensors of every bucket. For each bucket it calls
                :meth:`allows`, :meth:`begin`, and after the update :meth:`end`.
            put_back: callback that calls this object's :meth:`put_back`, copies restored weights to the device, and
                restores step counts.

        Raises:
            EngineError: a disk has failed in both attempts, or state was lost; all ranks raise the same error.
        """
        self.refuse_failed()
        for last in (False, True):
            self._failure, self._agreed, self._unreadable = None, None, False
            attempt()
            failed = self.agree()
            if failed is None:
                self._commit()
                return
            put_back()
            lost = self._agreement.first(self._lost is not None or (last and self._unreadable))
            if last or lost is not None:
                self._refuse(failed, lost)

    def allows(self, number: int) -> bool:
        """Returns True if the set ``number`` (a bucket's optimizer tensors) may be updated: no disk failure is known.
        For a set after this rank's last set on disk, first calls the collective :meth:`agree`.
        """
        return self._failure is None if number <= self._last else self.agree() is None

    def begin(self, number: int) -> bool:
        """Loads the moments of the set ``number`` (a bucket's optimizer tensors) into host memory for its update, and
        starts to read the next set. Returns False if the set must not be updated: a disk has failed, or the moments
        differ from the last write.
        """
        if not self._sets[number] or not self._buffers.size:
            return True
        try:
            self._pages[number] = page = self._take_moments(number)
            self._touched.append(number)
            self._keep_weights(number, page)
            self._read_ahead(number)
        except EngineError as error:
            self._failure = self._failure or error
        return self._failure is None

    def end(self, number: int) -> None:
        """Starts to write the updated moments of the set ``number`` (a bucket's optimizer tensors) to disk. Does
        nothing after a disk failure.
        """
        if number not in self._pages or self._failure is not None:
            return
        page, found, uses = self._pages.pop(number), self._found(number), self._kept[number][1]
        try:
            if found:
                if number not in self._files or not self._files[number].fits(found):
                    if number in self._files:
                        self._replaced[number] = self._files[number]
                    self._files[number] = self._make(number, found)
                self._under_way.append(self._files[number].start_write(page, self._state, self._threads))
                uses = uses.joined(self._under_way[-1])
            self._buffers.give_back(page, uses)
        except EngineError as error:
            self._failure = error

    def agree(self) -> int | None:
        """Waits for all reads and writes of this update. Returns the lowest rank with a failed disk, or None. The first
        call in an update is a collective over the world.
        """
        if self._agreed is None:
            reads = [read for _, read in self._reads.values()]
            for blocks in (*self._under_way, *reads):
                try:
                    blocks.result()
                except EngineError as error:
                    self._failure = self._failure or error
            self._reads.clear()
            self._agreed = (self._agreement.first(self._failure is not None),)
        return self._agreed[0]

    def put_back(self) -> None:
        """Undoes the update on this rank: restores moments and weights in host memory. Communicates nothing."""
        for number in self._touched:
            replaced, files = self._replaced.pop(number, None), self._files.get(number)
            if files is not None and (replaced is not None or files.valid is None):
                self._files.pop(number).close()
            if replaced is not None:
                self._files[number] = replaced
            if number in self._files:
                self._files[number].show(self._state)
        self._restore_weights()
        self._end_update()

    def refuse_failed(self) -> None:
        """Raises if a disk failure in an earlier update, on any rank, has lost optimizer state, so that the run can
        neither continue nor save. Communicates nothing.

        Raises:
            EngineError: optimizer state was lost.
        """
        if self._lost is not None:
            raise EngineError(
                f"an update has failed midway, so load the last checkpoint into a new engine: {self._lost}"
            )

    def close(self) -> None:
        """Ends the threads, and deletes the files and their folder."""
        self._threads.shutdown(wait=True)
        for files in self._files.values():
            files.close()
        for file in self._before.values():
            file.close()
        self._files.clear()
        self._before.clear()
        self._folder.close()

    # ------------------------------------------------------------------ parts of it

    def _commit(self) -> None:
        for number in self._touched:
            if number in self._files:
                self._files[number].commit()
        for files in self._replaced.values():
            files.close()
        self._replaced.clear()
        self._buffers.free_all()
        self._end_update()

    def _end_update(self) -> None:
        self._touched.clear()
        self._pages.clear()
        self._kept.clear()
        self._under_way.clear()

    def _refuse(self, failed: int, lost: int | None) -> None:
        rank = failed if lost is None else lost
        says = self._agreement.sentence(rank, str(self._lost or self._failure))
        if lost is None:
            raise EngineError(
                f"rank {rank} could not read or write its optimizer files on disk in two attempts, so all ranks have "
                f"undone this step; save a checkpoint on another disk, or repeat the step once this disk works: {says}"
            )
        self._lost = EngineError(says)
        raise EngineError(
            f"rank {rank} has lost optimizer state, so no rank makes this step; load the last checkpoint into a new "
            f"engine: {says}"
        )

    def _found(self, number: int) -> list[FoundMoment]:
        return [(weights, *each) for weights in self._sets[number] for each in self._state.get(weights, {}).items()]

    def _on_disk(self, number: int) -> bool:
        return number in self._files and self._files[number].shown(self._state)

    def _take_moments(self, number: int) -> Tensor:
        """Returns the page of a set, with its moments if it has any."""
        if self._on_disk(number):
            self._start_read(number)
            page, read = self._reads.pop(number)
            try:
                read.result()
            except EngineError:
                self._unreadable = True
                raise
            self._files[number].lend(page, self._state)
            return page
        page, found = self._buffers.take(), self._found(number)
        if found:
            self._write_loaded(number, page, found)
        return page

    def _write_loaded(self, number: int, page: Tensor, found: Sequence[FoundMoment]) -> None:
        """Writes loaded moments, which are no view of a slot, to disk; if that fails they remain in memory."""
        if (before := self._files.pop(number, None)) is not None:
            before.close()
        files = self._make(number, found)
        try:
            files.start_write(page, self._state, self._threads).result()
        except EngineError:
            for weights, name, moment in found:
                self._state[weights][name] = moment
            files.close()
            raise
        files.commit()
        files.lend(page, self._state)
        self._files[number] = files

    def _start_read(self, number: int) -> None:
        if number not in self._reads:
            page = self._buffers.take()
            self._reads[number] = page, self._files[number].start_read(page, self._threads)

    def _read_ahead(self, number: int) -> None:
        following = next((n for n in range(number + 1, len(self._sets)) if self._on_disk(n)), None)
        if following is not None and self._buffers.spare:
            self._start_read(following)

    def _keep_weights(self, number: int, page: Tensor) -> None:
        """Starts to write the weights from before the update, which are at the end of the page meanwhile."""
        tensors = self._sets[number]
        size = whole_sectors(sum(weights.nbytes for weights in tensors))
        if number not in self._before:
            self._before[number] = BlockFile(self._folder.path / f"before-{number}", size)
        start = len(page) - size
        for weights, place in _places(tensors, page[start:]):
            place.copy_(weights)
        self._under_way.append(self._before[number].start_write(page.numpy().data[start:], self._threads))
        self._kept[number] = page, self._under_way[-1]

    def _restore_weights(self) -> None:
        """Restores the weights of the sets that the update has begun."""
        written = []
        for number, (page, write) in self._kept.items():
            try:
                write.result()
                written.append(number)
            except EngineError:  # a page whose write has failed is not used again, so it has them still
                self._copy_back(number, page)
        self._buffers.free_all()
        for number in written:
            page = self._buffers.take()
            self._buffers.free_all()
            try:
                into = page.numpy().data[len(page) - self._before[number].size :]
                self._before[number].start_read(into, self._threads).result()
                self._copy_back(number, page)
            except EngineError as error:
                self._lost = error
        self._buffers.free_all()

    def _copy_back(self, number: int, page: Tensor) -> None:
        for weights, place in _places(self._sets[number], page[len(page) - self._before[number].size :]):
            weights.detach().copy_(place)

    def _make(self, number: int, found: Sequence[FoundMoment]) -> BucketFiles:
        self._made += 1  # another name each time: what maps the file before may still be read
        files = BucketFiles(self._folder.path, f"{number}-{self._made}", found)
        if not files.slots[0].direct and not self._told:
            self._told = True
            logger.warning(
                "the file system of %s refuses direct transfers, so moments go through its page cache, which takes "
                "memory; give a folder on a local disk in zero_optimization.offload_optimizer.nvme_path.",
                self._folder.path,
            )
        return files


def _places(tensors: Sequence[Tensor], memory: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns each tensor with its place in ``memory``, uint8 [bytes]."""
    places, start = [], 0
    for weights in tensors:
        places.append((weights, memory[start : start + weights.nbytes].view(weights.dtype).view(weights.shape)))
        start += weights.nbytes
    return places
