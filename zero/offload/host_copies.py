"""Buckets with optimizer state in host memory, and the copies between host and device in a step.

    device   backward            | reduced 0 | reduced 1 | norm |        kept 0  gather 0 ------>
                                     |           |                         ^          kept 1  gather 1 ------>
    link                             sums 0      sums 1                    |            ^
                                         v           v                     |            |
    host                                 host_sums                 update 0 | update 1  |  update 2 ...
                                                                   master, moments

Sums of gradients follow their reduction, on a stream of their own, so they overlap with the backward. The norm is
computed on the device of the sums. Each bucket is copied back and gathered while the host updates the next one.
"""

from collections.abc import Sequence

import torch

from engine.kernels.device import SideStream, is_host, record_event
from engine.parallel.comm.comm import Pending
from engine.zero.flat_buckets import FlatBucket
from engine.zero.layout import FlatLayout


def offloaded_buckets(layout: FlatLayout, ratio: float) -> frozenset[int]:
    """Returns the indices of the first buckets, as few as together have at least the share ``ratio`` (0 to 1) of
    trainable elements.
    """
    chosen: list[int] = []
    elements = 0
    for bucket in layout.buckets:
        if elements >= ratio * layout.elements:
            break
        chosen.append(bucket.index)
        elements += bucket.elements
    return frozenset(chosen)


class HostCopies:
    """Copies of reduced gradients to the host, and of updated weights to the device, for the buckets that the host
    updates.

    Code that changes reduced gradients on the device must call ``changed``; ``wait`` then copies them again.
    """

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        self.buckets = buckets
        """All trained buckets of this rank."""
        hosted = [flat for flat in buckets if flat.host_sums is not None]
        self.any = bool(hosted) or any(flat.kept_on_host for flat in buckets)
        """The host updates some of the buckets, or has their parameters."""
        self.late = False
        """Sums are copied by ``wait`` only, because an update may still read the sums of the step before."""
        self._device = hosted[0].grads.device if hosted else torch.device("cpu")
        self._side = SideStream(self._device)
        self._reduced: torch.Event | None = None
        """After the last reduction that the side stream waits for."""
        self._brought: dict[int, torch.Event | None] = {}
        """Buckets with copied sums, or with sums on their way until the event."""

    def changed(self, flat: FlatBucket) -> None:
        """Marks the host's copy of the gradients of the bucket ``flat`` as outdated. The next ``wait`` copies them
        again.
        """
        self._brought.pop(flat.bucket.index, None)

    def forget(self) -> None:
        """Marks the host's copies of the gradients of all buckets as outdated, so that the next ``wait`` for a bucket
        copies its gradients again.
        """
        self._brought.clear()

    def follow(self, flat: FlatBucket, reduction: Pending) -> None:
        """Starts the copy of the reduced gradients of the bucket ``flat`` to the host, on a side stream after
        ``reduction``. If updates are delayed, or ``reduction`` is in progress on a CPU device, ``wait`` makes the copy
        instead.
        """
        if flat.host_sums is None or self.late or (is_host(self._device) and reduction.under_way):
            return
        with self._side.behind():
            reduction.wait()
            self._reduced = record_event(self._device)
            self._copy(flat)

    @torch.no_grad()
    def wait(self, flat: FlatBucket) -> None:
        """Waits until the host has the current reduced gradients of the bucket ``flat``. Starts the copy if needed."""
        if flat.host_sums is None:
            return
        if flat.bucket.index not in self._brought:
            with self._side.behind():
                self._copy(flat)
        event = self._brought[flat.bucket.index]
        if event is not None:
            event.synchronize()

    def join(self) -> None:
        """Makes the device's current stream wait for the gradient reductions before the copies of ``follow``, but not
        for the last copy. The host does not wait.
        """
        if self._reduced is not None:
            self._reduced.wait()
            self._reduced = None

    @torch.no_grad()
    def give(self, flat: FlatBucket) -> None:
        """Copies this rank's master weights of the bucket ``flat`` to its parameter shard ``flat.kept``, cast to the
        parameters' dtype. Communicates nothing. May use the host's copy of the gradients as a buffer; then marks that
        copy as outdated.
        """
        assert flat.master is not None
        if flat.kept_on_host:  # waits for a master on the device, since the host may read what is copied here
            flat.kept.copy_(flat.master.to(flat.kept.dtype))
            return
        source = flat.master
        if flat.host_sums is not None and flat.master.dtype != flat.kept.dtype:
            source = flat.host_sums.view(flat.kept.dtype)[: len(flat.kept)]
            source.copy_(flat.master)
            self.changed(flat)
        flat.kept.copy_(source, non_blocking=True)

    def _copy(self, flat: FlatBucket) -> None:
        assert flat.host_sums is not None
        flat.host_sums.copy_(flat.gradient(flat.owned), non_blocking=True)
        self._brought[flat.bucket.index] = record_event(self._device)
