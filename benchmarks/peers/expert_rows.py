"""Dispatches rows to the ranks of their experts and combines them, with experts that only scale rows.

A step is a forward and a backward of equal rows. The tokens of the workload are the tokens of all ranks together.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.models import CHOSEN, EXPERTS, mixture_config
from benchmarks.peers.workload import Mode, Workload


class Weighed(nn.Module):
    """Experts without products, called as Qwen3-MoE's: each row is multiplied by its weight."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states * top_k_weights.sum(1, keepdim=True)


class _Rows:
    """Rows of this rank [T, H], the numbers of their experts [T, k] and weights [T, k]."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        tokens = workload.sequences * workload.decoder.context // mode.ranks
        generator = torch.Generator().manual_seed(workload.seed + dist.get_rank())
        chances = torch.ones(tokens, EXPERTS)
        chances[:, : EXPERTS // mode.ranks] = workload.uneven
        self.numbers = torch.multinomial(chances, CHOSEN, generator=generator)
        self.x = torch.randn(tokens, workload.decoder.width, generator=generator).requires_grad_()
        self.weights = torch.full((tokens, CHOSEN), 1 / CHOSEN).requires_grad_()


class DispatchedRows(_Rows):
    """Dispatch and combine by :mod:`engine.parallel.experts`."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        from engine.parallel.comm.comm import Comm
        from engine.parallel.comm.torch_backend import TorchBackend
        from engine.parallel.experts.forms import RoutedExperts
        from engine.parallel.experts.proof import prove_routed
        from engine.parallel.experts.routed import SharedExperts
        from engine.parallel.grid import Grid
        from engine.parallel.tensor.tp_axis import TensorAxis

        super().__init__(mode, workload)
        grid = Grid(dp=mode.ranks, experts=mode.ranks, rank=dist.get_rank())
        comm = Comm(grid, TorchBackend(grid, torch.device("cpu")))
        found = prove_routed(
            "",
            Qwen3MoeExperts(mixture_config(workload.decoder, hidden_size=8, moe_intermediate_size=4)),  # type: ignore[no-untyped-call]
        )
        assert isinstance(found, RoutedExperts)
        self._shared = SharedExperts(found, Weighed(), comm, TensorAxis(comm))

    def step(self, _: Tensor) -> float:
        """Dispatches and combines rows in forward and backward; returns the mean of the results."""
        self.x.grad = self.weights.grad = None
        self.y = self._shared.forward(self.x, self.numbers, self.weights)
        self.y.sum().backward()  # type: ignore[no-untyped-call]
        return self.y.mean().item()


class ExchangedRows(_Rows):
    """Calls of ``all_to_all_single`` with the bytes of :class:`DispatchedRows` and nothing between them."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        super().__init__(mode, workload)
        hit = torch.zeros(len(self.x), mode.ranks, dtype=torch.bool)
        hit.scatter_(1, self.numbers * mode.ranks // EXPERTS, True)
        gives = hit.sum(0)
        gets = torch.empty_like(gives)
        dist.all_to_all_single(gets, gives)
        self._gives, self._gets = gives.tolist(), gets.tolist()
        width = self.x.shape[1]
        there, back = (self._gets, self._gives), (self._gives, self._gets)
        self._calls = [(there, width + 2 * CHOSEN), (back, width), (there, width), (back, width + CHOSEN)]
        self._sent = [torch.zeros(sum(gives), elements) for (_, gives), elements in self._calls]

    def step(self, _: Tensor) -> float:
        """Runs the all-to-alls of dispatch and combine once; returns 0 in place of a loss."""
        for ((gets, gives), elements), sent in zip(self._calls, self._sent, strict=True):
            dist.all_to_all_single(sent.new_empty(sum(gets), elements), sent, gets, gives)
        return 0.0
