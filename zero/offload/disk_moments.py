"""Moments on disk: read into buffers of the host for the update of their bucket, and written back behind it.

    disk    | read 0 | read 1 | read 2 | write 0 | read 3 | write 1 ...      threads
    host             | update 0        | update 1         | update 2 ...

Each bucket has a file. Between updates the optimizer's state is a view of the mapped file, so whoever reads it, such as
a checkpoint, gets the values without a copy in memory that would last. State that is no such view, because it is new or
was loaded, is taken as it is, and is on disk after the next update.
"""

from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.zero.offload.block_file import BlockFile
from engine.zero.offload.scratch_folder import ScratchFolder

MomentState = MutableMapping[Tensor, Any]
"""Optimizer tensor -> its moments by name, as ``torch.optim.Optimizer.state``."""


class _Moment(NamedTuple):
    """Place of one moment in the file of its bucket."""

    weights: Tensor
    name: str
    dtype: torch.dtype
    start: int

    def of(self, memory: Tensor) -> Tensor:
        """The moment in a copy of the file, uint8 [bytes]."""
        size = self.weights.numel() * self.dtype.itemsize
        return memory[self.start : self.start + size].view(self.dtype).view(self.weights.shape)


@dataclass(slots=True)
class _Filed:
    """A bucket whose moments are on disk."""

    file: BlockFile
    mapped: Tensor
    """The mapped file, uint8 [bytes]."""
    moments: list[_Moment]
    views: list[Tensor]
    """Views of ``mapped``, which are the optimizer's state between updates."""
    version: int = 0
    """Version of ``mapped`` at the last write: another one means that the program has written into a view."""
    writing: "Future[None] | None" = None
    page: Tensor | None = None
    """The buffer that has the moments during an update."""


class MomentBuffers:
    """Host memory for ``count`` whole files of at most ``size`` bytes; one that is being written is free afterwards."""

    def __init__(self, count: int, size: int) -> None:
        self._free = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
        self._busy: deque[tuple[Tensor, Future[None]]] = deque()

    @property
    def spare(self) -> bool:
        """A buffer is free, or will be when a write ends."""
        return bool(self._free or self._busy)

    def take(self) -> Tensor:
        """A buffer, uint8 [size]; waits for the oldest write if none is free."""
        if not self._free:
            page, write = self._busy.popleft()
            write.result()
            return page
        return self._free.pop()

    def give_back(self, page: Tensor, write: "Future[None]") -> None:
        """Free a buffer when ``write`` has ended."""
        self._busy.append((page, write))


class DiskMoments:
    """The moments of the sets of an optimizer (``UpdateOrder``) that are kept on disk.

    Args:
        sets: the optimizer tensors of each bucket; empty for a bucket that is not on disk.
        state: the optimizer's.
        buffers: memory for the buckets that are read, updated or written.
    """

    def __init__(
        self, folder: ScratchFolder, sets: Sequence[Sequence[Tensor]], state: MomentState, buffers: MomentBuffers
    ) -> None:
        self._folder, self._sets, self._state, self._buffers = folder, sets, state, buffers
        self._filed: dict[int, _Filed] = {}
        self._files = 0
        self._reads: dict[int, Future[None]] = {}
        self._failure: EngineError | None = None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="trine-moments")

    def begin(self, number: int) -> None:
        """Give the optimizer the moments of a set in memory, and start to read those of the next one.

        Raises:
            EngineError: the disk refuses, or does not have what was written last.
        """
        self.refuse_failed()
        if self._on_disk(number):
            filed = self._filed[number]
            self._start_read(number)
            with self._noting_failure():
                self._reads.pop(number).result()
            assert filed.page is not None
            for moment in filed.moments:
                self._state[moment.weights][moment.name] = moment.of(filed.page)
        following = next((n for n in range(number + 1, len(self._sets)) if self._on_disk(n)), None)
        if following is not None and self._buffers.spare:
            self._start_read(following)

    def end(self, number: int) -> None:
        """Take the moments of a set, which are updated, and start to write them."""
        found = [(weights, *each) for weights in self._sets[number] for each in self._state.get(weights, {}).items()]
        if not found:
            return
        filed = self._filed.get(number)
        kinds = [(id(weights), name, moment.dtype) for weights, name, moment in found]
        if filed is None or [(id(moment.weights), moment.name, moment.dtype) for moment in filed.moments] != kinds:
            with self._noting_failure():
                filed = self._filed[number] = self._made(number, found)
        page = self._buffers.take() if filed.page is None else filed.page
        for moment, view in zip(filed.moments, filed.views, strict=True):
            now, place = self._state[moment.weights][moment.name], moment.of(page)
            if now.data_ptr() != place.data_ptr():
                place.copy_(now)
            self._state[moment.weights][moment.name] = view
        filed.page, filed.writing = None, self._threads.submit(filed.file.write, page.numpy().data)
        self._buffers.give_back(page, filed.writing)

    def finish(self) -> None:
        """Wait until everything is written.

        Raises:
            EngineError: the disk is full or refuses.
        """
        for filed in self._filed.values():
            if filed.writing is not None:
                with self._noting_failure():
                    filed.writing.result()
                filed.writing, filed.version = None, filed.mapped._version

    def refuse_failed(self) -> None:
        """Raise what an update has failed with: some buckets are updated and others are not, so nothing is to be saved.

        Raises:
            EngineError: the disk has failed before.
        """
        if self._failure is not None:
            raise EngineError(f"an update was broken off halfway: {self._failure}")

    def close(self) -> None:
        """End the threads and delete the files."""
        self._threads.shutdown(wait=True)
        for filed in self._filed.values():
            filed.file.close()
        self._filed.clear()
        self._folder.close()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            self._failure = error
            raise

    def _on_disk(self, number: int) -> bool:
        """Whether the optimizer's state of a set is what its file has."""
        filed = self._filed.get(number)
        return filed is not None and all(
            self._state.get(moment.weights, {}).get(moment.name) is view
            for moment, view in zip(filed.moments, filed.views, strict=True)
        )

    def _start_read(self, number: int) -> None:
        if number in self._reads:
            return
        filed = self._filed[number]
        if filed.writing is not None:
            filed.writing.result()
        filed.page = self._buffers.take()
        checked = filed.version == filed.mapped._version
        self._reads[number] = self._threads.submit(filed.file.read, filed.page.numpy().data, checked)

    def _made(self, number: int, found: Sequence[tuple[Tensor, str, Tensor]]) -> _Filed:
        moments, end = [], 0
        for weights, name, moment in found:  # of whole multiples of the layout's alignment, so each begins aligned
            moments.append(_Moment(weights, name, moment.dtype, end))
            end += moment.nbytes
        if (before := self._filed.get(number)) is not None:
            before.file.close()
        self._files += 1  # another name each time: what maps the file before may still be read
        file = BlockFile(self._folder.path / f"bucket-{number}-{self._files}", end)
        mapped = torch.from_file(str(file.path), shared=True, size=end, dtype=torch.uint8)
        return _Filed(file, mapped, moments, [moment.of(mapped) for moment in moments])
