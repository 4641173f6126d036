"""Delayed update: the host updates the weights of one step while the next step computes (ZeRO-Offload, 5.2).

    device  | step t: gradients at w(t-1) | w(t) | step t+1: gradients at w(t) | w(t+1) | ...
    host    | update t-1, makes w(t) -----^      | update t, makes w(t+1) -----^        | update t+1

w(t) has the updates 0 to t-1. A step ends by bringing the weights of the update before it to the device, and then
starts its own. So each gradient but the first is computed with weights that lack the newest update; nothing else
changes: norm, clipping and the decision to skip follow from the step's own gradients, and every update is made, in
order, on the newest weights. A step that is skipped starts no update, and brings the one before it all the same.

A call that reads or writes state between steps (a save, a load, ``masters``, ``full_parameters``, a full state dict)
first finishes the update and brings it; the step after it has no delay. An evaluation uses the weights that the device
has.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.errors import EngineError
from engine.parallel.comm.agreement import bit_sum
from engine.zero.flat_buckets import FlatBucket


class DelayedUpdate:
    """Runner of weight updates on the host, each overlapped with the next step (ZeRO-Offload's delayed update).

    An update is pending from its start until its weights are on the device.

    Args:
        buckets: buckets of trainable parameters; the host updates all of them.
        give: copies updated masters to the device and gathers them over dp.
    """

    def __init__(self, buckets: Sequence[FlatBucket], give: Callable[[], None]) -> None:
        self._buckets, self._give = buckets, give
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trine-update")
        self._update: Future[None] | None = None
        self._given: torch.Tensor | None = None
        """Sums over the weights on the device when the update was started."""

    @property
    def pending(self) -> bool:
        """True if an update was started and its weights are not on the device yet."""
        return self._update is not None

    def launch(self, update: Callable[[], None]) -> None:
        """Starts the callback ``update`` on a thread, and returns at once. ``update`` must access host memory only. No
        other update may be pending.
        """
        assert self._update is None
        self._given = self._sums()
        self._update = self._thread.submit(update)

    def join(self) -> None:
        """Waits until the thread has computed the pending update, without raising its error. The new weights remain in
        host memory, so the update stays pending.
        """
        if self._update is not None:
            self._update.exception()

    def problem(self) -> EngineError | None:
        """Waits until the thread has computed the pending update, and returns its error, or None. A change of the
        weights on the device during the update is an error too.
        """
        if self._update is None or self._given is None:
            return None
        if (error := self._update.exception()) is not None:
            return EngineError(
                f"the update on the host failed during the next step ({type(error).__name__}: {error}), so weights "
                "and moments are not those of any step; load the last checkpoint into a new engine."
            )
        changed = (self._sums() != self._given).tolist()
        for flat, written in zip(self._buckets, changed, strict=True):
            if written:
                return EngineError(
                    f"{flat.bucket.slots[0].name!r}, or a parameter in its bucket, was written while its delayed "
                    "update (offload_optimizer.delayed_update) was still running, and this update would overwrite the "
                    "values; write inside `with eng.masters(...):` or `with eng.full_parameters(...):`, which finish "
                    "the update first."
                )
        return None

    def finish(self) -> bool:
        """Waits for the pending update and copies its weights to the device, with a gather over dp. Returns False if no
        update is pending. Collective over dp.

        Raises:
            EngineError: see ``problem``.
        """
        if self._update is None:
            return False
        if (problem := self.problem()) is not None:
            raise problem
        self._update = self._given = None
        self._give()
        return True

    def close(self) -> None:
        """Waits until the thread has computed a pending update, and ends the thread. Does not copy the new weights to
        the device.
        """
        self._thread.shutdown(wait=True)

    def _sums(self) -> torch.Tensor:
        """Returns a sum over the bits of each bucket's owned weights on the device."""
        return torch.stack([bit_sum(flat.kept) for flat in self._buckets]) if self._buckets else torch.zeros(0)
