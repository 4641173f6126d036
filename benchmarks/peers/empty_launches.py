"""Trine with a GPU's operators and empty kernels: measures host time of the launches, without a GPU.

The operators of a block (norm, rotary embedding, gated unit) run their Python up to Triton's launch, which returns at
once. Outputs are zero, so that losses stay finite, and have no meaning.
"""

from typing import Any

import torch

from benchmarks.peers.trine import Trine, make_config
from benchmarks.peers.workload import Mode, Workload

OPERATORS = ("norm", "rotary", "gated")


class _Zeros:
    """The module torch, whose memory without content has zeros."""

    empty_like = staticmethod(torch.zeros_like)
    empty = staticmethod(torch.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class EmptyLaunches(Trine):
    """:class:`Trine` with kernel launches that do nothing. The process must have no other engine."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        _launch_nothing()
        super().__init__(mode, workload)

    def config(self, mode: Mode, workload: Workload) -> dict[str, Any]:
        return make_config(mode, workload) | {"kernels": "triton"}


def _launch_nothing() -> None:
    import triton

    from engine.build import forward_changes
    from engine.kernels import dispatch
    from engine.kernels.gpu import activations, norm
    from engine.kernels.ops import rotary

    for module in (forward_changes, dispatch):
        vars(module)["runs_triton"] = lambda device: True
    for module in (activations, norm, rotary):
        vars(module)["torch"] = _Zeros()
    dispatch.Kernels._decide = lambda self, operator, *_: operator in OPERATORS  # type: ignore[method-assign]
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign]
    triton.JITFunction.run = lambda *_, **__: None
