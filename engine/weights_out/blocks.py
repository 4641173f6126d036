"""Whole tensors of one version, a bucket at a time, for consumers that know Hugging Face names only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from engine.checkpoint.format.host_image import in_batches, torch_dtype
from engine.checkpoint.load import AT_ONCE
from engine.errors import EngineError
from engine.outer.messages import StoreRefusedError
from engine.weights_out.reader import Known, WeightReader
from engine.weights_out.transfer import Shadows
from engine.weights_out.version import Geometry, PublishedTensor, WeightVersion

Memory = Callable[[], Mapping[str, Tensor]]
"""Function that returns the memory of tensors by key."""


class WeightConsumer(Protocol):
    """Interface of a consumer of published versions of a model's weights, such as a folder or inference servers.

    A consumer changes its version in three phases: ``prepare`` reads the new version, ``hold`` ends the use of the old
    one, and ``commit`` makes the new version the current one.
    """

    @property
    def last(self) -> int:
        """Number of the last version that this consumer has committed; 0 before the first."""

    def prepare(self, blocks: "WeightBlocks") -> None:
        """Prepares the take-over of the new version, to which ``blocks`` gives access; the current version does not
        change.

        Raises an error if this fails.
        """

    def hold(self) -> None:
        """Ends the use of the current version, such as by pausing generation, once all consumers have prepared."""

    def commit(self, blocks: "WeightBlocks") -> None:
        """Makes the prepared version, to which ``blocks`` gives access, the current one."""

    def drop(self) -> None:
        """Drops the version that ``prepare`` has read, or has read in part, and continues with the current version."""


def deliver(blocks: "WeightBlocks", consumers: Sequence[WeightConsumer]) -> None:
    """Passes the version of ``blocks`` to all consumers: all prepare it before the first commits it.

    If a consumer fails before the first commit, none takes the version over.

    Raises:
        EngineError: a consumer has failed. If it failed in its commit, consumers that have committed have the new
            version; the failed one may have none.
    """
    left = list(consumers)
    try:
        _on_each(left, lambda consumer: consumer.prepare(blocks))
        _on_each(left, lambda consumer: consumer.hold())
        while left:
            left[0].commit(blocks)
            left.pop(0)
    except BaseException:
        for consumer in left:
            with suppress(EngineError, StoreRefusedError, OSError):  # the first error is the one that counts
                consumer.drop()
        raise


def _on_each(consumers: Sequence[WeightConsumer], phase: Callable[[WeightConsumer], None]) -> None:
    """Performs a phase on all consumers at a time; raises the first error once all have ended."""
    with ThreadPoolExecutor(len(consumers), "weights-out") as pool:
        for job in [pool.submit(phase, consumer) for consumer in consumers]:
            job.result()


def published(values: Mapping[str, Tensor], tensors: Mapping[str, PublishedTensor]) -> dict[str, Tensor]:
    """Returns the tensors of ``values`` under the names that they have in a Hugging Face checkpoint, as views.

    One tensor may become several, for example one for each expert.

    Args:
        values: whole tensors by key of the model's state dict.
        tensors: descriptions of all published tensors by the same keys.
    """
    return {
        part.key: whole.view(-1)[part.start : part.start + part.elements].view(part.shape)
        for key, whole in values.items()
        for part in tensors[key].entries(key)
    }


class WeightBlocks:
    """Access to the whole tensors of one published version, a bucket (group of tensors) at a time.

    Args:
        reader: connections to the ranks that serve the version.
        version: the version to read.
        until: time (``monotonic``) after which reading fails.
        bucket: maximum bytes of a bucket; a larger tensor is a bucket alone.
    """

    def __init__(self, reader: WeightReader, version: WeightVersion, until: float, bucket: int = AT_ONCE) -> None:
        self.version, self.until, self._reader, self._bucket = version, until, reader, bucket
        self.geometry: Geometry = reader.geometry(version.run, until)

    def groups(self) -> list[list[str]]:
        """Returns, for each bucket, the list of its tensors' keys."""
        served = self.geometry.served
        return list(in_batches(served, lambda key: served[key].kind.bytes, self._bucket))

    def iter_groups(self) -> Iterator[dict[str, Tensor]]:
        """Reads the weights of one version; yields, for each bucket (group of tensors), a dict from key to host tensor.

        The hashes of the data are checked.

        Raises:
            EngineError: the weights have not arrived by the time ``until``, or the training has dropped this version.
        """
        for keys in self.groups():
            made = {key: torch.empty(t.shape, dtype=torch_dtype(t.kind)) for key, t in self._of(keys)}
            self.fetch(self.bucket(keys, lambda made=made: made))  # type: ignore[misc]
            yield made

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors by key; errors as in ``iter_groups``."""
        for group in self.iter_groups():
            yield from group.items()

    def bucket(self, keys: Sequence[str], memory: Memory, old: bool = False) -> Shadows:
        """Returns a destination into which ``fetch`` reads the tensors ``keys``.

        Args:
            memory: callback that returns a mapping from each key to a host tensor; it is called once.
            old: True if these host tensors have values of an earlier version, so that only changed blocks are read.
        """
        opened, wanted = cache(memory), [self.geometry.whole(key) for key in keys]
        return Shadows(wanted, values=lambda key: opened()[key] if old else None, make=lambda key: opened()[key])

    def fetch(self, into: Shadows, known: Known | None = None) -> Known:
        """Reads all blocks (256 KiB of a tensor) that differ from the current values of the destination ``into``.

        Returns the hashes of all blocks, by number of the serving rank: a list with one array for each piece.

        Args:
            known: result of an earlier call for the current values of ``into``; None: their hashes are computed.
        """
        return self._reader.fetch(self.version, into, known, self.until)

    @property
    def lacked(self) -> int:
        """Bytes of the blocks that this reader requested because its values differed, over all versions that it has
        read.
        """
        return self._reader.traffic.lacked

    def _of(self, keys: Sequence[str]) -> Iterator[tuple[str, PublishedTensor]]:
        return ((key, self.geometry.tensors[key]) for key in keys)
