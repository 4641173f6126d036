"""Batches that one rank of a replica reads for all: its tensor and pipeline ranks work on the same rows.

Two all-reduces over the axis ``replica``, label "batch": 16 bytes with the length and whether reading has failed, then
the bytes.
"""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from engine.errors import EngineError, first_line
from engine.parallel.comm.agreement import take_from
from engine.parallel.comm.comm import Comm

_LABEL = "batch"
_SHAPE = "shape"
_KINDS: Mapping[str, type[list[Any]] | type[tuple[Any, ...]]] = MappingProxyType({"list": list, "tuple": tuple})


class ReplicaBatches:
    """Hands what the first rank of a replica has read to the others. Every rank of the replica makes the same calls."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self.reads = comm.grid.index("replica") == 0
        """Whether this rank is the one that reads."""

    def share(self, read: Callable[[], Any]) -> Any:
        """What ``read`` gives on the first rank: tensors and plain values, in tuples, lists and dicts.

        Raises:
            EngineError: the first rank could not read; that rank raises its own error.
        """
        if self._comm.grid.size("replica") == 1:
            return read()
        made, problem = b"", None
        try:
            made = _encoded(read()) if self.reads else b""
        except Exception as error:  # a dataset may raise anything, and the other ranks wait
            problem, made = error, first_line(error).encode(errors="backslashreplace")
        head = torch.tensor([len(made), problem is not None], dtype=torch.int64, device=self._device)
        self._comm.all_reduce(head, "replica", _LABEL).wait()
        data = torch.zeros(int(head[0]), dtype=torch.uint8, device=self._device)
        if self.reads:
            data.copy_(torch.frombuffer(bytearray(made), dtype=torch.uint8))
        take_from(data, self.reads, self._comm, "replica", _LABEL)
        if problem is not None:
            raise problem
        received = data.cpu().numpy().tobytes()
        if head[1]:
            reader = self._comm.grid.peers("replica")[0]
            raise EngineError(f"rank {reader} reads the batches of this replica and has failed: {received.decode()}")
        return _decoded(received)


def _encoded(value: Any) -> bytes:
    """Tensors as safetensors, and what holds them as JSON beside them."""
    tensors: dict[str, Tensor] = {}

    def shape_of(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            name = str(len(tensors))
            tensors[name] = tree.detach().cpu().clone(memory_format=torch.contiguous_format)
            return ["tensor", name]
        if isinstance(tree, Mapping):
            return ["dict", [[shape_of(key), shape_of(item)] for key, item in tree.items()]]
        if isinstance(tree, list | tuple):
            return [type(tree).__name__ if type(tree) in _KINDS.values() else "tuple", [*map(shape_of, tree)]]
        if tree is None or isinstance(tree, bool | int | float | str):
            return ["plain", tree]
        raise EngineError(
            f'batches "rank0" sends tensors, numbers and text, and the batch has a {type(tree).__name__}; convert it '
            'in collate, or give batches="all".'
        )

    return save(tensors, {_SHAPE: json.dumps(shape_of(value))})


def _decoded(data: bytes) -> Any:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = load(data)

    def made(shape: Any) -> Any:
        kind, content = shape
        if kind == "dict":
            return {made(key): made(item) for key, item in content}
        if kind in _KINDS:
            return _KINDS[kind](map(made, content))
        return tensors[content] if kind == "tensor" else content

    return made(json.loads(header["__metadata__"][_SHAPE]))
