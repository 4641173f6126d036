"""Whole tensors of one version, a bucket at a time, for consumers that know Hugging Face names only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from engine.checkpoint.format.host_image import torch_dtype
from engine.checkpoint.format.safetensors_file import in_batches
from engine.checkpoint.load import AT_ONCE
from engine.errors import EngineError
from engine.outer.messages import StoreRefusedError
from engine.weights_out.reader import Known, WeightReader
from engine.weights_out.transfer import Shadows
from engine.weights_out.version import Geometry, PublishedTensor, WeightVersion

Memory = Callable[[], Mapping[str, Tensor]]
"""Function that returns the memory of tensors by key."""


class WeightConsumer(Protocol):
    """Interface of a consumer of published weights, such as a folder or inference servers.

    A consumer changes its version in three phases: ``prepare`` reads the new version, ``hold`` ends the use of the
    current version, and ``commit`` makes the new version current.
    """

    @property
    def last(self) -> int:
        """Number of the last version that this consumer has committed; 0 before the first."""

    def prepare(self, blocks: "WeightBlocks") -> None:
        """Reads the new version from ``blocks``, without changing the current version; raises if this fails."""

    def hold(self) -> None:
        """Ends the use of the current version, such as by pausing generation, after all consumers have prepared."""

    def commit(self, blocks: "WeightBlocks") -> None:
        """Makes the prepared version of ``blocks`` the current version."""

    def drop(self) -> None:
        """Drops the version that ``prepare`` has read wholly or in part; the current version remains."""


def deliver(blocks: "WeightBlocks", consumers: Sequence[WeightConsumer]) -> None:
    """Passes the new version in ``blocks`` to all consumers; no consumer commits it before all have prepared it.

    If a consumer fails before the first commit, all consumers stay with the old version.

    Raises:
        EngineError: a consumer has failed. After a failed commit, some consumers may have the new version.
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
    """Returns the tensors of ``values`` as views, under their names in a Hugging Face checkpoint.

    One tensor may become several, such as one for each expert.

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
    """Reader of the whole tensors of one published version, a bucket (group of tensors) at a time.

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
        """Yields the tensors of each bucket (group of tensors) in host memory, by key; checks their hashes.

        Raises:
            EngineError: the weights have not arrived in time, or the training has dropped this version.
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
        """Returns host memory for the tensors ``keys``, into which ``fetch`` reads them.

        Args:
            memory: callback without arguments that returns host tensors by key, for all ``keys``; called at most
                once, when ``fetch`` first needs a tensor.
            old: True if the tensors of ``memory`` have values of an earlier version, so that only changed blocks are
                read.
        """
        opened, wanted = cache(memory), [self.geometry.whole(key) for key in keys]
        return Shadows(wanted, values=lambda key: opened()[key] if old else None, make=lambda key: opened()[key])

    def fetch(self, into: Shadows, known: Known | None = None) -> Known:
        """Reads all blocks (256 KiB of a tensor) of this version that differ from the present values of ``into``.

        Returns the hashes of all blocks, which a later call takes as ``known``.

        Args:
            known: result of the call that read the present values of ``into``; None: hashes are computed.
        """
        return self._reader.fetch(self.version, into, known, self.until)

    def _of(self, keys: Sequence[str]) -> Iterator[tuple[str, PublishedTensor]]:
        return ((key, self.geometry.tensors[key]) for key in keys)
