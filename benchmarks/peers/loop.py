"""Training loops of plain torch: one process, one all-reduce a step, and DistributedDataParallel."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.workload import Mode, Workload, make_adamw, make_model, mean_loss
from engine.models.decoder import Decoder


class Plain:
    """Plain torch loop: backward, one flat all-reduce, clipping, optimizer step. Other peers override parts."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        self._mode = mode
        self._largest_norm = workload.clip
        model = make_model(workload)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._model = self._wrap(model)
        self._parameters = list(self._model.parameters())
        self._optimizer = make_adamw(self._parameters, workload)

    def step(self, rows: Tensor) -> float | None:
        """Trains one step; returns the loss of this rank's sequences."""
        loss = self._backward(rows)
        self._reduce()
        self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """Returns this rank's weights by name. Not for FSDP and DTensor, which replace parameters."""
        return {self._names[id(parameter)]: parameter.detach() for parameter in self._parameters}

    def _backward(self, rows: Tensor) -> float | None:
        count, loss = self._mode.accumulation, 0.0
        for index, part in enumerate(rows.chunk(count)):
            with self._microbatch(last=index == count - 1):
                mean = mean_loss(self._model(part[:, :-1]), part[:, 1:])
                (mean / count if count > 1 else mean).backward()  # type: ignore[no-untyped-call]
            loss += mean.item() / count
        return loss

    def _clip(self) -> None:
        nn.utils.clip_grad_norm_(self._parameters, self._largest_norm)

    def _wrap(self, model: Decoder) -> nn.Module:
        return model

    def _microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of every microbatch: only the last one reduces."""
        return nullcontext()

    @torch.no_grad()
    def _reduce(self) -> None:
        if self._mode.ranks == 1:
            return
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        flat = torch.cat([grad.view(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= self._mode.ranks
        parts = torch.split(flat, [grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


class Ddp(Plain):
    """torch's DistributedDataParallel with default buckets."""

    def _wrap(self, model: Decoder) -> nn.Module:
        self._ddp = DistributedDataParallel(model)
        return self._ddp

    def _microbatch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()

    def _reduce(self) -> None:
        """DDP has reduced during backward."""


class OneDataRank(Plain):
    """Mixin of peers with ranks that share the model, not the batch."""

    def _reduce(self) -> None:
        """Nothing to reduce over."""
