"""Sequences over several ranks by torch and by DeepSpeed: ranks compute contiguous or zig-zag parts of ``llama``.

Both need changes of the training script: shards of tokens, labels and position ids, and attention without a mask.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers.deepspeed import announce, make_config
from benchmarks.peers.loop import Plain
from benchmarks.peers.workload import Mode, Workload, make_adamw, make_model, mean_loss
from engine.models.decoder import Decoder


class TorchContext(Plain):
    """``torch.distributed.tensor.experimental.context_parallel`` around forward and backward, with one all-reduce of
    gradients a step.
    """

    def __init__(self, mode: Mode, workload: Workload) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(mode, workload)
        self._mesh = init_device_mesh("cpu", (mode.ranks,))

    def _wrap(self, model: Decoder) -> nn.Module:
        from transformers import AttentionInterface

        AttentionInterface.register("causal without a mask", _causal)
        config: Any = model.config
        config._attn_implementation = "causal without a mask"
        return model

    def _backward(self, rows: Tensor) -> float:
        count, loss = self._mode.accumulation, 0.0
        for part in rows.chunk(count):
            with self._sharded(part) as (tokens, labels, positions):
                mean = mean_loss(self._model(tokens, position_ids=positions), labels)
                (mean / count).backward()  # type: ignore[no-untyped-call]
            loss += mean.item() / count
        return loss

    @contextmanager
    def _sharded(self, rows: Tensor) -> Iterator[list[Tensor]]:
        """Yields tokens, labels and positions of this rank."""
        from torch.distributed.tensor.experimental import context_parallel

        buffers = _tokens_labels_positions(rows)
        with context_parallel(self._mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
            yield buffers


class Ulysses:
    """DeepSpeed's ``UlyssesSPAttentionHF`` with ``deepspeed.initialize`` and contiguous parts of each sequence.

    DeepSpeed averages gradients over data ranks and sums them over sequence ranks, so each rank's loss is divided by
    the sequence ranks. With the mean of its positions, gradients are ``ranks`` times those of one process.
    """

    def __init__(self, mode: Mode, workload: Workload) -> None:
        announce(mode)
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        self._mode, self._rank = mode, dist.get_rank()
        with redirect_stdout(io.StringIO()):
            deepspeed.init_distributed("gloo")
            model = make_model(workload)
            groups = UlyssesSPAttentionHF.register_with_transformers(
                model, "sdpa", mode.ranks, micro_batch_size=workload.sequences // mode.accumulation,
                seq_length=workload.decoder.context, seq_length_is_variable=False,
            )  # fmt: skip
            optimizer = make_adamw(list(model.parameters()), workload)
            config = make_config(mode, workload, sum(parameter.numel() for parameter in model.parameters()))
            config |= {"sequence_parallel_size": mode.ranks}
            self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=groups)

    def step(self, rows: Tensor) -> float:
        """Trains one step; returns the loss of this rank's positions."""
        loss = 0.0
        for part in rows.chunk(self._mode.accumulation):
            tokens, labels, positions = (
                whole.chunk(self._mode.ranks, 1)[self._rank].contiguous() for whole in _tokens_labels_positions(part)
            )
            mean = mean_loss(self._engine(tokens, position_ids=positions), labels)
            self._engine.backward(mean / self._mode.ranks)
            self._engine.step()
            loss += mean.item() / self._mode.accumulation
        return loss


def _tokens_labels_positions(rows: Tensor) -> list[Tensor]:
    """Returns the three tensors [rows, S] of sequences [rows, S + 1] that a forward and its loss read."""
    tokens = rows[:, :-1].contiguous()
    return [tokens, rows[:, 1:].contiguous(), torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()]


def _causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of transformers without its mask, which does not fit the part of a rank."""
    scale: float | None = options.get("scaling")
    heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return heads.transpose(1, 2).contiguous(), None
