"""Brings shards of parameters that lie in host memory to the device, just before their buckets are gathered (ZeRO 3).

    compute       [ group k - 1 ]     [ group k          ]    [ group k + 1 ]
    link                              shard k + 1
    gather                                   k + 1 ------>

A shard is copied into its own place in the full bucket, from where it is gathered, so that it takes no memory of the
device besides. The copy goes beside the computation, on a stream of its own, one group ahead of it as gathers do, and
ends with the bucket: weights are written by the host, or into its memory, and never back from a gathered bucket.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from engine.kernels.device import SideStream, record_event
from engine.parallel.comm.comm import Pending
from engine.zero.flat_buckets import FlatBucket


class ShardArrival:
    """The copies of one batch of gathers."""

    def __init__(self, copied: torch.Event | None) -> None:
        self._copied = copied

    def before(self, gather: Pending) -> Pending:
        """``gather``, whose wait waits for the copies too where no collective has done so: with one data rank."""
        return gather if self._copied is None or gather.under_way else Pending(self._copied.wait)


class ShardSource:
    """Where gathers of a rank read its shards."""

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        hosted = [flat for flat in buckets if flat.kept_on_host]
        self._hosts = bool(hosted)
        self._device = hosted[0].params.device if hosted else torch.device("cpu")
        self._side = SideStream(self._device)
        self._last: torch.Event | None = None
        """After the newest copy that the host has not waited for."""

    def on_device(self, flats: Sequence[FlatBucket], beside: bool) -> AbstractContextManager[ShardArrival]:
        """Copy the shards of these buckets, whose memory is reserved; gathers are started inside.

        ``beside``: copies and gathers go beside the computation. Codes are made on its own stream instead, whose
        memory they take.
        """
        hosted = [flat for flat in flats if flat.kept_on_host] if self._hosts else []
        return self._copying(hosted, beside) if hosted else nullcontext(ShardArrival(None))

    @contextmanager
    def _copying(self, hosted: Sequence[FlatBucket], beside: bool) -> Iterator[ShardArrival]:
        with self._side.behind() if beside else nullcontext():
            for flat in hosted:
                flat.params[flat.shard].copy_(flat.kept, non_blocking=True)
            self._last = record_event(self._device)
            yield ShardArrival(self._last)

    def settle(self) -> None:
        """Return when the device has read the memory of the host, which may be written then."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    @staticmethod
    def of(flat: FlatBucket) -> Tensor:
        """The shard [owned] of a bucket on the device, inside ``on_device``."""
        return flat.params[flat.shard] if flat.kept_on_host else flat.kept
