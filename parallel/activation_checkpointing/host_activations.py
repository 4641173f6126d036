"""Activation offloading: tensors that a block saves for backward are copied to host memory and back in time.

    forward    block 0 | block 1        | block 2        |
                       | out: block 0   | out: block 1   | out: block 2        copies on a stream of their own
    backward   block 2           | block 1           | block 0
               in: block 1       | in: block 0       |

The first tensor that the backward of a block reads waits for the copies of that block and begins to copy the block that
ran before it, so that one block computes while another one comes. The device holds two blocks at most.

The copies are of runs of memory that autograd saves: once each, however many views of it are saved. Parameters and
buffers stay, and so do tensors of less than a page. A tensor that is written after it was saved comes back as it was
saved. Where the device is the CPU, the host's memory is a second copy, made by the same code.
"""

import weakref
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from engine.kernels.device import SideStream, hand_over, host_memory_like, record_event

_LEAST_BYTES = 4096
_MOST_GAPS = 2
"""A strided tensor is copied with its gaps if these make the run at most so many times as large."""
_PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Types whose memory is all that they are; the last one has shapes alone, where a plan is rehearsed."""
_Key = tuple[int, int, int, int, torch.dtype, bool, bool]
"""Storage, version of its content, first element, elements, and how they are read: dtype, conjugated, negated."""


class _Kept:
    """A run of memory that autograd has saved."""

    def __init__(self, run: Tensor, host: Tensor) -> None:
        self.source = StorageWeakRef(run.untyped_storage())  # type: ignore[no-untyped-call]
        self.host = host
        self.device = run.device
        self.back: Tensor | None = None
        """The run on the device again, while its block may still read it."""


class _BlockRun:
    """One call of a block."""

    def __init__(self, earlier: "_BlockRun | None") -> None:
        self.earlier = earlier if earlier is None else weakref.ref(earlier)
        self.kept: list[weakref.ref[_Kept]] = []
        """Runs of this call; runs of a freed graph are freed."""
        self.event: torch.Event | None = None
        self.here = False

    def runs(self) -> Iterator[_Kept]:
        """The runs that some graph still needs."""
        for reference in self.kept:
            kept = reference()
            if kept is not None:
                yield kept


class HostActivations:
    """Store in host memory for activations that blocks save for backward.

    ``bytes_out``: bytes copied to the host so far. ``observer``: called with each newly allocated host
    tensor, unless None.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes_out = 0
        self.observer: Callable[[Tensor], None] | None = None
        self._device, self._stream = device, SideStream(device)
        self._by_memory: weakref.WeakValueDictionary[_Key, _Kept] = weakref.WeakValueDictionary()
        self._called: set[int] = set()
        """Blocks of one microbatch: they have run since one of them ran for the second time."""
        self._last: _BlockRun | None = None
        self._now: weakref.ref[_BlockRun] | None = None
        """The call in backward."""

    def keeping(self, block: nn.Module) -> Any:
        """Returns a forward of ``block`` that stores the tensors saved for backward in host memory. Parameters, buffers
        and tensors below 4 KiB stay on the device.
        """
        inner = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            run = self._begin(block)
            with saved_tensors_hooks(lambda tensor: self._pack(tensor, run, block), self._unpack):
                return inner(*args, **kwargs)

        return forward

    def _begin(self, block: nn.Module) -> _BlockRun:
        if id(block) in self._called:
            self._called.clear()
            self._last = None
        self._called.add(id(block))
        self._last = _BlockRun(self._last)
        return self._last

    def _pack(self, tensor: Tensor, run: _BlockRun, block: nn.Module) -> Any:
        """Returns the graph's substitute for a tensor: the tensor itself, or its host copy, shape and strides."""
        extent = _extent(tensor)
        if tensor.device != self._device or not extent or _belongs_to(block, tensor):
            return tensor
        form = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        key = (_memory(tensor), tensor._version, int(tensor.storage_offset()), extent, *form)
        kept = self._by_memory.get(key)
        if kept is None or kept.source.expired():  # type: ignore[no-untyped-call]
            kept = self._by_memory[key] = self._send(tensor.detach().as_strided((extent,), (1,)))
        run.kept.append(weakref.ref(kept))
        return kept, run, tensor.shape, tensor.stride()

    def _send(self, memory: Tensor) -> _Kept:
        """Begin the copy of a run to the host."""
        host = host_memory_like(memory)
        if self.observer is not None:
            self.observer(host)
        with self._stream.behind():
            host.copy_(memory, non_blocking=True)
        self._stream.uses(memory)
        self.bytes_out += host.nbytes
        return _Kept(memory, host)

    def _unpack(self, held: Any) -> Tensor:
        if isinstance(held, Tensor):
            return held
        kept, run, shape, stride = held
        self._reach(run)
        if kept.back is None:  # saved after this call had come back: a backward inside a forward
            self._bring(run)
            hand_over(self._device, run.event, [kept.back])
        assert kept.back is not None
        back: Tensor = kept.back.as_strided(shape, stride)
        return back

    def _reach(self, run: _BlockRun) -> None:
        """The backward of a call has begun, or goes on."""
        now = None if self._now is None else self._now()
        if now is run:
            return
        earlier = None if run.earlier is None else run.earlier()
        if now is not None:
            _drop(now, frozenset(run.runs()) | frozenset(() if earlier is None else earlier.runs()))
        self._now = weakref.ref(run)
        if not run.here:
            self._bring(run)
        hand_over(self._device, run.event, [kept.back for kept in run.runs()])
        if earlier is not None and not earlier.here:
            self._bring(earlier)

    def _bring(self, run: _BlockRun) -> None:
        """Begin the copies of a call's memory to the device."""
        with self._stream.after(()):
            for kept in run.runs():
                if kept.back is None:
                    kept.back = torch.empty_like(kept.host, device=kept.device)
                    kept.back.copy_(kept.host, non_blocking=True)
            run.event = record_event(self._device)
        run.here = True


def _drop(run: _BlockRun, needed: Set[_Kept]) -> None:
    """Frees the tensors that a call has brought back, except ``needed`` ones; autograd holds what it still reads."""
    for kept in run.runs():
        if kept not in needed:
            kept.back = None
    run.here, run.event = False, None


def _extent(tensor: Tensor) -> int:
    """Elements of the run of memory that contains a tensor; 0 if it is not worth a copy, or has no plain memory."""
    if tensor.layout != torch.strided or type(tensor) not in _PLAIN or tensor.is_meta:
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    large = extent * tensor.element_size() >= _LEAST_BYTES
    return extent if large and extent <= _MOST_GAPS * tensor.numel() else 0


def _belongs_to(block: nn.Module, tensor: Tensor) -> bool:
    """Returns True if the tensor is part of a parameter or buffer. No cache: ZeRO 3 gathers them meanwhile."""
    memory = _memory(tensor)
    return any(_memory(own) == memory for own in (*block.parameters(), *block.buffers()))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
