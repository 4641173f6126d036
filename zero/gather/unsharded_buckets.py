"""Memory of gathered parameters (ZeRO 3): allocated and gathered, used by the modules, freed.

FREE   --ask-->   UNDER_WAY           --show-->   SHOWN                --free-->   FREE
       allocate, start the gather      wait; parameters look as usual

Copies shards of parameters from host memory to the device, just before their buckets are gathered (ZeRO 3).

    compute       [ group k - 1 ]     [ group k          ]    [ group k + 1 ]
    link                              shard k + 1
    gather                                   k + 1 ------>

A shard is copied into its own place in the full bucket, from where it is gathered, so that it needs no more memory of
the device. The copy overlaps with the computation, on a stream of its own, one group ahead of it as gathers do, and
ends with the bucket: weights are written by the host, or into its memory, and never back from a gathered bucket.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from functools import partial
from zlib import crc32

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.device import SideStream, record_event
from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.grid import Axis
from engine.parallel.trace.absent_parameter import conceal, reveal
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.encoded_gather import EncodedGather, encoded_gather
from engine.zero.gather.secondary_shards import NO_SHARDS, SecondaryLayout, SecondaryShards


class ShardSource:
    """Source of the shards that this rank sends in all-gathers of parameters. Shards in host memory are copied to the
    device first.
    """

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        hosted = [flat for flat in buckets if flat.kept_on_host]
        self._device = hosted[0].params.device if hosted else torch.device("cpu")
        self._side = SideStream(self._device)
        self._last: torch.Event | None = None
        """After the newest copy that the host has not waited for."""

    @contextmanager
    def on_device(self, flats: Sequence[FlatBucket], beside: bool) -> Iterator[torch.Event | None]:
        """Copies the shards of ``flats`` that are in host memory into the full parameters' memory on the device. The
        caller starts the all-gathers inside the context, which yields an event after the copies, or None.

        ``beside``: True to run copies and all-gathers on a side stream, overlapped with compute; must be False for
        quantized shards.
        """
        hosted = [flat for flat in flats if flat.kept_on_host]
        if not hosted:
            yield None
            return
        with self._side.behind() if beside else nullcontext():
            for flat in hosted:
                flat.params[flat.shard].copy_(flat.kept, non_blocking=True)
            self._last = record_event(self._device)
            yield self._last

    def settle(self) -> None:
        """Waits until all copies of shards from host memory to the device have ended. The host may then overwrite the
        shards.
        """
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    @staticmethod
    def of(flat: FlatBucket) -> Tensor:
        """Returns this rank's shard of the bucket ``flat`` on the device, as a flat tensor. For a shard in host memory,
        call it inside :meth:`on_device`.
        """
        return flat.params[flat.shard] if flat.kept_on_host else flat.kept


class BucketState(Enum):
    """State of the memory for the full parameters of one bucket on this rank."""

    FREE = auto()
    """Not allocated; a read of a parameter raises, or gathers first."""
    UNDER_WAY = auto()
    """Allocated, with an all-gather in progress; parameters are not readable."""
    SHOWN = auto()
    """Gathered; parameters are readable."""


class UnshardedBuckets:
    """Memory for the full parameters of this rank's buckets (ZeRO 3), allocated for a gather and freed after use.

    ``read(index, name)``: callback for a read of the parameter ``name`` while its bucket is not gathered; it gathers
    the bucket or raises. ``within``: layout of secondary shards (ZeRO++ hpZ), by default none.
    """

    def __init__(
        self, buckets: Sequence[FlatBucket], comm: Comm, read: Callable[[int, str], None],
        within: SecondaryLayout = NO_SHARDS,
    ) -> None:  # fmt: skip
        self._buckets, self._comm = buckets, comm
        self.secondary = SecondaryShards(buckets, within, comm)
        """Secondary shards of buckets that were gathered before."""
        self._resident = frozenset(index for index, flat in enumerate(buckets) if not flat.sharded)
        """Buckets that no other rank shares: their parameters are always there."""
        self._source = ShardSource(buckets)
        self._states = [BucketState.FREE] * len(buckets)
        self._gathers: dict[int, Pending] = {}
        """Gathers of the buckets that are not free."""
        self._versions: dict[int, tuple[int, ...]] = {}
        """Versions of the parameters of each shown bucket at its arrival: how often each had been written."""
        self._reads = [
            tuple(partial(read, index, slot.name) for slot in flat.bucket.slots) for index, flat in enumerate(buckets)
        ]
        """Calls of ``read`` for each parameter of each bucket."""
        self._index_of = {_memory(flat.params): index for index, flat in enumerate(buckets)}
        for index in range(len(buckets)):
            if index not in self._resident:
                self._hide(index)

    @property
    def live(self) -> frozenset[int]:
        """Indices of the buckets with allocated memory for full parameters, including buckets that are not sharded."""
        return self._resident.union(self._gathers)

    @property
    def encoded(self) -> frozenset[int]:
        """Indices of the buckets with quantized all-gathers of their weights."""
        return frozenset(index for index, flat in enumerate(self._buckets) if flat.codec is not None)

    def ask(self, indices: frozenset[int], exact: bool = False) -> None:
        """Allocates memory for the buckets ``indices`` and starts their all-gathers, in one batch for each sharding
        axis. Skips gathered buckets.

        ``exact``: True to gather over dp without quantization, False to use quantization and valid secondary shards.
        """
        missing = sorted(indices - self.live)
        if not exact:
            # equal on all ranks of the node, because all of them have gathered the same buckets before
            near = [index for index in missing if index in self.secondary.valid]
            if near:
                for index in near:
                    self._buckets[index].reserve()
                self._started(near, self.secondary.gather(near))
            missing = [index for index in missing if index not in near]
        for batch in self._by_axis(missing):
            self._ask_over(self._axis(batch[0]), batch, exact)

    def _by_axis(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Yields the indices of buckets that are sharded over one axis: of experts apart from others."""
        axes = [self._axis(index) for index in indices]
        for axis in dict.fromkeys(axes):
            yield [index for index, own in zip(indices, axes, strict=True) if own == axis]

    def _ask_over(self, axis: Axis, indices: Sequence[int], exact: bool) -> None:
        """Allocate memory for the buckets, which are sharded over ``axis``, and start their gather in one batch."""
        flats = [self._buckets[index] for index in indices]
        for flat in flats:
            flat.reserve()
        # codes are computed on the stream of the computation, so a side stream serves exact gathers only
        beside = exact or all(flat.codec is None for flat in flats)
        with self._source.on_device(flats, beside) as copied:
            pairs, encoded = [], []
            for flat in flats:
                own = ShardSource.of(flat)
                if exact or flat.codec is None:
                    pairs.append((flat.params, own))
                else:
                    gather = encoded_gather(flat, flat.codec, own, flat.bucket.spread.ranks)
                    pairs.append((gather.full, gather.own))
                    encoded.append(gather)
            apart = None if axis == self._comm.grid.sharding else axis
            pending = self._comm.gather_parameters(pairs, "parameters", axis=apart)
            if copied is not None and not pending.under_way:  # one data rank: readers wait for the copies alone
                pending = Pending(copied.wait)
        self._started(indices, pending.then(partial(_decode, encoded)))

    def _started(self, indices: Sequence[int], gather: Pending) -> None:
        for index in indices:
            self._states[index], self._gathers[index] = BucketState.UNDER_WAY, gather

    def _shown(self, indices: Iterable[int]) -> frozenset[int]:
        return frozenset(index for index in indices if self._states[index] is BucketState.SHOWN)

    def ask_again(self, indices: frozenset[int], wanted: frozenset[int]) -> None:
        """Gathers the buckets ``indices`` again, because another data rank needs them. All data ranks must pass the
        same ``indices``.

        Afterwards, the buckets in ``wanted``, and the buckets in ``indices`` that were readable before, are readable.
        The rest of ``indices`` is freed, except buckets with a gather in progress before the call.
        """
        live, shown = indices & self.live, self._shown(indices)
        self.refuse_written(indices)
        self.free(indices)
        self.ask(indices)
        self.show(shown | wanted)
        self.free(indices - live - wanted)

    def ask_alike(self, indices: frozenset[int], exact: bool = False) -> None:
        """Starts all-gathers of the buckets ``indices``, after a check that all data ranks request the same buckets.
        Skips gathered buckets.

        The check is one all-gather of 8 bytes per rank for each sharding axis, label "gather check". ``exact``: True to
        gather without quantization.

        Raises:
            EngineError: data ranks request different buckets.
        """
        missing = sorted(indices - self.live)
        for batch in self._by_axis(missing):
            self._compare(batch)
        self.ask(frozenset(missing), exact)

    def _compare(self, batch: Sequence[int]) -> None:
        """Compare the buckets that are asked for with the ranks that share them; layouts of other ranks may differ."""
        names, axis = [self._buckets[index].bucket.slots[0].name for index in batch], self._axis(batch[0])
        ranks = self._comm.grid.size(axis)
        if ranks == 1:  # the shards come from the host, and there is nobody to compare with
            return
        mine = torch.tensor([crc32("\n".join(names).encode())], device=self._buckets[0].params.device)
        table = torch.empty(ranks, dtype=mine.dtype, device=mine.device)
        apart = None if axis == self._comm.grid.sharding else axis
        self._comm.gather_parameters([(table, mine)], "gather check", axis=apart).wait()
        if bool((table != mine).any()):
            raise EngineError(
                f"data ranks use sharded parameters (ZeRO 3) in different orders, here {names[0]!r}: the model takes "
                "different paths on them; let all ranks take the same path, or set zero_optimization.stage to 2."
            )

    def _axis(self, index: int) -> Axis:
        return self._buckets[index].bucket.spread.sharding

    def show(self, indices: frozenset[int]) -> None:
        """Waits for the all-gathers of the buckets ``indices``, which must have been started, and makes their
        parameters readable.
        """
        for index in indices - self._shown(indices) - self._resident:
            self._gathers[index].wait()
            self._states[index] = BucketState.SHOWN
            for parameter in self._buckets[index].parameters:
                reveal(parameter)
            self._versions[index] = _versions(self._buckets[index])

    def free(self, indices: frozenset[int], leave: bool = False) -> None:
        """Makes the parameters of the buckets ``indices`` unreadable, and frees the memory of the full parameters.

        ``leave``: True to spare memory that other tensors still share; False to free it even if autograd refers to it.
        """
        for index in indices & self._gathers.keys():
            self._gathers.pop(index).wait()
            self._states[index] = BucketState.FREE
            if not leave:
                self.secondary.take(index)
            self._hide(index)
            flat, before = self._buckets[index], _memory(self._buckets[index].params)
            if leave and flat.escaped:
                flat.move()
            flat.release()
            # a tensor that is made later may get the number of memory that has ended
            self._index_of[_memory(flat.params)] = self._index_of.pop(before)

    def settle(self) -> None:
        """Waits until all copies of this rank's shards from host memory to the device have ended. The host may then
        overwrite the shards.
        """
        self._source.settle()

    def drop_secondary(self, indices: Collection[int] | None = None) -> None:
        """Marks the secondary shards (ZeRO++ hpZ) of the buckets ``indices`` (None: all buckets) as invalid, after a
        parameter change.
        """
        self.secondary.drop(indices)

    def refuse_written(self, indices: frozenset[int]) -> None:
        """Raises if the model has written to a gathered parameter of the buckets ``indices``. Freeing would lose the
        write.

        Raises:
            EngineError: a parameter was written since it arrived; the message names the first one.
        """
        for index in self._shown(indices):
            flat, before = self._buckets[index], self._versions[index]
            for slot, old, new in zip(flat.bucket.slots, before, _versions(flat), strict=True):
                if old != new:
                    raise EngineError(
                        f"parameter {slot.name!r} is sharded (ZeRO 3) and the model writes into it while it runs; "
                        "the write would be lost: make it a buffer, write between steps inside `with "
                        "eng.full_parameters(...):`, or set zero_optimization.stage to 2."
                    )

    def bucket_of(self, tensor: Tensor) -> int | None:
        """Returns the index of the bucket that stores its full parameters in the memory of ``tensor``; None if no
        bucket does.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self._index_of.get(_memory(tensor)) if _has_memory(tensor) else None

    @contextmanager
    def without_content(self) -> Iterator[None]:
        """Makes the shapes of all parameters readable inside the context. Code inside must not read values of
        parameters that are not gathered.
        """
        states = enumerate(self._states)
        hidden = [index for index, each in states if each is not BucketState.SHOWN and index not in self._resident]
        for index in hidden:
            for parameter in self._buckets[index].parameters:
                reveal(parameter)
        try:
            yield
        finally:
            for index in hidden:
                self._hide(index)

    def _hide(self, index: int) -> None:
        for read, parameter in zip(self._reads[index], self._buckets[index].parameters, strict=True):
            conceal(parameter, read, "sharded over the data ranks (ZeRO 3)")


def _decode(gathers: Sequence[EncodedGather]) -> None:
    for gather in gathers:
        gather.decode()


def _memory(tensor: Tensor) -> int:
    """Returns the number of the tensor's storage, which does not change when the storage is resized."""
    return int(tensor.untyped_storage()._cdata)


def _versions(flat: FlatBucket) -> tuple[int, ...]:
    return tuple([parameter._version for parameter in flat.parameters])  # of every block at every use: no generator


def _has_memory(tensor: Tensor) -> bool:
    """Returns True if the tensor has a storage; sparse tensors and wrappers of torch.func have none."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.layout is torch.strided and not wrapped
