"""The memory of sharded parameters: asked for, whole, free again (ZeRO 3).

free   --ask-->   under way   --show-->   whole   --free-->   free
       memory, gather         wait, parameters are what they look like
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm, Pending
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.sharded_parameter import conceal, reveal


class UnshardedBuckets:
    """Which buckets of a stage are whole; indices count ``buckets``.

    ``read(index, name)`` answers whoever reads a parameter that is not.
    """

    def __init__(self, buckets: Sequence[FlatBucket], comm: Comm, read: Callable[[int, str], None]) -> None:
        self._buckets, self._comm, self._read = buckets, comm, read
        self._live: dict[int, Pending] = {}
        self._shown: set[int] = set()
        """Live buckets that have arrived."""
        self._versions: dict[int, tuple[int, ...]] = {}
        """Of shown buckets: how often each parameter had been written when it arrived."""
        self._index_of = {flat.params.untyped_storage()._cdata: index for index, flat in enumerate(buckets)}
        for index in range(len(buckets)):
            self._hide(index)

    @property
    def live(self) -> frozenset[int]:
        """Whole, or under way."""
        return frozenset(self._live)

    def ask(self, indices: frozenset[int]) -> None:
        """Give them memory and gather them, in one batch."""
        missing = sorted(indices - self._live.keys())
        if not missing:
            return
        pairs = []
        for index in missing:
            flat = self._buckets[index]
            flat.params.untyped_storage().resize_(flat.params.numel() * flat.params.element_size())
            pairs.append((flat.params, flat.kept))
        pending = self._comm.gather_parameters(pairs, "parameters")
        self._live.update(dict.fromkeys(missing, pending))

    def ask_alike(self, indices: frozenset[int]) -> None:
        """Ask out of the order that all data ranks keep; one gather of 8 bytes, label "gather check", if it is needed.

        Raises:
            EngineError: data ranks want different ones, of which each would get pieces.
        """
        missing = sorted(indices - self._live.keys())
        if not missing:
            return
        mine = torch.tensor([hash(tuple(missing))], device=self._buckets[0].params.device)
        table = torch.empty(self._comm.grid.dp, dtype=mine.dtype, device=mine.device)
        self._comm.gather_parameters([(table, mine)], "gather check").wait()
        if bool((table != mine).any()):
            name = self._buckets[missing[0]].bucket.slots[0].name
            raise EngineError(
                f"data ranks use sharded parameters (ZeRO 3) in different orders, here {name!r}: the model takes "
                "another path on each; make it the same on all, or set zero_optimization.stage to 2."
            )
        self.ask(frozenset(missing))

    def show(self, indices: frozenset[int]) -> None:
        """Wait for what was asked for; its parameters can be used."""
        for index in indices - self._shown:
            self._live[index].wait()
            self._shown.add(index)
            for parameter in self._buckets[index].parameters:
                reveal(parameter)
            self._versions[index] = _versions(self._buckets[index])

    def free(self, indices: frozenset[int]) -> None:
        """Take their memory away."""
        for index in indices & self._live.keys():
            self._live.pop(index).wait()
            self._hide(index)
            self._buckets[index].params.untyped_storage().resize_(0)

    def refuse_written(self, indices: frozenset[int]) -> None:
        """What a forward writes into a gathered parameter goes with it; whole parameters would keep it.

        Raises:
            EngineError: names the first that was written since it arrived.
        """
        for index in indices & self._shown:
            flat, before = self._buckets[index], self._versions[index]
            for slot, old, new in zip(flat.bucket.slots, before, _versions(flat), strict=True):
                if old != new:
                    raise EngineError(
                        f"parameter {slot.name!r} is sharded (ZeRO 3) and the model writes into it while it runs, "
                        "which would be lost: make it a buffer, write between steps inside `with "
                        "eng.full_parameters(...):`, or set zero_optimization.stage to 2."
                    )

    def bucket_of(self, tensor: Tensor) -> int | None:
        """The bucket in whose memory the tensor lies."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._index_of.get(tensor.untyped_storage()._cdata) if _has_memory(tensor) else None

    @contextmanager
    def without_content(self) -> Iterator[None]:
        """Inside, parameters look like any other, for code that looks at shapes only."""
        hidden = [index for index in range(len(self._buckets)) if index not in self._shown]
        for index in hidden:
            for parameter in self._buckets[index].parameters:
                reveal(parameter)
        try:
            yield
        finally:
            for index in hidden:
                self._hide(index)

    def _hide(self, index: int) -> None:
        self._shown.discard(index)
        flat = self._buckets[index]
        for slot, parameter in zip(flat.bucket.slots, flat.parameters, strict=True):
            conceal(parameter, partial(self._read, index, slot.name))


def _versions(flat: FlatBucket) -> tuple[int, ...]:
    return tuple(parameter._version for parameter in flat.parameters)


def _has_memory(tensor: Tensor) -> bool:
    """Not so: sparse tensors, and what torch.func puts around others."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.layout is torch.strided and not wrapped
