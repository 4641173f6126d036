"""Calls of a model's modules outside a training pass: a forward by the user, or another method.

Each module of a gather group gathers its buckets and frees them when it returns; nothing is gathered ahead, because the
next call is unknown. Every data rank makes the same calls. A backward through them is a pass as any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.parallel.comm.comm import Comm
from engine.zero.gather.unsharded_buckets import UnshardedBuckets


class OutsideCalls:
    """Parameter gathers (ZeRO 3) for module calls outside the engine's forwards and backwards. Calls may be nested."""

    def __init__(self, whole: UnshardedBuckets, comm: Comm) -> None:
        self._whole, self._comm = whole, comm
        self._depth = 0
        self._read: frozenset[int] = frozenset()

    @property
    def running(self) -> bool:
        """True while a module call outside a training pass is in progress."""
        return self._depth > 0

    @contextmanager
    def call(self, indices: frozenset[int]) -> Iterator[bool]:
        """Gathers the buckets ``indices`` for a module call inside the context. Frees the newly gathered ones at the
        end of the context. Yields True in the outermost of nested calls. Collective over dp.
        """
        if not self._depth:
            self._comm.join("a call of the model outside the engine")
        opened = indices - self._whole.live
        self._depth += 1
        try:
            with torch.no_grad():
                self._whole.ask_alike(opened)
                self._whole.show(opened | (indices & self._whole.live))
            yield self._depth == 1
            self._whole.refuse_written(opened)
        finally:
            self._depth -= 1
            read, self._read = (frozenset(), self._read) if self._depth else (self._read, frozenset())
            self._whole.free((opened | read) - (self._read if self._depth else frozenset()))

    def read(self, index: int) -> None:
        """Gathers the bucket ``index`` for a read of its parameters by code outside their modules. The bucket stays
        gathered until the outermost module call ends. Collective over dp.
        """
        if index not in self._whole.live:
            self._read |= {index}
        with torch.no_grad():
            self._whole.ask_alike(frozenset({index}))
            self._whole.show(frozenset({index}))
