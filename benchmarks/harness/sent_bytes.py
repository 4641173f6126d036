"""Counts bytes and collectives that a rank sends, the same way for every framework.

Every call of a process group, from Python or C++, passes torch's dispatcher in the namespace ``c10d`` or
``_c10d_functional``, where it is counted: DDP, FSDP2, DeepSpeed, Trine. Messages of Trine's tensor ranks through shared
memory are counted at their calls, as if sent.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("_c10d_functional", "c10d")
_TIMES_AROUND: Mapping[str, int] = MappingProxyType({
    "all_reduce": 2, "all_reduce_": 2, "allreduce_": 2,
    "all_gather_into_tensor": 1, "_allgather_base_": 1, "allgather_": 1,
    "reduce_scatter_tensor": 1, "_reduce_scatter_base_": 1, "reduce_scatter_": 1,
    "all_to_all_single": 1, "alltoall_base_": 1, "alltoall_": 1, "broadcast": 1, "broadcast_": 1,
    "dim_zero_all_to_all": 1,
})  # fmt: skip
"""How often a collective's whole payload goes around the ring; each rank passes on all of it but its own part."""
_OPAQUE = ("dim_zero_all_to_all",)
"""Operators of peers that call a process group where torch's dispatch modes do not see it."""
_SILENT = ("recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier")


class RingCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Context that counts the bytes (as in ring algorithms) and calls that this rank sends, in ``sent`` and ``calls``.

    A message counts on its sender; a collective over one rank does not count. An unknown operation raises KeyError.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = 0
        self.calls = 0
        self._watched = ExitStack()

    def __enter__(self) -> Self:
        module = sys.modules.get("engine.parallel.comm.shared_memory")  # whoever has not imported it does not use it
        owner: Any = getattr(module, "SharedMemory", None)
        for name in ("all_reduce", "all_gather", "reduce_scatter") if owner else ():
            seen = self._seen(name, getattr(owner, name))
            self._watched.enter_context(patch.object(owner, name, seen))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        self._watched.close()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _seen(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(shared: Any, *args: Any) -> Any:
            operation = {"all_gather": "_allgather_base_", "reduce_scatter": "reduce_scatter_"}.get(name, name)
            self._count(operation, max(_bytes(given) for given in args), shared.ranks)
            return real(shared, *args)

        return call

    def _count(self, operation: str, payload: int, ranks: int) -> None:
        self.sent += ring_bytes(operation, payload, ranks)
        self.calls += ranks > 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it come down to what it does on local tensors
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if (func.namespace in _NAMESPACES and name not in _SILENT) or name in _OPAQUE:
            ranks = _group(args).size()
            # The undivided tensor is the largest of what goes in and comes out: the output of an all-gather, the
            # input of a reduce-scatter; an operation in place has it as its only tensor.
            payload = max(_bytes(given) for given in (*args, *(kwargs or {}).values(), result))
            self._count(name, payload, ranks)
        return result


def ring_bytes(operation: str, payload: int, ranks: int) -> int:
    """Returns the bytes that one of ``ranks`` sends for a torch operation with a full tensor of ``payload`` bytes.

    Raises:
        KeyError: the operation is unknown.
    """
    if operation in _SILENT:
        return 0
    if operation == "send":
        return payload
    return int(_TIMES_AROUND[operation] * payload * Fraction(ranks - 1, ranks))


def _group(arguments: Sequence[Any]) -> dist.ProcessGroup:
    """Who communicates: ``c10d`` gives the group itself, ``_c10d_functional`` its name at the end."""
    for given in reversed(arguments):
        if isinstance(given, str):
            return _resolve_process_group(given)  # type: ignore[arg-type]  # its name for a str
        if isinstance(given, torch.ScriptObject) and given._type().name() == "ProcessGroup":  # type: ignore[attr-defined]
            return dist.ProcessGroup.unbox(given)
    raise KeyError("an operation without a group")


def _bytes(tree: object) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if _is_plain(leaf))


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided
